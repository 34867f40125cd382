"""The start of the clustering: k-means per LUT group, weighted by how much each weight matters.

Each weight counts by its squared gradient or by the mean squared input of its column (SqueezeLLM, arXiv 2306.07629).
Before any training this decides the perplexity: on SmolLM2-135M at 3 bits, unweighted k-means with one LUT for each
matrix gives about 400,000, k-means by squared gradients with one for each row 54 (docs/log.md). In one dimension the
global optimum can be computed; the C kernel does so (edkm_cli/kernels/kmeans.c).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from edkm_cli import kernels
from edkm_cli.clustering.checks import check_k, non_finite, usable_importance
from edkm_cli.granularity import Granularity


@torch.no_grad()
def kmeans_start(
    weight: Tensor, k: int, *, granularity: str | Granularity, importance: Tensor | None = None, name: str = "weight"
) -> Tensor:
    """Centroids (groups, k) float32 that minimise the weighted squared error of snapping each weight (out, in) to its
    nearest, ascending in each group. With fewer distinct values than k the last one is repeated.

    The global optimum, where a compiler is at hand and a group has at most 65,536 distinct values; beyond that the
    optimum over 65,536 cut points, converged by Lloyd's iteration. Weights on a GPU are copied to the host for that:
    sorting them there costs less than many short iterations here. Without a compiler the best of several converged
    Lloyd runs, where the weight is.

    `importance` is a number for each column (in,), or for each weight (out, in), not negative. Weights of importance zero
    are ignored; a group that has no others is clustered unweighted. Raises UserError for k outside 2 to 256, shapes that do
    not fit, NaN or Inf, and negative importance.
    """
    geometry = Granularity.parse(granularity)
    return kmeans_starts(weight, [k], granularity=geometry, importance=importance, name=name)[0]


@torch.no_grad()
def kmeans_starts(
    weight: Tensor, ks: Sequence[int], *, granularity: Granularity, importance: Tensor | None = None, name: str
) -> list[Tensor]:
    """`kmeans_start` for each number k of some, ascending, at the cost of the largest."""
    for k in ks:
        check_k(k, layer=name)
    tile = granularity.tile(weight.shape[0], weight.shape[1], layer=name)
    home = weight.device
    if weight.is_cuda and kernels.build.library() is not None:  # finds the optimum, in host memory
        weight = weight.cpu()
    values = weight.detach().float()
    if not bool(values.sum(dtype=torch.float64).isfinite()):
        raise non_finite(name)
    masses = None
    if importance is not None:
        masses = kernels.to_groups(usable_importance(importance, weight, layer=name).expand(weight.shape), tile)
    return [centroids.to(home) for centroids in kernels.kmeans(kernels.to_groups(values, tile), masses, ks)]
