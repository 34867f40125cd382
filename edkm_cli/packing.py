"""b-bit indices <-> bytes, numbers as tables store them, and a packed matrix as every kernel takes it.

Each row of indices is one little-endian bit stream: index i occupies the bits [i * b, (i + 1) * b) of its row, and bit p
of a row is bit p % 8 of the row's byte p // 8. Rows are padded with zero bits to whole bytes, so a row can be read
without its neighbours. For 3 bits eight indices fill exactly three bytes.

A tile of a matrix, (R, C), is what `Granularity.tile` returns. Groups are numbered tile row by tile row, left to right.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from edkm_cli.granularity import E3M4

MIN_BITS, MAX_BITS = 1, 8
Tile = tuple[int, int]
_MOST_ENDS = 7  # of rows of an embedding that have bits of their own


def stored_dtype(lut_dtype: str) -> torch.dtype:
    """What tensors hold entries of a number format of `LUT_DTYPES` in: of E3M4 the bytes, since torch has no such dtype."""
    return torch.uint8 if lut_dtype == E3M4 else getattr(torch, lut_dtype)


def to_stored(numbers: Tensor, lut_dtype: str) -> Tensor:
    """Float32 numbers in the range of a number format as tensors hold them, rounded to nearest, ties to even.

    A byte of E3M4 is a sign, three bits of exponent with bias 3 and four of mantissa; subnormals are multiples of 2**-6.

    >>> to_stored(torch.tensor([0.0, 0.0625, -1.0, 15.5]), "float8_e3m4").tolist()
    [0, 4, 176, 111]
    """
    if lut_dtype != E3M4:
        return numbers.to(stored_dtype(lut_dtype))
    exponent = _exponent(numbers)
    mantissa = torch.ldexp(numbers.abs(), 5 - exponent).round()  # 32 of them are the next exponent
    code = 16 * (exponent + 1) + mantissa + 128 * torch.signbit(numbers)
    return torch.where(numbers.isfinite(), code, 0x7F).to(torch.uint8)


def rounded_to(numbers: Tensor, lut_dtype: str) -> Tensor:
    """What `as_numbers` makes of `to_stored`, in fewer passes: training rounds all tables in each step."""
    if lut_dtype != E3M4:
        return numbers.to(stored_dtype(lut_dtype)).float()
    exponent = _exponent(numbers)
    return torch.ldexp(torch.ldexp(numbers, 5 - exponent).round(), exponent - 5)


def _exponent(numbers: Tensor) -> Tensor:
    return torch.frexp(numbers.abs().clamp_min(0.25)).exponent


def as_numbers(stored: Tensor) -> Tensor:
    """The float32 numbers of what `to_stored` gave; NaN for bytes that E3M4 uses for no finite number.

    >>> as_numbers(torch.tensor([0, 4, 176, 111, 112], dtype=torch.uint8)).tolist()
    [0.0, 0.0625, -1.0, 15.5, nan]
    """
    if stored.dtype != torch.uint8:
        return stored.float()
    exponent, mantissa = stored >> 4 & 7, stored & 15
    sizes = torch.ldexp((mantissa + 16 * (exponent > 0)).float(), exponent.clamp_min(1).int() - 7)
    return torch.where(exponent == 7, torch.nan, torch.where(stored < 128, sizes, -sizes))


def as_kept(entries: Tensor, scale: Tensor | None) -> Tensor:
    """A stored table of eight bits as it is kept in memory, its scale multiplied in: float16 where that is exact, that is
    unless numbers are tiny or huge; else float32."""
    numbers = as_numbers(entries)
    if scale is not None:  # one for all, or one for each table
        numbers = numbers * (scale.float() if scale.numel() == 1 else scale.float()[:, None])
    half = numbers.half()
    return half if not torch.compiler.is_compiling() and torch.equal(half.float(), numbers) else numbers


def fault(leaf: str, stored: Tensor) -> str:
    """What the numbers of a checkpoint's tensor, by the last part of its name, must be and are not; else ""."""
    if (leaf == "lut" or stored.is_floating_point()) and not bool(as_numbers(stored).isfinite().all()):
        return "finite, but holds NaN or Inf"
    if leaf == "factors" and not stored.is_floating_point():  # before version 9 of the format
        return "" if set(stored.tolist()) <= {1, 2, 4} else "1, 2 or 4 for each column"
    return "positive" if leaf == "factors" and not bool((stored > 0).all()) else ""


def packed_width(columns: int, bits: int) -> int:
    """Bytes in a packed row of `columns` indices.

    >>> packed_width(4096, bits=3)
    1536
    >>> packed_width(10, bits=3)  # 30 bits, padded to whole bytes
    4
    """
    return (columns * bits + 7) // 8


class Part(NamedTuple):
    """Neighbouring rows of an embedding, `first` to `end`, whose indices have `bits` each: the tensor `leaf`."""

    leaf: str
    first: int
    end: int
    bits: int


def parts_of(rows: int, ends: Sequence[Sequence[int]], bits: int) -> list[Part]:
    """The parts that `rows` rows consist of: up to each of the ends, (row, bits), and behind them with `bits`.

    >>> [tuple(part) for part in parts_of(10, [[4, 6]], 5)]
    [('indices', 0, 4, 6), ('indices_1', 4, 10, 5)]
    """
    steps = [(0, 0), *((min(end, rows), own) for end, own in ends), (rows, bits)]
    names = (f"indices_{number}" if number else "indices" for number in range(len(steps)))
    return [Part(name, low, high, own) for name, ((low, _), (high, own)) in zip(names, pairwise(steps), strict=False)]


def parts_faults(ends: Any, most: int) -> list[str]:
    """What is wrong with a file's ends of parts, of which there may be few, with at most so many bits each."""
    pairs = [pair for pair in ends if isinstance(pair, list) and [*map(type, pair)] == [int, int]]
    rows = [0, *(end for end, _ in pairs)]
    right = len(pairs) == len(ends) <= _MOST_ENDS and all(low < high for low, high in pairwise(rows))
    if right and all(2 <= bits <= most for _, bits in pairs):
        return []
    return [f"embedding_rows must list at most {_MOST_ENDS} ascending [row, 2 to {most} bits], got {ends!r:.100}"]


def _pattern(bits: int) -> tuple[int, int]:
    """The repeating unit of the bit stream: (indices, bytes)."""
    if not MIN_BITS <= bits <= MAX_BITS:
        raise ValueError(f"bits must be {MIN_BITS} to {MAX_BITS}, got {bits}")
    unit = math.lcm(bits, 8)
    return unit // bits, unit // 8


def pack(indices: Tensor, bits: int) -> Tensor:
    """Pack (rows, columns) uint8 indices into (rows, packed_width(columns, bits)) uint8 bytes.

    Raises ValueError for an index of 2**bits or more.

    >>> indices = torch.arange(8, dtype=torch.uint8)[None]
    >>> [hex(byte) for byte in pack(indices, bits=3)[0].tolist()]
    ['0x88', '0xc6', '0xfa']
    """
    per_unit, unit_bytes = _pattern(bits)
    if indices.dtype != torch.uint8 or indices.dim() != 2:
        raise ValueError(f"indices must be a 2-D uint8 tensor, got {tuple(indices.shape)} {indices.dtype}")
    rows, columns = indices.shape
    if bits < 8 and indices.numel() and int(indices.max()) >= 2**bits:
        raise ValueError(f"indices must be below 2**{bits}, got {int(indices.max())}")
    units = -(-columns // per_unit)
    padded = indices.new_zeros(rows, units * per_unit)
    padded[:, :columns] = indices
    padded = padded.view(rows, units, per_unit)
    packed = indices.new_zeros(rows, units, unit_bytes)
    for i in range(per_unit):
        first, shift = divmod(i * bits, 8)
        packed[:, :, first] |= padded[:, :, i] << shift
        if shift + bits > 8:
            packed[:, :, first + 1] |= padded[:, :, i] >> (8 - shift)
    return packed.view(rows, units * unit_bytes)[:, : packed_width(columns, bits)].contiguous()


def unpack(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Inverse of `pack`: (rows, packed_width) uint8 bytes to (rows, columns) uint8 indices.

    Raises ValueError where the bytes do not fit `columns`.

    >>> unpack(torch.tensor([[0x88, 0xC6, 0xFA]], dtype=torch.uint8), bits=3, columns=8).tolist()
    [[0, 1, 2, 3, 4, 5, 6, 7]]
    """
    per_unit, unit_bytes = _pattern(bits)
    if packed.dtype != torch.uint8 or packed.dim() != 2 or packed.shape[1] != packed_width(columns, bits):
        rule = f"{columns} indices of {bits} bits need {packed_width(columns, bits)} uint8 bytes a row"
        raise ValueError(f"{rule}, got {tuple(packed.shape)} {packed.dtype}")
    if bits == 8:
        return packed
    rows, units = packed.shape[0], -(-columns // per_unit)
    if packed.shape[1] != units * unit_bytes:
        packed = torch.nn.functional.pad(packed, (0, units * unit_bytes - packed.shape[1]))
    packed = packed.view(rows, units, unit_bytes)
    mask = 2**bits - 1
    indices = packed.new_empty(rows, units, per_unit)
    for i in range(per_unit):
        first, shift = divmod(i * bits, 8)
        value = packed[:, :, first] >> shift
        if shift + bits > 8:
            value |= packed[:, :, first + 1] << (8 - shift)
        indices[:, :, i] = value & mask
    return indices.view(rows, units * per_unit)[:, :columns].contiguous()


def to_groups(weight: Tensor, tile: Tile) -> Tensor:
    """(out, in) -> (groups, R * C). A view where a tile spans whole rows, a copy for blocks."""
    (out_features, in_features), (rows, columns) = weight.shape, tile
    tiled = weight.reshape(out_features // rows, rows, in_features // columns, columns)
    return tiled.transpose(1, 2).reshape(-1, rows * columns)


def from_groups(grouped: Tensor, shape: Sequence[int], tile: Tile) -> Tensor:
    """(groups, R * C) -> (out, in): the inverse of `to_groups`."""
    (out_features, in_features), (rows, columns) = shape, tile
    tiled = grouped.reshape(out_features // rows, in_features // columns, rows, columns)
    return tiled.transpose(1, 2).reshape(out_features, in_features)


class Packed(NamedTuple):
    """A packed matrix (out, in), as a checkpoint stores it (docs/format.md).

    `indices`: (out, bytes) uint8. `table`: a LUT (groups, 2**bits), or, where `tile` is None, the float32 scale (out, n)
    of the levels index - 2**(bits - 1): one for a row, or one for each of n equal groups of its columns.
    """

    indices: Tensor
    table: Tensor
    bias: Tensor | None
    bits: int
    tile: Tile | None

    @property
    def grouped(self) -> bool:
        """Whether rows have several scales, which only the plain path reads."""
        return self.tile is None and self.table.shape[1] != 1


def row_parts(indices: Sequence[Tensor], scale: Tensor, parts: Sequence[Part]) -> list[Packed]:
    """A row-scaled matrix whose rows differ in bits: the indices of each part, and the scales of all rows."""
    scales = scale.split([len(codes) for codes in indices])
    return [Packed(codes, own, None, part.bits, None) for codes, own, part in zip(indices, scales, parts, strict=True)]


def check(x_columns: int, packed: Packed) -> None:
    """Raises ValueError where shapes or dtypes do not belong together: the kernels read memory by them."""
    indices, table, bias, bits, tile = packed
    rows = indices.shape[0]
    if not 1 <= bits <= 8 or indices.dtype != torch.uint8 or indices.dim() != 2:
        raise ValueError(f"indices must be (rows, bytes) uint8 of 1 to 8 bits, got {indices.dtype} and {bits} bits")
    if indices.shape[1] != (width := packed_width(x_columns, bits)):
        raise ValueError(f"{x_columns} columns of {bits} bits are {width} bytes, got {indices.shape[1]}")
    if tile is None:
        groups = table.shape[-1] if table.dim() == 2 and table.shape[-1] else 1
        if x_columns % groups:
            raise ValueError(f"{groups} scales a row must divide its {x_columns} columns")
        wanted: tuple[int, ...] = (rows, groups)
    elif tile[0] < 1 or tile[1] < 1 or rows % tile[0] or x_columns % tile[1]:
        raise ValueError(f"tiles of {tile[0]} x {tile[1]} must divide a matrix of {rows} x {x_columns}")
    else:
        wanted = (rows // tile[0] * (x_columns // tile[1]), 2**bits)
    if tuple(table.shape) != wanted or (tile is None and table.dtype != torch.float32):
        raise ValueError(f"the table must be {wanted}, got {tuple(table.shape)} {table.dtype}")
    if bias is not None and tuple(bias.shape) != (rows,):
        raise ValueError(f"bias must be ({rows},), got {tuple(bias.shape)}")
