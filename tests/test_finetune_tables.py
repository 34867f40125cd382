"""edkm finetune --train tables and edkm distill: a checkpoint goes on training on packed weights, taught or not."""

import copy
import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import edkm_cli
from edkm_cli.clustering import lookup
from edkm_cli.data import load_documents, parse_source, tokenize
from edkm_cli.errors import Preempted, UserError
from edkm_cli.evaluate.perplexity import perplexity
from edkm_cli.finetune.command import finetune, plan_finetune
from edkm_cli.finetune.config import FinetuneConfig, build_distill_config
from edkm_cli.finetune.session import PackedSession
from edkm_cli.format import read_spec
from edkm_cli.granularity import MULTIPLES
from edkm_cli.nn.clustered import Clustering, hold_packed, lut_layers
from edkm_cli.packing import as_numbers, unpack
from edkm_cli.train.loop import Metrics
from helpers import byte_tokenizer, cluster, export, metrics_of, refused, run, tiny_llama, weights_of
from processes import assert_finished, together

SIZES = {"context": 64, "eval_windows": 2, "sequence_length": 32, "learning_rate": 2e-3, "lut_learning_rate": 2e-3}


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Made of `model_directory`'s model, at two bits, so that tables have something to learn."""
    directory = export(*cluster(tiny_llama(), bits=2), tmp_path_factory.mktemp("packed") / "tiny")
    byte_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("EDKM_CACHE", str(tmp_path_factory.getbasetemp() / "tables-cache"))


def settings(text_file, output, **changes):
    values = {"train": "tables", "data": (str(text_file),), "output": str(output), "steps": 6, "device": "cpu", **SIZES}
    return FinetuneConfig(**{**values, **changes})


@pytest.mark.parametrize("lut_dtype", ["float16", "float8_e4m3fn", "float8_e3m4"])
@pytest.mark.parametrize("granularity", ["row:1", "block:4x8"])
def test_gradients_of_tables_are_those_of_a_dense_model_summed_by_entry(tmp_path, granularity, lut_dtype, ids):
    options = {"granularity": granularity, "lut_dtype": lut_dtype}
    model = edkm_cli.load(export(*cluster(tiny_llama(hidden=32, inner=64), **options), tmp_path), dtype=torch.float32)
    dense = copy.deepcopy(model)
    dense.dequantize()
    dense.requires_grad_(True)
    hold_packed(model, Clustering(3, granularity, lut_dtype))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert all(name.endswith((".centroids", "norm.weight")) for name in trained)
    for one in (model, dense):
        one(input_ids=ids, labels=ids).loss.backward()
    for name, layer in lut_layers(model).items():
        weight = dense.get_submodule(name).weight
        torch.testing.assert_close(layer.hard_weight(), weight, rtol=0, atol=0)
        table = torch.zeros_like(layer.centroids, requires_grad=True)
        rows, columns = layer.clustering.granularity.tile(*weight.shape)
        blocks = torch.arange(weight.shape[0])[:, None] // rows * (weight.shape[1] // columns)
        groups = blocks + torch.arange(weight.shape[1])[None] // columns
        (table[groups, layer.codes().long()] * weight.grad).sum().backward()
        torch.testing.assert_close(layer.centroids.grad, table.grad, rtol=1e-3, atol=1e-5)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.testing.assert_close(parameter.grad, dense.get_parameter(name).grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("palette", "bits"), MULTIPLES)
def test_tables_of_k_quants_are_held_as_they_are_and_have_gradients(palette, bits, tmp_path, ids):
    form = {"bits": bits, "granularity": f"block:1x{MULTIPLES[palette, bits][0]}", "lut_dtype": "int8"}
    mixed = {"palette": palette, "embedding_group": 32}
    model = cluster(tiny_llama(hidden=256, inner=256), palette=palette, mixed=mixed, **form)
    model = edkm_cli.load(export(*model, tmp_path), dtype=torch.float32)
    before = model(ids).logits
    hold_packed(model, Clustering(*form.values(), palette=palette))
    torch.testing.assert_close(model(ids).logits, before, rtol=1e-4, atol=1e-4)
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(bool(layer.centroids.grad.isfinite().all()) for layer in lut_layers(model).values())


@pytest.fixture(scope="module")
def tuned(packed, text_file, tmp_path_factory):
    output = tmp_path_factory.mktemp("tuned") / "out"
    return output, finetune(packed, settings(text_file, output, steps=40, learning_rate=1e-2, lut_learning_rate=1e-2))


def test_tables_learn_a_text_and_the_codes_and_the_size_stay(packed, tuned):
    output, report = tuned
    losses, measured = metrics_of(output), report["perplexity"]
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])
    assert measured["exported"] == pytest.approx(measured["trained"], rel=1e-4)
    assert measured["exported"] < 0.95 * measured["compressed"]
    before, after = load_file(packed / "model.safetensors"), load_file(output / "model.safetensors")
    assert {name: (t.dtype, t.shape) for name, t in before.items()} == {n: (t.dtype, t.shape) for n, t in after.items()}
    changed = {name.rpartition(".")[2] for name in before if not torch.equal(before[name], after[name])}
    assert changed <= {"lut", "weight", "indices"}  # tables and norms; of indices the order of a table's entries alone
    models = [edkm_cli.load(path, dtype=torch.float32) for path in (packed, output)]
    for name, layer in models[0].named_modules():
        if name.endswith("proj"):
            pairs = [unpack(m.indices, 2, m.in_features).long() for m in (layer, models[1].get_submodule(name))]
            seen = [set(zip(*map(torch.Tensor.tolist, row), strict=True)) for row in zip(*pairs, strict=True)]
            assert all(len(dict(row)) == len(row) == len({new for _, new in row}) for row in seen)
    assert torch.equal(*(model.get_input_embeddings().indices for model in models))
    assert report["weights_bytes"] == os.path.getsize(output / "model.safetensors")
    page = (Path(edkm_cli.__file__).parent.parent / "docs" / "results.md").read_text(encoding="utf-8")
    assert report.keys() - set(re.findall(r"`(\w+)`", page)) == set()
    assert "trained for 40 steps" in (output / "README.md").read_text()


def test_a_dry_run_counts_tables_and_norms(packed, text_file, tmp_path):
    plan = plan_finetune(packed, settings(text_file, tmp_path / "out"))
    rows = 2 * (24 + 12 + 12 + 24 + 40 + 40 + 24)
    assert plan["trained_parameters"] == 4 * rows + 24 * 5
    assert plan["trained_layers"] == 14
    status, out, _ = run(
        "finetune", packed, "--train", "tables", "--data", text_file, "-o", tmp_path / "out", "--dry-run"
    )
    assert status == 0
    assert "tables" in out
    assert os.listdir(tmp_path) == []


def test_a_checkpoint_nears_its_reference_and_a_killed_run_ends_with_the_same_weights(
    packed, model_directory, tmp_path, monkeypatch
):
    flags = {"reference": str(model_directory), "eval_windows": 2, "context": 64, "steps": 6, "sequence_length": 32}
    flags |= {"device": "cpu", "lut_learning_rate": 5e-3, "learning_rate": 5e-3, "save_every": 2}
    whole = finetune(packed, build_distill_config(None, {**flags, "output": str(tmp_path / "whole")}))
    (row,) = whole["texts"]
    assert row["stages"]["exported"]["kl_per_token"] < row["stages"]["compressed"]["kl_per_token"]
    measured = tokenize(load_documents(parse_source("builtin")), byte_tokenizer())
    alone = perplexity(AutoModelForCausalLM.from_pretrained(model_directory), measured, context=64, max_windows=2)
    assert row["original"] == pytest.approx(alone.perplexity, rel=1e-5)
    assert whole["config"]["label_weight"] == 0
    cut, write = build_distill_config(None, {**flags, "output": str(tmp_path / "cut")}), Metrics.write

    def stop_at_five(self, record):
        write(self, record)
        if record["step"] == 5:
            raise Preempted("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(Metrics, "write", stop_at_five)
        with pytest.raises(Preempted):
            finetune(packed, cut)
    with pytest.raises(UserError, match="steps was 6 and is 7"):
        finetune(
            packed, build_distill_config(None, {**flags, "output": str(tmp_path / "cut"), "steps": 7}), resume=True
        )
    resumed = finetune(packed, cut, resume=True)
    assert weights_of(tmp_path / "cut") == weights_of(tmp_path / "whole")
    assert resumed["texts"] == whole["texts"]
    assert metrics_of(tmp_path / "cut") == metrics_of(tmp_path / "whole")
    assert finetune(packed, cut, resume=True) == json.loads(json.dumps(resumed))  # finished already


@pytest.mark.usefixtures("alone")
def test_two_processes_give_what_one_gives(start, packed, model_directory, text_file, tmp_path):
    common = {"reference": str(model_directory), "learning_rate": 1e-3, "lut_learning_rate": 1e-3}
    two = settings(text_file, tmp_path / "two", **common)
    children = together(start, [(packed, two)], tmp_path / "log")
    one = finetune(packed, settings(text_file, tmp_path / "one", gradient_accumulation=2, **common))
    assert_finished(children, tmp_path / "log")
    report = json.loads((tmp_path / "two" / "finetune.json").read_text())
    assert report["processes"] == 2
    assert report["perplexity"]["exported"] == pytest.approx(one["perplexity"]["exported"], rel=1e-4)
    ours, reference = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "one"))
    for name, tensor in reference.items():
        torch.testing.assert_close(
            ours[name].float(), tensor.float(), rtol=0, atol=1e-3 * float(tensor.float().abs().max())
        )


def test_what_does_not_go_together_is_refused_in_one_line(packed, model_directory, text_file, tmp_path):
    tables = ("finetune", packed, "--data", text_file, "-o", tmp_path / "out", "--train", "tables")
    assert "lora_rank is of an adapter" in refused(*tables, "--lora-rank", 4)
    assert "target_modules is of an adapter" in refused(*tables, "--target-modules", "q_proj")
    both = [text for name in ("all-linear", "lm_head") for text in ("--target-modules", name)]
    assert "target_modules all-linear stands alone" in refused("finetune", packed, "--data", text_file, *both)
    adapter = ("finetune", packed, "--data", text_file, "-o", tmp_path / "out")
    assert "use train tables" in refused(*adapter, "--reference", model_directory)
    assert "label_weight stands beside" in refused(*tables, "--label-weight", 0.5)
    assert "name a text" in refused("finetune", packed, "--data", "self", "--train", "tables")
    assert "--reference is required" in refused("distill", packed)
    assert "--reference must not be quantized" in refused(*tables, "--reference", packed)
    inside = ("-o", model_directory / "out", "--train", "tables", "--reference", model_directory)
    assert "--reference" in refused("finetune", packed, "--data", text_file, *inside)
    other = tmp_path / "other"
    tiny_llama(hidden=32).save_pretrained(other)
    byte_tokenizer().save_pretrained(other)
    assert "embed_tokens, which is (257, 24)" in refused(*tables, "--reference", other)
    tiny_llama(layers=3).save_pretrained(other)
    assert "has 3 at num_hidden_layers, which is 2" in refused(*tables, "--reference", other)
    words = tmp_path / "words"
    tiny_llama().save_pretrained(words)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(words)
    assert "another tokenizer" in refused(*tables, "--reference", words)
    assert not (tmp_path / "out").exists()


def test_the_table_lookup_of_the_written_model_is_that_of_the_trained_one(tuned):
    model = edkm_cli.load(tuned[0], dtype=torch.float32)
    layer = model.model.layers[0].mlp.up_proj
    held = edkm_cli.load(tuned[0], dtype=torch.float32)
    hold_packed(held, Clustering(2, "row:1", "float16"))
    mine = held.model.layers[0].mlp.up_proj
    assert torch.equal(lookup(mine.codes(), mine.lut(), granularity="row:1"), layer.dequantize())


def test_e3m4_tables_of_versions_with_one_scale_for_a_matrix_load_and_do_not_train(ids, tmp_path):
    directory = export(*cluster(tiny_llama(), lut_dtype="float8_e3m4"), tmp_path / "one")
    config, tensors = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    assert config["quantization_config"]["format_version"] == 10
    config["quantization_config"]["format_version"] = 8
    (directory / "config.json").write_text(json.dumps(config))
    scales = [name for name in tensors if name.endswith("lut_scale")]
    assert {tensors[name].dtype for name in scales} == {torch.float8_e8m0fnu}
    tensors |= {name: torch.full((1,), 2.0**-6) for name in scales}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    for name in ("checksums.json", "edkm-files.json", "tensors.json"):
        (directory / name).unlink(missing_ok=True)
    model = edkm_cli.load(directory, dtype=torch.float32)
    layer = model.model.layers[0].mlp.up_proj
    assert torch.equal(layer.table().float(), as_numbers(layer.lut) * 2.0**-6)
    dense = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).dequantize()
    torch.testing.assert_close(model(ids).logits, dense(ids).logits)
    session = PackedSession.__new__(PackedSession)
    session.directory, session.spec = directory, read_spec(directory)
    with pytest.raises(UserError, match=r"need format version 10, but .* has 8, with one scale for a matrix; compress"):
        _ = session.clustering
