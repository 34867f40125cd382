"""What a configuration resolves to: each decision once, the same for all who read it."""

import json
from dataclasses import replace

import pytest

from edkm_cli import models
from edkm_cli.compress import compress
from edkm_cli.config import CompressConfig
from edkm_cli.data import parse_sources
from edkm_cli.distributed import World
from edkm_cli.dryrun.plan import dry_run
from edkm_cli.errors import UserError
from edkm_cli.preflight import needed_tokens, plan_run, resolve
from edkm_cli.progress import Observer
from edkm_cli.report.read import read_run
from edkm_cli.summaries import summary
from families import family
from helpers import settings

HERE, TWO = World(), World(size=2, sharded=True)


def resolved(launch=HERE, **changes):
    config = CompressConfig(**changes)
    return resolve(config, launch, parse_sources(list(config.data)))


@pytest.mark.parametrize(
    ("changes", "held"),
    [
        ({}, True),
        ({"data": ("builtin",)}, False),
        ({"data": ("self=1",)}, True),
        ({"data": ("self=0.5", "builtin=0.5")}, False),
        ({"label_weight": 1.0}, False),
        ({"data": ("builtin",), "label_weight": 0.0}, True),
        ({"mode": "soft"}, False),
        ({"sharding": "full"}, False),
        ({"distill": False}, False),
        ({"start": "kmeans"}, False),
        ({"data": ("builtin",), "steps": 0}, True),
        ({"assignments": "free"}, False),
        ({"data": ("builtin",), "assignments": "held"}, True),
    ],
    ids=str,
)
def test_assignments_are_held_where_the_teacher_alone_is_learnt(changes, held):
    assert resolved(**changes).assignments == ("held" if held else "free")


@pytest.mark.parametrize(
    ("data", "labels"), [("self", 0.0), ("self=1", 0.0), ("builtin", 1.0), (("self=0.5", "builtin=0.5"), 1.0)], ids=str
)
def test_text_that_the_model_writes_has_no_labels_however_it_is_named(data, labels):
    assert resolved(data=data).label_weight == labels
    assert resolved(data=data, label_weight=0.25).label_weight == 0.25
    assert resolved(data=data, distill=False).label_weight == 1.0  # there is nothing else to learn


@pytest.mark.parametrize(
    ("changes", "sharded", "start"),
    [
        ({"steps": 0}, False, "reconstructed"),
        ({"steps": 0}, True, "compensated"),
        ({}, False, "reconstructed"),
        ({}, True, "compensated"),
        ({"sharding": "full"}, False, "compensated"),  # one process of a recipe for many
        ({"mode": "soft", "iterations": 0}, False, "compensated"),
        ({"mode": "soft"}, False, "compensated"),
        ({"start": "kmeans"}, False, "kmeans"),
    ],
    ids=str,
)
def test_auto_takes_the_best_start_that_a_run_can_have(changes, sharded, start):
    assert resolved(TWO if sharded else World(), **changes).start == start


@pytest.mark.parametrize("setting", [{"start": "reconstructed"}, {"assignments": "held"}], ids=str)
@pytest.mark.parametrize("changes", [{"mode": "hard"}, {"mode": "soft"}, {"sharding": "full"}], ids=str)
def test_what_needs_whole_weights_is_refused_without_them(setting, changes):
    (name,) = setting
    with pytest.raises(UserError, match=f"straight-through without sharding; use {name} auto"):
        CompressConfig(**setting, **changes)
    if "sharding" in changes:  # as accelerate is configured
        with pytest.raises(UserError, match=f"use {name} auto") as caught:
            resolved(TWO, **setting)
        assert caught.value.everywhere


def test_layers_that_get_more_of_a_text_than_hidden_states_are_compensated(tmp_path):
    family("gemma3n_text").save_pretrained(tmp_path)
    config = CompressConfig(model=str(tmp_path))
    plan = plan_run(config, HERE)
    assert (plan.config.start, plan.config.allocation, plan.by_layer) == ("compensated", "uniform", False)
    assert plan.resolved["start"] == "compensated"
    assert plan_run(config, HERE, like=plan).config == plan.config
    with pytest.raises(UserError, match=r"which Gemma3nForCausalLM is not known to be; use --start compensated"):
        plan_run(replace(config, start="reconstructed"), HERE)


def test_more_steps_pass_over_less_text_again(model_directory):
    settings = {
        "model": str(model_directory),
        "steps": 40,
        "start_tokens": 2048,
        "sequence_length": 64,
        "calibration_tokens": 64,
    }
    plans = [plan_run(CompressConfig(**settings, text_tokens=tokens), HERE) for tokens in (1024, None)]
    assert [needed_tokens(plan, written=True) for plan in plans] == [2048 + 64, int(1.1 * 40 * 64) + 64]
    assert {needed_tokens(plan) for plan in plans} == {int(1.1 * 40 * 64) + 64}  # of what else there is
    with pytest.raises(UserError, match="--data names no self"):
        resolved(text_tokens=1024, data=("builtin",))


def test_what_would_do_nothing_is_refused():
    with pytest.raises(UserError, match=r"--weight-decay does nothing here .*assignments held"):
        resolved(weight_decay=0.1)
    assert resolved(weight_decay=0.1, assignments="free").weight_decay == 0.1
    with pytest.raises(UserError, match=r"--start-passes does nothing here \(start kmeans"):
        resolved(start_passes=1, start="kmeans")


def test_nothing_is_left_open_and_what_is_resolved_stays():
    once = resolved()
    assert "auto" not in {getattr(once, name) for name in ("start", "allocation", "assignments", "sharding", "dtype")}
    assert resolve(once, World(), parse_sources(["self"])) == once


def test_processes_count_as_accumulation_does():
    four = resolved(World(size=4), steps=10, gradient_accumulation=1)
    assert four.start_tokens == resolved(steps=10, gradient_accumulation=4).start_tokens == 40 * 1024


@pytest.mark.parametrize("faster", [True, False])
def test_products_are_rounded_where_that_is_faster(faster, monkeypatch):
    monkeypatch.setattr("edkm_cli.preflight.multiplies_bfloat16", lambda device: faster)
    assert resolved().mixed_precision == ("bf16" if faster else "no")
    assert resolved(dtype="bfloat16").mixed_precision == resolved(mixed_precision="no").mixed_precision == "no"


@pytest.mark.parametrize(
    ("changes", "allocation", "bits"),
    [
        ({}, "sensitivity", 5),
        ({"embedding_bits": 16}, "sensitivity", 16),
        ({"embedding_bits": 4}, "sensitivity", 4),
        ({"bits": 5}, "uniform", 8),
        ({"start": "kmeans"}, "uniform", 8),
        ({"start": "kmeans", "bits": 3.5}, "sensitivity", 5),
        ({"allocation": "uniform", "embedding_bits": 16}, "uniform", 16),
    ],
    ids=str,
)
def test_embeddings_get_the_bits_that_the_allocation_leaves_them(changes, allocation, bits, model_directory):
    config = plan_run(CompressConfig(model=str(model_directory), **changes), HERE).config
    assert (config.allocation, config.embedding_bits) == (allocation, bits)


@pytest.mark.parametrize("bits", [16, 5])
def test_the_checkpoint_says_null_for_dense_embeddings(model_directory, bits):
    spec = plan_run(CompressConfig(model=str(model_directory), embedding_bits=bits), World()).spec
    assert spec.to_mapping()["embedding_bits"] == (None if bits == 16 else bits)
    assert type(spec).from_mapping(spec.to_mapping()) == spec
    with pytest.raises(UserError, match="2 to 8 or null, got 16"):
        type(spec).from_mapping({**spec.to_mapping(), "embedding_bits": 16})


@pytest.mark.parametrize(
    ("changes", "remedy"), [({"bits": 2.5}, "a whole number of --bits"), ({"bits": 3}, "--allocation uniform")], ids=str
)
def test_what_is_recommended_for_sharding_is_not_refused_next(model_directory, changes, remedy):
    config = CompressConfig(model=str(model_directory), data=("builtin",), allocation="sensitivity", **changes)
    with pytest.raises(UserError, match=f"use {remedy}"):
        plan_run(config, TWO)
    plan_run(replace(config, bits=3, allocation="uniform"), TWO)


def test_labels_beside_a_distillation_that_is_off_are_refused():
    with pytest.raises(UserError, match="label_weight 0 stands beside distillation"):
        CompressConfig(distill=False, label_weight=0.0)


def test_the_report_says_what_was_resolved(model_directory, text_file, tmp_path):
    config = settings(model_directory, text_file, tmp_path / "out", steps=0, start_tokens=None, bits=5)
    report = compress(config)
    assert report["config"]["start"] == "auto"
    assert report["resolved"]["start"] == "reconstructed"
    assert report["resolved"]["embedding_bits"] == 8
    assert report["resolved"] == json.loads((tmp_path / "out" / "report.json").read_text())["resolved"]
    assert dry_run(config)["resolved"] == report["resolved"]
    assert read_run(tmp_path / "out").settings["label_weight"] == 1.0


def test_one_model_without_weights_is_made_for_a_run(model_directory, text_file, tmp_path, monkeypatch):
    made = []
    skeleton = models.skeleton
    monkeypatch.setattr(models, "skeleton", lambda *a, **k: made.append(1) or skeleton(*a, **k))
    dry_run(settings(model_directory, text_file, tmp_path / "out"))
    assert len(made) == 1


def test_more_tokens_than_the_model_has_positions_for_are_warned_of(model_directory, text_file, tmp_path):
    long = {"sequence_length": 256, "context": 129, "steps": 1, "calibration_tokens": 64, "start_tokens": 64}
    config = settings(model_directory, text_file, tmp_path / "out", **long)
    told = []
    compress(config, observer=Observer(say=told.append))
    wanted = ["--sequence-length 256 is more than the 128 positions", "--context 129 is more than the 128 positions"]
    assert [warning.startswith(start) for warning, start in zip(dry_run(config)["warnings"], wanted, strict=True)] == [
        1,
        1,
    ]
    assert all(any(f"WARNING: {start}" in line for line in told) for start in wanted)
    assert "warnings" not in dry_run(replace(config, sequence_length=128, context=128))
    assert "WARNING: --context 129" in summary("plan", dry_run(config))
