"""Who writes to an output directory: a lock that names its holder, and that a killed process lets go."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from edkm_cli.errors import UserError


class Lock:
    """A file beside the output directory that one process at a time holds locked. It says who that is.

    The operating system frees the lock when its process ends, however it ends, so a file that is left over holds nothing.
    """

    def __init__(self, path: Path):
        self.path = path.with_name(f".{path.name}.lock")
        self._directory = path
        self._file: Any = None

    def acquire(self) -> None:
        """Raises UserError naming the holder where another process has it. A file system without locks is left alone."""
        while self._file is None:
            file = open(self.path, "a+", encoding="utf-8")  # noqa: SIM115 - closed by release
            try:
                _lock(file)
            except BlockingIOError:
                file.seek(0)
                holder = _holder(file.read())
                file.close()
                raise UserError(
                    f"--output {self._directory} is being written by {holder}; wait for it, or choose another directory"
                ) from None
            except OSError:
                file.close()
                return
            if _is_still(file, self.path):
                self._file = file
            else:  # its holder has just removed it
                file.close()
        self._file.truncate(0)
        facts = {"process": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        self._file.write(json.dumps(facts) + "\n")
        self._file.flush()

    def release(self) -> None:
        """Let go, and remove the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # Windows removes no open file
                self.path.unlink()
            self._file.close()
            self._file = None


def _lock(file: Any) -> None:
    """Raises BlockingIOError where another process has the lock, OSError where there are none."""
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        try:
            file.seek(1 << 20)  # beyond what is written, which stays readable
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        except OSError as error:
            raise BlockingIOError from error
        return
    fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_still(file: Any, path: Path) -> bool:
    """Whether a path still leads to an open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except OSError:
        return False


def _holder(text: str) -> str:
    try:
        facts = json.loads(text)
        return f"process {facts['process']} on {facts['host']} since {facts['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
