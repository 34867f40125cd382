"""The checkpoint's schema: what `quantization_config` holds, which tensors a module stores, and how files are written.

A compressed model is a standard Hugging Face directory. A palettized `Linear` stores `indices` (packed, uint8) and `lut`
(groups, 2**bits), and for float8 tables one `lut_scale`; an embedding and the output embedding store `indices` and a
float32 `scale` for each row, or for each group of its columns, and may store a factor for each column. docs/format.md
specifies both to the byte.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edkm_cli.errors import UserError
from edkm_cli.granularity import FREE, LUT_DTYPES, SUPER_BLOCK, Granularity, palette_faults, table_numbers
from edkm_cli.packing import MAX_BITS, MIN_BITS, packed_width
from edkm_cli.settings import shown

QUANT_METHOD = "edkm"
FORMAT_VERSION = 1
SCALED_VERSION = 2  # of float8 tables: version 1 had no scale for them
MIXED_VERSION = 3  # where matrices differ in bits, or groups of an embedding's columns have scales of their own
PALETTE_VERSION = 4  # where tables are those of a palette: scales are stored in their place
EXPERTS_VERSION = 5  # where each expert's matrices are linears of their own, or matrices differ in tiles
FACTORS_VERSION = 6  # where columns of an embedding have factors
MOST_FACTORED_BITS = 6  # of such an embedding: with more, levels times factors would not fit a byte, and gain little
FACTORS = (1, 2, 4)  # products with them are exact in any number format
CHECKSUMS = "checksums.json"
_MAX_JSON_BYTES = 64 * 2**20  # the index of a model of a million tensors is as large

# safetensors lays tensors out by falling alignment, then by name. The order of this table is that of the library.
SAFETENSORS_DTYPES: dict[torch.dtype, str] = {
    torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.uint32: "U32", torch.int32: "I32",
    torch.bfloat16: "BF16", torch.float16: "F16", torch.int16: "I16", torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fn: "F8_E4M3", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
TORCH_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
DENSE_BITS = 16  # of embeddings that stay as they are
Stored = dict[str, tuple[torch.dtype, tuple]]  # name -> (dtype, shape)
Write = Callable[[str, Tensor], None]
_LAYOUT_RANK = {dtype: rank for rank, dtype in enumerate(SAFETENSORS_DTYPES)}


@dataclass(frozen=True)
class QuantizationSpec:
    """The fields of `quantization_config`, checked. `skipped` names the linears and embeddings that stay dense.

    `embedding_bits` 16 stands for dense embeddings, for which the file has null. `embedding_group` columns of an embedding
    share a scale; None: a whole row. `module_bits` holds the bits of the linears that have others than `bits`.
    `module_granularity` likewise. `split_experts`: each expert's matrices are linears. `embedding_factors`: columns of an
    embedding have factors. `granularity` may be a text.
    `format_version` 0: the lowest that can hold the rest.
    """

    bits: int
    granularity: Granularity
    lut_dtype: str
    embedding_bits: int = DENSE_BITS
    skipped: list[str] = field(default_factory=list)
    format_version: int = 0
    embedding_group: int | None = None
    module_bits: dict[str, int] = field(default_factory=dict)
    palette: str = FREE
    split_experts: bool = False
    module_granularity: dict[str, str] = field(default_factory=dict)
    embedding_factors: bool = False

    def __post_init__(self) -> None:
        versions = (FORMAT_VERSION, SCALED_VERSION) if self.lut_dtype == "float8_e4m3fn" else (FORMAT_VERSION,)
        if self.palette != FREE or self.embedding_group is not None or self.module_bits:
            versions = (MIXED_VERSION if self.palette == FREE else PALETTE_VERSION,)
        versions = (EXPERTS_VERSION,) if self.split_experts or self.module_granularity else versions
        versions = (FACTORS_VERSION,) if self.embedding_factors else versions
        if self.format_version == 0 and _is_within(self.format_version, 0, 0):
            object.__setattr__(self, "format_version", versions[-1])
        faults = []
        if not _is_within(self.bits, MIN_BITS, MAX_BITS):
            faults.append(f"bits must be {MIN_BITS} to {MAX_BITS}, got {self.bits!r}")
        if not _is_within(self.embedding_bits, 2, DENSE_BITS) or MAX_BITS < self.embedding_bits < DENSE_BITS:
            faults.append(f"embedding_bits must be 2 to {MAX_BITS} or null, got {self.embedding_bits!r}")
        if not isinstance(self.lut_dtype, str) or self.lut_dtype not in LUT_DTYPES:
            faults.append(f"lut_dtype must be one of {', '.join(LUT_DTYPES)}, got {self.lut_dtype!r}")
        if not isinstance(self.skipped, list) or not all(isinstance(name, str) for name in self.skipped):
            faults.append("skipped must be a list of module names")
        if not _is_within(self.format_version, versions[0], versions[-1]):
            faults.append(
                f"format_version must be {' or '.join(map(str, versions))}, got {self.format_version!r}: update edkm-cli"
            )
        group = self.embedding_group
        if group is not None and (not _is_within(group, 1) or not self.packs_embeddings):
            faults.append(f"embedding_group must be a positive number, with embedding_bits, got {group!r}")
        faults += _module_bits_faults(self.module_bits)
        for name in ("split_experts", "embedding_factors"):
            faults += [] if getattr(self, name) in (True, False) else [f"{name} must be true or false"]
        if self.embedding_factors and not faults and self.embedding_bits > MOST_FACTORED_BITS:
            given = self.embedding_bits if self.packs_embeddings else None
            faults.append(f"embedding_factors needs embedding_bits of at most {MOST_FACTORED_BITS}, got {given}")
        try:
            object.__setattr__(self, "granularity", Granularity.parse(self.granularity))
            if not isinstance(self.module_granularity, dict):
                raise UserError("module_granularity must map module names to tiles")
            tiles = {self.granularity, *map(Granularity.parse, self.module_granularity.values())}
            for bits, granularity in product({self.bits, *self.module_bits.values()}, tiles) if not faults else ():
                faults += palette_faults(self.palette, bits, granularity, self.lut_dtype)
        except UserError as error:
            faults.append(str(error))
        if faults:
            raise UserError("quantization_config: " + "; ".join(faults))

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> "QuantizationSpec":
        """Read the `quantization_config` of a config.json. Raises UserError listing every fault."""
        values: dict[str, Any] = {key: value for key, value in mapping.items() if key != "quant_method"}
        known = set(cls.__dataclass_fields__)
        unknown, missing = sorted(set(values) - known), sorted(known - _OPTIONAL - set(values))
        if mapping.get("quant_method") != QUANT_METHOD or unknown or missing:
            raise UserError(
                f"quantization_config must have quant_method {QUANT_METHOD!r} and the keys {', '.join(sorted(known))}; "
                f"got quant_method {mapping.get('quant_method')!r}, unknown keys {unknown}, missing keys {missing}"
            )
        if values["format_version"] == 0:
            values["format_version"] = None  # 0 means today's only inside the program
        if values["embedding_bits"] == DENSE_BITS:
            raise UserError(f"quantization_config: embedding_bits must be 2 to {MAX_BITS} or null, got {DENSE_BITS}")
        embedding_bits = values.pop("embedding_bits")
        return cls(embedding_bits=DENSE_BITS if embedding_bits is None else embedding_bits, **values)

    def to_mapping(self) -> dict[str, Any]:
        """As config.json has it: what a version does not know is left out of it."""
        mapping = {"quant_method": QUANT_METHOD, **asdict(self), "granularity": str(self.granularity)}
        mapping["embedding_bits"] = self.embedding_bits if self.packs_embeddings else None
        return {key: value for key, value in mapping.items() if _SINCE.get(key, 0) <= self.format_version}

    def with_bits(self, bits: Mapping[str, int]) -> "QuantizationSpec":
        """The same, with these bits of linears by module path, in the lowest version that can hold them."""
        others = {name: count for name, count in bits.items() if count != self.bits}
        return replace(self, module_bits=others, format_version=0) if others or self.module_bits else self

    def bits_of(self, name: str, *, embedding: bool = False) -> int:
        """Bits of an index of the linear `name`, or of an embedding."""
        return self.embedding_bits if embedding else self.module_bits.get(name, self.bits)

    def granularity_of(self, name: str) -> Granularity:
        """Which weights of the linear `name` share a table."""
        return Granularity.parse(self.module_granularity.get(name, self.granularity))

    @property
    def packs_embeddings(self) -> bool:
        """Whether embeddings are compressed at all."""
        return self.embedding_bits != DENSE_BITS

    @property
    def torch_lut_dtype(self) -> torch.dtype:
        return getattr(torch, self.lut_dtype)

    @property
    def embedding_scale_dtype(self) -> torch.dtype:
        """What an embedding's float32 scales are rounded to: other engines, whose palettes these are, hold 16 bits."""
        half = torch.bfloat16 if self.lut_dtype == "bfloat16" else torch.float16
        return torch.float32 if self.palette == FREE else half

    def linear_bits(self, out_features: int, in_features: int, bits: int, *, layer: str = "") -> float:
        """Bits of a palettized linear with `bits` bits for each index, LUTs included."""
        tile_rows, tile_columns = self.granularity_of(layer).tile(out_features, in_features)
        lut_bits = table_numbers(self.palette, bits) * 8 * self.torch_lut_dtype.itemsize
        per_weight = bits + lut_bits / (tile_rows * tile_columns)
        numbers = table_numbers(self.palette, bits) if self.lut_dtype == "int8" else 0
        return out_features * in_features * (per_weight + 16 * numbers / SUPER_BLOCK)

    @property
    def scales_luts(self) -> bool:
        """Whether the tables of a linear have a scale beside them."""
        return self.lut_dtype == "float8_e4m3fn" and self.format_version >= SCALED_VERSION

    def linear_tensors(self, out_features: int, in_features: int, *, layer: str) -> Stored:
        """What a palettized linear stores."""
        groups, bits = self.granularity_of(layer).groups(out_features, in_features, layer=layer), self.bits_of(layer)
        tensors: Stored = {"indices": (torch.uint8, (out_features, packed_width(in_features, bits)))}
        shape = (groups, 2**bits) if self.palette == FREE else (out_features, groups // out_features)
        names = ("lut",) if self.palette == FREE else ("scales", "offsets")[: table_numbers(self.palette, bits)]
        tensors |= dict.fromkeys(names, (self.torch_lut_dtype, shape))
        if self.scales_luts:
            tensors["lut_scale"] = (torch.float32, (1,))
        if self.lut_dtype == "int8":
            tensors["lut_scale"] = (torch.float16, (out_features, in_features // SUPER_BLOCK, len(names)))
        return tensors

    def embedding_tensors(self, rows: int, columns: int) -> Stored:
        """Name -> (dtype, shape) of what a palettized embedding or output embedding stores.

        Raises UserError for groups of columns that do not divide a row.
        """
        group = self.embedding_group or columns
        if columns % group:
            fits = max(size for size in range(1, group) if columns % size == 0) if group > 1 else 1
            raise UserError(f"--embedding-group must divide the embeddings' {columns} columns, got {group}; use {fits}")
        indices = (torch.uint8, (rows, packed_width(columns, self.embedding_bits)))
        stored: Stored = {"indices": indices, "scale": (torch.float32, (rows, columns // group))}
        return stored | ({"factors": (torch.uint8, (columns,))} if self.embedding_factors else {})


_SINCE = {"embedding_group": MIXED_VERSION, "module_bits": MIXED_VERSION, "palette": PALETTE_VERSION}
_SINCE |= {
    "split_experts": EXPERTS_VERSION,
    "module_granularity": EXPERTS_VERSION,
    "embedding_factors": FACTORS_VERSION,
}
_OPTIONAL = {"skipped", *_SINCE}


def _module_bits_faults(value: Any) -> list[str]:
    if not isinstance(value, dict):
        return [f"module_bits must map module names to bits, got {value!r:.60}"]
    for name, bits in value.items():
        if not isinstance(name, str) or not _is_within(bits, MIN_BITS, MAX_BITS):
            return [f"module_bits must map module names to {MIN_BITS} to {MAX_BITS}, got {name!r:.60}: {bits!r:.60}"]
    return []


def _is_within(value: object, low: int, high: int | None = None) -> bool:
    """Whether a value of a file is a whole number in a range."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= (value if high is None else high)


def read_json(path: Path, *, remedy: str) -> dict[str, Any]:
    """A file that must hold a JSON object. Raises UserError, ending in `remedy`, for one that does not, or is larger or
    nested deeper than any of ours."""
    try:
        size = path.stat().st_size
        if size > _MAX_JSON_BYTES:
            raise ValueError(f"{size} bytes are more than the {_MAX_JSON_BYTES} that are read")
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError(f"it holds a {type(value).__name__}")
    except (ValueError, OSError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise UserError(f"{path} must be a JSON file with an object, but cannot be read ({why}); {remedy}") from error
    return value


def read_spec(directory: str | Path) -> QuantizationSpec | None:
    """The spec of a checkpoint directory, or None where it is no edkm checkpoint. Raises UserError if it is broken."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        return None
    mapping = read_json(path, remedy="export the model again").get("quantization_config")
    if not isinstance(mapping, dict) or mapping.get("quant_method") != QUANT_METHOD:
        return None
    return QuantizationSpec.from_mapping(mapping)


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
        total.update(name.encode())
        total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def is_plain_name(name: str) -> bool:
    """Whether a name that a file gives is that of a file in the same directory, not a path out of it."""
    simple = bool(name) and not set(name) & set("\0/\\") and name not in (".", "..")
    return simple and len(name.encode(errors="replace")) <= 255


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
    listing = directory / CHECKSUMS
    if not listing.is_file():
        return
    remedy = "copy or export the checkpoint again"
    entries = read_json(listing, remedy=remedy)
    try:
        expected = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise UserError(
            f"{listing} must map file names to bytes and sha256, but does not ({type(error).__name__}: {error}); {remedy}"
        ) from error
    for name, (size, digest) in expected.items():
        path = directory / name
        if not is_plain_name(name):
            raise UserError(f"{listing} must name files of its own directory, got {shown(name)}; {remedy}")
        if not path.is_file():  # a name too long for the system is missing, too
            raise UserError(f"{path} is missing, but {CHECKSUMS} names it; {remedy}")
        if path.stat().st_size != size:
            raise UserError(f"{path} must have {size} bytes, got {path.stat().st_size} (truncated?); {remedy}")
        if sha256_of(path) != digest:
            raise UserError(f"{path} does not have the sha256 in {CHECKSUMS} (altered or damaged); {remedy}")


def json_text(value: Any) -> str:
    """A value as JSON text. NaN and Inf, which JSON has no word for, become null."""
    return json.dumps(_finite(value), indent=2, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
    """fsync a file or directory, so that a rename that follows cannot outrun its content. Windows opens no directory."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
