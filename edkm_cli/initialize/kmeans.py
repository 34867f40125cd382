"""The start of a layer's tables, computed by all processes together: each takes some of the LUT groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from edkm_cli.clustering import Grid
from edkm_cli.distributed import World
from edkm_cli.granularity import Granularity


@torch.no_grad()
def shared_kmeans_starts(
    weight: Tensor,
    grid: Grid,
    widths: Sequence[int],
    *,
    granularity: Granularity,
    importance: Tensor | None,
    name: str,
    world: World,
) -> list[Tensor]:
    """`grid.starts(weight, widths)`: the same centroids (groups, numbers) on all processes, at 1/N of the time.

    Groups are independent, and those of a band of tile rows are consecutive, so each process clusters a band of rows.
    All hold the whole weight (out, in). Where there are fewer bands than processes (`tensor`), the first clusters all.
    """
    options: dict[str, Any] = {"granularity": granularity, "name": name}
    tile_rows, tile_columns = granularity.tile(*weight.shape, layer=name)
    bands = weight.shape[0] // tile_rows
    if world.size == 1 or bands < world.size:
        # Computed everywhere, taken from the first: processors may differ in the last bit.
        return [world.broadcast(each) for each in grid.starts(weight, widths, importance=importance, **options)]
    mine, groups = world.share_of(weight.shape[0], tile_rows), weight.shape[1] // tile_columns
    if mine.start < mine.stop:
        rows = importance[mine] if importance is not None and importance.dim() == 2 else importance
        shares = [each.float() for each in grid.starts(weight[mine], widths, importance=rows, **options)]
    else:
        shares = [torch.zeros(0, replace(grid, bits=bits).numbers, device=weight.device) for bits in widths]
    return [world.gather_rows(share, bands * groups) for share in shares]
