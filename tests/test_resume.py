"""Killed runs resume to the very same files; checkpoints are whole or not used; a changed setting is named."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from test_compress import settings, weights_of

import edkm_cli
from edkm_cli.compress import compress
from edkm_cli.config import UserError
from edkm_cli.errors import Preempted
from edkm_cli.resume import Checkpoints


def argv(config):
    """The command line of a configuration."""
    return [
        sys.executable, "-m", "edkm_cli", "compress", "--model", config.model,
        "--data", config.data[0], "-o", config.output, "--steps", str(config.steps), "--sequence-length", "48",
        "--context", "64", "--eval-windows", "2", "--calibration-tokens", "256", "--device", "cpu", "--mode", config.mode,
        "--lr", "1e-3", "--lut-learning-rate", "1e-3", "--save-every", str(config.save_every), "--resume",
    ]  # fmt: skip


@pytest.mark.parametrize("mode", ["straight-through", "soft"])
def test_a_run_stopped_by_sigterm_goes_on_to_the_same_files(model_directory, text_file, tmp_path, mode):
    whole = settings(model_directory, text_file, tmp_path / "whole", steps=6, mode=mode)
    compress(whole)
    parts = settings(model_directory, text_file, tmp_path / "parts", steps=6, mode=mode)
    shown = []

    def stop_at_third(text):
        shown.append(text)
        if len(shown) == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    from edkm_cli.compress import Observer

    with pytest.raises(Preempted, match="after step 3 of 6"):
        compress(parts, resume=True, observer=Observer(show=stop_at_third))
    assert not (tmp_path / "parts").exists()
    compress(parts, resume=True)
    assert weights_of(tmp_path / "parts") == weights_of(tmp_path / "whole")
    reports = [json.loads((tmp_path / name / "report.json").read_text()) for name in ("whole", "parts")]
    assert reports[0]["perplexity"] == reports[1]["perplexity"]
    lines = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "parts")]
    losses = [[json.loads(line)["loss"] for line in part] for part in lines]
    assert losses[0] == losses[1]
    assert set(os.listdir(tmp_path)) == {"whole", "parts"}


def test_a_finished_run_is_not_run_again(model_directory, text_file, tmp_path):
    config = settings(model_directory, text_file, tmp_path / "out", steps=2)
    first = compress(config, resume=True)
    assert compress(config, resume=True) == json.loads(json.dumps(first))


def test_a_changed_setting_model_or_text_is_named(model_directory, text_file, tmp_path):
    from edkm_cli.compress import Observer

    config = settings(model_directory, text_file, tmp_path / "out", steps=6)
    with pytest.raises(Preempted):
        compress(config, observer=Observer(show=lambda text: os.kill(os.getpid(), signal.SIGTERM)))
    changed = settings(model_directory, text_file, tmp_path / "out", steps=6, learning_rate=2e-3)
    with pytest.raises(UserError, match=r"learning_rate was 0\.001 and is 0\.002"):
        compress(changed, resume=True)
    other = tmp_path / "other.txt"
    other.write_text(text_file.read_text().replace("fox", "cat"))
    with pytest.raises(UserError, match="tokens_sha256"):
        compress(settings(model_directory, other, tmp_path / "out", steps=6), resume=True)
    compress(config, resume=True)  # and nothing of the unfinished run was lost


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


@pytest.mark.slow
def test_runs_killed_at_random_moments_end_with_the_same_weights(model_directory, text_file, tmp_path):
    whole = settings(model_directory, text_file, tmp_path / "whole", steps=30, save_every=5)
    begin = time.monotonic()
    subprocess.run(argv(whole), check=True, capture_output=True, timeout=300)
    seconds = time.monotonic() - begin
    config = settings(model_directory, text_file, tmp_path / "killed", steps=30, save_every=5)
    moments, kills = random.Random(0), 0
    while kills < 6:
        running = subprocess.Popen(argv(config), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        try:
            running.wait(timeout=moments.uniform(0.5, 1.0) * seconds)
            break
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()
            kills += 1
        if (tmp_path / "killed").exists():
            edkm_cli.load(tmp_path / "killed")
    done = subprocess.run(argv(config), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert weights_of(tmp_path / "killed") == weights_of(tmp_path / "whole")
    assert set(os.listdir(tmp_path)) == {"whole", "killed"}
