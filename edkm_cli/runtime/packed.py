"""A packed matrix as every kernel takes it, and whether its tensors belong together."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from edkm_cli.kernels.tiles import Tile
from edkm_cli.packing import Part, packed_width


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


def recorded() -> bool:
    """Whether torch.compile or torch.jit.trace records operations: what does not go by PyTorch's dispatcher would be a
    constant. Raises NotImplementedError where forward-mode derivatives are asked for, which would be left out."""
    if torch.autograd.forward_ad._current_level >= 0:
        raise NotImplementedError("packed weights have no forward-mode derivatives; dequantize the model")
    return torch.compiler.is_compiling() or torch._C._is_tracing()


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
