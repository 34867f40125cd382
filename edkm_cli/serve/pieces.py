"""Pieces of packed matrices: what one of several processes holds, and matrices that share an input as one.

Tensor parallelism gives each process some rows of a matrix (column parallel) or some of its columns (row parallel). Rows
are whole bytes, so they are taken as they are; columns need not begin or end with a byte, and are unpacked, cut and
packed again. Tables go with their rows: where a border falls into the rows that share one, both sides get a copy, and
the rows that share a table become fewer. Columns that share a table are never parted.

q, k, v and gate, up have one input, so a server asks for their product at once. Packed alike they are one packed matrix,
one below the other; a taller tile then counts as several with the same table. Otherwise the operator edkm::merged_linear
takes what they have together: their indices in one tensor, their tables in another one, and numbers. On a CPU it is a
function in C that finds what was prepared for the indices (runtime/tensors.c); elsewhere, and where that is not possible, it
calls edkm::lut_linear for each matrix. It has no gradient.
"""

import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from edkm_cli.errors import UserError
from edkm_cli.granularity import Granularity
from edkm_cli.packing import Packed, Tile, pack, packed_width, unpack
from edkm_cli.runtime import dispatch, lut_linear_c
from edkm_cli.runtime.lut_linear import lut_linear

_NUMBERS = 4  # of a matrix: its rows, bits, and the rows and columns of its tiles
_TABLE_SHARE = 8  # copies of tables may take an eighth of the bytes that the indices take


@dataclass(frozen=True)
class Piece:
    """Rows and columns of the stored matrix `name` of `shape` (out, in), whose tiles are `stored_tile`."""

    name: str
    shape: tuple[int, int]
    bits: int
    stored_tile: Tile
    rows: range
    columns: range

    @property
    def tile(self) -> Tile:
        """Rows and columns of the piece that share a table."""
        height, width = self.stored_tile
        return math.gcd(height, self.rows.start, len(self.rows)), min(width, len(self.columns))

    @property
    def bytes_a_row(self) -> int:
        return packed_width(len(self.columns), self.bits)

    @property
    def groups(self) -> int:
        """Tables of the piece."""
        return len(self.rows) // self.tile[0] * (len(self.columns) // self.tile[1])

    def cut_indices(self, stored: Tensor) -> Tensor:
        """The piece's (rows, bytes) of the stored indices (out, bytes), repacked where its columns cut a byte."""
        self._require("indices", stored, (self.shape[0], packed_width(self.shape[1], self.bits)))
        part = stored[self.rows.start : self.rows.stop]
        first, last = self.columns.start * self.bits, self.columns.stop * self.bits
        if first % 8 == 0 and (last % 8 == 0 or self.columns.stop == self.shape[1]):
            return part[:, first // 8 : (last + 7) // 8]
        indices = unpack(part.contiguous(), self.bits, self.shape[1])
        return pack(indices[:, self.columns.start : self.columns.stop].contiguous(), self.bits)

    def cut_table(self, stored: Tensor, leaf: str = "lut") -> Tensor:
        """The piece's tables (groups, 2**bits) of all of the matrix's, or their scales, (groups, 1)."""
        height, width = self.stored_tile
        across = self.shape[1] // width
        self._require(leaf, stored, (self.shape[0] // height * across, 2**self.bits if leaf == "lut" else 1))
        of_rows = [row // height for row in range(self.rows.start, self.rows.stop, self.tile[0])]
        grid = stored.view(self.shape[0] // height, across, -1)
        return grid[of_rows, self.columns.start // width : -(-self.columns.stop // width)].flatten(0, 1)

    def _require(self, leaf: str, stored: Tensor, shape: tuple[int, int]) -> None:
        if tuple(stored.shape) != shape:
            raise UserError(f"{self.name}.{leaf} must be {shape}, got {tuple(stored.shape)}; copy the checkpoint again")


def piece_of(
    name: str, shape: tuple[int, int], bits: int, granularity: Granularity, *, rows: range, columns: range
) -> Piece:
    """The piece of a stored matrix. Raises UserError, naming it, where tiles do not divide it, or `columns` cut one."""
    tile = granularity.tile(*shape, layer=name)
    width = tile[1]
    if width != shape[1] and (columns.start % width or len(columns) % width):
        raise UserError(
            f"{name}: blocks of {width} columns must divide the {len(columns)} columns of each tensor-parallel process, "
            f"but do not; serve with fewer processes, or compress with narrower blocks or --granularity row:1"
        )
    return Piece(name, shape, bits, tile, rows, columns)


def stacks(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Neighbours that can be one packed matrix: of equal bits, columns and width of tiles, where tables that have to be
    copied stay small beside the indices."""
    stacked: list[list[Piece]] = []
    for piece in pieces:
        joined = [*(stacked[-1] if stacked else []), piece]
        kinds = {(one.bits, len(one.columns), one.tile[1]) for one in joined}
        copied = sum(one.groups * (one.tile[0] - stacked_tile(joined)[0]) for one in joined) / stacked_tile(joined)[0]
        indices = sum(len(one.rows) * one.bytes_a_row for one in joined)
        if len(kinds) == 1 and copied * 2**piece.bits * 4 * _TABLE_SHARE <= indices:
            stacked[-1:] = [joined]
        else:
            stacked.append([piece])
    return stacked


def stacked_tile(pieces: Sequence[Piece]) -> Tile:
    """The tile of pieces that lie one below the other."""
    return math.gcd(*(piece.tile[0] for piece in pieces)), pieces[0].tile[1]


def stacked_table(pieces: Sequence[Piece], tables: Sequence[Tensor]) -> list[Tensor]:
    """The tables of each piece, as often as tiles of the common height need them; joined they are those of the stack."""
    height, width = stacked_tile(pieces)
    rows = [table.unflatten(0, (-1, len(one.columns) // width)) for one, table in zip(pieces, tables, strict=True)]
    copies = [one.tile[0] // height for one in pieces]
    return [row.repeat_interleave(copy, dim=0).flatten(0, 1) for row, copy in zip(rows, copies, strict=True)]


class Rows(NamedTuple):
    """A packed matrix among others: `rows` of it, codes of `bits`, and its tiles."""

    rows: int
    bits: int
    tile: Tile


def _matrices(indices: Tensor, luts: Tensor, members: Sequence[Rows], columns: int) -> Iterator[Packed]:
    """Views of each matrix in the flat tensors of all. Raises ValueError where these have another size."""
    bytes_of = [member.rows * packed_width(columns, member.bits) for member in members]
    entries = [member.rows * columns // math.prod(member.tile) * 2**member.bits for member in members]
    if indices.numel() != sum(bytes_of) or luts.numel() != sum(entries):
        rule = f"{[tuple(member) for member in members]} of {columns} columns have {sum(bytes_of)} bytes of"
        raise ValueError(f"{rule} indices and {sum(entries)} entries, got {indices.numel()} and {luts.numel()}")
    for part, table, member in zip(indices.split(bytes_of), luts.split(entries), members, strict=True):
        yield Packed(part.view(member.rows, -1), table.view(-1, 2**member.bits), None, member.bits, member.tile)


def _merged_linear(x: Tensor, indices: Tensor, luts: Tensor, bias: Tensor | None, numbers: list[int]) -> Tensor:
    members = [Rows(n[0], n[1], (n[2], n[3])) for n in zip(*[iter(numbers)] * _NUMBERS, strict=True)]
    biases = [None] * len(members) if bias is None else bias.split([member.rows for member in members])
    matrices = _matrices(indices, luts, members, x.shape[-1])
    outs = [
        lut_linear(x, matrix.indices, matrix.table, part_bias, bits=matrix.bits, tile=member.tile)
        for matrix, member, part_bias in zip(matrices, members, biases, strict=True)
    ]
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)


_LIBRARY = torch.library.Library("edkm", "FRAGMENT")
for _name in ("merged_linear", "merged_linear_plain"):
    _LIBRARY.define(f"{_name}(Tensor x, Tensor indices, Tensor luts, Tensor? bias, int[] numbers) -> Tensor")
    _LIBRARY.impl(_name, _merged_linear, "CompositeExplicitAutograd")


@torch.library.register_fake("edkm::merged_linear", lib=_LIBRARY)
def _fake(x: Tensor, indices: Tensor, luts: Tensor, bias: Tensor | None, numbers: list[int]) -> Tensor:
    return x.new_empty(*x.shape[:-1], sum(numbers[::_NUMBERS]))


lut_linear_c.register("merged_linear", "edkm::merged_linear_plain")


class PackedRows(nn.Module):
    """Packed matrices of `columns` columns one below the other: `indices` flat uint8 and `luts` flat, one matrix's behind
    the other's, in the order of `members`."""

    def __init__(self, indices: Tensor, luts: Tensor, members: Sequence[Rows], columns: int):
        super().__init__()
        self.rows = sum(member.rows for member in members)
        self.numbers = [n for m in members for n in (*m[:2], *m.tile)]
        self.indices = nn.Parameter(indices, requires_grad=False)
        self.luts = nn.Parameter(luts, requires_grad=False)
        if (key := dispatch.keep([*_matrices(self.indices, self.luts, members, columns)], columns)) is not None:
            weakref.finalize(self, lut_linear_c.forget, key)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x @ W.T + bias for x (..., columns)."""
        return torch.ops.edkm.merged_linear(x, self.indices, self.luts, bias, self.numbers)
