"""Dense linears -> clustered linears."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from edkm_cli.distributed import ALONE, World
from edkm_cli.initialize.kmeans import shared_kmeans_start
from edkm_cli.nn.clustered import ClusteredLinear, Clustering
from edkm_cli.nn.swap import LINEAR, Swap


def swap_linears(
    model: nn.Module,
    swaps: list[Swap],
    clustering: Clustering,
    *,
    importance: Callable[[str], torch.Tensor | None] = lambda name: None,
    temperature: float = 1.0,
    world: World = ALONE,
    prefix: str = "",
) -> Iterator[str]:
    """Replace the planned linears by `ClusteredLinear`, one at a time; yields each name when done (for progress).

    `model` may be the part of one at `prefix` (a path that ends in a dot): then the swaps below it are done. All
    processes of `world` call this with the same weights and importances.
    """
    for swap in swaps:
        if swap.role == LINEAR and not swap.reason and swap.name.startswith(prefix):
            linear = model.get_submodule(swap.name.removeprefix(prefix))
            assert isinstance(linear, nn.Linear)
            centroids = shared_kmeans_start(
                linear.weight.detach(),
                2**clustering.bits,
                granularity=clustering.granularity,
                importance=importance(swap.name),
                name=swap.name,
                world=world,
            )
            clustered = ClusteredLinear(
                linear.weight, linear.bias, centroids, clustering, temperature=temperature, name=swap.name
            )
            model.set_submodule(swap.name.removeprefix(prefix), clustered)
            yield swap.name
