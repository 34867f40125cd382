"""The real command in a child of the fork server, broken on purpose: what the children of test_faults.py run.

A fault comes before the `number`-th change of the file system, counted from the first one whose name contains `after`;
or in step `step` of training. In between lies every state that a run can be interrupted in, so moments are drawn from
these numbers.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from edkm_cli.cli import main
from edkm_cli.files import write_json
from edkm_cli.train import loop
from kill_worker import Changes, changed, end_this_process

_LATER = 10 * 365 * 86400  # seconds


@dataclass(frozen=True)
class Fault:
    """`kind` names a function below; `place` is the file or directory that it is about."""

    kind: str = "nothing"
    number: int = 0
    after: str = ""
    step: int = 0
    place: str = ""


def command(arguments, log, fault=None, record=None):
    """`edkm ARGUMENTS` with a fault; what it prints goes to `log`, the names of its changes to `record`."""
    torch.set_num_threads(1)
    with open(log, "w", encoding="utf-8", buffering=1) as sys.stderr:
        sys.stdout = sys.stderr
        fault = fault or Fault()
        changes = Changes(after=fault.after, number=fault.number, action=lambda: globals()[fault.kind](fault))
        if fault.step:
            _break_step(fault)
        try:
            main([str(argument) for argument in arguments])
        finally:
            if record is not None:
                write_json(Path(record), list(changes.names))


def nothing(fault):
    pass


def kill(fault):
    end_this_process()


def terminate(fault):
    os.kill(os.getpid(), signal.SIGTERM)


def fill(fault):
    """Use up the disk of `place`."""
    with open(Path(fault.place) / "filler", "wb", buffering=0) as filler:
        block = bytes(1 << 20)
        while block:
            try:
                filler.write(block)
            except OSError:
                block = block[: len(block) // 2]


def forbid(fault):
    """From now on nothing below `place` can be changed."""

    def hook(event, arguments):
        name = changed(event, arguments)
        if name and name.startswith(fault.place):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), name)

    sys.addaudithook(hook)


def rewrite(fault):
    """Another text in the data file."""
    path = Path(fault.place)
    path.write_text(path.read_text(encoding="utf-8").replace("fox", "cat") + "One line more.\n", encoding="utf-8")


def rewrite_and_kill(fault):
    rewrite(fault)
    end_this_process()


def wait(fault):
    """Until the file `go` is there."""
    (Path(fault.place) / "waits").touch()
    while not (Path(fault.place) / "go").exists():
        time.sleep(0.01)


def jump(fault):
    """The clock of the system is ten years on, or back, and goes on from there."""
    real, by = time.time, _LATER if fault.number % 2 else -_LATER
    time.time = lambda: real() + by
    real_ns = time.time_ns
    time.time_ns = lambda: real_ns() + by * 10**9


def _break_step(fault):
    """In step `step` of training memory runs out, truly or at our word, or the loss is no number."""
    step = loop._Training.step

    def broken(self, number):
        if number + 1 == fault.step:
            if fault.kind == "allocate":
                torch.empty(2**46)  # 280 TB
            if fault.kind == "memory":
                raise MemoryError
            loss = self.objective.loss
            object.__setattr__(self.objective, "loss", lambda *arguments: loss(*arguments) * float("nan"))
        return step(self, number)

    loop._Training.step = broken
