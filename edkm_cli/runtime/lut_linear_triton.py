"""Triton kernels for CUDA: packed matrices of any kind decoded, for cuBLAS to multiply, and values summed by their codes
(lut_linear_torch.py)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from edkm_cli.kernels.layout_c import DTYPES, readable
from edkm_cli.packing import Packed

_COLUMNS = 1024
_ENTRIES = 8192  # sums in registers: of each entry and some columns


def supports(indices: Tensor, packed: Packed) -> bool:
    """Whether the kernels read this matrix on a GPU: all but rows with several scales."""
    return indices.is_cuda and not packed.grouped


@triton.jit
def _codes(indices, row, column, inside, bytes_a_row, BITS: tl.constexpr):
    """The codes of a row's columns, in any shape that the two have together."""
    bit = column * BITS
    at = indices + row.to(tl.int64) * bytes_a_row + bit // 8
    code = tl.load(at, mask=inside, other=0).to(tl.int32)
    crossing = inside & (bit % 8 + BITS > 8)
    code |= tl.load(at + 1, mask=crossing, other=0).to(tl.int32) << 8
    return (code >> (bit % 8)) & (2**BITS - 1)


@triton.jit
def _dense_kernel(
    indices, table, out, columns, bytes_a_row, across, tile_rows, tile_columns,
    BITS: tl.constexpr, LEVELS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    code = _codes(indices, row, column, inside, bytes_a_row, BITS)
    if LEVELS:
        w = (code - 2 ** (BITS - 1)).to(tl.float32) * tl.load(table + row)
    else:
        group = (row // tile_rows) * across + column // tile_columns
        w = tl.load(table + group.to(tl.int64) * (2**BITS) + code, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * columns + column, w.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sum_kernel(
    values, indices, sums, first, columns, bytes_a_row, tile_columns, BITS: tl.constexpr, COLUMNS: tl.constexpr
):
    row, entry = tl.program_id(0), tl.arange(0, 2**BITS)
    found = tl.zeros((2**BITS, COLUMNS), tl.float32)
    for start in range(0, tile_columns, COLUMNS):
        at = start + tl.arange(0, COLUMNS)
        column, inside = tl.program_id(1) * tile_columns + at, at < tile_columns
        code = _codes(indices, first + row, column, inside, bytes_a_row, BITS)
        value = tl.load(values + row.to(tl.int64) * columns + column, mask=inside, other=0.0).to(tl.float32)
        found += tl.where(entry[:, None] == code[None, :], value[None, :], 0.0)
    tl.store(sums + (row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * 2**BITS + entry, tl.sum(found, 1))


def sum_by_code(values: Tensor, packed: Packed, columns: int, first: int) -> Tensor:
    """`lut_linear_torch.sum_by_code`, of values of any dtype in `DTYPES`, in float32."""
    across, tile_columns = (1, columns) if packed.tile is None else (columns // packed.tile[1], packed.tile[1])
    sums = torch.empty(len(values), across, 2**packed.bits, dtype=torch.float32, device=values.device)
    indices, run = packed.indices.contiguous(), min(_ENTRIES >> packed.bits, triton.next_power_of_2(tile_columns))
    _sum_kernel[(len(values), across)](
        values.contiguous(), indices, sums, first, columns, indices.shape[1], tile_columns, BITS=packed.bits, COLUMNS=run
    )  # fmt: skip
    return sums


def dense(packed: Packed, columns: int, dtype: torch.dtype) -> Tensor:
    """`lut_linear_torch.dense`."""
    kept = dtype if dtype in DTYPES else torch.float32
    out = torch.empty(packed.indices.shape[0], columns, dtype=kept, device=packed.indices.device)
    indices, (tile_rows, tile_columns) = packed.indices.contiguous(), packed.tile or (1, columns)
    table = readable(packed.table)  # Triton reads the same dtypes
    layout = (indices.shape[1], columns // tile_columns, tile_rows, tile_columns)
    run = min(_COLUMNS, triton.next_power_of_2(columns))
    _dense_kernel[(out.shape[0], triton.cdiv(columns, run))](
        indices, table, out, columns, *layout, BITS=packed.bits, LEVELS=packed.tile is None, COLUMNS=run
    )
    return out.to(dtype)
