"""Packed rows whose products cost little to ask for, as an operator that compiled graphs contain.

A small model asks for a hundred products for each token, so what is done in Python before the kernel starts shows. The
operator edkm::served_linear takes the tensors and numbers of edkm::lut_linear and gives the same. But it has no gradient,
and where the rows are those of a `PackedRows` it finds what was prepared for them, by the address of their indices.
"""

from __future__ import annotations

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
