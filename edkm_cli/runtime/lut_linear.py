"""The operators edkm::lut_linear, edkm::row_scaled_linear and edkm::row_scaled_embedding: the weight stays packed.

They take tensors and numbers only, so that `torch.compile`, `torch.export` and other runtimes can call them. Backward
decodes W again, in parts, for the gradient of x, and makes dL/dW in parts for that of a lookup table: nothing of a weight's
size is saved or, on a CPU, made. Scales of rows do not train: one that requires a gradient is refused.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from edkm_cli.packing import Packed, Tile, check
from edkm_cli.runtime import dispatch
from edkm_cli.runtime.lut_linear_c import recorded, unwatched

_LIBRARY = torch.library.Library("edkm", "DEF")
for _name, _table, _tile in (
    ("lut_linear", "lut", ", int tile_rows, int tile_columns"),
    ("row_scaled_linear", "scale", ""),
):
    _LIBRARY.define(f"{_name}(Tensor x, Tensor indices, Tensor {_table}, Tensor? bias, int bits{_tile}) -> Tensor")
    _LIBRARY.define(
        f"{_name}_input_gradient(Tensor grad, Tensor indices, Tensor {_table}, SymInt columns, int bits{_tile}) -> Tensor"
    )
_LIBRARY.define(
    "lut_linear_table_gradient(Tensor grad, Tensor x, Tensor indices, Tensor lut, int bits, int tile_rows, "
    "int tile_columns) -> Tensor"
)
_LIBRARY.define(
    "row_scaled_embedding(Tensor ids, Tensor indices, Tensor scale, SymInt columns, int bits, ScalarType dtype) -> Tensor"
)


def _linear(x: Tensor, indices: Tensor, table: Tensor, bias: Tensor | None, bits: int, *tile: int) -> Tensor:
    packed = Packed(indices, table, bias, bits, tile or None)  # type: ignore[arg-type]
    check(x.shape[-1], packed)
    return dispatch.linear(x, packed)


def _gradient(grad: Tensor, indices: Tensor, table: Tensor, columns: int, bits: int, *tile: int) -> Tensor:
    packed = Packed(indices, table, None, bits, tile or None)  # type: ignore[arg-type]
    check(columns, packed)
    return dispatch.input_gradient(grad, packed, columns)


@torch.library.impl(_LIBRARY, "lut_linear_table_gradient", "CompositeExplicitAutograd")
def _table_gradient(grad: Tensor, x: Tensor, indices: Tensor, lut: Tensor, bits: int, *tile: int) -> Tensor:
    packed = Packed(indices, lut, None, bits, tile)  # type: ignore[arg-type]
    check(x.shape[-1], packed)
    return dispatch.table_gradient(grad, x, packed)


@torch.library.impl(_LIBRARY, "row_scaled_embedding", "CompositeExplicitAutograd")
def _embedding(ids: Tensor, indices: Tensor, scale: Tensor, columns: int, bits: int, dtype: torch.dtype) -> Tensor:
    packed = Packed(indices, scale, None, bits, None)
    check(columns, packed)
    return dispatch.lookup_rows(packed, columns, ids, dtype)


def _fake_linear(x: Tensor, indices: Tensor, table: Tensor, bias: Tensor | None, *numbers: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], indices.shape[0])


def _fake_gradient(grad: Tensor, indices: Tensor, table: Tensor, columns: int, *numbers: int) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], columns)


@torch.library.register_fake("edkm::lut_linear_table_gradient", lib=_LIBRARY)
def _fake_table_gradient(grad: Tensor, x: Tensor, indices: Tensor, lut: Tensor, *numbers: int) -> Tensor:
    rounded = x.dtype == grad.dtype == torch.bfloat16
    for tensor in () if rounded else (grad, x):  # what the kernel needs beside a part of dL/dW: both in float32
        torch.empty_like(tensor, dtype=torch.float32)
    return torch.empty_like(lut, memory_format=torch.contiguous_format)


@torch.library.register_fake("edkm::row_scaled_embedding", lib=_LIBRARY)
def _fake_embedding(ids: Tensor, indices: Tensor, scale: Tensor, columns: int, bits: int, dtype: torch.dtype) -> Tensor:
    return ids.new_empty(*ids.shape, columns, dtype=dtype)


def _save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    """Of a linear, or of its gradient in x: that has the output's gradient in x's place, a number in that of the bias."""
    x, indices, table, bias, *ctx.numbers = inputs
    if table.requires_grad and len(ctx.numbers) == 1:
        raise ValueError("the scales of a row-scaled linear do not train; detach them, or train before compression")
    ctx.columns, ctx.bias_dtype = x.shape[-1], bias.dtype if isinstance(bias, Tensor) else None
    ctx.save_for_backward(indices, table, x if table.requires_grad else None)  # the first two: what the layer holds


def _differentiate(name: str) -> None:
    """Backward of the linear `name` and, for second derivatives, of its gradient in x: each is the other's."""
    forward, backward = getattr(torch.ops.edkm, name), getattr(torch.ops.edkm, f"{name}_input_gradient")
    of_table = torch.ops.edkm.lut_linear_table_gradient

    def of_forward(ctx: Any, grad: Tensor) -> tuple:
        indices, table, x = ctx.saved_tensors
        grad_x = grad_table = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = backward(grad, indices, table, ctx.columns, *ctx.numbers)
        if ctx.needs_input_grad[2]:
            grad_table = of_table(grad, x, indices, table, *ctx.numbers)
        if ctx.bias_dtype is not None and ctx.needs_input_grad[3]:
            grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0).to(ctx.bias_dtype)
        return grad_x, None, grad_table, grad_bias, *(None for _ in ctx.numbers)

    def of_backward(ctx: Any, upstream: Tensor) -> tuple:
        indices, table, grad = ctx.saved_tensors
        of_grad = forward(upstream, indices, table, None, *ctx.numbers) if ctx.needs_input_grad[0] else None
        grad_table = of_table(grad, upstream, indices, table, *ctx.numbers) if ctx.needs_input_grad[2] else None
        return of_grad, None, grad_table, None, *(None for _ in ctx.numbers)

    torch.library.register_autograd(f"edkm::{name}", of_forward, setup_context=_save, lib=_LIBRARY)
    torch.library.register_autograd(f"edkm::{name}_input_gradient", of_backward, setup_context=_save, lib=_LIBRARY)


def _save_table_gradient(ctx: Any, inputs: tuple, output: Tensor) -> None:
    grad, x, indices, _, *ctx.numbers = inputs
    ctx.save_for_backward(grad, x, indices)


def _of_table_gradient(ctx: Any, upstream: Tensor) -> tuple:
    """The table's gradient is linear in grad and in x: `upstream` takes the table's place."""
    grad, x, indices = ctx.saved_tensors
    of_grad = of_x = None
    if ctx.needs_input_grad[0]:
        of_grad = torch.ops.edkm.lut_linear(x, indices, upstream, None, *ctx.numbers).to(grad.dtype)
    if ctx.needs_input_grad[1]:
        of_x = torch.ops.edkm.lut_linear_input_gradient(grad, indices, upstream, x.shape[-1], *ctx.numbers).to(x.dtype)
    return of_grad, of_x, None, None, *(None for _ in ctx.numbers)


for _name in ("lut_linear", "row_scaled_linear"):
    _LIBRARY.impl(_name, _linear, "CompositeExplicitAutograd")
    _LIBRARY.impl(f"{_name}_input_gradient", _gradient, "CompositeExplicitAutograd")
    torch.library.register_fake(f"edkm::{_name}", _fake_linear, lib=_LIBRARY)
    torch.library.register_fake(f"edkm::{_name}_input_gradient", _fake_gradient, lib=_LIBRARY)
    _differentiate(_name)
torch.library.register_autograd(
    "edkm::lut_linear_table_gradient", _of_table_gradient, setup_context=_save_table_gradient, lib=_LIBRARY
)


def lut_linear(x: Tensor, indices: Tensor, lut: Tensor, bias: Tensor | None, *, bits: int, tile: Tile) -> Tensor:
    """x @ W.T + bias for a palettized W: x (..., in) floating, indices (out, bytes) uint8, lut (groups, 2**bits).

    `tile`: rows and columns that share a LUT. Differentiable in x, lut and bias. Raises ValueError where shapes do not fit.
    """
    if unwatched(x, lut, bias):
        return _linear(x, indices, lut, bias, bits, *tile)
    return torch.ops.edkm.lut_linear(x, indices, lut, bias, bits, *tile)


def row_scaled_linear(x: Tensor, indices: Tensor, scale: Tensor, bias: Tensor | None, *, bits: int) -> Tensor:
    """x @ W.T + bias for W = scale * (index - 2**(bits - 1)): x (..., in), indices (out, bytes) uint8, scale (out, 1)."""
    if unwatched(x, scale, bias):
        return _linear(x, indices, scale, bias, bits)
    return torch.ops.edkm.row_scaled_linear(x, indices, scale, bias, bits)


def logits(x: Tensor, parts: Sequence[Packed], bias: Tensor | None) -> Tensor:
    """`row_scaled_linear` with a matrix whose rows are those of `parts`, one after the other: x (..., in), (..., out)."""
    return joined([row_scaled_linear(x, part.indices, part.table, None, bits=part.bits) for part in parts], bias)


def joined(outs: list[Tensor], bias: Tensor | None) -> Tensor:
    """The products with the parts of a matrix as its product."""
    out = outs[0] if len(outs) == 1 else torch.cat(outs, -1)
    return out if bias is None else out + bias.to(out.dtype)


def row_scaled_embedding(
    ids: Tensor, indices: Tensor, scale: Tensor, *, columns: int, bits: int, dtype: torch.dtype
) -> Tensor:
    """Rows `ids` (...) of scale * (index - 2**(bits - 1)), (..., columns) in `dtype`. Raises IndexError for a bad id."""
    if not unwatched(ids):
        return torch.ops.edkm.row_scaled_embedding(ids, indices, scale, columns, bits, dtype)
    return _embedding(ids, indices, scale, columns, bits, dtype)


def decoded_rows(
    ids: Tensor, parts: Sequence[Packed], factors: Tensor | None, *, columns: int, dtype: torch.dtype
) -> Tensor:
    """`row_scaled_embedding` of a matrix whose rows are those of `parts`, one after the other, its columns times factors
    (columns,). Each part decodes a row for each id, of which those of its own are taken; on a CPU parts that no id is of
    are left out."""
    parts = [part for part in parts if part.indices.shape[0]]
    kept = dtype if factors is None else torch.float32  # so that it is rounded once
    low, high, first, values = -math.inf, math.inf, 0, None
    if len(parts) > 1 and ids.numel() and ids.is_cpu and type(ids) is Tensor and not recorded():
        low, high = (int(id) for id in ids.aminmax())
    for number, part in enumerate(parts):
        rows, last = part.indices.shape[0], number == len(parts) - 1
        if (last or low < first + rows) and (not number or high >= first):  # the outer ones refuse ids that are none
            at = ids if len(parts) == 1 else (ids - first).clamp(0 if number else None, None if last else rows - 1)
            found = row_scaled_embedding(at, part.indices, part.table, columns=columns, bits=part.bits, dtype=kept)
            values = found if values is None else torch.where((ids >= first)[..., None], found, values)
        first += rows
    assert values is not None
    return values if factors is None else (values * factors).to(dtype)
