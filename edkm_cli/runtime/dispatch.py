"""The dispatch of products with packed matrices: which path runs when, decoding in parts, and gradients.

Paths, chosen by `_path` (docs/runtime.md): `kernel` never writes W out (C; CUDA C on a GPU); `dense` decodes a part of W at
a time into memory that stays in cache (on a GPU all of it, by Triton), and PyTorch multiplies; `reference` is plain PyTorch.
EDKM_LUT_LINEAR=kernel, dense or reference forces one, where it can run.
"""

import functools
import os
from collections.abc import Iterator, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from edkm_cli.errors import UserError
from edkm_cli.kernels import triton_module
from edkm_cli.kernels.layout_c import DTYPES
from edkm_cli.packing import Packed, check
from edkm_cli.runtime import lut_linear_c, lut_linear_cuda, lut_linear_torch

_PATHS = ("auto", "kernel", "dense", "reference")
_PART_WEIGHTS = 1 << 20  # weights decoded at a time: a few MiB
_PART_ROWS = 128  # fewer rows than that make a slow product
_ALL_TOKENS = 1 << 32


@functools.cache
def forced_path() -> str:
    """EDKM_LUT_LINEAR. Raises UserError for a path that is none."""
    if (path := os.environ.get("EDKM_LUT_LINEAR") or "auto") not in _PATHS:
        raise UserError(f"EDKM_LUT_LINEAR must be one of {', '.join(_PATHS)}, got {path!r}; correct or unset it")
    return path


def most_tokens(dtype: torch.dtype) -> int:
    """Up to how many tokens the C kernel computes: all where its loops are written for the processor's vectors, else as many
    as it was measured to be the faster one for. What is measured on the machine itself, in C, changes no bit of a result."""
    return _ALL_TOKENS if lut_linear_c.level() or forced_path() == "kernel" else 8 if dtype == torch.bfloat16 else 32


def _path(x: Tensor, packed: Packed) -> str:
    forced = forced_path()
    if forced == "reference" or not x.numel() or not packed.indices.shape[0]:
        return "reference"
    if x.is_cuda:
        return "cuda" if forced != "dense" and lut_linear_cuda.supports(x, packed) else "dense"
    if x.dtype not in DTYPES or x.device.type != "cpu" or not lut_linear_c.supports(packed):
        return "reference"
    return forced if forced != "auto" else "kernel" if x.numel() <= most_tokens(x.dtype) * x.shape[-1] else "dense"


def computes_packed(packed: Packed) -> bool:
    """Whether one token's product is computed from the packed weight; else decoding it once is faster."""
    if packed.indices.is_cuda:
        x = packed.indices.new_empty(1, packed.indices.shape[1] * 8 // packed.bits, dtype=torch.bfloat16)
        return forced_path() in ("auto", "kernel") and lut_linear_cuda.supports(x, packed)
    return forced_path() in ("auto", "kernel") and lut_linear_c.supports(packed)


def linear(x: Tensor, packed: Packed) -> Tensor:
    """x @ W.T + bias (..., out) for x (..., in)."""
    path = _path(x, packed)
    if path == "cuda":
        if (found := lut_linear_cuda.linear(x, packed)) is not None:
            return found
        path = _path(x, packed)  # it failed, and is not asked again
    if path == "kernel":
        return lut_linear_c.linears(x, lut_linear_c.prepare((packed,), x.shape[-1]))[0]
    if path == "reference":
        return lut_linear_torch.linear(x, packed)
    out_features, columns = packed.indices.shape[0], x.shape[-1]
    out = x.new_empty(*x.shape[:-1], out_features)
    for rows in _row_ranges(out_features, columns, x):
        part = dense(packed, columns, x.dtype, rows=rows)
        bias = None if packed.bias is None else packed.bias[rows.start : rows.stop].to(x.dtype)
        out[..., rows.start : rows.stop] = torch.nn.functional.linear(x, part, bias)
    return out


def products(matrices: Sequence[Packed], columns: int) -> lut_linear_c.Products | None:
    """`lut_linear_c.products` of matrices that have one input, on a GPU `lut_linear_cuda.products`; None where that is not
    the way for all of them."""
    first = matrices[0]
    if first.indices.is_cuda:
        return lut_linear_cuda.products(matrices, columns) if forced_path() in ("auto", "kernel") else None
    alike = all(m.bits == first.bits and (m.tile is None) == (first.tile is None) for m in matrices)
    if not alike or not _kernel_takes(matrices):
        return None
    return lut_linear_c.products(lut_linear_c.prepare(matrices, columns), _limits())


def keep(matrices: Sequence[Packed], columns: int) -> int | None:
    """`lut_linear_c.keep`; None, too, where the C kernel does not take all of them."""
    return lut_linear_c.keep(matrices, columns, _limits()) if _kernel_takes(matrices) else None


def _triton(packed: Packed) -> Any:
    """Triton's kernels of packed matrices, where they read this one; else None."""
    return triton_module("edkm_cli.runtime.lut_linear_triton", packed.indices, packed)


def _limits() -> dict[torch.dtype, int]:
    return {dtype: most_tokens(dtype) for dtype in DTYPES}


def _kernel_takes(matrices: Sequence[Packed]) -> bool:
    allowed = forced_path() in ("auto", "kernel")
    return allowed and all(m.indices.shape[0] and lut_linear_c.supports(m) for m in matrices)


def _row_ranges(rows: int, columns: int, x: Tensor) -> Iterator[range]:
    """Parts of about _PART_WEIGHTS; on a GPU the scratch of one layer is small beside the model, so it is one part."""
    step = rows if x.is_cuda else max(_PART_ROWS, _PART_WEIGHTS // max(columns, 1) // 16 * 16)
    return (range(first, min(first + step, rows)) for first in range(0, rows, max(step, 1)))


def input_gradient(grad: Tensor, packed: Packed, columns: int) -> Tensor:
    """grad @ W (..., columns) for grad (..., out): a range of columns at a time, so that no sum is rounded twice."""
    on_cpu = grad.dtype in DTYPES and lut_linear_c.supports(packed)
    if forced_path() == "reference" or not (grad.is_cuda or on_cpu):
        return grad @ lut_linear_torch.dense(packed, columns, grad.dtype)
    out = grad.new_empty(*grad.shape[:-1], columns)
    for span in _row_ranges(columns, grad.shape[-1], grad):
        out[..., span.start : span.stop] = grad @ dense(packed, columns, grad.dtype, span=span)
    return out


def table_gradient(grad: Tensor, x: Tensor, packed: Packed) -> Tensor:
    """dL/dlut (groups, 2**bits) for grad (..., out) = dL/dy and x (..., in): for each entry the sum of dL/dW = grad.T @ x
    over the weights that chose it. dL/dW is made some rows at a time, in float32, in float64 where x is, and in bfloat16
    where both are: rounding it, too, changes no sum by more than rounding grad did, and takes a quarter of the time."""
    tile, columns = packed.tile, x.shape[-1]
    assert tile is not None
    kept = x.dtype if x.dtype == torch.float64 or x.dtype == grad.dtype == torch.bfloat16 else torch.float32
    flat, upstream = x.reshape(-1, columns).to(kept), grad.reshape(-1, grad.shape[-1]).to(kept)
    fast = kept != torch.float64 and forced_path() != "reference"
    triton = _triton(packed) if fast else None
    passes = triton or (lut_linear_c if fast and x.is_cpu and lut_linear_c.supports(packed) else lut_linear_torch)
    sums = flat.new_zeros(upstream.shape[1] // tile[0], columns // tile[1], 2**packed.bits, dtype=torch.float64)
    for rows in _row_ranges(upstream.shape[1], columns, x):
        part = upstream[:, rows.start : rows.stop].t() @ flat
        part = part.float() if kept == torch.bfloat16 and triton is None else part
        part = passes.sum_by_code(part, packed, columns, rows.start)
        sums.index_add_(0, torch.arange(rows.start, rows.stop, device=x.device) // tile[0], part.double())
    return sums.flatten(0, 1).to(packed.table.dtype)


def dense(
    packed: Packed, columns: int, dtype: torch.dtype, *, rows: range | None = None, span: range | None = None
) -> Tensor:
    """W, or its `rows` and columns `span` (which starts at a multiple of 16), decoded to `dtype`."""
    rows = range(packed.indices.shape[0]) if rows is None else rows
    span = range(columns) if span is None else span
    if forced_path() != "reference" and lut_linear_c.supports(packed):
        return lut_linear_c.dense(packed, columns, dtype, row_range=rows, column_range=span)
    with torch.cuda.device_of(packed.indices):  # Triton starts on the current GPU
        whole = (_triton(packed) or lut_linear_torch).dense(packed, columns, dtype)
    return whole[rows.start : rows.stop, span.start : span.stop]


def lookup_rows(packed: Packed, columns: int, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows that ids (...) names, (..., columns): an embedding. Raises IndexError for an id that is none."""
    fast = forced_path() != "reference" and ids.device.type == "cpu" and lut_linear_c.supports(packed)
    rows = (lut_linear_c if fast else lut_linear_torch).rows
    return rows(packed, columns, ids.reshape(-1).long(), dtype).view(*ids.shape, columns)


class Ready:
    """A module's matrices as the kernel reads them, so that a call costs little: made again when a tensor has moved."""

    def __init__(self) -> None:
        self._matrices: tuple[Packed, ...] = ()
        self._addresses: tuple[int, ...] = ()
        self._products: lut_linear_c.Products | None = None

    def __reduce__(self) -> tuple:  # of copies, too
        return Ready, ()

    def product(self, x: Tensor, matrices: tuple[Packed, ...], columns: int) -> list[Tensor] | None:
        """x times each matrix, or None where the kernel is not the way.

        `matrices` should hold the same objects at each call as long as they stay what they are.
        """
        kept = self._matrices
        if len(kept) == len(matrices) and all(map(is_, kept, matrices)):
            found = None if self._products is None else self._products(x)
            if found is not None or _addresses(matrices) == self._addresses:
                return found
        for packed in matrices:
            check(columns, packed)
        self._matrices, self._addresses = matrices, _addresses(matrices)
        self._products = products(matrices, columns)
        return None if self._products is None else self._products(x)


def _addresses(matrices: tuple[Packed, ...]) -> tuple[int, ...]:
    return tuple(t.data_ptr() for m in matrices for t in m[:3] if t is not None)
