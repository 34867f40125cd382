"""MLX directories: positions as mlx-lm reads them, and such directories as rows of `edkm compare`."""

import json

import pytest
import torch

from edkm_cli import data
from edkm_cli.errors import UserError
from edkm_cli.evaluate.perplexity import perplexity
from edkm_cli.export.command import export_model
from edkm_cli.export.formats import mlx
from edkm_cli.export.formats.folder import _with_older_names, read_model
from edkm_cli.export.formats.options import Options
from edkm_cli.research.compare import command, worker
from edkm_cli.research.compare.command import settings_of
from edkm_cli.research.compare.config import CompareConfig, Entry
from families import family
from helpers import byte_tokenizer, logits_of, paletted, tiny_llama

SIZES = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
HALF = {"rope_type": "default", "rope_theta": 50000.0, "partial_rotary_factor": 0.5}
LAYERS = {
    "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 777.0},
}
NAMES = {
    "llama": (LLAMA_3, {"rope_theta": 500000.0, "rope_scaling": {**LLAMA_3, "type": "llama3"}}),
    "phi3": (HALF, {"rope_theta": 50000.0, "partial_rotary_factor": 0.5}),
    "gemma3_text": (
        LAYERS,
        {
            "rope_theta": 50000.0,
            "rope_scaling": {**LAYERS["full_attention"], "type": "linear"},
            "rope_local_base_freq": 777.0,
            "sliding_window_pattern": 2,
        },
    ),
}


@pytest.mark.parametrize("kind", NAMES)
def test_positions_have_the_names_that_mlx_lm_and_older_engines_read(kind, ids, tmp_path):
    rope, names = NAMES[kind]
    kinds = (
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8} if kind == "gemma3_text" else {}
    )
    model = family(kind, torch.bfloat16, rope_parameters=rope, **SIZES, **kinds).float()
    directory, _ = paletted(tmp_path / "source", "affine", model=model)
    export_model(directory, "mlx", tmp_path / "out", options=Options())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {name: config.get(name) for name in names} == names
    export_model(directory, "dense", tmp_path / "dense", options=Options())
    assert {name: json.loads((tmp_path / "dense" / "config.json").read_text()).get(name) for name in names} == names
    # The older names change nothing for those who read the newer ones.
    logits = logits_of(read_model(tmp_path / "out", mlx.read(tmp_path / "out", Options())))(ids)
    torch.testing.assert_close(logits, logits_of(model)(ids), atol=1e-3, rtol=1e-3)
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
    reader, _ = pytest.importorskip("mlx_lm.utils").load_model(tmp_path / "out")
    reader.set_dtype(mx.float32)
    read = torch.tensor(reader(mx.array(ids.numpy())).tolist())
    torch.testing.assert_close(read, logits, atol=1e-3, rtol=1e-3)


def test_a_directory_of_mlx_lm_is_a_row(text_file, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_worker", lambda *arguments: worker.main([*map(str, arguments)]))
    original = tiny_llama(hidden=64, inner=128)
    original.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    directory, _ = paletted(tmp_path / "source", "affine", model=tiny_llama(hidden=64, inner=128))
    export_model(directory, "mlx", tmp_path / "out", options=Options())
    row = f"mlx:{tmp_path / 'out'}"
    other = tmp_path / "other.txt"
    other.write_text("Another kind of text, with other words in it. " * 9)
    shared = {"model": str(tmp_path / "model"), "data": (str(text_file),), "eval_data": (str(other),)}
    short = {"context": 64, "eval_windows": 2, "sequence_length": 48, "device": "cpu"}
    result = command.compare(CompareConfig(methods=(row,), output=str(tmp_path / "rows"), **shared, **short))["rows"][0]
    assert (result["error"], result["label"], result["training"]) == (None, row, "none")
    assert (result["bits"], result["granularity"], result["decoder_bits_per_weight"]) == (3, "group:32", 4.0)
    assert result["note"] == "embeddings at 8 bits; decoded to float32"
    ids = data.tokenize(data.load_documents(data.parse_source(str(other)), "all"), byte_tokenizer())
    model = read_model(tmp_path / "out", mlx.read(tmp_path / "out", Options()))
    direct = perplexity(model, ids, context=64, max_windows=2, reference=logits_of(original))
    assert result["perplexity"] == pytest.approx(direct.perplexity)
    assert result["kl_per_token"] == pytest.approx(direct.kl_per_token, rel=1e-3)
    assert result["kl_per_token"] > 0


def test_a_directory_that_lacks_a_tensor_is_no_model_with_random_numbers(tmp_path):
    directory, _ = paletted(tmp_path / "source", "affine", model=tiny_llama(hidden=64, inner=128))
    export_model(directory, "mlx", tmp_path / "out", options=Options())
    tensors = [one for one in mlx.read(tmp_path / "out", Options()) if one[0] != "model.norm.weight"]
    with pytest.raises(UserError, match=r"must hold every tensor of its model, but lacks model\.norm\.weight"):
        read_model(tmp_path / "out", tensors)


def test_a_directory_that_is_none_of_mlx_lm_is_refused_before_the_work(tmp_path, model_directory):
    config = CompareConfig(model=str(model_directory))
    with pytest.raises(UserError, match=r"must name a directory of mlx-lm, but .* is none"):
        settings_of(Entry.parse(f"mlx:{tmp_path}"), config)
    with pytest.raises(UserError, match=r"cannot be read as one"):  # a dense model
        settings_of(Entry.parse(f"mlx:{model_directory}"), config)


@pytest.mark.parametrize(("target", "bits", "palette"), [("mlx:3", 3, "affine"), ("gguf:q4_0", 4, "integers")])
def test_a_row_of_ours_may_have_the_grid_of_another_engine(target, bits, palette, model_directory):
    config = CompareConfig(model=str(model_directory), bits=3)
    arguments = settings_of(Entry.parse(f"edkm:target={target}:data=self"), config)["arguments"]
    assert (arguments["bits"], arguments["palette"], arguments["target"]) == (bits, palette, target)
    with pytest.raises(UserError, match=r"methods, 'edkm:bits=9:target=.*bits.*got 9"):
        settings_of(Entry.parse(f"edkm:target={target}:bits=9"), config)


def test_positions_of_gpt_neox_have_its_own_older_names():
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    names = _with_older_names({"model_type": "gpt_neox", "rope_parameters": rope})
    assert (names["rotary_emb_base"], names["rotary_pct"], names["rope_scaling"]) == (1e4, 0.25, None)
