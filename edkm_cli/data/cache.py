"""Tokens of large sources, made once by several processes and kept in the user's cache directory.

A store is built in a directory of its own and renamed when it is whole, under a lock that the operating system takes
back from a process that dies; every byte is checked when it is opened. So a killed run, two runs at once or a full disk
leave either a whole store or none.
"""

import errno
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from filelock import FileLock, Timeout

from edkm_cli.allocator import return_free_blocks
from edkm_cli.config import TextSettings
from edkm_cli.data.encode import Encoded, Encoder
from edkm_cli.data.reading import Part
from edkm_cli.data.store import StoreWriter, TokenStore, disk_error, in_memory, open_store
from edkm_cli.distributed import ALONE, World
from edkm_cli.errors import UserError
from edkm_cli.files import sync
from edkm_cli.settings import token_cache_directory

Say = Callable[[str], None]


def cached_store(
    settings: dict[str, Any], parts: Callable[[], Iterator[Part]], encoder: Encoder, options: TextSettings, say: Say
) -> TokenStore:
    """The store of these settings from the cache, or made now.

    Args:
        settings: all that decides the tokens; JSON. With a `token_limit`, it ends once there are so many.
        parts: reads the source from its beginning.
        options: by how many processes it is made, and whether again even where there is one.

    Raises UserError where the source cannot be read or the cache cannot be written; the cache then is as it was.
    """
    root = token_cache_directory()
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]
    directory = root / key
    with locked(root / f"{key}.lock", say, "tokenizing the same data") as waited:  # then it was made again just now
        if (waited or not options.rebuild_cache) and (store := open_store(directory, settings)) is not None:
            return store
        if directory.exists():
            say(f"the tokens in {directory} {'' if options.rebuild_cache else 'are damaged, and '}are made again")
            shutil.rmtree(directory, ignore_errors=True)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        encoded = encoded_parts(parts(), encoder, workers=options.data_workers or cores)
        _build(directory, settings, encoded, encoder.dtype)
        store = open_store(directory, settings)
    if store is None:
        raise UserError(f"tokens written to {directory} do not read back as written; check the disk")
    return store


def _build(directory: Path, settings: dict[str, Any], encoded: Iterator[Encoded], dtype: Any) -> None:
    token_limit = settings["token_limit"]
    for left in directory.parent.glob(f"{directory.name}.*.tmp"):  # of runs that died: the lock is ours
        shutil.rmtree(left, ignore_errors=True)
    staging = directory.with_name(f"{directory.name}.{os.getpid()}.tmp")
    writer = None
    try:
        staging.mkdir()
        writer = StoreWriter(staging, dtype)
        for part in encoded:
            writer.append(part)
            if token_limit is not None and writer.counts.tokens >= token_limit:
                break
        writer.close(settings)
        try:
            os.rename(staging, directory)
        except OSError:
            if not directory.exists():  # where it does, another run was first, on a file system without locks
                raise
        sync(directory.parent)
    except OSError as error:
        raise disk_error(error, directory.parent) from error
    finally:
        if writer is not None:
            with suppress(OSError):  # what could not be flushed is thrown away next
                writer.abandon()
        shutil.rmtree(staging, ignore_errors=True)


def memory_store(parts: Iterable[Part], encoder: Encoder) -> TokenStore:
    """A store of a small source, made in this process."""
    encoded = [encoder.encode(part) for part in parts]
    return_free_blocks()
    return in_memory(encoded, encoder.dtype)


def encoded_parts(parts: Iterator[Part], encoder: Encoder, *, workers: int) -> Iterator[Encoded]:
    """The parts encoded, in order, by `workers` processes of a core each; a bounded number is under way at any time."""
    if workers <= 1:
        with patch.dict(os.environ, TOKENIZERS_PARALLELISM="false"):  # one process is one core, too
            yield from map(encoder.encode, parts)
        return
    # A fork shares the tokenizer and the libraries; it touches neither torch nor a GPU. Windows and macOS start anew.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(encoder, os.getpid())) as pool:
        waiting: deque[Any] = deque()
        try:
            for part in parts:
                waiting.append(pool.submit(_encode, part))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise UserError("a tokenizing process was killed, often for memory; use --data-workers 1") from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


_encoder: Encoder | None = None


def _begin(encoder: Encoder, run: int) -> None:
    """In a worker: its encoder, no threads beside the other workers', and an end when its run, a process, has ended."""
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the run's to tell
    _encoder = encoder
    threading.Thread(target=end_with, args=(run,), daemon=True).start()


def end_with(run: int) -> None:
    """A process whose run was killed would wait for work for ever, or go on with it."""
    while os.getppid() == run:
        time.sleep(0.5)
    os._exit(1)


def _encode(part: Part) -> Encoded:
    assert _encoder is not None
    return _encoder.encode(part)


@contextmanager
def locked(path: Path, say: Say, doing: str, world: World = ALONE, **cache: str) -> Iterator[bool]:
    """Hold a lock that ends with this process, however it ends; gives whether another had it before. Where the file system
    has none, two runs may do the work twice; the rename then lets the first one win. Processes of a `world` take
    theirs after the first one has its own, so that of two runs one has all. `cache`: how `disk_error` calls it."""
    lock, told = FileLock(path, fallback_to_soft=False), iter([f"another process is {doing}; waiting for it"])

    def taken() -> bool:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire(blocking=False)
        except Timeout:
            return False
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                raise disk_error(error, path.parent, **cache) from error
        return True

    def wait() -> None:
        for line in told:  # once
            say(line)
        time.sleep(0.1)

    while not world.on_main(taken):  # not inside a collective, which would time out
        wait()
    while not (world.main or taken()):
        wait()
    try:
        yield not list(told)
    finally:
        lock.release()
