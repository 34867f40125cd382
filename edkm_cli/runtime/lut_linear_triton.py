"""A Triton kernel for CUDA: packed matrices of any kind decoded (lut_linear_torch.py), for cuBLAS to multiply."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from edkm_cli.kernels.layout_c import DTYPES
from edkm_cli.runtime.packed import Packed

_COLUMNS = 1024


@triton.jit
def _weights(
    indices, table, row, column, inside, bytes_a_row, across, tile_rows, tile_columns, BITS: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """Weights of rows (R, 1) and columns (1, C) as float32; levels unscaled."""
    bit = column * BITS
    at = indices + row.to(tl.int64) * bytes_a_row + bit // 8
    code = tl.load(at, mask=inside, other=0).to(tl.int32)
    crossing = inside & (bit % 8 + BITS > 8)
    code |= tl.load(at + 1, mask=crossing, other=0).to(tl.int32) << 8
    code = (code >> (bit % 8)) & (2**BITS - 1)
    if LEVELS:
        return (code - 2 ** (BITS - 1)).to(tl.float32)
    group = (row // tile_rows) * across + column // tile_columns
    return tl.load(table + group.to(tl.int64) * (2**BITS) + code, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _dense_kernel(
    indices, table, out, columns, bytes_a_row, across, tile_rows, tile_columns,
    BITS: tl.constexpr, LEVELS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) + tl.zeros((1, 1), tl.int32)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = column < columns
    w = _weights(indices, table, row, column, inside, bytes_a_row, across, tile_rows, tile_columns, BITS, LEVELS)
    if LEVELS:
        w *= tl.load(table + row)
    tl.store(out + row.to(tl.int64) * columns + column, w.to(out.dtype.element_ty), mask=inside)


def dense(packed: Packed, columns: int, dtype: torch.dtype) -> Tensor:
    """`lut_linear_torch.dense`."""
    kept = dtype if dtype in DTYPES else torch.float32
    out = torch.empty(packed.indices.shape[0], columns, dtype=kept, device=packed.indices.device)
    indices, (tile_rows, tile_columns) = packed.indices.contiguous(), packed.tile or (1, columns)
    table = (packed.table if packed.table.dtype in DTYPES else packed.table.float()).contiguous()  # what Triton reads
    layout = (indices.shape[1], columns // tile_columns, tile_rows, tile_columns)
    run = min(_COLUMNS, triton.next_power_of_2(columns))
    _dense_kernel[(out.shape[0], triton.cdiv(columns, run))](
        indices, table, out, columns, *layout, BITS=packed.bits, LEVELS=packed.tile is None, COLUMNS=run
    )
    return out.to(dtype)
