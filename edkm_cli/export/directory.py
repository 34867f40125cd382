"""The output directory of a run: checked before the work, written beside its place, renamed into it in one step."""

import ctypes
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from filelock import FileLock, Timeout

from edkm_cli.config import CHECKPOINTS
from edkm_cli.distributed import ALONE, World
from edkm_cli.errors import UserError
from edkm_cli.export import ownership
from edkm_cli.export.ownership import FILES, MARKER
from edkm_cli.files import json_text, require_room, sync, write_json, written_whole

_REPORTED = ("compare_dense", "dense_learning_rate", "max_perplexity_ratio")  # change no weight, but what is reported
_SPARE_BYTES = 50_000_000  # beside the tensors: metrics, trackers, tokenizer
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_Method = TypeVar("_Method", bound=Callable[..., Any])


def _on_main(method: _Method) -> _Method:
    """A method that the first process runs, for all."""

    @wraps(method)
    def of_all(self: "OutputDirectory", *args: Any, **options: Any) -> Any:
        return self._world.on_main(lambda: method(self, *args, **options))

    return cast("_Method", of_all)


class OutputDirectory:
    """`DIR` receives a complete result or nothing: all is written to `DIR.partial`, then renamed.

    A context: inside, other runs are kept out. All processes of `world` call alike; the first one touches the disk.
    Only what runs of ours wrote is ever removed (`edkm_cli.export.ownership`).

    Args:
        inputs: (option, path) of everything that the run reads, beside which the result must lie.
        resume: an unfinished run may be there, to go on with, or a finished one.

    Raises UserError on construction where the place cannot take a result: it lies in an input or holds one, is a file, is
    not empty (without `overwrite`), holds what no run of ours wrote, cannot be written to, or an unfinished run has
    checkpoints there (without `overwrite`, and not to `resume` it).
    """

    def __init__(
        self,
        path: str | Path,
        *,
        inputs: Iterable[tuple[str, Path]] = (),
        overwrite: bool = False,
        resume: bool = False,
        world: World = ALONE,
    ):
        self.path = Path(os.path.realpath(Path(path).expanduser()))  # a link stays, what it leads to is replaced
        self.partial = self.path.with_name(self.path.name + ".partial") if self.path.name else self.path
        self._overwrite, self._resume, self._world = overwrite, resume, world
        self._lock = Lock(self.path)
        self._check([*inputs, *ownership.cache_paths()])

    @_on_main
    def _check(self, inputs: list[tuple[str, Path]]) -> None:
        ownership.require_apart("--output", self.path, inputs)
        ownership.require_apart("--output", self.partial, inputs)
        if not self.path.name:
            raise UserError(f"--output must be a directory of its own, got {self.path}; choose another")
        if self.path.name.endswith(".partial"):
            raise UserError(f"--output {self.path} must not end in .partial, as unfinished results do; choose another")
        if str(self.path).encode(errors="replace").decode() != str(self.path):  # a tokenizer is not saved there
            raise UserError(f"--output must have a name in UTF-8, got {os.fsencode(self.path)!r}; choose another")
        if os.path.ismount(self.path):
            raise UserError(f"--output {self.path} is where a disk is mounted and cannot be replaced; name one inside")
        if os.path.lexists(self.path) and not self.path.is_dir():
            raise UserError(f"--output must be a directory, but {self.path} is a file; choose another")
        if self.path.is_dir() and any(self.path.iterdir()):
            if not self._overwrite and not (self._resume and ownership.listing(self.path)):
                raise UserError(f"--output {self.path} exists and is not empty; choose another, or give --overwrite")
            if self._overwrite:
                ownership.require_ours(self.path, f"--overwrite removes only what edkm wrote: {self.path} is to go")
        parent = next(folder for folder in self.path.parents if folder.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            raise UserError(f"--output needs a directory that can be written to, but {parent} cannot; choose another")
        if self.partial.is_symlink() or (self.partial.exists() and not self.partial.is_dir()):
            raise UserError(f"{self.partial} is needed for the unfinished result, but is none; move it away")
        if self.partial.exists() and (not self._resume or self.marked() is None):
            ownership.require_ours(self.partial, f"{self.partial} is needed for the unfinished result")
            if not self._resume:
                self._require_no_checkpoints()

    def _require_no_checkpoints(self) -> None:
        found = (*(self.partial / CHECKPOINTS).glob("step-*"), *(self.partial / CHECKPOINTS).glob("start/*.json"))
        kept = sorted(str(path.relative_to(self.partial)) for path in found if path.suffix != ".tmp")
        if kept and not self._overwrite:
            rule = f"{self.partial} holds the checkpoints of an unfinished run (the last one is {kept[-1]}); go on with"
            raise UserError(f"{rule} --resume, give --overwrite to throw it away, or choose another --output")

    def __enter__(self) -> "OutputDirectory":
        """Raises UserError naming the run that holds the directory already."""
        self._world.on_main(self._lock.acquire)
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @_on_main
    def rehearse(self, needed_bytes: int) -> None:
        """Try what the end of the run will do: raises UserError unless files and directories can be written, synced and
        renamed there and the disk has room for the result. Not where a run is resumed that is finished."""
        if self._resume and not self._overwrite and ownership.listing(self.path):
            return
        folder = next(folder for folder in self.path.parents if folder.exists())
        trial = folder / f".{self.path.name}.rehearsal"  # always the same: a killed run leaves one at most
        try:
            held = (path for path in trial.rglob("*") if not path.is_dir())
            if any(path.read_bytes() not in (b"", b"edkm") for path in held):
                raise FileExistsError(f"{trial} is needed for a moment, but holds something else; move it away")
            try:
                shutil.rmtree(trial, ignore_errors=True)
                (trial / "new").mkdir(parents=True)
                with written_whole(trial / "new" / "probe") as partial:
                    partial.write_bytes(b"edkm")
                os.rename(trial / "new", trial / "whole")  # buckets that are mounted may move files only
            finally:
                shutil.rmtree(trial, ignore_errors=True)
        except OSError as error:
            raise UserError(f"--output must be on a writable disk, {folder} is none ({error}); take another") from error
        there = sum((self.partial / name).lstat().st_size for name in ownership.entries(self.partial))
        require_room(folder, needed_bytes + _SPARE_BYTES - there, "--output needs", "free some or choose another place")

    @_on_main
    def finished(self, report: str, identity: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any] | None:
        """To resume: the report, by its file's name, of a finished run with this identity, and of what it reports with this
        configuration; None where there is none. What is left to clear away there after a kill is cleared away.

        Raises UserError where the finished run is another one (without `overwrite`), naming what differs.
        """
        if not self._resume or not ownership.listing(self.path):
            return None
        content = ownership.read_object(self.path / report)
        asked = {name: config[name] for name in _REPORTED if name in config}
        before = {name: (content.get("config") or {}).get(name) for name in asked}
        recorded = ownership.listing(self.path).get("identity") or {}
        changes = differences({**recorded, **before}, {**identity, **asked})
        if changes and self._overwrite:
            return None
        if changes:
            rule = f"--resume: {self.path} is finished, but {changes}"
            raise UserError(f"{rule}; choose another --output, or add --overwrite")
        for name, facts in ownership.listing(self.path)["files"].items():
            file = self.path / name
            if not ownership.WRITTEN.fullmatch(name):  # a page or figure that was made of it afterwards
                continue
            if not file.is_file() or (file.suffix == ".safetensors" and ownership.entry_of(file) != facts):
                rule = f"--resume: {self.path} is finished, but its {name} is missing or damaged"
                raise UserError(f"{rule}; make it again with --overwrite, or choose another --output")
        settle(self.path)
        return content

    @_on_main
    def unfinished(self, identity: Mapping[str, Any]) -> dict[str, Any] | None:
        """To resume: what `mark` recorded of an unfinished run with this identity; None where there is none.

        Raises UserError where the unfinished run is another one, naming what differs.
        """
        facts = self.marked() if self._resume else None
        if facts is not None and (changes := differences(facts["fingerprint"], identity)):
            rule = f"--resume needs the settings, model and data of the run in {self.partial}, but {changes}"
            raise UserError(f"{rule}; give the same ones, or start again with --overwrite in its place")
        return facts

    def marked(self) -> dict[str, Any] | None:
        """What `mark` recorded in an unfinished run, or None where there is none, or none that can be read."""
        facts = ownership.read_object(self.partial / MARKER)
        return facts if isinstance(facts.get("fingerprint"), dict) else None

    @_on_main
    def begin(self, *, keep: bool = False) -> Path:
        """Make `DIR.partial` and return it. What an unfinished run left there is removed, or kept to go on with.

        Raises UserError where checkpoints would be removed that nobody has given up.
        """
        if self.partial.exists() and not keep:
            self._require_no_checkpoints()
            ownership.remove(self.partial)
        (self.partial / FILES).unlink(missing_ok=True)  # of a run that was killed while it put its result in place
        self.partial.mkdir(parents=True, exist_ok=True)
        if not (self.partial / MARKER).is_file():
            write_json(self.partial / MARKER, {})  # from here on it is ours
        return self.partial

    @_on_main
    def mark(self, identity: Mapping[str, Any], **facts: Any) -> None:
        """Record what the unfinished run is; a directory with this file is ours to remove."""
        write_json(self.partial / MARKER, {"fingerprint": identity, **facts})

    def commit(self) -> None:
        """On the first process: put the finished result in its place. An earlier one disappears only after it is there.

        Wherever this is interrupted, `DIR` is the old result or the new one, whole (where the system cannot swap two
        directories, it may also be absent), and training state goes last: what was interrupted goes on from it, or is
        finished by `settle`. Raises UserError, and leaves the result in `DIR.partial`, where something foreign has come
        into `DIR` meanwhile, or something was taken out of `DIR.partial`.
        """
        if not (self.partial / MARKER).is_file():
            raise UserError(f"{self.partial} must stay as it is until the run ends, but was removed; start again")
        if os.path.lexists(self.path) and not self.path.is_dir():
            raise UserError(f"the result is whole in {self.partial}: {self.path} has become a file; move it away")
        if self.path.exists():
            if any(self.path.iterdir()) and not self._overwrite:
                rule = f"the result is whole in {self.partial}: {self.path} is not empty any more"
                raise UserError(f"{rule}; move it away")
            ownership.require_ours(self.path, f"the result is whole in {self.partial}: {self.path} is to be replaced")
        facts, files = ownership.read_object(self.partial / MARKER), ownership.files_of(self.partial)
        write_json(self.partial / FILES, {"identity": facts.get("fingerprint"), "files": files})
        for folder, _, names in os.walk(self.partial):
            for path in (*(Path(folder, name) for name in names), Path(folder)):
                sync(path)
        if not self.path.exists() or (os.name != "nt" and not any(self.path.iterdir())):  # one of an image is not moved
            os.rename(self.partial, self.path)
        elif not _exchange(self.partial, self.path):
            old = self.path.with_name(f"{self.path.name}.old-{os.getpid()}")
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
    ownership.remove(path.with_name(path.name + ".partial"))
    ownership.remove(path, below=f"{CHECKPOINTS}/")
    (path / MARKER).unlink(missing_ok=True)  # another process may look at the finished run, too
    sync(path)


def differences(recorded: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """What differs between the identity of a run and what is asked for; empty where nothing does."""
    wanted = json.loads(json_text(wanted))  # as it is read from the file: infinity is null there, tuples are lists
    names = [name for name in sorted({*recorded, *wanted}) if recorded.get(name) != wanted.get(name)]
    return ", ".join(f"{name} was {recorded.get(name)!r} and is {wanted.get(name)!r}" for name in names)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two directories atomically (Linux); False where the system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):  # TypeError: Windows
        return False
    return rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0


class Lock:
    """A file beside the output directory that one process at a time holds locked. It says who that is.

    The operating system frees the lock when its process ends, however it ends, so a file that is left over holds nothing.
    """

    def __init__(self, path: Path):
        self.path = path.with_name(f".{path.name}.lock") if path.name else path
        self._directory, self._lock = path, FileLock(self.path, fallback_to_soft=False)

    def acquire(self) -> None:
        """Raises UserError naming the holder where another process has it. A file system without locks is left alone."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            facts = ownership.read_object(self.path)
            told = {"process", "host", "since"} <= facts.keys()
            who = f"process {facts['process']} on {facts['host']} since {facts['since']}" if told else "another process"
            raise UserError(f"--output {self._directory} is written by {who}; wait, or choose another") from None
        except PermissionError:  # another user's
            raise
        except OSError:
            return
        if self.path.stat().st_size and "process" not in ownership.read_object(self.path):
            self._lock.release()
            raise UserError(f"{self.path} is needed to keep other runs out, but holds something else; move it away")
        facts = {"process": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        self.path.write_text(json.dumps(facts) + "\n", encoding="utf-8")

    def release(self) -> None:
        """Let go, and remove the file."""
        if self._lock.is_locked:
            self.path.unlink(missing_ok=True)
            self._lock.release()
