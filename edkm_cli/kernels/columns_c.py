"""Columns of weights rounded or improved one after the other, and sums by code, on the CPU: `columns.c`, `descent.c` and
`code_sums.c`."""

import torch
from torch import Tensor

from edkm_cli.kernels.layout_c import call

_LANES, _MAX_COLUMNS = 16, 128  # of columns.c


def round_columns(block: Tensor, luts: Tensor, tiles: Tensor, factor: Tensor) -> Tensor:
    """`columns_torch.round_columns` of a float32 block of at most 128 columns that is stored as float32."""
    columns, rows = block.shape
    assert columns <= _MAX_COLUMNS, "the kernel has room for so many"
    assert block.is_contiguous(), "it is changed in place"
    errors = torch.empty_like(block)
    tensors = block, errors, luts.contiguous(), tiles.contiguous(), factor.contiguous()
    call("round_columns", -(-rows // _LANES), block.numel(), *tensors, columns, rows, luts.shape[1])
    return errors


def descend(indices: Tensor, errors: Tensor, luts: Tensor, hessian: Tensor, sweeps: int) -> None:
    """`columns_torch.descend` in float32, each row until nothing changes in it."""
    assert indices.is_contiguous(), "they are changed in place"
    assert errors.is_contiguous(), "they are changed in place"
    tensors, sizes = (indices, errors, luts.contiguous(), hessian.contiguous()), (indices.shape[1], *luts.shape[1:])
    call("descend", len(indices), indices.numel(), *tensors, *sizes, sweeps)


def sum_by_code(indices: Tensor, hessian: Tensor, k: int) -> Tensor:
    """`columns_torch.sum_by_code` in float32."""
    products = torch.zeros(len(indices), k, k, dtype=torch.float64)
    tensors = indices.contiguous(), hessian.contiguous(), products
    call("sum_by_code", len(indices), indices.numel(), *tensors, indices.shape[1], k)
    return products
