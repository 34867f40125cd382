"""The Core ML export: the program read back from disk is the source, weight by weight and prediction by prediction."""

import importlib.util
import json

import numpy as np
import pytest
import torch

from edkm_cli import hf
from edkm_cli.errors import UserError
from edkm_cli.export.command import export_model, require_parity
from edkm_cli.export.formats import coreml
from edkm_cli.export.formats.options import Options
from edkm_cli.export.source import Compressed
from edkm_cli.format import DENSE_BITS
from helpers import byte_tokenizer, cluster, export, refused, tiny_llama, tiny_qwen

here = pytest.mark.skipif(importlib.util.find_spec("coremltools") is None, reason="needs coremltools")


def checkpoint(folder, model=None, **options):
    model, spec = cluster(model or tiny_llama(), **options)
    byte_tokenizer().save_pretrained(folder)
    return export(model, spec, folder)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("rows"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 5}, "coreml holds 1, 2, 3, 4, 6 and 8 bits, got 5; use --bits 4"),
        ({"lut_dtype": "bfloat16"}, "got bfloat16; use --lut-dtype float16"),
        ({"granularity": "block:4x8"}, "use --granularity row:1 or tensor"),
    ],
)
def test_what_core_ml_cannot_hold_is_refused_with_what_would_fit(options, message, tmp_path):
    source = checkpoint(tmp_path / "source", **options)
    assert message in refused("export", source, "--to", "coreml", "--output", tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sequence-length", "8-4"], "--sequence-length must be a number, or a range"),
        (["--sequence-length", "1-4096"], "--sequence-length must end by 128"),
        (["--sequence-length", "1-64", "--verify", "perplexity"], "windows of --context 1024 tokens"),
        (["--sequence-length", "64", "--dtype", "float32"], "coreml computes in float16"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_any_work(rows, arguments, message, tmp_path):
    assert message in refused("export", rows, "--to", "coreml", "--output", tmp_path / "out", *arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_one_line_with_the_command(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(coreml, "find_spec", lambda name: None)
    line = refused("export", rows, "--to", "coreml", "--output", tmp_path / "out", "--sequence-length", "64")
    assert "pip install 'edkm-cli[coreml]'" in line


@here
@pytest.mark.parametrize(
    "source",
    [
        {"granularity": "row:1"},
        {"model": lambda: tiny_llama(tied=False, bias=True), "granularity": "tensor", "bits": 4},
        {"model": tiny_qwen, "granularity": "row:4", "lut_dtype": "float8_e4m3fn", "embedding_bits": DENSE_BITS},
    ],
)
def test_the_program_predicts_what_the_source_predicts(source, ids, tmp_path):
    made = source.pop("model", tiny_llama)()
    folder = checkpoint(tmp_path / "source", made, **source)
    result = export_model(folder, "coreml", tmp_path / "out", options=Options(sequence_length="1-32"))
    assert result["format"] == "coreml"
    packed = hf.load(folder, dtype=torch.float32)
    program = coreml.load(tmp_path / "out", Options())
    with torch.no_grad():
        wanted, found = packed(ids[:1]).logits, program(ids[:1]).logits
    assert (found - wanted).norm() <= 5e-3 * wanted.norm()  # norms, biases and embeddings are float16


@here
@pytest.mark.parametrize("tied", [True, False])
def test_what_an_embedding_gives_and_takes_is_multiplied_with_its_columns_factors(tied, ids, tmp_path):
    made, spec = cluster(tiny_llama(tied=tied), embedding_bits=5, mixed={"embedding_factors": True})
    for module in (made.model.embed_tokens, made.lm_head)[: 2 - tied]:
        module.factors.copy_(torch.linspace(0.5, 3, 24))
    byte_tokenizer().save_pretrained(tmp_path / "source")
    source = export(made, spec, tmp_path / "source")
    export_model(source, "coreml", tmp_path / "out", options=Options(sequence_length="1-32"))
    program = coreml.load(tmp_path / "out", Options())
    with torch.no_grad():
        wanted, found = made(ids[:1]).logits, program(ids[:1]).logits
    assert (found - wanted).norm() <= 5e-3 * wanted.norm()


@here
@pytest.mark.parametrize("length", ["32", "1-32"])
def test_the_programs_perplexity_is_the_sources(rows, length, tmp_path):
    options = Options(sequence_length=length, verify="perplexity", context=32, max_windows=2)
    result = export_model(rows, "coreml", tmp_path / "out", options=options)
    assert result["perplexity"]["export"] == pytest.approx(result["perplexity"]["source"], rel=1e-2)


@here
def test_each_compressed_weight_is_one_table_operation_with_our_indices_and_entries(rows, tmp_path):
    export_model(rows, "coreml", tmp_path / "out", options=Options(sequence_length="32"))
    function, metadata = coreml._function(tmp_path / "out")
    names = json.loads(metadata["edkm.tensors"])
    found = {names[op.name]: op for op in function.operations if op.op_type == "constexpr_lut_to_dense"}
    source = Compressed(rows)
    assert found.keys() == {tensor.name for tensor in source.linears}
    for tensor in source.linears:
        operation = found[tensor.name]
        assert np.array_equal(operation.indices.val, source.indices(tensor.module).numpy())
        assert np.array_equal(operation.lut.val[:, 0, :, 0], source.table(tensor.module).half().numpy())


@here
def test_a_cache_gives_the_predictions_of_the_whole_sequence(rows, ids, tmp_path):
    export_model(rows, "coreml", tmp_path / "out", options=Options(sequence_length="1-32", cache=True))
    whole = coreml.load(tmp_path / "out", Options())(ids[:1]).logits
    program = coreml.load(tmp_path / "out", Options())
    parts = [program(ids[:1, :9], position=0), program(ids[:1, 9:10], position=9), program(ids[:1, 10:], position=10)]
    torch.testing.assert_close(torch.cat([part.logits for part in parts], 1), whole, atol=1e-4, rtol=1e-4)


@here
@pytest.mark.parametrize("what", ["entry", "row", "bias"])
def test_damage_to_a_program_is_found_and_named(what, tmp_path, monkeypatch):
    folder = checkpoint(tmp_path / "source", tiny_llama(bias=True))
    options = Options(sequence_length="32")
    name = "model.layers.1.mlp.down_proj"
    source = Compressed(folder)
    with monkeypatch.context() as patch:
        if what == "entry":
            table = source.table
            patch.setattr(source, "table", lambda path: table(path) + (path == name) / 64)
        elif what == "row":
            indices = source.indices
            patch.setattr(source, "indices", lambda path: indices(path).roll(int(path == name), 0))
        else:
            decoder = coreml.coreml_graph._Decoder
            without = lambda self, x, path: self.mb.linear(x=x, weight=self.weight(f"{path}.weight"))  # noqa: E731
            patch.setattr(decoder, "_linear", without)
        (tmp_path / "out").mkdir()
        coreml.write(source, tmp_path / "out", options)
    with pytest.raises(UserError, match="is in the source, but not" if what == "bias" else name):
        require_parity(source, tmp_path / "out", coreml, options)
