"""Nearest LUT entries, lookups and sums by entry on the CPU, by `palette.c`; `palette_torch` says what each returns."""

import torch
from torch import Tensor

from edkm_cli.kernels.layout_c import Tiled, matrix, readable, writable
from edkm_cli.kernels.tiles import Tile


def nearest(weight: Tensor, centroids: Tensor, tile: Tile) -> Tensor:
    tiled, indices = Tiled(weight, tile), torch.empty(weight.shape, dtype=torch.uint8)
    tiled.run("nearest", centroids.shape[1], matrix(tiled.weight), centroids.float().contiguous(), indices)
    return indices


def snap(weight: Tensor, centroids: Tensor, tile: Tile, dtype: torch.dtype) -> tuple[Tensor, bool]:
    tiled, out = Tiled(weight, tile), torch.empty(weight.shape, dtype=writable(dtype))
    flawed = torch.zeros(tiled.tile_rows * tiled.parts, dtype=torch.uint8)
    entries = centroids.float().contiguous()
    tiled.run("snap", centroids.shape[1], matrix(tiled.weight), entries, matrix(out), flawed)
    return out.to(dtype), not bool(flawed.any())


def sum_by_entry(weight: Tensor, centroids: Tensor, grad: Tensor, tile: Tile) -> Tensor:
    tiled, upstream, k = Tiled(weight, tile), readable(grad), centroids.shape[1]
    entries, sums = centroids.float().contiguous(), tiled.partial(k)
    tiled.run("sum_by_entry", k, matrix(tiled.weight), entries, matrix(upstream), sums)
    return tiled.join(sums)


def lookup(indices: Tensor, centroids: Tensor, tile: Tile, dtype: torch.dtype) -> Tensor:
    """`palette_torch.lookup`; indices beyond the LUT are refused there, so they are checked here too."""
    if int(indices.max()) >= centroids.shape[1]:
        raise IndexError(f"index {int(indices.max())} is outside a LUT of {centroids.shape[1]} entries")
    out = torch.empty(indices.shape, dtype=writable(dtype))
    tiled, positions = Tiled(out, tile), indices.contiguous()
    tiled.run("lookup", centroids.shape[1], positions, centroids.float().contiguous(), matrix(out))
    return out.to(dtype)
