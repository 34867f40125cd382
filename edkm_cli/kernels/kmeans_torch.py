"""Weighted one-dimensional k-means in plain PyTorch: Lloyd's iteration on sorted values from several starts, best kept.

Where the C kernel can't run. It converges to a local optimum per start; `kmeans.c` finds the global one.

Before either, the few different numbers among millions of weights (`distinct`): a model that was trained in 16 bits holds at
most 65,536 of them, also when it is loaded in float32. Weights that are equal belong to one cluster, so a group is its
distinct values, each with the sum of its importances.
"""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from edkm_cli.kernels.table_torch import PATTERNS

_STEPS = 100
_CHUNK = {"cpu": 1 << 22, "cuda": 1 << 24}  # values sorted at a time; about 80 bytes are in use for each


def _starts(values: Tensor, mass: Tensor, k: int) -> list[Tensor]:
    """Starting centroids (groups, k) at quantiles of mass, of count, of the value range, and of mass * distance^2."""
    size, spots = values.shape[1], (torch.arange(k, dtype=torch.float64, device=values.device) + 0.5) / k
    by_range = values[:, :1] + (values[:, -1:] - values[:, :1]) * spots
    starts = [values[:, (spots * size).long()], by_range]
    spread = (values - values.mean(1, keepdim=True)).square()
    for density in (mass, mass * spread, (mass * (spread + spread.mean(1, keepdim=True))).sqrt()):
        below = density.cumsum(1)
        at = torch.searchsorted(below, spots * below[:, -1:]).clamp_max(size - 1)
        starts.append(values.gather(1, at))
    return starts


def _lloyd(values: Tensor, sums: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """(centroids, the part of the squares they explain) after convergence; sums (2, groups, n + 1) are prefix sums."""
    edges = None
    for _ in range(_STEPS):
        inner = torch.searchsorted(values, (centroids[:, 1:] + centroids[:, :-1]) / 2, right=True)
        if edges is not None and torch.equal(inner, edges):
            break
        edges = inner
        ends = torch.nn.functional.pad(inner, (1, 0)), torch.nn.functional.pad(inner, (0, 1), value=values.shape[1])
        mass, moment = (s.gather(1, ends[1]) - s.gather(1, ends[0]) for s in sums)
        centroids = torch.where(mass > 0, moment / mass.clamp_min(1e-300), centroids).sort(1).values
    return centroids, (2 * moment * centroids - mass * centroids.square()).sum(1)


def kmeans(values: Tensor, importance: Tensor | None, ks: Sequence[int]) -> list[Tensor]:
    """`kmeans_c.kmeans`, to a local optimum."""
    parts: list[list[Tensor]] = [[] for _ in ks]
    at_once = max(1, _CHUNK.get(values.device.type, 1 << 22) // values.shape[1])
    for first in range(0, values.shape[0], at_once):
        chunk, order = values[first : first + at_once].double().sort(1)
        mass = torch.ones_like(chunk)
        if importance is not None:
            mass = importance[first : first + at_once].double().gather(1, order)
            mass = torch.where(mass.sum(1, keepdim=True) > 0, mass, 1.0)
        mass = mass / mass.sum(1, keepdim=True)
        sums = torch.stack((mass, mass * chunk)).cumsum(2)
        sums = torch.nn.functional.pad(sums, (1, 0))
        for k, found in zip(ks, parts, strict=True):
            runs = [_lloyd(chunk, sums, start.sort(1).values) for start in _starts(chunk, mass, k)]
            best = torch.stack([explained for _, explained in runs]).argmax(0)
            found.append(torch.stack([c for c, _ in runs])[best, torch.arange(len(chunk), device=chunk.device)])
    return [torch.cat(found).float() for found in parts]


def narrowed(values: Tensor) -> Tensor | None:
    """Float32 values as bfloat16 or float16 where that changes none of them, else None."""
    for dtype in (torch.bfloat16, torch.float16):
        narrow = values.to(dtype)
        if torch.equal(narrow.float(), values):
            return narrow
    return None


def distinct(values: Tensor, importance: Tensor | None, kernels: ModuleType) -> tuple[Tensor, Tensor]:
    """(distinct values (1, u) float32, their importances (1, u) float32) of 16-bit values (n,), all finite.

    Without importance, or where it is zero everywhere, each value counts as often as it occurs.
    """
    matrix = values[None].contiguous()
    counts = kernels.count_patterns(matrix)
    masses = counts.double() if importance is None else kernels.sum_by_pattern(matrix, importance[None])
    if not bool(masses.any()):
        masses = counts.double()
    patterns = torch.arange(PATTERNS, device=values.device).to(torch.int16)[counts > 0]
    return patterns.view(values.dtype).float()[None], masses[counts > 0].float()[None]
