"""Columns of a weight rounded one after the other, in plain PyTorch: reference of the fast kernel."""

from __future__ import annotations

import torch
from torch import Tensor


def round_columns(block: Tensor, luts: Tensor, tiles: Tensor, factor: Tensor, stored: torch.dtype) -> Tensor:
    """Errors of the columns of `block` (columns, rows), each rounded when those before it have passed theirs on; in place,
    `block` becomes what its columns were right before they were rounded.

    Args:
        luts: (tiles, k, rows) in the block's dtype, ascending along k: the entries of a row in each tile of columns.
        tiles: (columns,) int64, the tile of each column.
        factor: (columns, columns): column j passes on `factor[j, t]` of its error to column t > j.
        stored: what the block's values are stored as; a column is rounded to that before its entry is found.
    """
    entries = luts.transpose(1, 2).contiguous()  # (tiles, rows, k)
    borders = (entries[..., 1:] + entries[..., :-1]) / 2
    errors = torch.empty_like(block)
    for j, tile in enumerate(tiles.tolist()):
        if stored != block.dtype:
            block[j] = block[j].to(stored)  # or another entry might be the nearest
        nearest = torch.searchsorted(borders[tile], block[j][:, None])
        torch.sub(block[j], entries[tile].gather(1, nearest)[:, 0], out=errors[j])
        block[j + 1 :].addr_(factor[j, j + 1 :], errors[j], alpha=-1)
    return errors
