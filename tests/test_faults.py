"""Faults in the middle of a run: a full disk, no memory. Nothing half-written appears, and a resumed run ends the same.

Kills are in test_compress_resume.py. `make faults` injects more; EDKM_FAULTS is the number.
"""

import errno
import os
import random

import pytest
from safetensors.torch import load_file

from edkm_cli.compress import compress
from edkm_cli.config import CompressConfig
from edkm_cli.export.directory import OutputDirectory
from edkm_cli.train import loop

COUNT = int(os.environ.get("EDKM_FAULTS", "6"))
SETTINGS = {
    "steps": 3,
    "save_every": 1,
    "sequence_length": 32,
    "context": 32,
    "eval_windows": 1,
    "importance": "none",
    "start": "kmeans",
    "distill": False,
}


class Fault:
    """Counts the calls of a few functions, and fails the `number`-th one (0: none)."""

    def __init__(self, monkeypatch, number):
        self.count, self._number = 0, number
        full = OSError(errno.ENOSPC, "No space left on device")
        for owner, name, error in (
            (os, "fsync", full),
            (os, "replace", full),
            (os, "rename", full),
            (loop._Training, "step", MemoryError("out of memory in a step")),
        ):
            monkeypatch.setattr(owner, name, self._failing(getattr(owner, name), error))

    def _failing(self, function, error):
        def called(*arguments, **options):
            self.count += 1
            if self.count == self._number:
                raise error
            return function(*arguments, **options)

        return called


@pytest.mark.slow
def test_a_run_that_a_fault_ended_is_resumed_to_the_same_weights(model_directory, text_file, tmp_path):
    def config(name):
        return CompressConfig(
            model=str(model_directory), data=(str(text_file),), output=str(tmp_path / name), **SETTINGS
        )

    with pytest.MonkeyPatch.context() as patch:
        counted = Fault(patch, 0)
        compress(config("whole"))
    wanted = load_file(tmp_path / "whole" / "model.safetensors")
    draw = random.Random(0)
    numbers = draw.sample(range(1, counted.count + 1), min(COUNT, counted.count))
    for number in numbers:
        name = f"fault-{number}"
        with pytest.MonkeyPatch.context() as patch:
            Fault(patch, number)
            try:
                compress(config(name))
            except (OSError, MemoryError):
                pass
            except Exception as error:
                assert "No space left" in str(error), error  # told in one line where it can be  # noqa: PT017
        out = tmp_path / name
        assert not out.exists() or (out / "report.json").is_file()
        compress(config(name), resume=True)
        found = load_file(out / "model.safetensors")
        assert found.keys() == wanted.keys()
        assert all((found[key].float() == wanted[key].float()).all() for key in wanted), number
        assert not OutputDirectory(tmp_path / name, overwrite=True).partial.exists()
        assert not list(tmp_path.glob(".*lock")), number
