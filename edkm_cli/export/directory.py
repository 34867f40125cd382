"""The output directory of a run: checked before the work, written beside its place, renamed into it in one step."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edkm_cli.errors import UserError
from edkm_cli.export.lock import Lock
from edkm_cli.format import json_text, sync, write_json
from edkm_cli.train.state import CHECKPOINTS

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
MARKER = "edkm-run.json"
_UNMARKED = f"{MARKER}.tmp"


class OutputDirectory:
    """`DIR` receives a complete result or nothing: all is written to `DIR.partial`, then renamed.

    Training checkpoints of an unfinished run are removed by `overwrite` or by the success of the run, and by nothing
    else.

    Raises UserError on construction where the place cannot take a result: it exists and is not empty (without
    `overwrite`), is a file, cannot be written to, or an unfinished run has checkpoints there (without `overwrite`, and
    not to `resume` it).
    """

    def __init__(self, path: str | Path, *, overwrite: bool = False, resume: bool = False):
        self.path = Path(path).expanduser().absolute()
        self.partial = self.path.with_name(self.path.name + ".partial")
        self._overwrite = overwrite
        self._lock = Lock(self.path)
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"--output must be a directory, but {self.path} is a file; choose another")
        if self.path.is_dir() and any(self.path.iterdir()) and not overwrite:
            raise UserError(f"--output {self.path} exists and is not empty; choose another, or give --overwrite")
        parent = next(folder for folder in self.path.parents if folder.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            raise UserError(f"--output needs a directory that can be written to, but {parent} cannot; choose another")
        if self.partial.exists() and not _is_ours(self.partial):
            raise UserError(
                f"{self.partial} is needed for the unfinished result, but holds something else; move it away"
            )
        if not resume:
            self._require_no_checkpoints()

    def _require_no_checkpoints(self) -> None:
        kept = sorted(path.name for path in (self.partial / CHECKPOINTS).glob("step-*") if path.suffix != ".tmp")
        if kept and not self._overwrite:
            raise UserError(
                f"{self.partial} holds the checkpoints of an unfinished run (the last one is {kept[-1]}); go on with "
                "--resume, give --overwrite to throw it away, or choose another --output"
            )

    def hold(self) -> None:
        """Keep other runs out until `release`. Raises UserError naming the run that holds the directory already."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock.acquire()

    def release(self) -> None:
        """Let other runs in."""
        self._lock.release()

    def rehearse(self, needed_bytes: int) -> None:
        """Try what the end of the run will do: raises UserError unless a file can be written, synced and renamed there
        and the disk has room for the result."""
        folder = next(folder for folder in self.path.parents if folder.exists())
        trial = folder / f".{self.path.name}.rehearsal"  # always the same: a killed run leaves one at most
        try:
            shutil.rmtree(trial, ignore_errors=True)
            trial.mkdir()
            probe = trial / "probe"
            probe.write_bytes(b"edkm")
            sync(probe)
            os.rename(probe, trial / "renamed")
        except OSError as error:
            raise UserError(
                f"--output must be on a disk that can be written to, but {folder} cannot ({error}); choose another"
            ) from error
        finally:
            shutil.rmtree(trial, ignore_errors=True)
        free = shutil.disk_usage(folder).free
        if free < needed_bytes:
            raise UserError(
                f"--output needs {needed_bytes / 1e6:.0f} MB on the disk of {folder}, which has {free / 1e6:.0f} MB free; "
                "free some or choose another place"
            )

    def begin(self, *, keep: bool = False) -> Path:
        """Make `DIR.partial` and return it. What an unfinished run left there is removed, or kept to go on with.

        Raises UserError where checkpoints would be removed that nobody has given up.
        """
        if self.partial.exists() and not keep:
            self._require_no_checkpoints()
            _remove(self.partial)
        self.partial.mkdir(parents=True, exist_ok=True)
        return self.partial

    def marked(self) -> dict[str, Any] | None:
        """What `mark` recorded in an unfinished run, or None where there is none, or none that can be read."""
        try:
            found = json.loads((self.partial / MARKER).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return None
        parts = [found.get(name) for name in ("fingerprint", "perplexity")] if isinstance(found, dict) else [None]
        return found if all(isinstance(part, dict) for part in parts) else None

    def mark(self, facts: dict[str, Any]) -> None:
        """Record what the unfinished run is; a directory with this file is ours to remove."""
        write_json(self.partial / MARKER, facts)

    def commit(self) -> None:
        """Put the finished result in its place. An earlier result disappears only after the new one is there.

        Wherever this is interrupted, `DIR` is the old result or the new one, whole (where the system cannot swap two
        directories, it may also be absent), and training state goes last: what was interrupted goes on from it, or is
        finished by `settle`.
        """
        for file in self.partial.iterdir():
            sync(file)
        sync(self.partial)
        if not self.path.exists():
            os.rename(self.partial, self.path)
        else:
            # What is about to be replaced carries the mark, too, so that a run after a kill here can clean up.
            shutil.copyfile(self.partial / MARKER, self.path / MARKER)
            if not _exchange(self.partial, self.path):
                old = self.path.with_name(self.path.name + ".old")
                os.rename(self.path, old)
                os.rename(self.partial, self.path)
                os.rename(old, self.partial)
        sync(self.path.parent)
        settle(self.path)


def settle(path: Path) -> None:
    """Clear away what only the unfinished run needed, inside the finished result at `path` and beside it, the mark last.

    The end of `commit`; called again where a kill has come before it.
    """
    if not (path / MARKER).is_file():
        return
    partial = path.with_name(path.name + ".partial")
    if partial.is_dir() and _is_ours(partial):
        _remove(partial)
    shutil.rmtree(path / CHECKPOINTS, ignore_errors=True)
    (path / MARKER).unlink(missing_ok=True)  # another process may look at the finished run, too
    sync(path)


def _is_ours(directory: Path) -> bool:
    """Whether a run began it: it has the mark, or nothing but what a kill while it was marked leaves."""
    names = {entry.name for entry in directory.iterdir()}
    return MARKER in names or not names - {_UNMARKED}


def _remove(directory: Path) -> None:
    """Remove a directory of ours, its mark last: what a kill leaves of it is still known as ours."""
    for entry in directory.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != MARKER:
            entry.unlink()
    shutil.rmtree(directory)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two directories atomically (Linux); False where the system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):  # TypeError: Windows
        return False
    return rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0


def finished_report(output: str, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The report of a finished run with this configuration in `output`, if there is one; what is left to clear away there
    after a kill is cleared away."""
    path = Path(output).expanduser().absolute()
    try:
        found = json.loads((path / "report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("config") != json.loads(json_text(config)):
        return None
    settle(path)
    return found
