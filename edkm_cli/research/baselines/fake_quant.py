"""Symmetric rounding by the largest magnitude, as SmoothQuant and LLM-QAT share it, with a straight-through gradient.

    scale = max|x| / (2^(bits - 1) - 1),    q = scale * round(x / scale)

Levels are symmetric around zero, so one of the 2^bits is never used. Weights have a scale for each
row, or for each group of a row, stored in float16. Activations have a scale for each token, computed as they appear and
never stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

NO_QUANTIZATION = 16


def absmax(values: Tensor, *, bits: int, group_size: int = 0, scale_dtype: torch.dtype = torch.float32) -> Tensor:
    """`values` (..., columns) rounded to the levels of their group of `group_size` neighbours in the last dimension.

    `group_size` 0 makes one group of all columns. The scale is rounded to `scale_dtype`, the result has the shape and
    dtype of `values`.
    """
    groups = values.unflatten(-1, (-1, group_size or values.shape[-1]))
    levels = 2 ** (bits - 1) - 1
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-5) / levels
    scale = scale.to(scale_dtype).to(values.dtype)
    # A scale that was rounded down may put the largest value half a level outside.
    return (groups / scale).round().clamp(-levels, levels).mul(scale).flatten(-2)


class FakeQuantize(torch.autograd.Function):
    """`absmax` whose gradient is that of the identity (straight-through estimator)."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, bits: int, group_size: int, scale_dtype: torch.dtype) -> Tensor:
        return absmax(values, bits=bits, group_size=group_size, scale_dtype=scale_dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None, None


def per_token(values: Tensor, bits: int) -> Tensor:
    """Activations (..., features), rounded with a scale for each token."""
    return FakeQuantize.apply(values, bits, 0, torch.float32)


def quantize_inputs(layers: Iterable[nn.Module], bits: int) -> None:
    """From now on the layers see their input (..., features) quantized per token."""
    for layer in layers:
        layer.register_forward_pre_hook(lambda module, inputs: (per_token(inputs[0], bits), *inputs[1:]))


def quantize_outputs(layers: Iterable[nn.Module], bits: int) -> None:
    """From now on the layers give their output (..., features) quantized per token."""
    for layer in layers:
        layer.register_forward_hook(lambda module, inputs, output: per_token(output, bits))
