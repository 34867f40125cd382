"""Whole runs on a tiny model: the report, the files, reproducibility, and outputs that are never half there."""

import json
import os
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import edkm_cli
from edkm_cli.compress import Run, compress
from edkm_cli.config import CompressConfig
from edkm_cli.distributed import World
from edkm_cli.errors import UserError
from edkm_cli.evaluate.command import evaluate_model
from edkm_cli.evaluate.config import EvalConfig
from edkm_cli.export.directory import OutputDirectory
from edkm_cli.export.source import Compressed
from edkm_cli.preflight import plan_run
from edkm_cli.progress import Observer
from edkm_cli.report.inspection import verify
from families import family
from helpers import byte_tokenizer, settings, tiny_llama, weights_of


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"distill": False},
        {"mode": "soft", "iterations": 2, "centroid_weighting": "uniform"},
        {"mode": "hard", "temperature_schedule": "cosine"},
        {"mode": "soft", "iterations": 0},
        {"gradient_accumulation": 2, "batch_size": 2},
        {"gradient_checkpointing": True},
        {"offload": "cpu", "method": "dkm", "mode": "soft"},
        {"granularity": "tensor", "dtype": "bfloat16"},
        {"granularity": "block:4x8", "lut_dtype": "float8_e4m3fn"},
        {"mixed_precision": "bf16"},
        {"mixed_precision": "bf16", "mode": "soft"},
        {"embedding_bits": 16},
        {"importance": "none"},
        {"importance": "activation", "steps": 0},
    ],
    ids=lambda changes: ",".join(f"{key}={value}" for key, value in changes.items()) or "defaults",
)
def test_a_run_leaves_a_model_that_loads_and_measures_as_reported(model_directory, text_file, tmp_path, changes):
    config = settings(model_directory, text_file, tmp_path / "out", **changes)
    result = compress(config)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report == json.loads(json.dumps(result))
    measured = report["perplexity"]
    assert (measured["trained"] is None) is (config.steps == 0)
    # Packed products add in another order than those of the decoded weights.
    close = 5e-3 if config.dtype == "bfloat16" else 1e-5
    assert measured["exported"] == pytest.approx(measured["trained" if config.steps else "start"], rel=close)
    assert set(os.listdir(tmp_path)) == {"out"}
    for name in ("README.md", "config.json", "generation_config.json", "tokenizer.json", "checksums.json"):
        assert (tmp_path / "out" / name).is_file()
    again = evaluate_model(
        str(tmp_path / "out"),
        EvalConfig(
            data=(str(text_file),),
            context=64,
            max_windows=2,
            dtype="float32" if config.dtype == "auto" else config.dtype,
            device="cpu",
        ),
    )
    assert again["weights_bytes"] == report["weights_bytes"]
    assert again["decoder_bits_per_weight"] == pytest.approx(report["decoder_bits_per_weight"])


def test_training_lowers_the_loss_and_the_gap_to_the_original(model_directory, text_file, tmp_path):
    config = settings(
        model_directory,
        text_file,
        tmp_path / "out",
        bits=2,
        steps=40,
        learning_rate=3e-3,
        label_weight=0.0,
        start="kmeans",
    )
    compress(config)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 41))
    first, last = (sum(line["loss"] for line in part) / 8 for part in (lines[:8], lines[-8:]))
    assert last < 0.8 * first
    assert lines[-1]["tokens"] == 40 * 48


def test_the_same_seed_gives_the_same_files(model_directory, text_file, tmp_path):
    for name in ("a", "b"):
        compress(settings(model_directory, text_file, tmp_path / name))
    assert weights_of(tmp_path / "a") == weights_of(tmp_path / "b")
    compress(settings(model_directory, text_file, tmp_path / "c", seed=1))
    assert weights_of(tmp_path / "a") != weights_of(tmp_path / "c")


@pytest.mark.parametrize("mode", ["straight-through", "hard", "soft"])
def test_methods_edkm_and_dkm_give_the_same_model(model_directory, text_file, tmp_path, mode):
    models = []
    for method in ("edkm", "dkm"):
        compress(settings(model_directory, text_file, tmp_path / method, method=method, mode=mode))
        models.append(edkm_cli.load(tmp_path / method))
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(models[0](tokens).logits, models[1](tokens).logits, rtol=1e-2, atol=2e-3)


def test_accumulation_and_checkpointing_do_not_change_the_result(model_directory, text_file, tmp_path):
    compress(settings(model_directory, text_file, tmp_path / "a", batch_size=2))
    compress(settings(model_directory, text_file, tmp_path / "b", gradient_accumulation=2, gradient_checkpointing=True))
    losses = []
    for name in "ab":
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_an_existing_result_is_kept_unless_overwritten_by_a_whole_one(model_directory, text_file, tmp_path):
    config = settings(model_directory, text_file, tmp_path / "out", steps=0)
    compress(config)
    before = weights_of(tmp_path / "out")
    with pytest.raises(UserError, match="not empty"):
        compress(config)
    failing = settings(model_directory, text_file, tmp_path / "out", learning_rate=1e30, steps=3, bits=2)
    with pytest.raises(UserError, match="finite"):
        compress(failing, overwrite=True)
    assert weights_of(tmp_path / "out") == before
    edkm_cli.load(tmp_path / "out")
    compress(settings(model_directory, text_file, tmp_path / "out", steps=0, bits=2), overwrite=True)
    assert weights_of(tmp_path / "out") != before
    assert set(os.listdir(tmp_path)) == {"out"}


def test_a_compressed_model_is_not_compressed_again(model_directory, text_file, tmp_path):
    compress(settings(model_directory, text_file, tmp_path / "out", steps=0))
    with pytest.raises(UserError, match="compressed already"):
        compress(settings(tmp_path / "out", text_file, tmp_path / "again", steps=0))


def test_a_directory_that_is_not_ours_is_never_removed(tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "precious.txt").write_text("keep")
    with pytest.raises(UserError, match="holds something else"):
        OutputDirectory(tmp_path / "out")


def test_a_full_disk_is_found_out_before_the_work(tmp_path):
    with pytest.raises(UserError, match="free some"):
        OutputDirectory(tmp_path / "out").rehearse(10**18)


def test_weights_of_16_bits_and_their_tables_are_not_trained_in_one_shard(model_directory, text_file, tmp_path):
    config = settings(model_directory, text_file, tmp_path / "out", sharding="full", dtype="bfloat16")
    with pytest.raises(UserError, match="both must be float32, but --dtype is bfloat16"):
        Run(config, World(size=2, sharded=True), Observer(), lambda plan: None)


def test_checkpoints_of_held_assignments_need_little_disk():
    plan = plan_run(CompressConfig(model="llama-7b", assignments="held", allocation="uniform", keep=1), World())
    result_bytes = replace(plan, config=replace(plan.config, steps=0)).needed_bytes
    luts = 32 * 8 * (5 * 4096 + 2 * 11008)
    assert plan.needed_bytes == result_bytes + 2 * 12 * luts


def test_a_gradient_that_is_not_finite_never_reaches_weights_and_checkpoints(
    model_directory, text_file, tmp_path, monkeypatch
):
    clip, norms = torch.nn.utils.clip_grad_norm_, iter([1.0, 1.0, float("nan")])

    def overflowing(parameters, limit):
        return clip(parameters, limit) * next(norms)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", overflowing)
    config = settings(model_directory, text_file, tmp_path / "out", save_every=1)
    with pytest.raises(UserError, match="gradient's norm must stay finite, but is nan at step 3"):
        compress(config)
    kept = sorted(path.name for path in (tmp_path / "out.partial" / "checkpoints").glob("step-*"))
    assert kept == ["step-000001", "step-000002"]


@pytest.mark.parametrize("steps", [0, 2])
def test_what_is_not_compressed_keeps_the_number_format_of_the_source(steps, text_file, tmp_path):
    """On a CPU, where a bfloat16 model trains in float32: stored as float32 it grew."""
    source, text = tmp_path / "model", str(text_file)
    model = family("deepseek_v3", torch.bfloat16)
    gate = model.model.layers[1].mlp.gate
    gate.e_score_correction_bias = gate.e_score_correction_bias.float()  # as the family's files have it
    model.save_pretrained(source)
    byte_tokenizer().save_pretrained(source)
    config = settings(source, text, tmp_path / "out", steps=steps, start="kmeans", context=32, sequence_length=32)
    result = compress(config)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    kept = sorted(before.keys() & after.keys())
    router = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert before[router].dtype == torch.float32
    assert {router, "model.norm.weight"} <= set(kept)
    assert "model.layers.1.mlp.experts.down_proj.3.indices" in after
    for name in kept:
        assert after[name].dtype == before[name].dtype, name
        assert steps or torch.equal(after[name], before[name]), name
    assert result["weights_bytes"] < sum(tensor.nbytes for tensor in before.values())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    measured = result["perplexity"]
    assert measured["exported"] == pytest.approx(measured["trained" if steps else "start"], rel=1e-5)
    assert edkm_cli.load(tmp_path / "out").dtype == torch.bfloat16
    assert verify(Compressed(tmp_path / "out"))["report"]
    sizes = evaluate_model(
        str(tmp_path / "out"), EvalConfig(data=(str(text),), context=32, max_windows=1, device="cpu")
    )
    assert sizes["model_bits_per_weight"] == pytest.approx(result["model_bits_per_weight"])


@pytest.mark.parametrize("more", [{"steps": 0}, {"steps": 2, "data": ("self",), "text_tokens": 4096}, {"steps": 2}])
def test_generation_settings_stay_whichever_way_the_model_is_read(more, text_file, tmp_path):
    tiny_llama().save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    given = {"eos_token_id": [256, 5], "temperature": 0.6, "top_p": 0.9}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(given))
    compress(settings(tmp_path / "model", text_file, tmp_path / "out", **{"eval_data": ("builtin",)} | more))
    kept = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert {key: kept.get(key) for key in given} == given


def test_sizes_count_what_the_files_hold_wider_than_the_configuration_says(text_file, tmp_path):
    tiny_llama(hidden=64, inner=88).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(path.read_text().replace('"float32"', '"bfloat16"'))
    config = settings(tmp_path / "model", text_file, tmp_path / "out", steps=0, embedding_bits=16, target_size="100KB")
    result = compress(config)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert tensors["model.embed_tokens.weight"].dtype == torch.float32
    assert 95_000 < size <= 100_000
    assert result["model_bits_per_weight"] == pytest.approx(8 * size / result["parameters"])
    assert verify(Compressed(tmp_path / "out"))["report"]
    assert f"{result['resolved']['bits']:.3g}-bit palettized" in (tmp_path / "out" / "README.md").read_text()
