"""Differentiable k-means as the paper writes it (DKM, arXiv 2108.12659, section 3): the reference of everything faster.

Materialises the (groups, n, k) attention map of every iteration and leaves the gradient to autograd.
"""

import torch
from torch import Tensor

from edkm_cli.clustering.checks import checked_importance, checked_tile
from edkm_cli.granularity import Granularity
from edkm_cli.kernels import EMPTY_MASS, TAU_FLOOR, centroid_dtype, from_groups, to_groups


def dense_dkm(
    weight: Tensor,
    centroids: Tensor,
    *,
    granularity: str | Granularity,
    temperature: float,
    iterations: int,
    importance: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Cluster a weight softly and differentiably, keeping every attention map for backward.

    Args:
        weight: (out, in), any floating dtype. float64 is computed in float64, all others in float32.
        centroids: (groups, k), the start, groups in `Granularity`'s order.
        temperature: relative; the attention's tau is `temperature * population variance` of the group, and the
            gradient includes that path.
        iterations: number T of centroid updates. The output attends to the centroids after the last one.
        importance: how much each weight counts in the means, (out, in), or (in,) where it is that of a column; not
            negative, about 1 on average (`relative_importance`). It gets no gradient. None: all alike, as in the paper.

    Returns:
        The clustered weight sum_j A_ij c_j (out, in) in the weight's dtype, and the centroids after T updates
        (groups, k), float64 for float64 weights, else float32.

    Raises:
        UserError: shapes do not fit the granularity, or k is not in 2 to 256.
    """
    tile = checked_tile(weight, centroids, granularity)
    w = to_groups(weight, tile).to(centroid_dtype(weight))  # (groups, n)
    c = centroids.to(w.dtype)  # (groups, k)
    mass = checked_importance(importance, weight)
    m = None if mass is None else to_groups(mass.expand(weight.shape), tile).to(w.dtype)  # (groups, n)
    tau = (temperature * w.var(1, correction=0)).clamp_min(TAU_FLOOR)

    def attention(c: Tensor) -> Tensor:
        square = (w[:, :, None] - c[:, None, :]).square()
        # Subtracting the row's minimum changes nothing (also not the gradient) and keeps near-hard logits finite.
        return torch.softmax((square.amin(-1, keepdim=True).detach() - square) / tau[:, None, None], -1)

    for _ in range(iterations):
        a = attention(c) if m is None else attention(c) * m[:, :, None]
        c = (torch.einsum("gnk,gn->gk", a, w) + EMPTY_MASS * c) / (a.sum(1) + EMPTY_MASS)
    return from_groups(torch.einsum("gnk,gk->gn", attention(c), c), weight.shape, tile).to(weight.dtype), c
