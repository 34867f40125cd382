"""How the lookup tables of a compressed model are used: entries that no weight takes, tables of a single value."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from edkm_cli.packing import unpack
from edkm_cli.runtime.palettized import PalettizedLinear

_UNUSED_WARNING = 0.25  # of a layer's entries


@torch.no_grad()
def table_use(model: nn.Module) -> list[dict[str, Any]]:
    """For each palettized linear `name`, `tables`, `collapsed` (all entries are one value), `entries`, `unused_entries`."""
    return [
        {"name": name, **layer_use(module)}
        for name, module in model.named_modules()
        if isinstance(module, PalettizedLinear)
    ]


def layer_use(module: PalettizedLinear) -> dict[str, int]:
    """The counts of `table_use` for one layer; memory is that of a few rows of the weight."""
    lut = module.table().float()
    groups, entries = lut.shape
    tile_rows, tile_columns = module.granularity.tile(module.out_features, module.in_features)
    rows = max(tile_rows, 64 // tile_rows * tile_rows)
    unused = 0
    for first in range(0, module.out_features, rows):
        packed = module.indices[first : first + rows]
        indices = unpack(packed, module.bits, module.in_features).long()
        tiles = indices.view(len(packed) // tile_rows, tile_rows, -1, tile_columns).transpose(1, 2).flatten(0, 1)
        counts = torch.zeros(len(tiles), entries, dtype=torch.int64, device=tiles.device)
        counts.scatter_add_(1, tiles.flatten(1), torch.ones_like(tiles.flatten(1)))
        unused += int((counts == 0).sum())
    collapsed = int((lut.amax(1) == lut.amin(1)).sum())
    return {"tables": groups, "collapsed": collapsed, "entries": groups * entries, "unused_entries": unused}


def table_warnings(use: list[dict[str, Any]]) -> list[str]:
    """A line for each layer whose tables have collapsed, or with many entries that no weight takes."""
    lines = []
    for layer in use:
        if layer["collapsed"]:
            lines.append(
                f"{layer['name']}: {layer['collapsed']} of {layer['tables']} tables have collapsed to one value"
            )
        elif layer["unused_entries"] > _UNUSED_WARNING * layer["entries"]:
            lines.append(f"{layer['name']}: {layer['unused_entries']} of {layer['entries']} table entries are not used")
    return lines
