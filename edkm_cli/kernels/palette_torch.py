"""Nearest LUT entry, and the sums a LUT entry gathers, in plain PyTorch: reference of the fast kernels.

The distance is |w - c| in float32 (float64 for float64 weights), a tie goes to the lower index. One subtraction is
correctly rounded everywhere, so every implementation finds the same index for every weight, bit for bit.
"""

import torch
from torch import Tensor

from edkm_cli.kernels.attention_torch import chunks
from edkm_cli.kernels.closed_form import centroid_dtype
from edkm_cli.kernels.tiles import Tile, from_groups, to_groups


def _nearest(values: Tensor, centroids: Tensor) -> Tensor:
    return (values[:, :, None] - centroids[:, None, :]).abs_().argmin(-1)


def nearest(weight: Tensor, centroids: Tensor, tile: Tile) -> Tensor:
    """Index of the nearest entry, (out, in) uint8."""
    values, compute = to_groups(weight, tile), centroid_dtype(weight)
    indices = torch.empty(values.shape, dtype=torch.uint8, device=weight.device)
    for chunk in chunks(values, centroids.shape[1]):
        indices[chunk] = _nearest(values[chunk].to(compute), centroids[chunk[0]].to(compute)).to(torch.uint8)
    return from_groups(indices, weight.shape, tile)


def lookup(indices: Tensor, centroids: Tensor, tile: Tile, dtype: torch.dtype) -> Tensor:
    """centroids[group, index] for indices (out, in) uint8, in `dtype`."""
    positions, entries = to_groups(indices, tile), centroids.to(dtype)
    dense = torch.empty(positions.shape, dtype=dtype, device=indices.device)
    for chunk in chunks(positions, 8):
        dense[chunk] = entries[chunk[0]].gather(1, positions[chunk].long())
    return from_groups(dense, indices.shape, tile)


def snap(weight: Tensor, centroids: Tensor, tile: Tile, dtype: torch.dtype) -> tuple[Tensor, bool]:
    """(the nearest entry of each weight in `dtype`, whether all weights are finite)."""
    finite = bool(weight.sum(dtype=centroid_dtype(weight)).isfinite())
    return lookup(nearest(weight, centroids, tile), centroids, tile, dtype), finite


def sum_by_entry(weight: Tensor, centroids: Tensor, grad: Tensor, tile: Tile) -> Tensor:
    """The sum of `grad` over the weights nearest to each entry, (groups, k) float64."""
    values, grads, compute = to_groups(weight, tile), to_groups(grad, tile), centroid_dtype(weight)
    sums = torch.zeros(centroids.shape, dtype=torch.float64, device=weight.device)
    for chunk in chunks(values, centroids.shape[1]):
        indices = _nearest(values[chunk].to(compute), centroids[chunk[0]].to(compute))
        sums[chunk[0]] = sums[chunk[0]].scatter_add(1, indices, grads[chunk].double())
    return sums
