"""The tiles of a weight matrix as rows: (out, in) <-> (groups, weights in a group).

A tile is what `Granularity.tile` returns: (R, C). Groups are numbered tile row by tile row, left to right.
"""

from collections.abc import Sequence

from torch import Tensor

Tile = tuple[int, int]


def to_groups(weight: Tensor, tile: Tile) -> Tensor:
    """(out, in) -> (groups, R * C). A view where a tile spans whole rows, a copy for blocks."""
    (out_features, in_features), (rows, columns) = weight.shape, tile
    tiled = weight.reshape(out_features // rows, rows, in_features // columns, columns)
    return tiled.transpose(1, 2).reshape(-1, rows * columns)


def from_groups(grouped: Tensor, shape: Sequence[int], tile: Tile) -> Tensor:
    """(groups, R * C) -> (out, in): the inverse of `to_groups`."""
    (out_features, in_features), (rows, columns) = shape, tile
    tiled = grouped.reshape(out_features // rows, in_features // columns, rows, columns)
    return tiled.transpose(1, 2).reshape(out_features, in_features)
