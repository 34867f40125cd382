"""How the C kernels are called: pointers in, threads over row ranges, partial sums joined in float64.

ctypes releases the interpreter's lock during a call, so a pool of `torch.get_num_threads()` Python threads serves. Work is
cut into the same units whatever the number of threads: results don't depend on it.
"""

import ctypes
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor

from edkm_cli.kernels.build import library
from edkm_cli.packing import Tile

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_UNIT_WEIGHTS = 1 << 18  # weights in a unit of work: a group larger than that is shared by threads
ALONE_WEIGHTS = 1 << 15  # below that, waking other threads costs more than it saves
_MAY_FAIL = ("kmeans", "descend", "sum_by_code")  # the kernels that return something: 1 where memory is short


class _Layout(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int64) for name in ("stride", "tile_rows", "tile_columns", "parts", "k"))


class _Matrix(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("dtype", ctypes.c_int64), ("one_row", ctypes.c_int64))


def supports(weight: Tensor) -> bool:
    """Whether the C kernels take this weight: on the CPU, float32 or 16-bit, and a compiler was there."""
    return weight.device.type == "cpu" and weight.dtype in DTYPES and library() is not None


@functools.cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:  # a forked child must not wait for its parent's threads
    return ThreadPoolExecutor(threads, thread_name_prefix="edkm")


def parallel(work: Callable[[int, int], None], units: int, weights: int) -> None:
    """work(first, last) over all units, split evenly among threads."""
    threads = min(torch.get_num_threads(), units)
    if threads < 2 or weights < ALONE_WEIGHTS:
        return work(0, units)
    edges = [units * t // threads for t in range(threads + 1)]
    pool = _pool(torch.get_num_threads(), os.getpid())
    others = [pool.submit(work, edges[t], edges[t + 1]) for t in range(1, threads)]
    try:
        work(edges[0], edges[1])
        for other in others:
            other.result()
    except BaseException:  # an interruption, say: what the others write to must not be freed before they are done
        wait(others)
        raise


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def call(kernel: str, units: int, weights: int, *arguments: Any) -> None:
    """Call `edkm_<kernel>(*arguments, first, last)` on all units. Tensors (or None) go as pointers and must outlive the
    call, whole numbers as 64-bit ones. Raises MemoryError where a kernel finds no room for its scratch memory."""
    function = getattr(library(), f"edkm_{kernel}")
    passed = [ctypes.c_int64(one) if isinstance(one, int) else one for one in arguments]
    passed = [pointer(one) if one is None or isinstance(one, Tensor) else one for one in passed]

    def work(first: int, last: int) -> None:
        if function(*passed, ctypes.c_int64(first), ctypes.c_int64(last)) and kernel in _MAY_FAIL:
            raise MemoryError(f"{kernel} found no room for its sums")

    parallel(work, units, weights)


def matrix(tensor: Tensor | None) -> Any:
    """A matrix for the kernels; a vector (in,) stands for a matrix whose rows are all alike, None for no matrix."""
    if tensor is None:
        return ctypes.byref(_Matrix(None, 0, 0))
    return ctypes.byref(_Matrix(tensor.data_ptr(), DTYPES[tensor.dtype], int(tensor.dim() == 1)))


def readable(tensor: Tensor) -> Tensor:
    """Contiguous and of a dtype the kernels read."""
    return (tensor if tensor.dtype in DTYPES else tensor.float()).contiguous()


def writable(dtype: torch.dtype) -> torch.dtype:
    """The kernels write float32 and bfloat16; other dtypes are converted afterwards."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


class Tiled:
    """A weight with its tiles and its cut into units: runs kernels over all units."""

    def __init__(self, weight: Tensor, tile: Tile) -> None:
        self.weight = readable(weight)
        out_features, in_features = weight.shape
        self.tile, self.tile_rows, self.across = tile, out_features // tile[0], in_features // tile[1]
        self.parts = max(1, min(tile[0], -(-tile[0] * in_features // _UNIT_WEIGHTS)))
        self.groups = self.tile_rows * self.across

    def run(self, kernel: str, k: int, *arguments: Any) -> None:
        """`call` with the layout before the other arguments."""
        layout = _Layout(self.weight.shape[1], *self.tile, self.parts, k)
        call(kernel, self.tile_rows * self.parts, self.weight.numel(), ctypes.byref(layout), *arguments)

    def partial(self, *shape: int) -> Tensor:
        """Room for what every piece of work sums up, to be joined by `join`."""
        return torch.empty(self.tile_rows, self.parts, self.across, *shape, dtype=torch.float64, device="cpu")

    def join(self, partial: Tensor) -> Tensor:
        """(groups, ...) sums from the pieces' sums."""
        return partial.sum(1).reshape(self.groups, *partial.shape[3:])
