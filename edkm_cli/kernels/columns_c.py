"""Columns of a weight rounded one after the other on the CPU, by `columns.c`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from edkm_cli.kernels.build import library
from edkm_cli.kernels.layout_c import parallel, pointer

_LANES, _MAX_COLUMNS = 16, 128  # of columns.c


def round_columns(block: Tensor, luts: Tensor, tiles: Tensor, factor: Tensor) -> Tensor:
    """`columns_torch.round_columns` of a float32 block of at most 128 columns that is stored as float32."""
    (columns, rows), compiled = block.shape, library()
    assert compiled is not None, "callers ask `supports` first"
    assert columns <= _MAX_COLUMNS, "the kernel has room for so many"
    assert block.is_contiguous(), "it is changed in place"
    errors, luts, tiles, factor = torch.empty_like(block), luts.contiguous(), tiles.contiguous(), factor.contiguous()

    def work(first: int, last: int) -> None:
        sizes = (ctypes.c_int64(v) for v in (columns, rows, luts.shape[1], first, last))
        compiled.edkm_round_columns(*map(pointer, (block, errors, luts, tiles, factor)), *sizes)

    parallel(work, -(-rows // _LANES), block.numel())
    return errors
