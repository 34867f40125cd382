"""Weighted one-dimensional k-means on the CPU, by `kmeans.c`: the global optimum, by dynamic programming."""

from collections.abc import Sequence

import torch
from torch import Tensor

from edkm_cli.kernels.layout_c import call


def kmeans(values: Tensor, importance: Tensor | None, ks: Sequence[int]) -> list[Tensor]:
    """Optimal centroids (groups, k) of float32 values (groups, n), weighted by importance (groups, n) if given, for each k
    of some, ascending."""
    groups, size = values.shape
    masses = None if importance is None else importance.contiguous()
    centroids, numbers = torch.empty(groups, sum(ks), dtype=torch.float32), torch.tensor(ks)
    call("kmeans", groups, values.numel(), values.contiguous(), masses, size, numbers, len(ks), centroids)
    return [part.contiguous() for part in centroids.split(list(ks), 1)]
