"""Weighted one-dimensional k-means on the CPU, by `kmeans.c`: the global optimum, by dynamic programming."""

from __future__ import annotations

import torch
from torch import Tensor

from edkm_cli.kernels.layout_c import call


def kmeans(values: Tensor, importance: Tensor | None, k: int) -> Tensor:
    """Optimal centroids (groups, k) of float32 values (groups, n), weighted by importance (groups, n) if given."""
    groups, size = values.shape
    masses = None if importance is None else importance.contiguous()
    centroids = torch.empty(groups, k, dtype=torch.float32)
    call("kmeans", groups, values.numel(), values.contiguous(), masses, size, k, centroids)
    return centroids
