"""The start of the clustering: weighted one-dimensional k-means per LUT group."""

from __future__ import annotations

import torch
from torch import Tensor

from edkm_cli.clustering.checks import check_k
from edkm_cli.config import UserError
from edkm_cli.granularity import Granularity
from edkm_cli.kernels import to_groups


@torch.no_grad()
def kmeans_start(
    weight: Tensor,
    k: int,
    *,
    granularity: str | Granularity,
    importance: Tensor | None = None,
    name: str = "weight",
) -> Tensor:
    """Centroids (groups, k) float32, ascending, that minimise the importance-weighted squared snapping error."""
    check_k(k, layer=name)
    tile = Granularity.parse(granularity).tile(*weight.shape, layer=name)
    values = to_groups(weight.float(), tile)
    mass = torch.ones_like(weight, dtype=torch.float32) if importance is None else importance.float().expand_as(weight)
    mass = to_groups(mass.contiguous(), tile)
    if not bool(values.sum().isfinite()):
        raise UserError(f"{name} holds NaN or Inf")
    values, order = values.sort(1)
    mass = mass.gather(1, order)
    mass = torch.where(mass.sum(1, keepdim=True) > 0, mass, 1.0)
    quantiles = torch.linspace(0, values.shape[1] - 1, 2 * k + 1)[1::2].long().to(values.device)
    centroids = values[:, quantiles].contiguous()
    for _ in range(60):
        edges = torch.searchsorted(values, (centroids[:, 1:] + centroids[:, :-1]) / 2)
        owner = torch.zeros_like(order).scatter_add_(1, edges.clamp_max(values.shape[1] - 1), torch.ones_like(edges))
        owner = owner.cumsum(1)
        total = torch.zeros_like(centroids).scatter_add_(1, owner, mass)
        sums = torch.zeros_like(centroids).scatter_add_(1, owner, mass * values)
        centroids = torch.where(total > 0, sums / total.clamp_min(1e-30), centroids).sort(1).values
    return centroids
