"""Histograms and gathers by bit pattern on the CPU, by `table.c`; `table_torch` says what each returns."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from edkm_cli.kernels.build import library
from edkm_cli.kernels.layout_c import ALONE_WEIGHTS, DTYPES, call, matrix, parallel, pointer, readable, writable
from edkm_cli.kernels.table_torch import PATTERNS, Parts


def _histogram(weight: Tensor, dtype: torch.dtype, kernel: str, *arguments: Any) -> Tensor:
    """One histogram a thread, added up."""
    total = weight.numel()
    parts = max(1, min(torch.get_num_threads(), total // ALONE_WEIGHTS))
    sums, function = torch.zeros(parts, PATTERNS, dtype=dtype), getattr(library(), f"edkm_{kernel}")

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
    entries = table if table.dtype in DTYPES else table.float()
    out = torch.empty(weight.shape, dtype=entries.dtype)
    call("gather", weight.numel(), weight.numel(), weight, entries, entries.element_size(), out)
    return out.to(table.dtype)


def blend(weight: Tensor, parts: Parts, offset: Tensor) -> Tensor:
    rows, out = torch.zeros(PATTERNS, 4), torch.empty(weight.shape, dtype=writable(weight.dtype))
    rows[:, 0] = offset
    factors: list[Tensor | None] = [None, None]
    for number, (factor, table) in enumerate(parts):
        factors[number], rows[:, number + 1] = readable(factor), table
    call("blend", weight.numel(), weight.numel(), weight, *map(matrix, factors), rows, matrix(out))
    return out.to(weight.dtype)
