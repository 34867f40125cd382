"""Runs in processes of their own: children of a fork server that are killed, and torchrun."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from edkm_cli.progress import Observer

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
SERVER = multiprocessing.get_context("forkserver")
PATIENCE_SECONDS = 600.0  # on a busy machine


def argv(config):
    """The command line of a configuration."""
    return [
        sys.executable, "-m", "edkm_cli", "compress", "--model", config.model,
        "--data", config.data[0], "-o", config.output, "--steps", str(config.steps), "--sequence-length", "48",
        "--context", "64", "--eval-windows", "2", "--calibration-tokens", "256",
        "--start-tokens", str(config.start_tokens), "--device", "cpu", "--mode", config.mode,
        "--lr", "1e-3", "--lut-learning-rate", "1e-3", "--save-every", str(config.save_every), "--resume",
        "--mixed-precision", config.mixed_precision,
    ]  # fmt: skip


def torchrun(python, config, *, sharding):
    """Two processes of a run, by torchrun; `python`: the fixture."""
    command = [python, *TORCHRUN, "2", *argv(config)[1:], "--sharding", sharding]
    environment = {**ENVIRONMENT, "PYTHON_EXEC": str(python)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@contextmanager
def children():
    """Gives a function that starts another in a child of the fork server; what is left of them is ended."""
    started = []

    def begin(function, *arguments, **options):
        started.append(SERVER.Process(target=function, args=arguments, kwargs=options))
        started[-1].start()
        return started[-1]

    try:
        yield begin
    finally:
        for child in started:
            child.kill()
            child.join()


def together(start, configs, log, *, size=2, resume=False, environment=()):
    """Starts the processes of a run as torchrun would, but from the fork server; they run each of the settings in turn.

    `start` is the fixture; what process N says on stderr goes to `log.N`.
    """
    import forked  # only here: it imports what a sharded run needs

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = (size, port, str(log), configs, resume, environment)
    return [start(forked.compress_together, rank, *arguments) for rank in range(size)]


def wait_for_steps(directory, steps, alive):
    """Returns when so many training steps are in a run's metrics, and fails when `alive()` says that it has ended."""
    metrics, deadline = directory / "metrics.jsonl", time.monotonic() + PATIENCE_SECONDS
    while not (metrics.is_file() and len(metrics.read_text().splitlines()) >= steps):
        assert alive(), "the run ended before"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def assert_finished(children, log):
    """They end by themselves and without an error."""
    for rank, child in enumerate(children):
        child.join(PATIENCE_SECONDS)
        assert child.exitcode == 0, Path(f"{log}.{rank}").read_text()[-3000:]


def stop_after(step):
    """An observer that sends SIGTERM, as a scheduler does, when so many steps are done."""
    shown = []

    def show(text):
        shown.append(text)
        if len(shown) == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return Observer(show=show)


def was_killed(child, seconds=PATIENCE_SECONDS):
    """Whether a child ends by SIGKILL, which it gets after so many seconds, and not by itself."""
    child.join(seconds)
    if child.is_alive():
        child.kill()
        child.join()
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode != 0
