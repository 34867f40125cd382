"""Triton kernels for CUDA: the nearest LUT entry of each weight, and the sums an entry gathers (passes_torch.py).

One program works on a run of weights in one matrix row and one tile, so that its LUT is k numbers read once. Distances
are |w - c| in float32 and a strictly smaller one wins: the reference's index for every weight.

Nobody waits for the device: what is not finite becomes NaN in the result, and shows in whatever is computed from it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from edkm_cli.kernels.layout_c import DTYPES
from edkm_cli.packing import Tile

_MAX_RUN = 1024


def supports(weight: Tensor) -> bool:
    """Whether the kernels take this weight: on a GPU, float32 or 16-bit."""
    return weight.is_cuda and weight.dtype in DTYPES


@triton.jit
def _place(across, columns, tile_rows, tile_columns, RUN: tl.constexpr):
    """(offsets of this program's weights, which of them are inside, their group)."""
    runs = tl.cdiv(tile_columns, RUN)
    row = tl.program_id(0)
    tile_column = tl.program_id(1) // runs
    at = (tl.program_id(1) % runs) * RUN + tl.arange(0, RUN)
    offset = row.to(tl.int64) * columns + tile_column * tile_columns + at
    return offset, at < tile_columns, (row // tile_rows).to(tl.int64) * across + tile_column


@triton.jit
def _nearest(w, lut, k):
    """(index, entry) of the nearest of k entries; the entry is NaN where something is not finite."""
    first = tl.load(lut)
    entry = tl.zeros_like(w) + first
    index = tl.zeros_like(w).to(tl.int32)
    best = tl.abs(w - entry)
    flaw = first - first  # 0, or NaN if an entry is NaN or Inf
    for j in range(1, k):
        c = tl.load(lut + j)
        flaw += c - c
        distance = tl.abs(w - c)
        closer = distance < best
        best = tl.where(closer, distance, best)
        entry = tl.where(closer, c, entry)
        index = tl.where(closer, j, index)
    return index, entry + (w - w + flaw)


@triton.jit
def _snap_kernel(
    weight, luts, out, across, columns, tile_rows, tile_columns, k, INDEX: tl.constexpr, RUN: tl.constexpr
):
    offset, inside, group = _place(across, columns, tile_rows, tile_columns, RUN)
    w = tl.load(weight + offset, mask=inside, other=0.0).to(tl.float32)
    index, entry = _nearest(w, luts + group * k, k)
    if INDEX:
        tl.store(out + offset, index.to(tl.uint8), mask=inside)
    else:
        tl.store(out + offset, entry.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sum_kernel(weight, luts, grad, sums, across, columns, tile_rows, tile_columns, k, RUN: tl.constexpr):
    offset, inside, group = _place(across, columns, tile_rows, tile_columns, RUN)
    w = tl.load(weight + offset, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + offset, mask=inside, other=0.0).to(tl.float32)
    index, _ = _nearest(w, luts + group * k, k)
    for j in range(k):
        tl.atomic_add(sums + group * k + j, tl.sum(tl.where(index == j, g, 0.0), 0).to(tl.float64))


def _launch(weight: Tensor, tile: Tile) -> tuple[tuple[int, int], tuple[int, int, int, int], int]:
    """(grid, (tiles across, columns, tile rows, tile columns), run length)."""
    out_features, in_features = weight.shape
    run, across = min(_MAX_RUN, triton.next_power_of_2(tile[1])), in_features // tile[1]
    return (out_features, across * triton.cdiv(tile[1], run)), (across, in_features, *tile), run


def nearest(weight: Tensor, centroids: Tensor, tile: Tile) -> Tensor:
    return snap(weight, centroids, tile, torch.uint8)[0]


def snap(weight: Tensor, centroids: Tensor, tile: Tile, dtype: torch.dtype) -> tuple[Tensor, None]:
    """`passes_torch.snap`, with NaN instead of an answer: in the place of a weight that is not finite, and in the
    whole group of an entry that is not. As uint8, which holds no entry: the index of each."""
    grid, layout, run = _launch(weight, tile)
    out, luts = torch.empty(weight.shape, dtype=dtype, device=weight.device), centroids.float().contiguous()
    _snap_kernel[grid](weight.contiguous(), luts, out, *layout, luts.shape[1], INDEX=dtype == torch.uint8, RUN=run)
    return out, None


def sum_by_entry(weight: Tensor, centroids: Tensor, grad: Tensor, tile: Tile) -> Tensor:
    grid, layout, run = _launch(weight, tile)
    luts, sums = centroids.float().contiguous(), torch.zeros(centroids.shape, dtype=torch.float64, device=weight.device)
    _sum_kernel[grid](weight.contiguous(), luts, grad.contiguous(), sums, *layout, luts.shape[1], RUN=run)
    return sums
