"""Where models come from, and what is said when they cannot be had."""

import json
import shutil

import pytest
import torch
import transformers

from edkm_cli import model_files, models
from edkm_cli.errors import UserError
from edkm_cli.hf import load
from edkm_cli.nn.swap import is_tied
from families import family
from helpers import byte_tokenizer, cluster, compress_arguments, export, refused, tiny_llama


def test_aliases_resolve_to_the_hub_or_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("EDKM_CACHE", str(tmp_path))
    assert models.resolve("llama-7b").location == "huggyllama/llama-7b"
    smol = models.resolve("smollm2-135m")
    assert smol.path == tmp_path / "smollm2-135m" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert models.resolve("owner/name").is_local is False


def test_a_directory_of_results_called_like_an_alias_hides_no_model(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama-7b" / "3bit").mkdir(parents=True)
    assert models.resolve("llama-7b").location == "huggyllama/llama-7b"
    for output in ("llama-7b", "llama-7b/3bit"):
        assert "must be apart from the source" in refused("compress", "--model", "llama-7b", "-o", output)


def test_every_alias_knows_its_architecture():
    from transformers import AutoConfig

    for name, entry in models.aliases().items():
        assert AutoConfig.for_model(**entry["architecture"]).get_text_config(decoder=True).num_hidden_layers > 0, name


@pytest.mark.parametrize("name", ["", "gpt", "/no/such/place", "a/b/c", "no.gguf"])
def test_what_is_no_model_is_refused(name):
    with pytest.raises(UserError, match="--model"):
        models.resolve(name)


def test_a_directory_without_a_config_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"config\.json"):
        models.resolve(str(tmp_path))


def test_a_damaged_gguf_file_gets_one_line(tmp_path):
    file = tmp_path / "bad.gguf"
    file.write_bytes(b"GGUF and then nonsense")
    with pytest.raises(UserError, match="could not be read") as caught:
        models.load_dense(models.resolve(str(file)), dtype="float32")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_gives_the_dtype_asked_for_and_exact_rotary_frequencies(tmp_path, dtype):
    dense = tiny_llama()
    dense.save_pretrained(tmp_path)
    loaded = models.load_dense(models.resolve(str(tmp_path)), dtype=dtype)
    assert {parameter.dtype for parameter in loaded.parameters()} == {getattr(torch, dtype)}
    assert torch.equal(loaded.model.rotary_emb.inv_freq, dense.model.rotary_emb.inv_freq)
    assert not loaded.training


def test_without_weights_an_alias_still_has_a_configuration(monkeypatch, tmp_path):
    monkeypatch.setenv("EDKM_CACHE", str(tmp_path))
    assert models.load_config(models.resolve("smollm2-135m")).hidden_size == 576
    assert models.load_config(models.resolve("llama-7b")).num_hidden_layers == 32
    with pytest.raises(UserError, match=r"get_smollm2\.sh"):
        models.load_dense(models.resolve("smollm2-135m"), dtype="float32")


def altered(directory, tmp_path, change):
    """A copy of a model directory whose tensors `change(tensors)` has altered."""
    from safetensors.torch import load_file, save_file

    copied = tmp_path / "altered"
    shutil.copytree(directory, copied)
    tensors = load_file(copied / "model.safetensors")
    change(tensors)
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    return str(copied)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.down_proj.weight"), r"missing \(model\.layers\.1\.mlp\.down_proj\.weight"),
        (lambda t: t.pop("model.embed_tokens.weight"), r"missing .*model\.embed_tokens\.weight"),
        (lambda t: t.update({"model.layers.9.extra": torch.zeros(2)}), r"unexpected \(model\.layers\.9\.extra"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), r"model\.norm\.weight is \(3,\) for \(24,\)"),
    ],
)
def test_what_the_files_lack_or_have_too_many_is_named(model_directory, tmp_path, change, message):
    source = models.resolve(altered(model_directory, tmp_path, change))
    with pytest.raises(UserError, match=message):
        models.load_dense(source, dtype="float32")


def test_a_weight_that_is_no_number_is_named(model_directory, tmp_path):
    def spoil(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")

    source = models.resolve(altered(model_directory, tmp_path, spoil))
    with pytest.raises(UserError, match=r"finite weights, but model\.layers\.1\.mlp\.up_proj\.weight holds NaN"):
        model_files.require_finite(source.name, models.load_dense(source, dtype="float32"))


def test_a_head_that_lacks_in_an_untied_model_is_named(tmp_path):
    tiny_llama(tied=False).save_pretrained(tmp_path / "untied")
    source = models.resolve(altered(tmp_path / "untied", tmp_path, lambda t: t.pop("lm_head.weight")))
    with pytest.raises(UserError, match=r"missing \(lm_head\.weight"):
        models.load_dense(source, dtype="float32")


def untied_but_said_to_be_tied(directory):
    """A directory with a head of its own whose config.json says that it is tied."""
    dense = tiny_llama(tied=False)
    dense.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    config["tie_word_embeddings"] = True
    (directory / "config.json").write_text(json.dumps(config))
    return dense


def test_the_weights_decide_what_is_tied_not_the_flag(tmp_path, ids):
    dense = untied_but_said_to_be_tied(tmp_path / "dense")
    source = models.resolve(str(tmp_path / "dense"))
    assert models.load_config(source).tie_word_embeddings is False
    loaded = models.load_dense(source, dtype="float32")
    assert loaded.config.tie_word_embeddings is False
    assert torch.equal(loaded(ids).logits, dense(ids).logits)
    clustered, spec = cluster(loaded)
    exported = load(export(clustered, spec, tmp_path / "out"))
    assert torch.equal(exported(ids).logits, clustered(ids).logits)


def test_an_equal_head_in_the_files_is_tied_as_the_flag_says(tmp_path):
    from safetensors.torch import load_file, save_file

    tiny_llama(tied=True).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    source = models.resolve(str(tmp_path))
    assert models.load_config(source).tie_word_embeddings is True
    assert is_tied(models.load_dense(source, dtype="float32"))


@pytest.mark.parametrize("method", ["gptq", "fp8", "bitsandbytes", "compressed-tensors", "edkm", None])
def test_a_model_that_is_quantized_already_is_refused_with_the_remedy(tmp_path, method):
    tiny_llama().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"must not be quantized yet.*give the model it was made from"):
        models.load_config(models.resolve(str(tmp_path)))
    with pytest.raises(UserError):
        models.load_dense(models.resolve(str(tmp_path)), dtype="float32")


def test_a_model_of_pickles_is_told_that_it_needs_safetensors_and_how_to_convert_it(tmp_path, text_file):
    directory = tmp_path / "pickled"
    tiny_llama().save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    torch.save(tiny_llama().state_dict(), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()
    for more in ([], ["--dry-run"]):
        line = refused(*compress_arguments(directory, text_file, tmp_path / "out", *more))
        assert "must have its weights in safetensors files" in line
        assert "save_pretrained(NEW)" in line
        assert "damaged" not in line


def test_aliases_are_what_their_names_say():
    for name in models.aliases():
        architecture = models.resolve(name).architecture
        text = architecture.get("text_config", architecture)
        made = transformers.AutoConfig.for_model(**architecture).get_text_config(decoder=True)
        assert made.vocab_size == text["vocab_size"], name
    with torch.device("meta"):
        config = models.load_config(models.resolve("qwen3-30b-a3b"))
        config.num_hidden_layers = 1
        layer = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(config).model.layers.parameters())
    assert 30.5e9 < 48 * layer + 2 * 151936 * 2048 < 30.6e9


def test_a_revision_reaches_the_hub_and_no_file_has_one(tmp_path, monkeypatch):
    asked = []

    def from_pretrained(location, **options):
        asked.append((location, options["revision"]))
        raise OSError("no network")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", from_pretrained)
    with pytest.raises(UserError, match="could not be loaded"):
        models.load_config(models.resolve("someone/model", "v2"))
    assert asked == [("someone/model", "v2")]
    with pytest.raises(UserError, match="--revision"):
        models.resolve("smollm2-135m", "v2")


def test_a_configuration_that_asks_for_tuples_is_refused(model_directory, text_file, tmp_path):
    """Transformers' own models fail with it."""
    shutil.copytree(model_directory, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "return_dict": False}))
    line = refused(*compress_arguments(tmp_path / "model", text_file, tmp_path / "out"))
    assert "must not have return_dict false in its config.json; remove it there" in line
    assert not (tmp_path / "out").exists()


def test_experts_in_one_tensor_are_not_far_more_than_their_files_hold(tmp_path):
    family("gpt_oss", num_local_experts=128).save_pretrained(tmp_path / "model")
    source = models.resolve(str(tmp_path / "model"))
    model = models.skeleton(source, models.load_config(source))
    assert sum("experts" in name and name.endswith(".weight") for name, _ in model.named_parameters()) == 512
