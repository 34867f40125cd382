"""Runs in processes of their own: children of a fork server that are killed, and torchrun."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from edkm_cli.progress import Observer

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
WORKER = Path(__file__).with_name("distributed_worker.py")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["kill_worker"])


def argv(config):
    """The command line of a configuration."""
    return [
        sys.executable, "-m", "edkm_cli", "compress", "--model", config.model,
        "--data", config.data[0], "-o", config.output, "--steps", str(config.steps), "--sequence-length", "48",
        "--context", "64", "--eval-windows", "2", "--calibration-tokens", "256",
        "--start-tokens", str(config.start_tokens), "--device", "cpu", "--mode", config.mode,
        "--lr", "1e-3", "--lut-learning-rate", "1e-3", "--save-every", str(config.save_every), "--resume",
    ]  # fmt: skip


def command(config, *, sharding):
    return [*TORCHRUN, "2", *argv(config)[1:], "--sharding", sharding]


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


def stop_after(step):
    """An observer that sends SIGTERM, as a scheduler does, when so many steps are done."""
    shown = []

    def show(text):
        shown.append(text)
        if len(shown) == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return Observer(show=show)


def was_killed(child, seconds=300.0):
    """Whether a child ends by SIGKILL, which it gets after so many seconds, and not by itself."""
    child.join(seconds)
    if child.is_alive():
        child.kill()
        child.join()
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode != 0
