"""k-means of millions of weights by the few different numbers among them.

A model that was trained in 16 bits holds at most 65,536 different values, and still does when it is loaded in float32.
Weights that are equal belong to one cluster, so a group is its distinct values, each with the sum of its importances.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edkm_cli.kernels.table_torch import PATTERNS, TableKernels


def narrowed(values: Tensor) -> Tensor | None:
    """Float32 values as bfloat16 or float16 where that changes none of them, else None."""
    for dtype in (torch.bfloat16, torch.float16):
        narrow = values.to(dtype)
        if torch.equal(narrow.float(), values):
            return narrow
    return None


def distinct(values: Tensor, importance: Tensor | None, kernels: TableKernels) -> tuple[Tensor, Tensor]:
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
