"""Runs that are killed at many moments end with the same weights, in the setting that they began in or in another: at twenty
each by `make faults`, at three by `make test`."""

import json
import os
import random
import re
import time

import pytest
import torch
from safetensors.torch import load_file

import edkm_cli
import kill_worker
from edkm_cli.config import CHECKPOINTS
from helpers import assert_same_run, metrics_of, settings, weights_of
from processes import PATIENCE_SECONDS, together, was_killed

MOMENTS = 20 if "EDKM_FAULTS" in os.environ else 3


def moments_to_kill(names, seed):
    """Of twenty: eight by the clock, and twelve before a change of the file system: as (after, the most changes to count
    from there), from the beginning, within a checkpoint and from the first weights written to the end."""
    first = next(place for place, name in enumerate(names) if CHECKPOINTS in name)
    export = next(place for place, name in enumerate(names) if "model.safetensors" in name)
    moments = [None] * 8 + [("", first)] * 3 + [("step-", 9)] * 4 + [("model.safetensors", len(names) - export)] * 5
    random.Random(seed).shuffle(moments)
    return moments[:MOMENTS]


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_with_the_same_weights(start, model_directory, text_file, tmp_path):
    def configured(name):
        return settings(model_directory, text_file, tmp_path / name, steps=12, save_every=3)

    assert not was_killed(start(kill_worker.run, configured("whole"), record=tmp_path / "names"))
    begin = time.monotonic()  # the server is there by now, and imports are done
    assert not was_killed(start(kill_worker.run, configured("again")))
    seconds = time.monotonic() - begin
    chance = random.Random(1)
    moments = moments_to_kill(json.loads((tmp_path / "names").read_text()), seed=0)
    runs, attempts = ["again", "killed-1"], 0
    while moments:
        attempts += 1
        assert attempts < 200
        config, output = configured(runs[-1]), tmp_path / runs[-1]
        if moments[-1] is None:
            killed = was_killed(start(kill_worker.run, config), chance.uniform(0, seconds))
        else:
            after, most = moments[-1]
            killed = was_killed(start(kill_worker.run, config, after=after, number=chance.randint(1, most)))
        if output.exists():
            edkm_cli.load(output)
            assert weights_of(output) == weights_of(tmp_path / "whole")
        if killed:
            moments.pop()
        else:
            runs.append(f"killed-{len(runs)}")  # that one was through before its moment came
    assert not was_killed(start(kill_worker.run, configured(runs[-1])))
    for name in runs:
        assert_same_run(tmp_path / name, tmp_path / "whole")
    left = {f".{name}.lock" for name in runs}  # by a kill between the last rename and the end: it locks nothing
    assert {"whole", "names", *runs} <= set(os.listdir(tmp_path)) <= {"whole", "names", *runs} | left


def same_to_rounding(output, reference):
    """Whether weights have the same entries, and tables, norms and losses are the same to rounding."""
    ours, wanted = (load_file(path / "model.safetensors") for path in (output, reference))
    if any(not torch.equal(ours[name], tensor) for name, tensor in wanted.items() if not tensor.is_floating_point()):
        return False
    floating = [name for name, tensor in wanted.items() if tensor.is_floating_point()]
    close = all(
        torch.allclose(ours[name].float(), wanted[name].float(), rtol=0, atol=2e-3 * float(wanted[name].abs().max()))
        for name in floating
    )
    return close and metrics_of(output) == pytest.approx(metrics_of(reference), rel=1e-3)


def layers_done(unfinished):
    """How many layers' start is on disk, of one that ended before its last layer; 0 of any other."""
    progress = unfinished / "checkpoints" / "start" / "progress.json"
    return json.loads(progress.read_text())["layers"] if progress.exists() else 0


def near(output, reference, done):
    """Whether a start that went on in another arithmetic after `done` layers is the reference's: in its entries what was
    done, but for near ties what follows. (Text that a tiny model writes anew changes half of the entries.)"""
    ours, wanted = (load_file(path / "model.safetensors") for path in (output, reference))
    entries = {name: tensor for name, tensor in wanted.items() if not tensor.is_floating_point()}
    if any(ours[name].shape != tensor.shape for name, tensor in entries.items()):
        return False
    changed = {name: int((ours[name] != tensor).sum()) for name, tensor in entries.items()}
    follows = {name for name in entries if int((re.findall(r"layers\.(\d+)", name) or [-1])[0]) >= done}
    few = sum(changed[name] for name in follows) <= 0.1 * sum(entries[name].numel() for name in follows)
    same = not any(changed[name] for name in entries.keys() - follows)
    return few and same and metrics_of(output) == pytest.approx(metrics_of(reference), rel=0.05)


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_the_default_road_killed_at_random_moments_goes_on_in_another_setting_or_says_why_not(
    start, model_directory, text_file, tmp_path
):
    """Held assignments, text that the model wrote. The other setting (two processes in place of two batches a step, or
    PyTorch in place of the C kernels, both without the first one's cache) goes on from what is on disk, between two layers
    of the start, too; where nothing that training needs was there yet, it does all of it in its own way."""
    values = {"data": ("self",), "eval_data": (str(text_file),), "start_tokens": 256, "steps": 6, "save_every": 2}
    values["lut_dtype"] = "float16"  # of eight bits an entry would differ by an eighth or not at all

    def configured(name, processes=1):
        changes = {**values, "gradient_accumulation": 2 // processes}
        return settings(model_directory, text_file, tmp_path / name, **changes)

    def go_on(name, setting):
        cache = {"EDKM_CACHE": str(tmp_path / f"cache-{setting}")}
        if setting == "processes":
            log = tmp_path / f"{name}.log"
            return together(start, [configured(name, 2)], log, resume=True, environment=cache)
        kernels = {"EDKM_CPU_KERNELS": "0"} if setting == "kernels" else {}
        return [start(kill_worker.run, configured(name), environment={**cache, **kernels})]

    def finish_all(processes):
        for process in processes:
            process.join(PATIENCE_SECONDS)
        return {process.exitcode for process in processes}

    first = {"EDKM_CACHE": str(tmp_path / "cache-first")}
    names = tmp_path / "names"
    assert not was_killed(start(kill_worker.run, configured("whole-first"), environment=first, record=names))
    for setting in ("processes", "kernels"):
        assert finish_all(go_on(f"whole-{setting}", setting)) == {0}
    changes = json.loads(names.read_text())
    training = next(place for place, name in enumerate(changes) if "step-" in name)
    chance = random.Random(3)
    moments = [("", chance.randint(1, training)) for _ in range(MOMENTS * 2 // 5)]
    moments += [("step-", chance.randint(1, 30)) for _ in range(MOMENTS - len(moments))]
    for index, (after, number) in enumerate(moments):
        name, setting = f"killed-{index}", ("processes", "kernels")[index % 2]
        config = configured(name)
        assert was_killed(start(kill_worker.run, config, after=after, number=number, environment=first))
        done = layers_done(tmp_path / f"{name}.partial")
        assert finish_all(go_on(name, setting)) == {0}
        found = [
            whole for whole in ("first", setting) if same_to_rounding(tmp_path / name, tmp_path / f"whole-{whole}")
        ]
        between = done and near(tmp_path / name, tmp_path / "whole-first", done)
        assert found or between, (after, number, setting)
        if after:  # training had begun: it went on with the same tables on the same entries
            assert "first" in found
