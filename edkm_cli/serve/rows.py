"""Packed rows whose products cost little to ask for, as an operator that compiled graphs contain.

A small model asks for a hundred products for each token, so what is done in Python before the kernel starts shows. The
operator edkm::served_linear takes the tensors and numbers of edkm::lut_linear and gives the same. But it has no gradient,
and where the rows are those of a `PackedRows` it finds what was prepared for them, by the address of their indices.
edkm::served_linears is several of these with one input, side by side: what a merged layer (q, k, v) is whose parts differ
in bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from edkm_cli.kernels.lut_linear import lut_linear
from edkm_cli.kernels.tiles import Packed, Tile
from edkm_cli.nn.ready import Ready

_LIBRARY = torch.library.Library("edkm", "FRAGMENT")
_LIBRARY.define(
    "served_linear(Tensor x, Tensor indices, Tensor lut, Tensor? bias, int bits, int tile_rows, int tile_columns) -> Tensor"
)


class _Prepared:
    """What the kernel needs of one packed matrix, kept for as long as its `PackedRows`."""

    def __init__(self, indices: Tensor, lut: Tensor, bits: int, tile: Tile):
        self._packed, self._ready = Packed(indices, lut, None, bits, tile), Ready()

    def product(self, x: Tensor, lut: Tensor, bias: Tensor | None) -> Tensor:
        packed, kept = self._packed, self._packed.bias
        if lut is not packed.table and lut.data_ptr() != packed.table.data_ptr():
            return lut_linear(x, packed.indices, lut, bias, bits=packed.bits, tile=packed.tile or (1, 1))
        if bias is not kept and (bias is None or kept is None or bias.data_ptr() != kept.data_ptr()):
            packed = self._packed = packed._replace(bias=bias)
        outs = self._ready.product(x, (packed,), x.shape[-1])
        if outs is not None:
            return outs[0]
        assert packed.tile is not None
        return lut_linear(x, packed.indices, packed.table, bias, bits=packed.bits, tile=packed.tile)


_PREPARED: WeakValueDictionary[int, _Prepared] = WeakValueDictionary()  # by the address of the indices


@torch.library.impl(_LIBRARY, "served_linear", "CompositeExplicitAutograd")
def _served_linear(
    x: Tensor, indices: Tensor, lut: Tensor, bias: Tensor | None, bits: int, tile_rows: int, tile_columns: int
) -> Tensor:
    prepared = _PREPARED.get(indices.data_ptr())
    if prepared is None:
        return lut_linear(x, indices, lut, bias, bits=bits, tile=(tile_rows, tile_columns))
    return prepared.product(x, lut, bias)


@torch.library.register_fake("edkm::served_linear", lib=_LIBRARY)
def _fake(x: Tensor, indices: Tensor, lut: Tensor, bias: Tensor | None, *numbers: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], indices.shape[0])


_LIBRARY.define("served_linears(Tensor x, Tensor[] indices, Tensor[] luts, Tensor? bias, int[] numbers) -> Tensor")


@torch.library.impl(_LIBRARY, "served_linears", "CompositeExplicitAutograd")
def _served_linears(
    x: Tensor, indices: list[Tensor], luts: list[Tensor], bias: Tensor | None, numbers: list[int]
) -> Tensor:
    biases = [None] * len(indices) if bias is None else bias.split([part.shape[0] for part in indices])
    outs = [
        _served_linear(x, part, lut, its, *numbers[3 * i : 3 * i + 3])
        for i, (part, lut, its) in enumerate(zip(indices, luts, biases, strict=True))
    ]
    return torch.cat(outs, dim=-1)


@torch.library.register_fake("edkm::served_linears", lib=_LIBRARY)
def _fake_linears(
    x: Tensor, indices: list[Tensor], luts: list[Tensor], bias: Tensor | None, numbers: list[int]
) -> Tensor:
    return x.new_empty(*x.shape[:-1], sum(part.shape[0] for part in indices))


class PackedRows(nn.Module):
    """Rows of a layer as one packed matrix: `indices` (rows, bytes) uint8, `lut` (groups, 2**bits)."""

    def __init__(self, indices: Tensor, lut: Tensor, bits: int, tile: Tile):
        super().__init__()
        self.rows, self.bits, self.tile = indices.shape[0], bits, tile
        self.indices = nn.Parameter(indices, requires_grad=False)
        self.lut = nn.Parameter(lut, requires_grad=False)
        self._prepared = _PREPARED[self.indices.data_ptr()] = _Prepared(self.indices, self.lut, bits, tile)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x @ W.T + bias for x (..., in)."""
        if torch.compiler.is_compiling():
            return torch.ops.edkm.served_linear(x, self.indices, self.lut, bias, self.bits, *self.tile)
        return _served_linear(x, self.indices, self.lut, bias, self.bits, *self.tile)


def products_side_by_side(parts: Sequence[PackedRows], x: Tensor, bias: Tensor | None) -> Tensor:
    """The parts' products one beside the other, (..., all rows), for x (..., in); `bias` (all rows) or None."""
    indices: list[Tensor] = [part.indices for part in parts]
    luts: list[Tensor] = [part.lut for part in parts]
    numbers = [number for part in parts for number in (part.bits, *part.tile)]
    if torch.compiler.is_compiling():
        return torch.ops.edkm.served_linears(x, indices, luts, bias, numbers)
    return _served_linears(x, indices, luts, bias, numbers)
