"""Passes over float32 and 16-bit weights on the CPU, in C; `passes_torch` and `table_torch` say what each returns."""

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from edkm_cli.kernels.build import library
from edkm_cli.kernels.closed_form import Passes
from edkm_cli.kernels.layout_c import ALONE_WEIGHTS, Tiled, call, matrix, parallel, pointer, readable, writable
from edkm_cli.kernels.table_torch import PATTERNS, Parts
from edkm_cli.packing import Tile

_LANES, _MAX_COLUMNS = 16, 128  # of columns.c
_empty, _zeros = (partial(make, device="cpu") for make in (torch.empty, torch.zeros))  # whatever the default device is


class CPasses(Passes):
    """`closed_form.Passes`."""

    def __init__(self, weight: Tensor, tile: Tile, importance: Tensor | None = None) -> None:
        self._tiled, self._dtype, self.group_size = Tiled(weight, tile), weight.dtype, tile[0] * tile[1]
        self._importance = None if importance is None else readable(importance)
        self._grad_weight: Tensor | None = None

    def spread(self) -> tuple[Tensor, Tensor]:
        tiled = self._tiled
        counts, means, squares = tiled.partial(), tiled.partial(), tiled.partial()
        tiled.run("spread", 1, matrix(tiled.weight), counts, means, squares)
        mean = (counts * means).sum(1, keepdim=True) / self.group_size
        square = squares + counts * (means - mean).square()
        return mean.reshape(-1), tiled.join(square) / self.group_size

    def moments(self, centroids: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
        tiled, k = self._tiled, centroids.shape[1]
        shift, mass = tiled.partial(k), tiled.partial(k)
        of_weights = matrix(tiled.weight), matrix(self._importance)
        tiled.run("moments", k, *of_weights, centroids.contiguous(), tau, shift, mass)
        return tiled.join(shift), tiled.join(mass)

    def soft(self, centroids: Tensor, tau: Tensor, dtype: torch.dtype) -> Tensor:
        tiled = self._tiled
        out = _empty(tiled.weight.shape, dtype=writable(dtype))
        tiled.run("soft", centroids.shape[1], matrix(tiled.weight), centroids.contiguous(), tau, matrix(out))
        return out.to(dtype)

    def _gradient(self, zero: bool) -> Tensor:
        if self._grad_weight is None:
            self._grad_weight = (_zeros if zero else _empty)(self._tiled.weight.shape, dtype=torch.float32)
        return self._grad_weight

    def soft_backward(self, centroids: Tensor, tau: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        tiled, k, upstream = self._tiled, centroids.shape[1], readable(grad)
        assert self._grad_weight is None, "the output's gradient comes first: its kernel overwrites"
        grad_centroids, grad_tau, weight_grad = tiled.partial(k), tiled.partial(), self._gradient(zero=False)
        at = matrix(tiled.weight), matrix(None), centroids.contiguous(), tau, matrix(upstream)
        tiled.run("backward", k, *at, None, None, matrix(weight_grad), grad_centroids, grad_tau)
        return tiled.join(grad_centroids), tiled.join(grad_tau) / tau / tau

    def moments_backward(self, centroids: Tensor, moved: Tensor, pull: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
        tiled, k, pull = self._tiled, centroids.shape[1], pull.float()
        grad_centroids, grad_tau, weight_grad = tiled.partial(k), tiled.partial(), self._gradient(zero=True)
        of_weights, into = (matrix(tiled.weight), matrix(self._importance)), matrix(weight_grad)
        at = centroids.contiguous(), tau, into, moved.contiguous()
        tiled.run("backward", k, *of_weights, *at, pull, into, grad_centroids, grad_tau)
        return tiled.join(grad_centroids), tiled.join(grad_tau) / tau / tau

    def weight_gradient(self, mean: Tensor, pull: Tensor) -> Tensor:
        tiled, weight_grad = self._tiled, self._gradient(zero=True)
        out = weight_grad if writable(self._dtype) == torch.float32 else torch.empty_like(tiled.weight)
        tiled.run("weight_gradient", 1, matrix(tiled.weight), matrix(weight_grad), mean, pull, matrix(out))
        self._grad_weight = None
        return out.to(self._dtype)


def nearest(weight: Tensor, centroids: Tensor, tile: Tile) -> Tensor:
    tiled, indices = Tiled(weight, tile), _empty(weight.shape, dtype=torch.uint8)
    tiled.run("nearest", centroids.shape[1], matrix(tiled.weight), centroids.float().contiguous(), indices)
    return indices


def snap(weight: Tensor, centroids: Tensor, tile: Tile, dtype: torch.dtype) -> tuple[Tensor, bool]:
    tiled, out = Tiled(weight, tile), _empty(weight.shape, dtype=writable(dtype))
    flawed = _zeros(tiled.tile_rows * tiled.parts, dtype=torch.uint8)
    entries = centroids.float().contiguous()
    tiled.run("snap", centroids.shape[1], matrix(tiled.weight), entries, matrix(out), flawed)
    return out.to(dtype), not bool(flawed.any())


def sum_by_entry(weight: Tensor, centroids: Tensor, grad: Tensor, tile: Tile) -> Tensor:
    tiled, upstream, k = Tiled(weight, tile), readable(grad), centroids.shape[1]
    entries, sums = centroids.float().contiguous(), tiled.partial(k)
    tiled.run("sum_by_entry", k, matrix(tiled.weight), entries, matrix(upstream), sums)
    return tiled.join(sums)


def lookup(indices: Tensor, centroids: Tensor, tile: Tile, dtype: torch.dtype) -> Tensor:
    """`passes_torch.lookup`; indices beyond the LUT are refused there, so they are checked here too."""
    if int(indices.max()) >= centroids.shape[1]:
        raise IndexError(f"index {int(indices.max())} is outside a LUT of {centroids.shape[1]} entries")
    out = _empty(indices.shape, dtype=writable(dtype))
    tiled, positions = Tiled(out, tile), indices.contiguous()
    tiled.run("lookup", centroids.shape[1], positions, centroids.float().contiguous(), matrix(out))
    return out.to(dtype)


def round_columns(block: Tensor, luts: Tensor, tiles: Tensor, factor: Tensor) -> Tensor:
    """`passes_torch.round_columns` of a float32 block of at most 128 columns that is stored as float32."""
    columns, rows = block.shape
    assert columns <= _MAX_COLUMNS, "the kernel has room for so many"
    assert block.is_contiguous(), "it is changed in place"
    errors = torch.empty_like(block)
    tensors = block, errors, luts.contiguous(), tiles.contiguous(), factor.contiguous()
    call("round_columns", -(-rows // _LANES), block.numel(), *tensors, columns, rows, luts.shape[1])
    return errors


def descend(indices: Tensor, errors: Tensor, luts: Tensor, hessian: Tensor, sweeps: int) -> None:
    """`passes_torch.descend` in float32, each row until nothing changes in it."""
    assert all(tensor.is_contiguous() for tensor in (indices, errors)), "they are changed in place"
    tensors, sizes = (indices, errors, luts.contiguous(), hessian.contiguous()), (indices.shape[1], *luts.shape[1:])
    call("descend", len(indices), indices.numel(), *tensors, *sizes, sweeps)


def sum_by_code(indices: Tensor, hessian: Tensor, k: int) -> Tensor:
    """`passes_torch.sum_by_code` in float32."""
    products = _zeros(len(indices), k, k, dtype=torch.float64)
    tensors = indices.contiguous(), hessian.contiguous(), products
    call("sum_by_code", len(indices), indices.numel(), *tensors, indices.shape[1], k)
    return products


def kmeans(values: Tensor, importance: Tensor | None, ks: Sequence[int]) -> list[Tensor]:
    """Optimal centroids (groups, k) of float32 values (groups, n), weighted by importance (groups, n) if given, for each k
    of some, ascending."""
    groups, size = values.shape
    masses = None if importance is None else importance.contiguous()
    centroids, numbers = _empty(groups, sum(ks), dtype=torch.float32), torch.tensor(ks, device="cpu")
    call("kmeans", groups, values.numel(), values.contiguous(), masses, size, numbers, len(ks), centroids)
    return [part.contiguous() for part in centroids.split(list(ks), 1)]


def _histogram(weight: Tensor, dtype: torch.dtype, kernel: str, *arguments: Any) -> Tensor:
    """One histogram a thread, added up."""
    total = weight.numel()
    parts = max(1, min(torch.get_num_threads(), total // ALONE_WEIGHTS))
    sums, function = _zeros(parts, PATTERNS, dtype=dtype), getattr(library(), f"edkm_{kernel}")

    def work(first: int, last: int) -> None:
        for part in range(first, last):
            edges = (ctypes.c_int64(total * p // parts) for p in (part, part + 1))
            function(pointer(weight), *arguments, pointer(sums[part]), *edges)

    parallel(work, parts, total)
    return sums.sum(0)


def count_patterns(weight: Tensor) -> Tensor:
    return _histogram(weight, torch.int64, "count_patterns")


def sum_by_pattern(weight: Tensor, grad: Tensor) -> Tensor:
    upstream = readable(grad)
    return _histogram(weight, torch.float64, "sum_by_pattern", matrix(upstream))


def gather(weight: Tensor, table: Tensor) -> Tensor:
    entries = readable(table)
    out = _empty(weight.shape, dtype=entries.dtype)
    call("gather", weight.numel(), weight.numel(), weight, entries, entries.element_size(), out)
    return out.to(table.dtype)


def blend(weight: Tensor, parts: Parts, offset: Tensor) -> Tensor:
    rows, out = _zeros(PATTERNS, 4, dtype=torch.float32), _empty(weight.shape, dtype=writable(weight.dtype))
    rows[:, 0] = offset
    factors: list[Tensor | None] = [None, None]
    for number, (factor, table) in enumerate(parts):
        factors[number], rows[:, number + 1] = readable(factor), table
    call("blend", weight.numel(), weight.numel(), weight, *map(matrix, factors), rows, matrix(out))
    return out.to(weight.dtype)
