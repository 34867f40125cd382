"""Choices of entries improved one column after the other on the CPU, by `descent.c`."""

from __future__ import annotations

import ctypes

from torch import Tensor

from edkm_cli.kernels.build import library
from edkm_cli.kernels.layout_c import parallel, pointer


def descend(indices: Tensor, errors: Tensor, luts: Tensor, hessian: Tensor, sweeps: int) -> None:
    """`descent_torch.descend` in float32, each row until nothing changes in it."""
    (rows, columns), compiled = indices.shape, library()
    assert compiled is not None, "callers ask `supports` first"
    assert indices.is_contiguous(), "they are changed in place"
    assert errors.is_contiguous(), "they are changed in place"
    luts, hessian = luts.contiguous(), hessian.contiguous()

    def work(first: int, last: int) -> None:
        sizes = (ctypes.c_int64(v) for v in (columns, luts.shape[1], luts.shape[2], sweeps, first, last))
        compiled.edkm_descend(*map(pointer, (indices, errors, luts, hessian)), *sizes)

    parallel(work, rows, indices.numel())
