"""Two processes, data parallel and sharded, give what one gives; a killed process ends the run, and it resumes."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_compress import settings

import edkm_cli
from edkm_cli.compress import compress
from edkm_cli.distributed import World, assign, full, local
from edkm_cli.packing import unpack

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
WORKER = Path(__file__).with_name("distributed_worker.py")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


def launch(configs, directory, *, processes=2):
    file = directory / "settings.json"
    file.write_text(json.dumps([asdict(config) for config in configs]))
    return subprocess.run(
        [*TORCHRUN, str(processes), str(WORKER), str(file)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=600,
    )


def assert_same_to_rounding(found, wanted, columns=24):
    """Sums over processes are added in another order: gradients differ in the last bits, Adam may turn the sign of an
    update whose gradient is nearly zero, and a weight on the border of two entries may fall to the other side. Over 20
    steps at a learning rate of 1e-3: entries and norms within 1e-3 of the largest, at most 1 weight in 1,000 elsewhere.
    """
    ours, reference = load_file(found / "model.safetensors"), load_file(wanted / "model.safetensors")
    assert ours.keys() == reference.keys()
    changed = total = 0
    for name, tensor in reference.items():
        if name.endswith("indices") and "proj" in name:
            width = tensor.shape[1] * 8 // 3
            changed += int((unpack(ours[name], 3, width) != unpack(tensor, 3, width)).sum())
            total += tensor.shape[0] * width
        elif name.endswith("indices"):
            assert torch.equal(ours[name], tensor), name  # embeddings do not train
        else:
            torch.testing.assert_close(
                ours[name].float(), tensor.float(), rtol=0, atol=1e-3 * float(tensor.float().abs().max())
            )
    assert changed <= total / 1000, f"{changed} of {total} weights"
    perplexities = [json.loads((path / "report.json").read_text())["perplexity"] for path in (found, wanted)]
    for stage, value in perplexities[1].items():
        assert perplexities[0][stage] == pytest.approx(value, rel=1e-3), stage


CASES = {
    "data-parallel": {},
    "sharded": {"sharding": "full"},
    "sharded-soft": {"sharding": "full", "mode": "soft", "iterations": 2, "gradient_checkpointing": True},
    "sharded-tensor-hard": {"sharding": "full", "mode": "hard", "granularity": "tensor", "embedding_bits": 16},
    "sharded-trained-luts": {"sharding": "full", "mode": "soft", "iterations": 0},
    "sharded-dkm": {"sharding": "full", "method": "dkm", "mode": "soft", "importance": "activation"},
    "data-parallel-dkm": {"method": "dkm", "mode": "soft", "granularity": "block:4x8"},
    "sharded-lora": {"sharding": "full", "lora_rank": 2},
    "data-parallel-lora": {"lora_rank": 2, "distill": False},
}


def test_two_processes_give_what_one_gives(model_directory, text_file, tmp_path):
    runs, references = [], {}
    for name, changes in CASES.items():
        common = {"steps": 20, "calibration_tokens": 512, **changes}
        runs.append(settings(model_directory, text_file, tmp_path / name, **common))
        references[name] = settings(
            model_directory, text_file, tmp_path / f"one-{name}", gradient_accumulation=2, **common
        )
    done = launch(runs, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, config in references.items():
        compress(config)
        assert_same_to_rounding(tmp_path / name, tmp_path / f"one-{name}")
    report = json.loads((tmp_path / "sharded" / "report.json").read_text())
    assert report["processes"] == 2
    assert report["sharded"] is True
    edkm_cli.load(tmp_path / "sharded")


@pytest.mark.slow
def test_four_processes_give_what_one_gives(model_directory, text_file, tmp_path):
    common = {"steps": 20, "calibration_tokens": 512}
    runs = [
        settings(model_directory, text_file, tmp_path / sharding, sharding=sharding, **common)
        for sharding in ("none", "full")
    ]
    done = launch(runs, tmp_path, processes=4)
    assert done.returncode == 0, done.stderr[-3000:]
    compress(settings(model_directory, text_file, tmp_path / "one", gradient_accumulation=4, **common))
    for sharding in ("none", "full"):
        assert_same_to_rounding(tmp_path / sharding, tmp_path / "one")


def command(config, *, sharding):
    from test_resume import argv

    return [*TORCHRUN, "2", *argv(config)[1:], "--sharding", sharding]


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", "full"])
def test_a_killed_process_ends_the_run_with_a_clear_line_and_the_run_resumes(
    model_directory, text_file, tmp_path, sharding
):
    changes = {"steps": 40, "save_every": 2, "sharding": sharding}
    whole = settings(model_directory, text_file, tmp_path / "whole", **changes)
    config = settings(model_directory, text_file, tmp_path / "killed", **changes)
    running = subprocess.Popen(
        command(config, sharding=sharding), env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    metrics = tmp_path / "killed.partial" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (metrics.is_file() and len(metrics.read_text().splitlines()) >= 5):
        time.sleep(0.05)
    children = subprocess.run(["pgrep", "-P", str(running.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(children[-1]), signal.SIGKILL)
    output = running.communicate(timeout=120)[0]
    assert running.returncode != 0
    assert "lost another one" in output, output[-3000:]
    assert not (tmp_path / "killed").exists()
    done = subprocess.run(
        command(config, sharding=sharding), env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    uninterrupted = subprocess.run(
        command(whole, sharding=sharding), env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )
    assert uninterrupted.returncode == 0, uninterrupted.stderr[-3000:]
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("killed", "whole")]
    assert files[0] == files[1]


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
