"""Every format of `edkm export`: what it holds is the source, and what is damaged does not pass."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from edkm_cli import hf
from edkm_cli.errors import UserError
from edkm_cli.export.command import export_model
from edkm_cli.export.formats import find
from edkm_cli.export.formats.options import Options
from edkm_cli.export.parity import require_same_perplexity
from edkm_cli.export.source import Compressed
from families import family
from helpers import byte_tokenizer, cluster, export, refused, run, tiny_llama


def checkpoint(folder, **options):
    """A tiny compressed LLaMA with biases, of widths that all formats can hold."""
    model, spec = cluster(tiny_llama(bias=True, hidden=64, inner=128), **options)
    byte_tokenizer().save_pretrained(folder)
    return export(model, spec, folder)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """3 bits, a float16 table for each row: what most formats hold."""
    return checkpoint(tmp_path_factory.mktemp("rows"))


def test_a_plain_model_is_what_transformers_loads_from_the_checkpoint(rows, ids, text_file, tmp_path):
    from transformers import AutoModelForCausalLM

    status, out, err = run("export", rows, "--to", "dense", "--dtype", "float32", "--output", tmp_path / "out",
                           "--json", tmp_path / "j.json", "--verify", "perplexity", "--data", text_file,
                           "--context", 64)  # fmt: skip
    assert status == 0, err
    assert "equal to the source" in out
    result = json.loads((tmp_path / "j.json").read_text())
    assert (result["tensors"], result["rounded"]) == (len(Compressed(rows).tensors), 0)
    assert result["perplexity"]["export"] == pytest.approx(result["perplexity"]["source"], rel=1e-5)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    packed = hf.load(rows, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, packed(ids).logits, atol=1e-4, rtol=1e-4)
    name = "model.layers.1.mlp.down_proj"
    assert torch.equal(plain.get_submodule(name).weight, packed.get_submodule(name).dequantize())
    assert (tmp_path / "out" / "tokenizer.json").is_file()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_weight_of_a_plain_model_is_rounded_once(rows, dtype, tmp_path):
    result = export_model(rows, "dense", tmp_path / "out", options=Options(dtype=dtype))
    assert (result["largest_difference"] == 0) is (dtype == "float32")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    with Compressed(rows) as source:
        for name, tensor in stored.items():
            assert torch.equal(tensor, source.dense(name).to(getattr(torch, dtype)))


def test_fused_experts_are_written_as_their_family_stores_them(tmp_path):
    model, spec = cluster(family("mixtral", torch.float32))
    source = export(model, spec, tmp_path / "source")
    result = export_model(source, "dense", tmp_path / "out", options=Options(dtype="float32"))
    assert result["largest_difference"] == 0
    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert any(name.endswith("experts.3.w2.weight") for name in names)


def test_a_file_that_changes_after_writing_leaves_nothing_behind(rows, tmp_path, monkeypatch):
    form = find("dense")
    written = form.write

    def write(source, folder, options, track):
        written(source, folder, options, track)
        damage(folder, "model.layers.1.self_attn.q_proj.bias", lambda tensor: tensor + 1)

    monkeypatch.setattr(form, "write", write)
    with pytest.raises(UserError, match=r"1\.self_attn\.q_proj\.bias differs from the source in 64 of 64 numbers"):
        export_model(rows, "dense", tmp_path / "out", options=Options())
    assert list(tmp_path.iterdir()) == []


def damage(folder, name, change):
    """Change a tensor of an export, or drop it where `change` gives None."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    changed = change(tensors.pop(name))
    save_file(tensors if changed is None else {**tensors, name: changed.contiguous()}, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "gguf"], "--to must be one of dense"),
        (["--to", "dense", "--dtype", "int8"], "--dtype must be one of auto, float16"),
        (["--to", "dense", "--verify", "all"], "--verify must be weights or perplexity, got 'all'"),
        (["--to", "dense", "--verify", "perplexity", "--data", "no-such-file.txt"], "no-such-file.txt"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(rows, tmp_path, arguments, message):
    assert message in refused("export", rows, "--output", tmp_path / "out", *arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_number_beyond_the_dtype_is_named_and_nothing_is_left(tmp_path):
    source = checkpoint(tmp_path / "source", lut_dtype="float32")
    model = hf.load(source)
    model.model.norm.weight.data[3] = 1e6
    model.save_pretrained(tmp_path / "large")
    with pytest.raises(UserError, match=r"model\.norm\.weight holds 1e\+06, more than 65504"):
        export_model(tmp_path / "large", "dense", tmp_path / "out", options=Options(dtype="float16"))
    assert {path.name for path in tmp_path.iterdir()} == {"source", "large"}


def test_the_output_is_kept_and_is_not_the_source(rows, tmp_path):
    (tmp_path / "note.txt").write_text("mine")
    assert "exists and is not empty" in refused("export", rows, "--to", "dense", "--output", tmp_path)
    assert "must be another directory than the source" in refused(
        "export", rows, "--to", "dense", "--output", rows, "--overwrite"
    )


def test_a_perplexity_that_drifts_is_refused():
    require_same_perplexity(30.0, 30.002, exact=True)
    with pytest.raises(UserError, match=r"within 0\.01%, but has 30\.01"):
        require_same_perplexity(30.0, 30.01, exact=True)
    require_same_perplexity(30.0, 30.01, exact=False)
    with pytest.raises(UserError, match="nothing was put in place"):
        require_same_perplexity(30.0, float("nan"), exact=False)
