"""Two processes, data parallel and sharded, give what one gives; a killed process ends the run, and it resumes."""

import json
import os
import shutil
import signal
import subprocess

import pytest
import torch

import edkm_cli
from edkm_cli.compress import compress
from edkm_cli.distributed import World, assign, full, launched, local
from edkm_cli.errors import UserError
from families import family
from helpers import assert_same_to_rounding, byte_tokenizer, settings, weights_of
from processes import PATIENCE_SECONDS, assert_finished, together, torchrun, wait_for_steps

CASES = {
    "data-parallel": {},
    "sharded": {"sharding": "full"},
    "sharded-soft": {"sharding": "full", "mode": "soft", "iterations": 2, "gradient_checkpointing": True},
    "sharded-tensor-hard": {"sharding": "full", "mode": "hard", "granularity": "tensor", "embedding_bits": 16},
    "sharded-trained-luts": {"sharding": "full", "mode": "soft", "iterations": 0},
    "sharded-dkm": {"sharding": "full", "method": "dkm", "mode": "soft", "importance": "activation"},
    "data-parallel-dkm": {"method": "dkm", "mode": "soft", "granularity": "block:4x8"},
    # Rows are shared out; what trackers end must not be the group of processes.
    "data-parallel-held": {"assignments": "held", "lut_dtype": "float16", "log_with": ("tensorboard",)},
    "data-parallel-without-teacher": {"distill": False},
}


@pytest.mark.usefixtures("alone")
def test_two_processes_give_what_one_gives(start, model_directory, text_file, tmp_path, exact_products):
    # Rounded to bfloat16, gradients of nearly zero turn their signs, and Adam with them.
    runs, references = [], {}
    for name, changes in CASES.items():
        common = {"steps": 3, "calibration_tokens": 256, **changes}
        runs.append(settings(model_directory, text_file, tmp_path / name, **common))
        references[name] = settings(
            model_directory, text_file, tmp_path / f"one-{name}", gradient_accumulation=2, **common
        )
    children = together(start, runs, tmp_path / "log", environment={"EXACT_PRODUCTS": "1"})
    for config in references.values():
        compress(config)
    assert_finished(children, tmp_path / "log")
    for name in references:
        assert_same_to_rounding(tmp_path / name, tmp_path / f"one-{name}")
    report = json.loads((tmp_path / "sharded" / "report.json").read_text())
    assert report["processes"] == 2
    assert report["sharded"] is True
    edkm_cli.load(tmp_path / "sharded")


@pytest.mark.usefixtures("alone")
def test_processes_with_the_same_sequence_do_not_wait_for_each_other(start, model_directory, text_file, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text(text_file.read_text()[:500])
    changes = {"steps": 2, "sharding": "full", "sequence_length": 300, "eval_data": (str(text_file),)}
    config = settings(model_directory, short, tmp_path / "out", start="compensated", **changes)
    assert_finished(together(start, [config], tmp_path / "log"), tmp_path / "log")


@pytest.mark.usefixtures("alone")
def test_experts_of_two_processes_are_those_of_one(start, text_file, tmp_path):
    # Not every process's tokens reach every expert.
    family("mixtral").save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    runs, references = [], {}
    dense = {"experts": "dense", "sharding": "full", "start": "compensated", "label_weight": 1.0}
    for name, changes in {"held": {"assignments": "held"}, "free": {}, "dense": dense}.items():
        common = {"steps": 4, "calibration_tokens": 512, **changes}
        runs.append(settings(tmp_path / "model", text_file, tmp_path / name, **common))
        references[name] = settings(
            tmp_path / "model", text_file, tmp_path / f"one-{name}", gradient_accumulation=2, **common
        )
    children = together(start, runs, tmp_path / "log")
    for config in references.values():
        compress(config)
    assert_finished(children, tmp_path / "log")
    for name in references:
        assert_same_to_rounding(tmp_path / name, tmp_path / f"one-{name}")


@pytest.mark.usefixtures("alone")
def test_a_start_that_two_processes_were_killed_in_goes_on_with_the_next_layer(
    start, model_directory, text_file, tmp_path
):
    common = {"steps": 0, "dtype": "bfloat16", "granularity": "row:4"}
    whole, cut = (settings(model_directory, text_file, tmp_path / name, **common) for name in ("whole", "cut"))
    for child in together(start, [cut], tmp_path / "killed", environment={"STOP_AFTER_A_LAYER": "1"}):
        child.join(PATIENCE_SECONDS)
        assert child.exitcode == 9
    assert_finished(together(start, [cut], tmp_path / "resumed", resume=True), tmp_path / "resumed")
    assert_finished(together(start, [whole], tmp_path / "log"), tmp_path / "log")
    layers = {name: (tmp_path / f"{name}.0.layers").read_text().split() for name in ("killed", "resumed", "log")}
    assert layers["killed"] == ["model.layers.0"]
    assert layers["resumed"] == ["model.layers.1"]
    assert layers["log"] == ["model.layers.0", "model.layers.1"]
    assert weights_of(tmp_path / "cut") == weights_of(tmp_path / "whole")


@pytest.mark.usefixtures("alone")
def test_processes_that_have_different_models_say_so_before_the_work(start, model_directory, text_file, tmp_path):
    for rank in range(2):
        shutil.copytree(model_directory, tmp_path / f"node{rank}" / "model")
    weights = tmp_path / "node1" / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x40")
    config = settings("model", text_file, tmp_path / "out", steps=2)
    children = together(start, [config], tmp_path / "log", environment={"FOLDERS": str(tmp_path / "node")})
    for rank, child in enumerate(children):
        child.join(PATIENCE_SECONDS)
        assert "must have the same settings, model and texts" in (tmp_path / f"log.{rank}").read_text()
    assert not list(tmp_path.glob("out*"))


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_four_processes_give_what_one_gives(start, model_directory, text_file, tmp_path):
    common = {"steps": 10, "calibration_tokens": 512, "start": "compensated"}  # a sharded run's
    runs = [
        settings(model_directory, text_file, tmp_path / sharding, sharding=sharding, **common)
        for sharding in ("none", "full")
    ]
    children = together(start, runs, tmp_path / "log", size=4)
    compress(settings(model_directory, text_file, tmp_path / "one", gradient_accumulation=4, **common))
    assert_finished(children, tmp_path / "log")
    for sharding in ("none", "full"):
        assert_same_to_rounding(tmp_path / sharding, tmp_path / "one")


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("sharding", ["none", "full"])
def test_a_killed_process_ends_the_run_with_a_clear_line_and_the_run_resumes(
    start, python, model_directory, text_file, tmp_path, sharding
):
    changes = {"steps": 24, "save_every": 2, "sharding": sharding}
    whole = settings(model_directory, text_file, tmp_path / "whole", **changes)
    config = settings(model_directory, text_file, tmp_path / "killed", **changes)
    running = torchrun(python, config, sharding=sharding)
    wait_for_steps(tmp_path / "killed.partial", 5, lambda: running.poll() is None)
    last = subprocess.run(["pgrep", "-n", "-f", config.output], capture_output=True, text=True).stdout
    os.kill(int(last), signal.SIGKILL)
    output = running.communicate(timeout=PATIENCE_SECONDS)[0]
    assert running.returncode != 0
    assert "lost another one" in output, output[-3000:]
    assert not (tmp_path / "killed").exists()
    assert_finished(together(start, [config, whole], tmp_path / "log", resume=True), tmp_path / "log")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("killed", "whole")]
    assert files[0] == files[1]


def test_a_launcher_that_gives_no_number_of_processes_is_told(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(UserError, match="whole numbers, set by a launcher"):
        launched()


def test_a_world_of_one_changes_nothing():
    world, matrix = World(), torch.arange(12.0).view(4, 3)
    assert world.turns([5, 6, 7]) == [(5, True), (6, True), (7, True)]
    assert torch.equal(world.gather_rows(world.scatter_rows(matrix), 4), matrix)
    assert torch.equal(world.sum(matrix.clone()), matrix)
    assert full(matrix) is matrix
    assert local(matrix) is matrix
    target = torch.zeros(4, 3)
    assign(target, matrix)
    assert torch.equal(target, matrix)


@pytest.mark.parametrize(("count", "size"), [(1, 4), (5, 2), (8, 4), (9, 4)])
def test_turns_cover_each_item_once_and_are_equally_many(count, size):
    shares = [World(rank=rank, size=size).turns(range(count)) for rank in range(size)]
    assert len({len(share) for share in shares}) == 1
    assert sorted(item for share in shares for item, counts in share if counts) == list(range(count))
