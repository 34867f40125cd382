"""How files are read and written: JSON and safetensors, whole or not at all, and with checksums."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edkm_cli.errors import UserError, explained
from edkm_cli.settings import shown

CHECKSUMS = "checksums.json"
_MAX_JSON_BYTES = 64 * 2**20  # the index of a model of a million tensors is as large

# safetensors lays tensors out by falling alignment, then by name. The order of this table is that of the library.
SAFETENSORS_DTYPES: dict[torch.dtype, str] = {
    torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.uint32: "U32", torch.int32: "I32",
    torch.bfloat16: "BF16", torch.float16: "F16", torch.int16: "I16", torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fn: "F8_E4M3", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
TORCH_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
Write = Callable[[str, Tensor], None]
_LAYOUT_RANK = {dtype: rank for rank, dtype in enumerate(SAFETENSORS_DTYPES)}


def read_json(path: Path, *, remedy: str) -> dict[str, Any]:
    """A file that must hold a JSON object. Raises UserError, ending in `remedy`, for one that does not, or is larger or
    nested deeper than any of ours."""
    try:
        if (size := path.stat().st_size) > _MAX_JSON_BYTES:
            raise ValueError(f"{size} bytes are more than the {_MAX_JSON_BYTES} that are read")
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError(f"it holds a {type(value).__name__}")
    except (ValueError, OSError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise UserError(f"{path} must be a JSON file with an object, but cannot be read ({why}); {remedy}") from error
    return value


@contextmanager
def safetensors_writer(path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple]]) -> Iterator[Write]:
    """Gives `write(name, tensor)` for one safetensors file, in any order, so that memory holds one tensor at a time.

    The bytes equal those of `safetensors.torch.save_file` with metadata {"format": "pt"}. The file appears under its
    name only when every tensor has been written. Errors are ValueError: a caller's fault.
    """
    offsets: dict[str, int] = {}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(tensors, key=lambda name: (_LAYOUT_RANK[tensors[name][0]], name)):
        dtype, shape = tensors[name]
        offsets[name], end = end, end + dtype.itemsize * torch.Size(shape).numel()
        header[name] = {"dtype": SAFETENSORS_DTYPES[dtype], "shape": list(shape), "data_offsets": [offsets[name], end]}
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    missing = set(tensors)
    with written_whole(path) as partial, open(partial, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + end)

        def write(name: str, tensor: Tensor) -> None:
            announced = tensors[name]
            if (tensor.dtype, tuple(tensor.shape)) != (announced[0], tuple(announced[1])):
                raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, announced as {announced}")
            file.seek(8 + len(encoded) + offsets[name])
            file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            missing.discard(name)

        yield write
        if missing:
            raise ValueError(f"tensors never written: {sorted(missing)[:5]}")


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """One sha256 over names and bytes of tensors."""
    total = hashlib.sha256()
    for name, tensor in tensors:
        total.update(name.encode(errors="surrogateescape"))
        total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def is_plain_name(name: str) -> bool:
    """Whether a name that a file gives is that of a file in the same directory, not a path out of it."""
    simple = bool(name) and not set(name) & set("\0/\\") and name not in (".", "..")
    return simple and len(name.encode(errors="replace")) <= 255


def whole_record(path: Path) -> dict[str, Any] | None:
    """A record of ours with `files`, the sha256 by name of files beside it; None where it or one of them is damaged."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        files = record.get("files") or {f"{path.stem}.safetensors": record["sha256"]}  # as it was before
        return record if all(sha256_of(path.with_name(name)) == sha256 for name, sha256 in files.items()) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def write_checksums(directory: Path, names: Iterable[str]) -> None:
    """Record size and sha256 of the named files in checksums.json."""
    files = {name: directory / name for name in sorted(names)}
    entries = {name: {"bytes": file.stat().st_size, "sha256": sha256_of(file)} for name, file in files.items()}
    write_json(directory / CHECKSUMS, entries)


def verify_checksums(directory: str | Path) -> None:
    """Check every file that checksums.json names. Raises UserError for a missing, truncated or altered one.

    A directory without it passes: `save_pretrained` elsewhere does not copy it.
    """
    directory = Path(directory)
    if not (listing := directory / CHECKSUMS).is_file():
        return
    remedy = "copy or export the checkpoint again"
    entries = read_json(listing, remedy=remedy)
    with explained(f"{listing} must map file names to bytes and sha256, but does not", f"; {remedy}"):
        expected = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in entries.items()}
    for name, (size, digest) in expected.items():
        path = directory / name
        if not is_plain_name(name):
            raise UserError(f"{listing} must name files of its own directory, got {shown(name)}; {remedy}")
        if not path.is_file():  # a name too long for the system is missing, too
            raise UserError(f"{path} is missing, but {CHECKSUMS} names it; {remedy}")
        if (found := path.stat().st_size) != size:
            raise UserError(f"{path} must have {size} bytes, got {found} (truncated, or saved anew?); {remedy}")
        if sha256_of(path) != digest:
            raise UserError(f"{path} does not have the sha256 in {CHECKSUMS} (altered or damaged); {remedy}")


def require_room(folder: Path, needed: int, what: str, remedy: str) -> None:
    """Raises UserError, beginning with `what` needs it and ending in `remedy`, unless the disk has so many bytes free."""
    if (free := shutil.disk_usage(folder).free) < needed:
        room = f"{needed / 1e6:.0f} MB on the disk of {folder}, which has {free / 1e6:.0f} MB free"
        raise UserError(f"{what} {room}; {remedy}")


def json_text(value: Any) -> str:
    """A value as JSON text. NaN and Inf, which JSON has no word for, become null."""
    finite = json.loads(json.dumps(value), parse_constant=lambda name: None)
    return json.dumps(finite, indent=2, allow_nan=False) + "\n"


@contextmanager
def written_whole(path: Path, mark: str = "") -> Iterator[Path]:
    """A file beside `path` to write to: synced and renamed to it at the end, or no file is left. `mark` is in its name."""
    partial = path.with_name(f"{path.name}{mark}.tmp")
    try:
        yield partial
        sync(partial)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically. NaN and Inf become null."""
    with written_whole(path) as partial:
        partial.write_text(json_text(value), encoding="utf-8")


def sync(path: Path) -> None:
    """fsync a file or directory, so that a rename that follows cannot outrun its content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some shared folders cannot be synced
            raise
    finally:
        os.close(descriptor)
