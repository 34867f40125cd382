"""Passes over weights on the meta device: results with shapes and dtypes and no values.

For planning a run: what a pass returns is as large as what the C and Triton kernels return, and so is what they keep
while they work, as far as it is of the weight's size. Used like any other kernels, through the dispatch point;
`passes_torch` says what each returns.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from edkm_cli.kernels.closed_form import Passes, Spread, centroid_dtype
from edkm_cli.packing import Tile


def nearest(weight: Tensor, centroids: Tensor, tile: Tile) -> Tensor:
    return weight.new_empty(weight.shape, dtype=torch.uint8)


def snap(weight: Tensor, centroids: Tensor, tile: Tile, dtype: torch.dtype) -> tuple[Tensor, bool]:
    """`passes_torch.snap`, of a weight that is finite."""
    return weight.new_empty(weight.shape, dtype=dtype), True


def sum_by_entry(weight: Tensor, centroids: Tensor, grad: Tensor, tile: Tile) -> Tensor:
    return centroids.new_empty(centroids.shape, dtype=torch.float64)


def lookup(indices: Tensor, centroids: Tensor, tile: Tile, dtype: torch.dtype) -> Tensor:
    return indices.new_empty(indices.shape, dtype=dtype)


def kmeans(values: Tensor, importance: Tensor | None, ks: Sequence[int]) -> list[Tensor]:
    """`passes_torch.kmeans`. What k-means itself needs is host memory, also for weights on a GPU."""
    return [values.new_empty(values.shape[0], k) for k in ks]


class ShapePasses(Passes):
    """The passes of `closed_form`, all iterations in one go: only the weight's gradient is as large as the weight."""

    def __init__(self, weight: Tensor, tile: Tile, importance: Tensor | None = None) -> None:
        self._weight, self._groups = weight, weight.numel() // (tile[0] * tile[1])

    def spread(self) -> tuple[Tensor, Tensor]:
        mean = self._weight.new_empty(self._groups, dtype=torch.float64)
        return mean, torch.empty_like(mean)

    def soft(self, centroids: Tensor, tau: Tensor, dtype: torch.dtype) -> Tensor:
        return self._weight.new_empty(self._weight.shape, dtype=dtype)

    def iterate(self, centroids: Tensor, tau: Tensor, iterations: int) -> Tensor:
        return torch.empty_like(centroids)

    def backward(
        self, start: Tensor, spread: Spread, iterations: int, grad: Tensor | None, grad_centroids: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        summed = self._weight.new_empty(self._weight.shape, dtype=centroid_dtype(self._weight))
        return summed.to(self._weight.dtype), torch.empty_like(start)
