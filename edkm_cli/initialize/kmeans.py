"""The k-means start of a layer, computed by all processes together: each takes some of the LUT groups."""

from __future__ import annotations

import torch
from torch import Tensor

from edkm_cli.clustering import kmeans_start
from edkm_cli.distributed import World
from edkm_cli.granularity import Granularity


@torch.no_grad()
def shared_kmeans_start(
    weight: Tensor, k: int, *, granularity: Granularity, importance: Tensor | None, name: str, world: World
) -> Tensor:
    """`kmeans_start(weight, k)`: the same centroids (groups, k) on all processes, at 1/N of the time.

    Groups are independent, and those of a band of tile rows are consecutive, so each process clusters a band of rows.
    All hold the whole weight (out, in). Where there are fewer bands than processes (`tensor`), the first clusters all.
    """
    tile_rows, tile_columns = granularity.tile(*weight.shape, layer=name)
    bands = weight.shape[0] // tile_rows
    if world.size == 1 or bands < world.size:
        # Computed everywhere, taken from the first: processors may differ in the last bit.
        return world.broadcast(_start(weight, k, granularity, importance, name))
    share = -(-bands // world.size) * tile_rows
    mine = slice(min(world.rank * share, weight.shape[0]), min((world.rank + 1) * share, weight.shape[0]))
    groups = weight.shape[1] // tile_columns
    band = torch.zeros(share // tile_rows * groups, k, device=weight.device)
    if mine.start < mine.stop:
        rows = importance[mine] if importance is not None and importance.dim() == 2 else importance
        found = _start(weight[mine], k, granularity, rows, name)
        band[: found.shape[0]] = found
    return world.gather_rows(band, bands * groups)


def _start(weight: Tensor, k: int, granularity: Granularity, importance: Tensor | None, name: str) -> Tensor:
    return kmeans_start(weight, k, granularity=granularity, importance=importance, name=name)
