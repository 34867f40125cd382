"""What `--log-with` writes: it lies in the output directory, says what metrics.jsonl says, and survives a kill."""

import os
import time
from importlib.util import find_spec

import pytest

import edkm_cli
import kill_worker
from edkm_cli.compress import compress
from helpers import compress_arguments, metrics_of, refused, settings, weights_of
from processes import was_killed


def events_of(directory):
    """Tag -> [(step, value)] of TensorBoard's files, as TensorBoard shows them."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory)).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def assert_same_as_metrics(directory, steps):
    events = events_of(directory / "edkm")
    for tag in ("loss", "gradient_norm", "learning_rate", "temperature"):
        assert [step for step, _ in events[tag]] == list(range(1, steps + 1))
        assert [value for _, value in events[tag]] == pytest.approx(metrics_of(directory, tag), rel=1e-6)


def test_tensorboard_files_come_with_the_result(model_directory, text_file, tmp_path):
    config = settings(model_directory, text_file, tmp_path / "out", log_with=("tensorboard",))
    compress(config)
    assert_same_as_metrics(tmp_path / "out", 4)
    compress(settings(model_directory, text_file, tmp_path / "plain"))
    assert weights_of(tmp_path / "out") == weights_of(tmp_path / "plain")
    assert set(os.listdir(tmp_path / "out")) == {*os.listdir(tmp_path / "plain"), "edkm"}
    assert set(os.listdir(tmp_path)) == {"out", "plain"}
    edkm_cli.load(tmp_path / "out")


def test_steps_that_a_killed_run_repeats_are_shown_once(start, model_directory, text_file, tmp_path):
    pytest.importorskip("tensorboard")
    config = settings(model_directory, text_file, tmp_path / "out", steps=6, save_every=2, log_with=("tensorboard",))
    assert was_killed(start(kill_worker.run, config, after="step-000004", number=1))
    assert metrics_of(tmp_path / "out.partial", "step") == [1, 2, 3, 4]
    time.sleep(1)  # the files are named, and read in the order of, the second when a run began
    compress(config, resume=True)
    assert_same_as_metrics(tmp_path / "out", 6)


def test_wandb_offline_files_come_with_the_result(model_directory, text_file, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_DIR", raising=False)
    compress(settings(model_directory, text_file, tmp_path / "out", log_with=("wandb",)))
    assert list((tmp_path / "out" / "wandb").glob("offline-run-*/*.wandb"))
    assert set(os.listdir(tmp_path)) == {"out"}


def test_a_missing_package_is_one_line_before_any_work(model_directory, text_file, tmp_path):
    if find_spec("wandb") is not None:
        pytest.skip("wandb is installed")
    line = refused(*compress_arguments(model_directory, text_file, tmp_path / "out", "--log-with", "wandb"))
    assert "--log-with wandb needs a package that is not installed; pip install wandb" in line
    assert not os.listdir(tmp_path)


def test_an_unknown_tracker_is_named(model_directory, text_file, tmp_path):
    line = refused(*compress_arguments(model_directory, text_file, tmp_path / "out", "--log-with", "paper"))
    assert "log_with must be one of tensorboard, wandb, got 'paper'" in line
