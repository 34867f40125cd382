"""The C kernels as Python functions: pointers in, threads over row ranges, partial sums joined in float64.

ctypes releases the interpreter's lock during a call, so a pool of `torch.get_num_threads()` Python threads is all the
threading there is. Work is cut into the same units whatever the number of threads: results don't depend on it.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from edkm_cli.kernels.build import library
from edkm_cli.kernels.table import PATTERNS
from edkm_cli.kernels.tiles import Tile

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_UNIT_WEIGHTS = 1 << 18  # weights in a unit of work: a group larger than that is shared by threads
_ALONE_WEIGHTS = 1 << 15  # below that, waking other threads costs more than it saves
_LANES, _MAX_COLUMNS = 16, 128  # of columns.c


class _Layout(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int64) for name in ("stride", "tile_rows", "tile_columns", "parts", "k"))


class _Matrix(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("dtype", ctypes.c_int64))


def supports(weight: Tensor) -> bool:
    """Whether the C kernels take this weight: on the CPU, float32 or 16-bit, and a compiler was there."""
    return weight.device.type == "cpu" and weight.dtype in _DTYPES and library() is not None


@functools.cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    del process  # part of the key only: a forked child must not wait for its parent's threads
    return ThreadPoolExecutor(threads, thread_name_prefix="edkm")


def _parallel(work: Callable[[int, int], None], units: int, weights: int) -> None:
    """work(first, last) over all units, split evenly among threads."""
    threads = min(torch.get_num_threads(), units)
    if threads < 2 or weights < _ALONE_WEIGHTS:
        work(0, units)
        return
    edges = [units * t // threads for t in range(threads + 1)]
    pool = _pool(torch.get_num_threads(), os.getpid())
    others = [pool.submit(work, edges[t], edges[t + 1]) for t in range(1, threads)]
    work(edges[0], edges[1])
    for other in others:
        other.result()


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _matrix(tensor: Tensor | None) -> Any:
    if tensor is None:
        return ctypes.byref(_Matrix(None, 0))
    return ctypes.byref(_Matrix(tensor.data_ptr(), _DTYPES[tensor.dtype]))


def _readable(tensor: Tensor) -> Tensor:
    """Contiguous and of a dtype the kernels read."""
    return (tensor if tensor.dtype in _DTYPES else tensor.float()).contiguous()


def _writable(dtype: torch.dtype) -> torch.dtype:
    """The kernels write float32 and bfloat16; other dtypes are converted afterwards."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


class _Tiled:
    """A weight with its tiles and its cut into units: runs kernels over all units."""

    def __init__(self, weight: Tensor, tile: Tile) -> None:
        self.weight = _readable(weight)
        out_features, in_features = weight.shape
        self.tile, self.tile_rows, self.across = tile, out_features // tile[0], in_features // tile[1]
        self.parts = max(1, min(tile[0], -(-tile[0] * in_features // _UNIT_WEIGHTS)))
        self.groups = self.tile_rows * self.across

    def run(self, kernel: str, k: int, *arguments: Any) -> None:
        """Call `edkm_<kernel>(layout, *arguments, first, last)`; tensors go as pointers and must outlive the call."""
        layout = _Layout(self.weight.shape[1], *self.tile, self.parts, k)
        function = getattr(library(), f"edkm_{kernel}")
        passed = [_pointer(a) if isinstance(a, Tensor) else a for a in arguments]

        def work(first: int, last: int) -> None:
            function(ctypes.byref(layout), *passed, ctypes.c_int64(first), ctypes.c_int64(last))

        _parallel(work, self.tile_rows * self.parts, self.weight.numel())

    def partial(self, *shape: int) -> Tensor:
        """Room for what every piece of work sums up, to be joined by `join`."""
        return torch.empty(self.tile_rows, self.parts, self.across, *shape, dtype=torch.float64)

    def join(self, partial: Tensor) -> Tensor:
        """(groups, ...) sums from the pieces' sums."""
        return partial.sum(1).reshape(self.groups, *partial.shape[3:])


class CpuPasses:
    """The passes of `closed_form` over a float32 or 16-bit weight on the CPU."""

    def __init__(self, weight: Tensor, tile: Tile) -> None:
        self._tiled, self._dtype = _Tiled(weight, tile), weight.dtype
        self._grad_weight: Tensor | None = None

    @property
    def group_size(self) -> int:
        return self._tiled.tile[0] * self._tiled.tile[1]

    def spread(self) -> tuple[Tensor, Tensor]:
        tiled = self._tiled
        counts, means, squares = tiled.partial(), tiled.partial(), tiled.partial()
        tiled.run("spread", 1, _matrix(tiled.weight), counts, means, squares)
        mean = (counts * means).sum(1, keepdim=True) / self.group_size
        square = squares + counts * (means - mean).square()
        return mean.reshape(-1), tiled.join(square) / self.group_size

    def moments(self, centroids: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
        tiled, k = self._tiled, centroids.shape[1]
        shift, mass = tiled.partial(k), tiled.partial(k)
        tiled.run("moments", k, _matrix(tiled.weight), centroids.contiguous(), tau, shift, mass)
        return tiled.join(shift), tiled.join(mass)

    def soft(self, centroids: Tensor, tau: Tensor, dtype: torch.dtype) -> Tensor:
        tiled = self._tiled
        out = torch.empty(tiled.weight.shape, dtype=_writable(dtype))
        tiled.run("soft", centroids.shape[1], _matrix(tiled.weight), centroids.contiguous(), tau, _matrix(out))
        return out.to(dtype)

    def _gradient(self, zero: bool) -> Tensor:
        if self._grad_weight is None:
            self._grad_weight = (torch.zeros if zero else torch.empty)(self._tiled.weight.shape, dtype=torch.float32)
        return self._grad_weight

    def soft_backward(self, centroids: Tensor, tau: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        tiled, k, upstream = self._tiled, centroids.shape[1], _readable(grad)
        assert self._grad_weight is None, "the output's gradient comes first: its kernel overwrites"
        grad_centroids, grad_tau, weight_grad = tiled.partial(k), tiled.partial(), self._gradient(zero=False)
        matrices = _matrix(upstream), _matrix(weight_grad)
        tiled.run(
            "soft_backward", k, _matrix(tiled.weight), centroids.contiguous(), tau, *matrices, grad_centroids, grad_tau
        )
        return tiled.join(grad_centroids), tiled.join(grad_tau) / tau / tau

    def moments_backward(self, centroids: Tensor, moved: Tensor, pull: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
        tiled, k, pull = self._tiled, centroids.shape[1], pull.float()
        grad_centroids, grad_tau, weight_grad = tiled.partial(k), tiled.partial(), self._gradient(zero=True)
        at = centroids.contiguous(), tau, moved.contiguous(), pull
        tiled.run("moments_backward", k, _matrix(tiled.weight), *at, _matrix(weight_grad), grad_centroids, grad_tau)
        return tiled.join(grad_centroids), tiled.join(grad_tau) / tau / tau

    def weight_gradient(self, mean: Tensor, pull: Tensor) -> Tensor:
        tiled, weight_grad = self._tiled, self._gradient(zero=True)
        out = weight_grad if _writable(self._dtype) == torch.float32 else torch.empty_like(tiled.weight)
        tiled.run("weight_gradient", 1, _matrix(tiled.weight), _matrix(weight_grad), mean, pull, _matrix(out))
        self._grad_weight = None
        return out.to(self._dtype)


def nearest(weight: Tensor, centroids: Tensor, tile: Tile) -> Tensor:
    """`palette_torch.nearest`."""
    tiled, indices = _Tiled(weight, tile), torch.empty(weight.shape, dtype=torch.uint8)
    tiled.run("nearest", centroids.shape[1], _matrix(tiled.weight), centroids.float().contiguous(), indices)
    return indices


def snap(weight: Tensor, centroids: Tensor, tile: Tile, dtype: torch.dtype) -> tuple[Tensor, bool]:
    """`palette_torch.snap`."""
    tiled, out = _Tiled(weight, tile), torch.empty(weight.shape, dtype=_writable(dtype))
    flawed = torch.zeros(tiled.tile_rows * tiled.parts, dtype=torch.uint8)
    entries = centroids.float().contiguous()
    tiled.run("snap", centroids.shape[1], _matrix(tiled.weight), entries, _matrix(out), flawed)
    return out.to(dtype), not bool(flawed.any())


def sum_by_entry(weight: Tensor, centroids: Tensor, grad: Tensor, tile: Tile) -> Tensor:
    """`palette_torch.sum_by_entry`."""
    tiled, upstream, k = _Tiled(weight, tile), _readable(grad), centroids.shape[1]
    entries, sums = centroids.float().contiguous(), tiled.partial(k)
    tiled.run("sum_by_entry", k, _matrix(tiled.weight), entries, _matrix(upstream), sums)
    return tiled.join(sums)


def lookup(indices: Tensor, centroids: Tensor, tile: Tile, dtype: torch.dtype) -> Tensor:
    """`palette_torch.lookup`; indices beyond the LUT are refused there, so they are checked here too."""
    if int(indices.max()) >= centroids.shape[1]:
        raise IndexError(f"index {int(indices.max())} is outside a LUT of {centroids.shape[1]} entries")
    out = torch.empty(indices.shape, dtype=_writable(dtype))
    tiled, positions = _Tiled(out, tile), indices.contiguous()
    tiled.run("lookup", centroids.shape[1], positions, centroids.float().contiguous(), _matrix(out))
    return out.to(dtype)


class CpuTableKernels:
    """`table.TableKernels` on the CPU."""

    def _run(self, kernel: str, units: int, *arguments: Any) -> None:
        function = getattr(library(), f"edkm_{kernel}")
        passed = [_pointer(a) if isinstance(a, Tensor) else a for a in arguments]

        def work(first: int, last: int) -> None:
            function(*passed, ctypes.c_int64(first), ctypes.c_int64(last))

        _parallel(work, units, units)

    def _histogram(self, weight: Tensor, dtype: torch.dtype, kernel: str, *arguments: Any) -> Tensor:
        """One histogram a thread, added up."""
        total, size = weight.numel(), PATTERNS
        parts = max(1, min(torch.get_num_threads(), total // _ALONE_WEIGHTS))
        sums, function = torch.zeros(parts, size, dtype=dtype), getattr(library(), f"edkm_{kernel}")

        def work(first: int, last: int) -> None:
            for part in range(first, last):
                edges = (ctypes.c_int64(total * p // parts) for p in (part, part + 1))
                function(_pointer(weight), *arguments, _pointer(sums[part]), *edges)

        _parallel(work, parts, total)
        return sums.sum(0)

    def count_patterns(self, weight: Tensor) -> Tensor:
        return self._histogram(weight, torch.int64, "count_patterns")

    def sum_by_pattern(self, weight: Tensor, grad: Tensor) -> Tensor:
        upstream = _readable(grad)
        return self._histogram(weight, torch.float64, "sum_by_pattern", _matrix(upstream))

    def gather(self, weight: Tensor, table: Tensor) -> Tensor:
        entries = table if table.dtype in _DTYPES else table.float()
        out = torch.empty(weight.shape, dtype=entries.dtype)
        self._run("gather", weight.numel(), weight, entries, ctypes.c_int64(entries.element_size()), out)
        return out.to(table.dtype)

    def blend(self, weight: Tensor, grad: Tensor | None, slope: Tensor, offset: Tensor) -> Tensor:
        upstream = None if grad is None else _readable(grad)
        pairs = torch.stack((slope, offset), 1).contiguous()
        out = torch.empty(weight.shape, dtype=_writable(weight.dtype))
        self._run("blend", weight.numel(), weight, _matrix(upstream), pairs, _matrix(out))
        return out.to(weight.dtype)


def kmeans(values: Tensor, importance: Tensor | None, k: int) -> Tensor:
    """Optimal centroids (groups, k) of float32 values (groups, n), weighted by importance (groups, n) if given."""
    groups, size = values.shape
    values, centroids = values.contiguous(), torch.empty(groups, k, dtype=torch.float32)
    masses, compiled = None if importance is None else importance.contiguous(), library()
    assert compiled is not None, "callers ask `supports` first"

    def work(first: int, last: int) -> None:
        sizes = (ctypes.c_int64(v) for v in (size, k))
        edges = (ctypes.c_int64(v) for v in (first, last))
        if compiled.edkm_kmeans(_pointer(values), _pointer(masses), *sizes, _pointer(centroids), *edges):
            raise MemoryError(f"k-means of groups of {size} weights")

    _parallel(work, groups, values.numel())
    return centroids


def round_columns(block: Tensor, luts: Tensor, tiles: Tensor, factor: Tensor) -> Tensor:
    """`columns_torch.round_columns` of a float32 block of at most 128 columns that is stored as float32."""
    (columns, rows), compiled = block.shape, library()
    assert compiled is not None, "callers ask `supports` first"
    assert columns <= _MAX_COLUMNS, "the kernel has room for so many"
    assert block.is_contiguous(), "it is changed in place"
    errors, luts, tiles, factor = torch.empty_like(block), luts.contiguous(), tiles.contiguous(), factor.contiguous()

    def work(first: int, last: int) -> None:
        sizes = (ctypes.c_int64(v) for v in (columns, rows, luts.shape[1], first, last))
        compiled.edkm_round_columns(*map(_pointer, (block, errors, luts, tiles, factor)), *sizes)

    _parallel(work, -(-rows // _LANES), block.numel())
    return errors
