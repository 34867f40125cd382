"""Killed runs resume to the very same files; checkpoints are whole or not used; a changed setting is named."""

import json
import os
import shutil
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import kill_worker
from edkm_cli.compress import compress
from edkm_cli.errors import Preempted, UserError
from edkm_cli.export.directory import FILES, MARKER, OutputDirectory, settle
from edkm_cli.files import sha256_of
from edkm_cli.progress import Observer
from edkm_cli.train.state import CHECKPOINTS, BestStep, Checkpoints
from helpers import assert_same_run, assert_same_to_rounding, metrics_of, settings, weights_of
from processes import PATIENCE_SECONDS, stop_after, together, wait_for_steps, was_killed


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mode": "soft", "centroid_weighting": "uniform"},
        {"mode": "hard", "temperature_schedule": "cosine", "granularity": "tensor", "dtype": "bfloat16"},
        {"assignments": "held"},
        {"mode": "soft", "distill": False},
        {"gradient_accumulation": 2, "save_every": 2, "weight_decay": 0.1, "dtype": "float16"},
    ],
    ids=lambda changes: ",".join(f"{key}={value}" for key, value in changes.items()) or "defaults",
)
def test_a_run_stopped_by_sigterm_goes_on_to_the_same_files(model_directory, text_file, tmp_path, changes):
    whole = settings(model_directory, text_file, tmp_path / "whole", steps=6, **changes)
    compress(whole)
    for after in (3, 6):
        parts = settings(model_directory, text_file, tmp_path / "parts", steps=6, **changes)
        with pytest.raises(Preempted, match=f"after step {after} of 6"):
            compress(parts, resume=True, observer=stop_after(after))
        assert not (tmp_path / "parts").exists()
        report = compress(parts, resume=True)
        assert_same_run(tmp_path / "parts", tmp_path / "whole")
        steps = (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()
        assert report["seconds"]["train"] >= sum(json.loads(line)["seconds"] for line in steps) - 0.01  # of both parts
        assert set(os.listdir(tmp_path)) == {"whole", "parts"}
        shutil.rmtree(tmp_path / "parts")


def test_a_run_goes_on_with_another_accumulation_to_rounding(model_directory, text_file, tmp_path):

    whole = settings(model_directory, text_file, tmp_path / "whole", steps=20, batch_size=2)
    compress(whole)
    with pytest.raises(Preempted, match="after step 9 of 20"):
        compress(
            settings(model_directory, text_file, tmp_path / "parts", steps=20, batch_size=2), observer=stop_after(9)
        )
    split = settings(model_directory, text_file, tmp_path / "parts", steps=20, gradient_accumulation=2)
    compress(split, resume=True)
    assert_same_to_rounding(tmp_path / "parts", tmp_path / "whole")
    losses, wanted = metrics_of(tmp_path / "parts"), metrics_of(tmp_path / "whole")
    assert losses[:9] == wanted[:9]
    assert losses[9:] == pytest.approx(wanted[9:], rel=1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "always",
    [{"sharding": "none"}, {"sharding": "full"}, {"label_weight": 0.0, "start_tokens": None}],
    ids=["data parallel", "sharded", "held"],
)
def test_two_processes_stop_on_sigterm_and_one_goes_on_to_rounding(start, model_directory, text_file, tmp_path, always):
    def configured(name, **changes):
        return settings(model_directory, text_file, tmp_path / name, steps=24, **always, **changes)

    children = together(start, [configured("parts")], tmp_path / "log")
    wait_for_steps(tmp_path / "parts.partial", 3, lambda: all(child.is_alive() for child in children))
    for child in children:
        child.terminate()  # as torchrun does
    for child in children:
        child.join(PATIENCE_SECONDS)
        assert child.exitcode == 1
    assert "SIGTERM: saved after step" in (tmp_path / "log.0").read_text()
    before = metrics_of(tmp_path / "parts.partial")
    assert 3 <= len(before) < 24
    compress(configured("parts", gradient_accumulation=2), resume=True)
    compress(configured("whole", gradient_accumulation=2))
    assert_same_to_rounding(tmp_path / "parts", tmp_path / "whole")
    assert metrics_of(tmp_path / "parts")[: len(before)] == before
    assert metrics_of(tmp_path / "parts") == pytest.approx(metrics_of(tmp_path / "whole"), rel=1e-3)


@pytest.mark.parametrize("held", [True, False])
def test_a_run_that_memory_ended_goes_on_with_less_of_it_to_the_same_bits(model_directory, text_file, tmp_path, held):
    changes = {"assignments": "held" if held else "free", "gradient_checkpointing": False}
    for name in ("whole", "parts"):
        config = settings(model_directory, text_file, tmp_path / name, **changes)
        with pytest.raises(Preempted, match="after step 2 of 4") if name == "parts" else nullcontext():
            compress(config, observer=stop_after(2) if name == "parts" else Observer())
    compress(replace(config, gradient_checkpointing=True, offload="cpu"), resume=True)
    whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], tensor) for name, tensor in parts.items())


@pytest.mark.parametrize("held", [True, False])
def test_what_training_began_from_is_taken_from_disk_or_the_run_is_refused(model_directory, text_file, tmp_path, held):
    changes = {"assignments": "held" if held else "free"}
    config = settings(model_directory, text_file, tmp_path / "out", **changes)
    with pytest.raises(Preempted, match="after step 2 of 4"):
        compress(config, observer=stop_after(2))
    start = tmp_path / "out.partial" / CHECKPOINTS / "start"
    state = json.loads((start / "state.json").read_text())
    assert {"rest.safetensors", "model.layers.0.safetensors"} < set(state["files"])
    # Another processor's start: its embeddings, which never train, differ. The kept ones are what the result has.
    kept = load_file(start / "rest.safetensors")
    kept["model.embed_tokens.indices"] ^= 1
    save_file(kept, start / "rest.safetensors")
    with pytest.raises(UserError, match=r"what training began from.*step-000002 is kept.*--overwrite"):
        compress(config, resume=True)
    state["files"]["rest.safetensors"] = sha256_of(start / "rest.safetensors")
    (start / "state.json").write_text(json.dumps(state))
    compress(config, resume=True)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["model.embed_tokens.indices"], kept["model.embed_tokens.indices"])


def test_other_sequences_in_a_step_are_refused(model_directory, text_file, tmp_path):
    with pytest.raises(Preempted):
        compress(settings(model_directory, text_file, tmp_path / "out", batch_size=2), observer=stop_after(1))
    with pytest.raises(UserError, match="sequences_per_step was 2 and is 4"):
        compress(
            settings(model_directory, text_file, tmp_path / "out", batch_size=2, gradient_accumulation=2), resume=True
        )


def test_a_finished_run_is_not_run_again(model_directory, text_file, tmp_path):
    config = settings(model_directory, text_file, tmp_path / "out", steps=2)
    first = compress(config, resume=True)
    assert compress(config, resume=True) == json.loads(json.dumps(first))


def test_the_last_step_is_measured_and_saved_whatever_divides_it(model_directory, text_file, tmp_path, monkeypatch):
    saved, save = [], Checkpoints.save
    monkeypatch.setattr(Checkpoints, "save", lambda kept, step, *rest: (saved.append(step), save(kept, step, *rest)))
    compress(settings(model_directory, text_file, tmp_path / "out", steps=3, eval_every=2, save_every=2))
    assert saved == [2, 3]
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert ["perplexity" in json.loads(line) for line in lines] == [False, True, True]


def test_a_run_killed_behind_its_last_step_ends_at_the_last_temperature(
    model_directory, text_file, tmp_path, monkeypatch
):
    def configured(name):
        return settings(model_directory, text_file, tmp_path / name, mode="soft", save_every=1, temperature=0.5)

    compress(configured("whole"))
    with monkeypatch.context() as patch:
        patch.setattr("edkm_cli.compress.write_checkpoint", lambda *_, **__: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            compress(configured("killed"))
    compress(configured("killed"), resume=True)
    assert weights_of(tmp_path / "killed") == weights_of(tmp_path / "whole")


def test_without_steps_it_is_no_matter_how_many_sequences_one_would_see(model_directory, text_file, tmp_path):
    first = compress(settings(model_directory, text_file, tmp_path / "out", steps=0))
    other = settings(model_directory, text_file, tmp_path / "out", steps=0, batch_size=2)
    assert compress(other, resume=True)["perplexity"] == first["perplexity"]


def test_a_changed_setting_model_or_text_is_named(model_directory, text_file, tmp_path):
    config = settings(model_directory, text_file, tmp_path / "out", steps=6)
    with pytest.raises(Preempted):
        compress(config, observer=stop_after(1))
    changed = settings(model_directory, text_file, tmp_path / "out", steps=6, learning_rate=2e-3)
    with pytest.raises(UserError, match=r"learning_rate was 0\.001 and is 0\.002"):
        compress(changed, resume=True)
    other = tmp_path / "other.txt"
    other.write_text(text_file.read_text().replace("fox", "cat"))
    with pytest.raises(UserError, match="tokens_sha256"):
        compress(settings(model_directory, other, tmp_path / "out", steps=6), resume=True)
    compress(config, resume=True)  # and nothing of the unfinished run was lost


def test_a_finished_run_is_returned_only_for_what_it_was_made_of(model_directory, text_file, tmp_path):
    model, text = tmp_path / "model", tmp_path / "text.txt"
    shutil.copytree(model_directory, model)
    shutil.copyfile(text_file, text)
    config = settings(model, text, tmp_path / "out", steps=0)
    report = compress(config)
    assert compress(config, resume=True) == json.loads(json.dumps(report))
    former = {path: path.read_bytes() for path in (text, model / "model.safetensors", model / "config.json")}
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 2

    def changes():
        yield "tokens_sha256", lambda: text.write_text(text_file.read_text().replace("fox", "owl"))
        yield "model_sha256", lambda: save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
        yield "model_sha256", lambda: (model / "config.json").write_text(rotated(former[model / "config.json"]))

    for name, change in changes():
        change()
        with pytest.raises(UserError, match=f"is finished, but .*{name}"):
            compress(config, resume=True)
        for path, content in former.items():
            path.write_bytes(content)
    with pytest.raises(UserError, match="compare_dense was False and is True"):
        compress(settings(model, text, tmp_path / "out", steps=1, compare_dense=True), resume=True)
    assert compress(config, resume=True) == json.loads(json.dumps(report))


def rotated(config):
    """config.json of another model with the same weights."""
    return json.dumps({**json.loads(config), "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}})


def test_an_unfinished_run_is_not_resumed_with_another_configuration_of_the_model(model_directory, text_file, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(model_directory, model)
    config = settings(model, text_file, tmp_path / "out", steps=4)
    with pytest.raises(Preempted):
        compress(config, observer=stop_after(1))
    (model / "config.json").write_text(rotated((model / "config.json").read_bytes()))
    with pytest.raises(UserError, match="model_sha256"):
        compress(config, resume=True)


@pytest.mark.parametrize(("stops", "skip"), [((1, 3), ()), ((2,), ("*.q_proj",))])  # what stays dense is held, too
def test_text_that_the_model_wrote_goes_with_the_run(model_directory, text_file, tmp_path, monkeypatch, stops, skip):
    """Another processor without the cache would write another text, and begin from other entries."""
    values = {"data": ("self",), "eval_data": (str(text_file),), "start_tokens": 256, "steps": 4, "skip": skip}
    monkeypatch.setenv("EDKM_CACHE", str(tmp_path / "cache"))
    compress(settings(model_directory, text_file, tmp_path / "whole", **values))
    for stop in stops:
        config = settings(model_directory, text_file, tmp_path / f"parts-{stop}", **values)
        with pytest.raises(Preempted):
            compress(config, observer=stop_after(stop))
        with monkeypatch.context() as patch:
            patch.setenv("EDKM_CACHE", str(tmp_path / f"another-{stop}"))
            patch.setattr("edkm_cli.self_text.write_text", None)  # nothing is written again
            kept = tmp_path / f"parts-{stop}.partial" / CHECKPOINTS / "self-text.safetensors"
            former = kept.read_bytes()
            kept.write_bytes(former[:-8])
            with pytest.raises(UserError, match="damaged or missing"):
                compress(config, resume=True)
            kept.write_bytes(former)
            compress(config, resume=True)
        assert_same_run(tmp_path / f"parts-{stop}", tmp_path / "whole")


def test_old_checkpoints_are_pruned_and_damaged_ones_passed_over(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    checkpoints = Checkpoints(tmp_path, keep=2)
    states = {}
    for step in range(1, 5):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        checkpoints.save(step, model, optimizer)
        states[step] = {name: value.clone() for name, value in model.state_dict().items()}
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-000003", "step-000004"]
    newest = tmp_path / "checkpoints" / "step-000004" / "state.safetensors"
    newest.write_bytes(newest.read_bytes()[:-3])
    fresh = torch.nn.Linear(3, 2)
    again = torch.optim.AdamW(fresh.parameters(), lr=0.1)
    assert checkpoints.load_newest(fresh, again) == 3
    for name, value in fresh.state_dict().items():
        assert torch.equal(value, states[3][name])
    again.zero_grad()
    fresh(torch.ones(1, 3)).sum().backward()
    again.step()
    for name, value in fresh.state_dict().items():
        assert torch.equal(value, states[4][name])


def test_a_best_step_that_is_lost_is_not_the_last_one_in_silence(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    best = BestStep(tmp_path, 0)
    assert best.restore(model, optimizer) == 0
    best.offer(3, 7.0, model, optimizer)
    assert best.restore(model, optimizer) == 3
    state = tmp_path / "checkpoints" / "best" / "step-000003" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-3])
    with pytest.raises(UserError, match="best step, but it is damaged"):
        best.restore(model, optimizer)


def contents(directory):
    """Relative path -> text of all files."""
    return {str(p.relative_to(directory)): p.read_text() for p in directory.rglob("*") if p.is_file()}


def finish(path, files):
    """A finished result of ours with these files."""
    output = OutputDirectory(path, overwrite=True)
    staging = output.begin()
    output.mark({})
    for name, text in files.items():
        (staging / name).parent.mkdir(parents=True, exist_ok=True)
        (staging / name).write_text(text)
    output.commit()


@pytest.mark.parametrize("former", [{}, {"model.safetensors": "old", "edkm/former": "old"}])
def test_wherever_a_commit_is_killed_the_output_is_old_or_new_and_the_rest_can_be_done(start, tmp_path, former):
    new, number, killed = {"model.safetensors": "new", "edkm/events": "new"}, 0, True
    while killed:
        number += 1
        path = tmp_path / str(number) / "out"
        if former:
            finish(path, former)
        output = OutputDirectory(path, overwrite=True)
        staging = output.begin()
        output.mark({})
        for name, text in {**new, f"{CHECKPOINTS}/step-000030/state.json": "state"}.items():
            (staging / name).parent.mkdir(parents=True, exist_ok=True)
            (staging / name).write_text(text)
        before = contents(staging)
        killed = was_killed(start(kill_worker.commit, path, number))
        found = contents(path) if path.exists() else {}
        weights = found.get("model.safetensors")
        assert weights in ("new", former.get("model.safetensors"))
        if weights == "new":
            assert {name: found[name] for name in new} == new
            settle(path)
        else:
            assert {name: text for name, text in found.items() if name != FILES} == former
            assert before.items() <= contents(staging).items()  # and nothing of the training is lost
            OutputDirectory(path, overwrite=True).commit()
        found = contents(path)
        assert set(json.loads(found.pop(FILES))["files"]) == set(new)
        assert found == new
        assert os.listdir(path.parent) == ["out"]
    assert number > 5


def test_wherever_a_checkpoint_is_killed_it_or_the_one_before_is_whole(start, tmp_path):
    states, number, killed = kill_worker.train_three_steps(tmp_path / "whole", 0), 0, True
    steps = set()
    while killed:
        number += 1
        folder = tmp_path / str(number)
        killed = was_killed(start(kill_worker.train_three_steps, folder, number))
        model = torch.nn.Linear(3, 2)
        step = Checkpoints(folder, keep=2).load_newest(model, torch.optim.AdamW(model.parameters()))
        steps.add(step)
        for name, value in model.state_dict().items():
            assert torch.equal(value, states[step][name])
    assert steps == {2, 3}
    assert step == 3


def test_a_kill_while_a_run_is_marked_does_not_stand_in_its_way(tmp_path):
    for names in ([], [f"{MARKER}.tmp"], [MARKER, f"{MARKER}.tmp"]):
        partial = tmp_path / "out.partial"
        partial.mkdir()
        for name in names:
            (partial / name).write_text("{")
        OutputDirectory(tmp_path / "out").begin()
        assert os.listdir(partial) == [MARKER]
        shutil.rmtree(partial)
