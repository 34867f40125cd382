"""Optimal weighted one-dimensional k-means on the CPU, by `kmeans.c`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from edkm_cli.kernels.build import library
from edkm_cli.kernels.layout_c import parallel, pointer


def kmeans(values: Tensor, importance: Tensor | None, k: int) -> Tensor:
    """Optimal centroids (groups, k) of float32 values (groups, n), weighted by importance (groups, n) if given."""
    groups, size = values.shape
    values, centroids = values.contiguous(), torch.empty(groups, k, dtype=torch.float32)
    masses, compiled = None if importance is None else importance.contiguous(), library()
    assert compiled is not None, "callers ask `supports` first"

    def work(first: int, last: int) -> None:
        sizes = (ctypes.c_int64(v) for v in (size, k))
        edges = (ctypes.c_int64(v) for v in (first, last))
        if compiled.edkm_kmeans(pointer(values), pointer(masses), *sizes, pointer(centroids), *edges):
            raise MemoryError(f"k-means of groups of {size} weights")

    parallel(work, groups, values.numel())
    return centroids
