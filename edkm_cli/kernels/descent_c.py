"""Choices of entries improved, and a matrix summed by codes, on the CPU: `descent.c` and `code_sums.c`."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from edkm_cli.kernels.build import library
from edkm_cli.kernels.layout_c import parallel, pointer


def descend(indices: Tensor, errors: Tensor, luts: Tensor, hessian: Tensor, sweeps: int) -> None:
    """`descent_torch.descend` in float32, each row until nothing changes in it."""
    assert indices.is_contiguous(), "they are changed in place"
    assert errors.is_contiguous(), "they are changed in place"
    sizes = (indices.shape[1], luts.shape[1], luts.shape[2], sweeps)
    _by_rows("edkm_descend", (indices, errors, luts.contiguous(), hessian.contiguous()), sizes, indices)


def sum_by_code(indices: Tensor, hessian: Tensor, k: int) -> Tensor:
    """`code_sums_torch.sum_by_code` in float32."""
    products = torch.zeros(len(indices), k, k, dtype=torch.float64)
    _by_rows("edkm_sum_by_code", (indices.contiguous(), hessian.contiguous(), products), (indices.shape[1], k), indices)
    return products


def _by_rows(kernel: str, tensors: tuple[Tensor, ...], sizes: tuple[Any, ...], indices: Tensor) -> None:
    """Call a kernel on all rows, which are units. Raises MemoryError where it finds no room for its scratch memory."""
    function = getattr(library(), kernel)
    pointers = [pointer(tensor) for tensor in tensors]

    def work(first: int, last: int) -> None:
        if function(*pointers, *(ctypes.c_int64(size) for size in (*sizes, first, last))):
            raise MemoryError(f"{kernel} found no room for its sums")

    parallel(work, len(indices), indices.numel())
