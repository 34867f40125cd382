"""Passes over weights, for training: the dispatch in front of plain PyTorch, C, Triton, and shapes alone (the meta device).

A 16-bit weight with one LUT goes by a table of distinct values, everything else is computed again weight by weight.
A file is named `<algorithm>_<backend>`: `torch` is the reference, `c`, `triton` and `meta` are tested against it.
"""

import functools
import importlib
import logging
from collections.abc import Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from edkm_cli.kernels import layout_c, passes_c, passes_torch, shapes_meta, table_torch
from edkm_cli.kernels.closed_form import EMPTY_MASS, TAU_FLOOR, Passes, Spread, centroid_dtype, relative_temperature
from edkm_cli.kernels.passes_c import CPasses
from edkm_cli.kernels.passes_torch import TorchPasses
from edkm_cli.kernels.table_torch import PATTERNS, TablePasses
from edkm_cli.packing import Tile, from_groups, to_groups

_LOG = logging.getLogger(__name__)


@functools.cache
def _triton_runs() -> bool:
    """Whether Triton, which is optional, can start kernels: it compiles what speaks to the driver. Says why not, once."""
    if find_spec("triton") is None:
        return False
    try:
        importlib.import_module("triton").runtime.driver.active.get_current_device()
    except Exception as error:  # no compiler, no Python.h, no place for its cache, no libcuda
        _LOG.warning("Triton's kernels are not available, what they do runs in plain PyTorch (slower): %s", error)
        return False
    return True


def triton_module(name: str, tensor: Tensor, *more: Any) -> ModuleType | None:
    """A module of Triton's kernels, which is optional, if they `supports` these arguments of a GPU: imported late, since
    that takes longer than most commands."""
    if not tensor.is_cuda or tensor.get_device() != torch.cuda.current_device() or not _triton_runs():
        return None
    module = importlib.import_module(name)
    return module if module.supports(tensor, *more) else None


def passes(weight: Tensor, tile: Tile, k: int, importance: Tensor | None = None) -> Passes:
    """The fastest passes there are for this weight and k centroids.

    `importance`, (in,) or (out, in), is how much each weight counts in the centroids' moments; None: all alike.
    """
    if weight.is_meta:
        return shapes_meta.ShapePasses(weight, tile, importance)
    if weight.dtype in (torch.bfloat16, torch.float16) and tile == tuple(weight.shape):  # few distinct values
        return TablePasses(weight.contiguous(), _table_kernels(weight), importance)
    if (fast := triton_module(f"{__name__}.attention_triton", weight, tile, k)) is not None:
        return fast.TritonPasses(weight, tile, importance)
    return (CPasses if layout_c.supports(weight) else TorchPasses)(weight, tile, importance)


def _table_kernels(weight: Tensor) -> ModuleType:
    """The module with the fastest passes by bit pattern over this 16-bit weight."""
    return passes_c if layout_c.supports(weight) else table_torch


def _palette(weight: Tensor) -> ModuleType:
    """The module with the fastest `nearest`, `snap` and `sum_by_entry` for this weight."""
    if weight.is_meta:
        return shapes_meta
    on_cpu = passes_c if layout_c.supports(weight) else passes_torch
    return triton_module(f"{__name__}.palette_triton", weight) or on_cpu


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
        return shapes_meta.lookup(indices, centroids, tile, dtype)
    on_cpu = layout_c.supports(centroids) and indices.dtype == torch.uint8 and not indices.is_cuda
    return (passes_c if on_cpu else passes_torch).lookup(indices, centroids, tile, dtype)


def kmeans(values: Tensor, importance: Tensor | None, ks: Sequence[int]) -> list[Tensor]:
    """Of each number k, ascending: centroids (groups, k) float32, ascending, of float32 values (groups, n), weighted by
    importance if given. All together they cost what the largest does."""
    if values.is_meta:
        return shapes_meta.kmeans(values, importance, ks)
    fast = passes_c if layout_c.supports(values) else passes_torch
    if values.shape[1] <= PATTERNS:
        return fast.kmeans(values, importance, ks)
    groups = []
    for at in range(len(values)):  # large: by its distinct values where there are few
        group, masses = values[at : at + 1], None if importance is None else importance[at : at + 1]
        if (narrow := table_torch.narrowed(group)) is not None:
            group, masses = table_torch.distinct(narrow, masses, _table_kernels(narrow))
        groups.append(fast.kmeans(group, masses, ks))
    return [torch.cat(centroids) for centroids in zip(*groups, strict=True)]


def _rounding(tensor: Tensor) -> ModuleType:
    """The module with the fastest `round_columns` and `changes` where the C kernels are not the way."""
    return triton_module(f"{__name__}.rounding_triton", tensor) or passes_torch


def round_columns(block: Tensor, luts: Tensor, tiles: Tensor, factor: Tensor, stored: torch.dtype) -> Tensor:
    """Round the columns of a block (columns, rows) one after the other; see `passes_torch.round_columns`."""
    if stored == block.dtype == torch.float32 and layout_c.supports(block):
        return passes_c.round_columns(block, luts, tiles, factor)
    return _rounding(block).round_columns(block, luts, tiles, factor, stored)


def descend(indices: Tensor, errors: Tensor, luts: Tensor, hessian: Tensor, sweeps: int) -> None:
    """Improve the choice of entries (out, in) uint8 one column after the other, in place; see `passes_torch.descend`."""
    if errors.dtype == torch.float32 and layout_c.supports(errors):
        passes_c.descend(indices, errors, luts, hessian, sweeps)
    else:
        passes_torch.descend(indices, errors, luts, hessian, sweeps, _rounding(errors).changes)


def sum_by_code(indices: Tensor, hessian: Tensor, k: int) -> Tensor:
    """A symmetric matrix (in, in) summed by the codes of its rows and columns; see `passes_torch.sum_by_code`."""
    fast = hessian.dtype == torch.float32 and layout_c.supports(hessian)
    return (passes_c if fast else passes_torch).sum_by_code(indices, hessian, k)
