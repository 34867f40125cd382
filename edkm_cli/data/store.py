"""Tokens of a source, written once: flat files that every process maps into memory.

A store is a directory of

- `tokens.bin`: ids, uint16 where the vocabulary has at most 65,536 entries, else uint32, little-endian;
- `trained.bin`: a bit a token, set where it is learnt; missing where all are;
- `ends.bin`: where each document ends, int64;
- `marks.bin`: digests by which the same text is found in a text that is measured, uint64, sorted;
- `manifest.json`: the settings, the counts, and the size and digest of each file. It is written last.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from edkm_cli.data.encode import Counts, Encoded
from edkm_cli.errors import UserError
from edkm_cli.files import sync, write_json

FORMAT = 6
TOKENS, TRAINED, ENDS, MARKS, MANIFEST = "tokens.bin", "trained.bin", "ends.bin", "marks.bin", "manifest.json"
_DIGEST_CHUNK = 32 << 20


@dataclass(eq=False)
class TokenStore:
    """Token ids (tokens,), bits of which of them are learnt, and where documents end; in memory or mapped from files.
    `sampled`: only a share of the marks is kept."""

    _tokens: np.ndarray
    _trained: np.ndarray | None
    ends: np.ndarray
    marks: np.ndarray
    counts: Counts
    sampled: bool = False

    def __len__(self) -> int:
        return len(self._tokens)

    def ids(self, start: int, stop: int) -> np.ndarray:
        """Ids start to stop, int64."""
        return self._tokens[start:stop].astype(np.int64)

    def trained(self, start: int, stop: int) -> np.ndarray:
        """Which of the tokens start to stop are learnt, bool."""
        if self._trained is None:
            return np.ones(min(stop, len(self)) - start, bool)
        bits = np.unpackbits(self._trained[start // 8 : -(-stop // 8)], bitorder="little")
        return bits[start % 8 : start % 8 + stop - start].astype(bool)

    @cached_property
    def sha256(self) -> str:
        """A digest of tokens, masks and documents: the same for a store in memory and on disk."""
        return combined(map(digest, [self._tokens, self.ends] + ([] if self._trained is None else [self._trained])))


def in_memory(parts: list[Encoded], dtype: Any) -> TokenStore:
    """A store of what has been encoded."""
    tokens = np.concatenate([np.empty(0, dtype), *(part.ids for part in parts)])
    lengths = np.concatenate([np.empty(0, np.int64), *(part.lengths for part in parts)])
    counts = sum((part.counts for part in parts), Counts())
    masks = [part.trained for part in parts]
    trained = np.packbits(np.concatenate(masks), bitorder="little") if counts.masked else None
    marks = np.unique(np.concatenate([np.empty(0, np.uint64), *(part.marks for part in parts)]))
    return TokenStore(tokens, trained, np.cumsum(lengths), marks, counts)


def store_of(texts: np.ndarray) -> TokenStore:
    """A store of token ids (documents, length) of which all are learnt, without marks."""
    count, length = texts.shape
    ends = np.arange(1, count + 1, dtype=np.int64) * length
    counts = Counts(documents=count, tokens=texts.size, trained=texts.size)
    return TokenStore(texts.reshape(-1), None, ends, np.empty(0, np.uint64), counts)


class StoreWriter:
    """Appends encoded parts to the files of a directory, which is not a store until `close`."""

    def __init__(self, directory: Path, dtype: Any):
        self._directory = directory
        self._files = {name: open(directory / name, "wb") for name in (TOKENS, TRAINED, ENDS)}  # noqa: SIM115
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._marks: list[np.ndarray] = []
        self._bits = np.empty(0, bool)
        self.counts = Counts()

    def append(self, part: Encoded) -> None:
        self._files[TOKENS].write(part.ids.astype(self._dtype).tobytes())
        self._files[ENDS].write((self.counts.tokens + np.cumsum(part.lengths)).astype("<i8").tobytes())
        bits = np.concatenate([self._bits, part.trained])
        whole = bits.size // 8 * 8
        self._files[TRAINED].write(np.packbits(bits[:whole], bitorder="little").tobytes())
        self._bits = bits[whole:]
        self._marks.append(part.marks)
        merged, *others = map(len, self._marks)
        if len(others) >= 255 and sum(others) > merged:  # once each time they double
            self._marks = [np.unique(np.concatenate(self._marks))]
        self.counts += part.counts

    def close(self, settings: dict[str, Any]) -> None:
        """Everything on disk, the manifest last."""
        self._files[TRAINED].write(np.packbits(self._bits, bitorder="little").tobytes())
        self.abandon()
        np.unique(np.concatenate([np.empty(0, np.uint64), *self._marks])).astype("<u8").tofile(self._directory / MARKS)
        if not self.counts.masked:
            os.unlink(self._directory / TRAINED)
        files = {}
        for name in (TOKENS, TRAINED, ENDS, MARKS):
            if (path := self._directory / name).exists():
                sync(path)
                files[name] = {"bytes": path.stat().st_size, "sha256": file_digest(path)}
        manifest = {"format": FORMAT, "settings": settings, "dtype": self._dtype.name, "counts": asdict(self.counts)}
        write_json(self._directory / MANIFEST, {**manifest, "files": files})
        sync(self._directory)

    def abandon(self) -> None:
        for file in self._files.values():
            file.close()


def open_store(directory: Path, settings: dict[str, Any]) -> TokenStore | None:
    """A store of these settings, every byte of it checked; None where there is none, or where it is damaged."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT or manifest["settings"] != json.loads(json.dumps(settings)):
            return None
        for name, facts in manifest["files"].items():
            path = directory / Path(name).name
            if path.stat().st_size != facts["bytes"] or file_digest(path) != facts["sha256"]:
                return None
        digests = {name: facts["sha256"] for name, facts in manifest["files"].items()}
        tokens = _mapped(directory / TOKENS, np.dtype(manifest["dtype"]).newbyteorder("<"))
        trained = _mapped(directory / TRAINED, np.dtype(np.uint8)) if TRAINED in digests else None
        ends, marks = _mapped(directory / ENDS, np.dtype("<i8")), _mapped(directory / MARKS, np.dtype("<u8"))
        counts = Counts(**manifest["counts"])
        if len(tokens) != counts.tokens or len(ends) != counts.documents:
            return None
        store = TokenStore(tokens, trained, ends, marks, counts, sampled=settings.get("sampled", False))
        store.sha256 = combined(digests[name] for name in (TOKENS, ENDS, TRAINED) if name in digests)
        return store
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    return np.empty(0, dtype) if path.stat().st_size == 0 else np.memmap(path, dtype=dtype, mode="r")


def combined(digests: Iterable[str]) -> str:
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _digest(size_bytes: int, read: Callable[[int], Any]) -> str:
    """SHA-256 of the SHA-256 of each 32 MB, so that threads share the work; `read` gives the chunk that begins at a byte."""
    with ThreadPoolExecutor(max(1, min(8, os.cpu_count() or 1))) as pool:
        starts = range(0, size_bytes, _DIGEST_CHUNK)
        return combined(pool.map(lambda start: hashlib.sha256(read(start)).hexdigest(), starts))


def digest(array: np.ndarray) -> str:
    """Of an array's bytes."""
    data = np.ascontiguousarray(array).view(np.uint8)
    return _digest(len(data), lambda start: data[start : start + _DIGEST_CHUNK].data)


def file_digest(path: Path) -> str:
    """Of a file's bytes, read in chunks so that they do not stay in this process's memory."""
    return _digest(path.stat().st_size, lambda start: np.fromfile(path, np.uint8, _DIGEST_CHUNK, offset=start))


def disk_error(error: OSError, folder: Path, *, what: str = "tokens", variable: str = "EDKM_TOKEN_CACHE") -> UserError:
    """The one line for a cache that cannot be written."""
    rule = f"{what} are kept in {folder}, which cannot be written to ({error.strerror or error})"
    return UserError(f"{rule}; free some room there, or set {variable} to another directory")
