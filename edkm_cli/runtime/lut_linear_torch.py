"""A packed matrix in plain PyTorch: unpack, decode, multiply. The reference of the fast kernels."""

import torch
from torch import Tensor

from edkm_cli.kernels import passes_torch
from edkm_cli.packing import Packed, unpack


def dense(packed: Packed, columns: int, dtype: torch.dtype) -> Tensor:
    """W (out, columns) in `dtype`: lut[group, index], or scale * level computed in float32; rounded once."""
    codes = unpack(packed.indices, packed.bits, columns)
    if packed.tile is None:
        shape = (*packed.table.shape, columns // packed.table.shape[1])  # (out, groups, columns of a group)
        levels = codes.float().sub_(2 ** (packed.bits - 1)).view(shape)
        return levels.mul_(packed.table.float()[:, :, None]).view(codes.shape).to(dtype)
    entries = packed.table if packed.table.dtype == torch.float64 else packed.table.float()
    return passes_torch.lookup(codes, entries, packed.tile, entries.dtype).to(dtype)


def linear(x: Tensor, packed: Packed) -> Tensor:
    """x @ W.T + bias for x (..., in), W decoded to the dtype of x."""
    return torch.nn.functional.linear(x, dense(packed, x.shape[-1], x.dtype), packed.bias)


def rows(packed: Packed, columns: int, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of a row-scaled W that ids (n,) names, (n, columns)."""
    indices, table = (tensor.index_select(0, ids) for tensor in packed[:2])
    return dense(packed._replace(indices=indices, table=table), columns, dtype)


def sum_by_code(values: Tensor, packed: Packed, columns: int, first: int) -> Tensor:
    """Sums of values (rows, columns) over the weights of each tile of each row that have the same code, from row `first` of
    W on: (rows, tiles of a row, 2**bits)."""
    tile, indices = packed.tile or (1, columns), packed.indices[first : first + len(values)].contiguous()
    codes = unpack(indices, packed.bits, columns).long().unflatten(1, (-1, tile[1]))  # (rows, tiles of a row, columns)
    return values.new_zeros(*codes.shape[:2], 2**packed.bits).scatter_add_(2, codes, values.reshape(codes.shape))
