"""Rows of a layer as packed matrices one below the other, whose products an operator in compiled graphs gives side by side.

The operator edkm::merged_linear takes what q, k and v or gate and up have together: their indices in one tensor, their
tables in another one, and numbers. On a CPU it is a function in C that finds what was prepared for the indices
(runtime/merged.c); elsewhere, and where that is not possible, it calls edkm::lut_linear for each matrix. It has no gradient.
"""

import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from edkm_cli.kernels.tiles import Tile
from edkm_cli.packing import packed_width
from edkm_cli.runtime import merged_c
from edkm_cli.runtime.lut_linear import lut_linear
from edkm_cli.runtime.packed import Packed

_NUMBERS = 4  # of a matrix: its rows, bits, and the rows and columns of its tiles
_LIBRARY = torch.library.Library("edkm", "FRAGMENT")
for _name in ("merged_linear", "merged_linear_plain"):
    _LIBRARY.define(f"{_name}(Tensor x, Tensor indices, Tensor luts, Tensor? bias, int[] numbers) -> Tensor")


class Rows(NamedTuple):
    """A packed matrix among others: `rows` of it, codes of `bits`, and its tiles."""

    rows: int
    bits: int
    tile: Tile


def _matrices(indices: Tensor, luts: Tensor, members: Sequence[Rows], columns: int) -> Iterator[Packed]:
    """Views of each matrix in the flat tensors of all. Raises ValueError where these have another size."""
    bytes_of = [member.rows * packed_width(columns, member.bits) for member in members]
    groups = [member.rows * columns // (member.tile[0] * member.tile[1]) for member in members]
    entries = [count << member.bits for count, member in zip(groups, members, strict=True)]
    if indices.numel() != sum(bytes_of) or luts.numel() != sum(entries):
        raise ValueError(
            f"{[tuple(member) for member in members]} of {columns} columns have {sum(bytes_of)} bytes of indices and "
            f"{sum(entries)} entries, got {indices.numel()} and {luts.numel()}"
        )
    parts, tables = indices.split(bytes_of), luts.split(entries)
    for part, table, count, member in zip(parts, tables, groups, members, strict=True):
        yield Packed(part.view(member.rows, -1), table.view(count, -1), None, member.bits, member.tile)


def _merged_linear(x: Tensor, indices: Tensor, luts: Tensor, bias: Tensor | None, numbers: list[int]) -> Tensor:
    members = [Rows(n[0], n[1], (n[2], n[3])) for n in zip(*[iter(numbers)] * _NUMBERS, strict=True)]
    biases = [None] * len(members) if bias is None else bias.split([member.rows for member in members])
    matrices = _matrices(indices, luts, members, x.shape[-1])
    outs = [
        lut_linear(x, matrix.indices, matrix.table, part_bias, bits=matrix.bits, tile=member.tile)
        for matrix, member, part_bias in zip(matrices, members, biases, strict=True)
    ]
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)


for _name in ("merged_linear", "merged_linear_plain"):
    _LIBRARY.impl(_name, _merged_linear, "CompositeExplicitAutograd")


@torch.library.register_fake("edkm::merged_linear", lib=_LIBRARY)
def _fake(x: Tensor, indices: Tensor, luts: Tensor, bias: Tensor | None, numbers: list[int]) -> Tensor:
    return x.new_empty(*x.shape[:-1], sum(numbers[::_NUMBERS]))


merged_c.register("merged_linear", "edkm::merged_linear_plain")


class PackedRows(nn.Module):
    """Packed matrices of `columns` columns one below the other: `indices` flat uint8 and `luts` flat, one matrix's behind
    the other's, in the order of `members`."""

    def __init__(self, indices: Tensor, luts: Tensor, members: Sequence[Rows], columns: int):
        super().__init__()
        self.rows = sum(member.rows for member in members)
        self.numbers = [n for m in members for n in (*m[:2], *m.tile)]
        self.indices = nn.Parameter(indices, requires_grad=False)
        self.luts = nn.Parameter(luts, requires_grad=False)
        key = merged_c.keep(list(_matrices(self.indices, self.luts, members, columns)), columns)
        if key is not None:
            weakref.finalize(self, merged_c.forget, key)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x @ W.T + bias for x (..., columns)."""
        return torch.ops.edkm.merged_linear(x, self.indices, self.luts, bias, self.numbers)
