"""Triton kernels for CUDA: columns rounded one after the other, and coordinate descent over entries (passes_torch.py).

Rows are independent: a program takes some of them through a block of columns that stays in registers. Its column j is read
as a sum over the block with all others zero, so that a step waits for a table's entries alone, which the L1 cache holds.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 16


def supports(tensor: Tensor) -> bool:
    """Whether the kernels take these weights or errors: on a GPU, float32."""
    return tensor.is_cuda and tensor.dtype == torch.float32


@triton.jit
def _round_kernel(
    block, luts, tiles, factor, errors, columns, rows, k,
    STORED: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    row, column, entry = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, K)
    place = column[:, None] * rows + row[None, :]
    inside = (column < columns)[:, None] & (row < rows)[None, :]
    there = (entry < k)[:, None] & (row < rows)[None, :]
    w = tl.load(block + place, mask=inside, other=0.0)
    for j in range(columns):
        table = luts + (tl.load(tiles + j) * k + entry[:, None]) * rows + row[None, :]
        upper = tl.load(table, mask=there, other=float("inf"))
        lower = tl.load(table - rows, mask=there & (entry > 0)[:, None], other=float("-inf"))
        now = tl.sum(tl.where(column[:, None] == j, w, 0.0), 0).to(STORED).to(tl.float32)
        error = now - tl.max(tl.where(now[None, :] > (lower + upper) / 2, upper, float("-inf")), 0)
        passed = tl.load(factor + j * columns + column, mask=(column > j) & (column < columns), other=0.0)
        w = tl.where(column[:, None] == j, now[None, :], w - passed[:, None] * error[None, :])
        tl.store(errors + j * rows + row, error, mask=row < rows)
    tl.store(block + place, w, mask=inside)


@triton.jit
def _descend_kernel(
    indices, errors, luts, hessian, changes, start, count, columns, rows, across, width, k,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    row, column, entry = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, K)
    first = row.to(tl.int64) * columns + start
    there = (row < rows)[:, None] & (entry < k)[None, :]
    beyond = tl.where(entry < k, 0.0, float("inf"))[None, :]  # entries that are none are near to nothing
    inside = (row < rows)[:, None] & (column < count)[None, :]
    part = tl.load(errors + first[:, None] + column[None, :], mask=inside, other=0.0)
    for j in range(count):
        table = luts + (row[:, None] * across + (start + j) // width) * k + entry[None, :]
        entries = tl.load(table, mask=there, other=0.0) + beyond
        before = tl.load(indices + first + j, mask=row < rows, other=0).to(tl.int32)
        now = tl.sum(tl.where(entry[None, :] == before[:, None], entries, 0.0), 1)
        weights = hessian + (start + j).to(tl.int64) * columns + start
        best = now - tl.sum(tl.where(column[None, :] == j, part, 0.0), 1) / tl.load(weights + j)
        chosen = tl.argmin(tl.abs(entries - best[:, None]), 1)
        change = tl.sum(tl.where(entry[None, :] == chosen[:, None], entries, 0.0), 1) - now
        part += change[:, None] * tl.load(weights + column, mask=column < count, other=0.0)[None, :]
        tl.store(indices + first + j, chosen.to(tl.uint8), mask=row < rows)
        tl.store(changes + row * count + j, change, mask=row < rows)


def round_columns(block: Tensor, luts: Tensor, tiles: Tensor, factor: Tensor, stored: torch.dtype) -> Tensor:
    """`passes_torch.round_columns`."""
    (columns, rows), k = block.shape, luts.shape[1]
    assert block.is_contiguous()
    factor, errors = factor.contiguous(), torch.empty_like(block)
    _round_kernel[(triton.cdiv(rows, _ROWS),)](
        block, luts.contiguous(), tiles, factor, errors, columns, rows, k,
        STORED=getattr(tl, str(stored).removeprefix("torch.")), COLUMNS=triton.next_power_of_2(columns), ROWS=_ROWS,
        K=triton.next_power_of_2(k),
    )  # fmt: skip
    return errors


def changes(indices: Tensor, errors: Tensor, luts: Tensor, hessian: Tensor, start: int, end: int) -> Tensor:
    """`passes_torch.changes`."""
    (rows, columns), (_, across, k) = indices.shape, luts.shape
    assert all(tensor.is_contiguous() for tensor in (indices, errors, luts, hessian))
    found = errors.new_empty(rows, end - start)
    _descend_kernel[(triton.cdiv(rows, _ROWS),)](
        indices, errors, luts, hessian, found, start, end - start, columns, rows, across, columns // across, k,
        COLUMNS=triton.next_power_of_2(end - start), ROWS=_ROWS, K=triton.next_power_of_2(k),
    )  # fmt: skip
    return found
