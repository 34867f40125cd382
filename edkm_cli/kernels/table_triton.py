"""Triton kernels for CUDA behind `table_torch.TableKernels`: histograms by atomics, gathers from a table that stays in L2.

A 16-bit weight's pattern indexes a table of 65,536 entries (256 KiB in float32). Weights concentrate on a few thousand
patterns, so atomics hit L2 and never memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from edkm_cli.kernels.table_torch import PATTERNS

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
def _blend_kernel(bits, grad, slope, offset, out, n, HAS_GRAD: tl.constexpr, B: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    pattern = tl.load(bits + at, mask=at < n, other=0).to(tl.int32) & 0xFFFF
    result = tl.load(offset + pattern)
    if HAS_GRAD:
        result += tl.load(grad + at, mask=at < n, other=0.0).to(tl.float32) * tl.load(slope + pattern)
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

    def blend(self, weight: Tensor, grad: Tensor | None, slope: Tensor, offset: Tensor) -> Tensor:
        out, upstream = torch.empty_like(weight), weight if grad is None else grad.contiguous()
        bits, has_grad = weight.view(torch.int16), grad is not None
        _blend_kernel[self._grid(weight)](
            bits, upstream, slope, offset, out, weight.numel(), HAS_GRAD=has_grad, B=_BLOCK
        )
        return out
