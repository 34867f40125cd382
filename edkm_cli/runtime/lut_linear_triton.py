"""Triton kernels for CUDA: packed matrices times few activations, and packed matrices decoded (lut_linear_torch.py).

One program multiplies some rows of W with one row of x: it reads packed bytes, looks entries up through the L1 cache and
adds in float32. A second token finds the bytes in the L2 cache. For many tokens `dense` writes W into scratch memory and
cuBLAS multiplies. Plain Triton: what runs in its interpreter is what runs on a GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from edkm_cli.kernels.layout_c import DTYPES
from edkm_cli.runtime.packed import Packed

_ROWS, _COLUMNS = 4, 512
_DENSE_COLUMNS = 1024


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
def _linear_kernel(
    x, indices, table, bias, out, rows, columns, bytes_a_row, across, tile_rows, tile_columns,
    BITS: tl.constexpr, LEVELS: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1).to(tl.int64)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, columns, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        w = _weights(
            indices, table, row[:, None], column[None, :], inside, bytes_a_row, across, tile_rows, tile_columns, BITS,
            LEVELS,
        )  # fmt: skip
        values = tl.load(x + token * columns + column, mask=column < columns, other=0.0).to(tl.float32)
        sums += tl.where(inside, w, 0.0) * values[None, :]
    y = tl.sum(sums, 1)
    if LEVELS:
        y *= tl.load(table + row, mask=row < rows, other=0.0)
    if BIAS:
        y += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(out + token * rows + row, y.to(out.dtype.element_ty), mask=row < rows)


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


def _layout(packed: Packed, columns: int) -> tuple[Tensor, Tensor, tuple[int, int, int, int]]:
    """(indices, table in a dtype that Triton reads, (bytes a row, tiles across, tile rows, tile columns))."""
    tile_rows, tile_columns = packed.tile or (1, columns)
    table = packed.table if packed.table.dtype in DTYPES else packed.table.float()
    indices = packed.indices.contiguous()
    return indices, table.contiguous(), (indices.shape[1], columns // tile_columns, tile_rows, tile_columns)


def linear(x: Tensor, packed: Packed) -> Tensor:
    """`lut_linear_torch.linear`, with W exact in float32 and float32 sums."""
    rows, columns = packed.indices.shape[0], x.shape[-1]
    indices, table, layout = _layout(packed, columns)
    flat = x.reshape(-1, columns).contiguous()
    out = x.new_empty(*x.shape[:-1], rows)
    bias = table if packed.bias is None else packed.bias.contiguous()
    _linear_kernel[(triton.cdiv(rows, _ROWS), flat.shape[0])](
        flat, indices, table, bias, out, rows, columns, *layout, BITS=packed.bits, LEVELS=packed.tile is None,
        BIAS=packed.bias is not None, ROWS=_ROWS, COLUMNS=min(_COLUMNS, triton.next_power_of_2(columns)),
    )  # fmt: skip
    return out


def dense(packed: Packed, columns: int, dtype: torch.dtype) -> Tensor:
    """`lut_linear_torch.dense`."""
    kept = dtype if dtype in DTYPES else torch.float32
    out = torch.empty(packed.indices.shape[0], columns, dtype=kept, device=packed.indices.device)
    indices, table, layout = _layout(packed, columns)
    run = min(_DENSE_COLUMNS, triton.next_power_of_2(columns))
    _dense_kernel[(out.shape[0], triton.cdiv(columns, run))](
        indices, table, out, columns, *layout, BITS=packed.bits, LEVELS=packed.tile is None, COLUMNS=run
    )
    return out.to(dtype)
