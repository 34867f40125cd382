"""Passes over weights: one dispatch point in front of plain PyTorch, C, Triton, and shapes alone (the meta device).

A 16-bit weight with one LUT goes by a table of distinct values, everything else is computed again weight by weight.
"""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType
from typing import cast

import torch
from torch import Tensor

from edkm_cli.kernels import cpu, kmeans_torch, palette_torch, shapes
from edkm_cli.kernels.attention_torch import TorchPasses
from edkm_cli.kernels.closed_form import (
    EMPTY_MASS,
    TAU_FLOOR,
    Passes,
    Spread,
    backward,
    centroid_dtype,
    iterate,
    relative_temperature,
)
from edkm_cli.kernels.table import TablePasses, TorchTableKernels
from edkm_cli.kernels.tiles import Tile, from_groups, to_groups

__all__ = [
    "EMPTY_MASS",
    "TAU_FLOOR",
    "Spread",
    "Tile",
    "backward",
    "centroid_dtype",
    "from_groups",
    "iterate",
    "kmeans",
    "lookup",
    "nearest",
    "passes",
    "relative_temperature",
    "snap",
    "sum_by_entry",
    "to_groups",
]


@functools.cache
def _triton() -> bool:
    """Whether Triton can be imported; it is optional."""
    return importlib.util.find_spec("triton") is not None


def _passes_on_gpu(weight: Tensor, tile: Tile, k: int) -> Passes | None:
    """Triton's passes for this weight, or None. Imported late: importing Triton takes longer than most commands."""
    if not _triton():
        return None
    from edkm_cli.kernels import triton_dkm, triton_table

    if is_table(weight, tile):
        return TablePasses(weight.contiguous(), triton_table.TritonTableKernels())
    return cast("Passes", triton_dkm.TritonPasses(weight, tile)) if triton_dkm.supports(weight, tile, k) else None


def is_table(weight: Tensor, tile: Tile) -> bool:
    """Whether distinct values are few enough for a table: 16 bits a weight and one LUT."""
    return weight.dtype in (torch.bfloat16, torch.float16) and tile == tuple(weight.shape)


def passes(weight: Tensor, tile: Tile, k: int) -> Passes:
    """The fastest passes there are for this weight and k centroids."""
    if weight.is_meta:
        return cast("Passes", shapes.ShapePasses(weight, tile))
    if weight.is_cuda and (on_gpu := _passes_on_gpu(weight, tile, k)) is not None:
        return on_gpu
    on_cpu = cpu.supports(weight)
    if is_table(weight, tile):
        return TablePasses(weight.contiguous(), cpu.CpuTableKernels() if on_cpu else TorchTableKernels())
    return cpu.CpuPasses(weight, tile) if on_cpu else TorchPasses(weight, tile)


def _palette(weight: Tensor) -> ModuleType:
    """The module with the fastest `nearest`, `snap` and `sum_by_entry` for this weight."""
    if weight.is_meta:
        return shapes
    if weight.is_cuda and _triton():
        from edkm_cli.kernels import triton_palette

        if triton_palette.supports(weight):
            return triton_palette
    return cpu if cpu.supports(weight) else palette_torch


def nearest(weight: Tensor, centroids: Tensor, tile: Tile) -> Tensor:
    """Index of the nearest entry, (out, in) uint8; ties go to the lower index."""
    return _palette(weight).nearest(weight, centroids, tile)


def snap(weight: Tensor, centroids: Tensor, tile: Tile, dtype: torch.dtype) -> tuple[Tensor, bool | None]:
    """(the nearest entry of each weight in `dtype`, whether all weights are finite).

    Triton's kernel answers None: the result then holds NaN where something is not finite, and nobody has to wait.
    """
    return _palette(weight).snap(weight, centroids, tile, dtype)


def sum_by_entry(weight: Tensor, centroids: Tensor, grad: Tensor, tile: Tile) -> Tensor:
    """The sum of `grad` over the weights nearest to each entry, (groups, k) float64."""
    return _palette(weight).sum_by_entry(weight, centroids, grad, tile)


def lookup(indices: Tensor, centroids: Tensor, tile: Tile, dtype: torch.dtype) -> Tensor:
    """centroids[group, index], (out, in), for centroids of a floating dtype."""
    if indices.is_meta:
        return shapes.lookup(indices, centroids, tile, dtype)
    on_cpu = cpu.supports(centroids) and not indices.is_cuda
    return (cpu if on_cpu else palette_torch).lookup(indices, centroids, tile, dtype)


def kmeans(values: Tensor, importance: Tensor | None, k: int) -> Tensor:
    """Centroids (groups, k) float32, ascending, of float32 values (groups, n), weighted by importance if given."""
    return (cpu if cpu.supports(values) else kmeans_torch).kmeans(values, importance, k)
