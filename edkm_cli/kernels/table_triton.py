"""Triton kernels for CUDA behind `table_torch.TableKernels`: histograms by atomics, gathers from a table that stays in L2.

A 16-bit weight's pattern indexes a table of 65,536 entries (256 KiB in float32). Weights concentrate on a few thousand
patterns, so atomics hit L2 and never memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from edkm_cli.kernels.table_torch import PATTERNS, Parts

_BLOCK = 1024


@triton.jit
def _count_kernel(bits, counts, n, B: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    pattern = tl.load(bits + at, mask=at < n, other=0).to(tl.int32) & 0xFFFF
    tl.atomic_add(counts + pattern, 1, mask=at < n)


@triton.jit
def _sum_kernel(bits, grad, sums, n, B: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    pattern = tl.load(bits + at, mask=at < n, other=0).to(tl.int32) & 0xFFFF
    upstream = tl.load(grad + at, mask=at < n, other=0.0).to(tl.float64)
    tl.atomic_add(sums + pattern, upstream, mask=at < n)


@triton.jit
def _gather_kernel(bits, table, out, n, B: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    pattern = tl.load(bits + at, mask=at < n, other=0).to(tl.int32) & 0xFFFF
    tl.store(out + at, tl.load(table + pattern), mask=at < n)


@triton.jit
def _blend_kernel(bits, f, f_table, g, g_table, offset, out, n, FACTORS: tl.constexpr, B: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    pattern = tl.load(bits + at, mask=at < n, other=0).to(tl.int32) & 0xFFFF
    result = tl.load(offset + pattern)
    if FACTORS > 0:
        result += tl.load(f + at, mask=at < n, other=0.0).to(tl.float32) * tl.load(f_table + pattern)
    if FACTORS > 1:
        result += tl.load(g + at, mask=at < n, other=0.0).to(tl.float32) * tl.load(g_table + pattern)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=at < n)


class TritonTableKernels:
    """`table_torch.TableKernels` on a GPU. Weights are contiguous."""

    def _grid(self, weight: Tensor) -> tuple[int]:
        return (triton.cdiv(weight.numel(), _BLOCK),)

    def count_patterns(self, weight: Tensor) -> Tensor:
        counts = torch.zeros(PATTERNS, dtype=torch.int32, device=weight.device)
        _count_kernel[self._grid(weight)](weight.view(torch.int16), counts, weight.numel(), B=_BLOCK)
        return counts.long()

    def sum_by_pattern(self, weight: Tensor, grad: Tensor) -> Tensor:
        sums = torch.zeros(PATTERNS, dtype=torch.float64, device=weight.device)
        bits, upstream = weight.view(torch.int16), grad.contiguous()
        _sum_kernel[self._grid(weight)](bits, upstream, sums, weight.numel(), B=_BLOCK)
        return sums

    def gather(self, weight: Tensor, table: Tensor) -> Tensor:
        out = torch.empty(weight.shape, dtype=table.dtype, device=weight.device)
        _gather_kernel[self._grid(weight)](weight.view(torch.int16), table, out, weight.numel(), B=_BLOCK)
        return out

    def blend(self, weight: Tensor, parts: Parts, offset: Tensor) -> Tensor:
        out, bits = torch.empty_like(weight), weight.view(torch.int16)
        given = [(factor.contiguous(), table) for factor, table in parts]
        (f, f_table), (g, g_table) = (*given, *[(weight, offset)] * 2)[:2]  # what is not given is not read
        _blend_kernel[self._grid(weight)](
            bits, f, f_table, g, g_table, offset, out, weight.numel(), FACTORS=len(given), B=_BLOCK
        )
        return out
