"""Rounding to the grid rule `absmax` while a model computes, as SmoothQuant and LLM-QAT share it, with a straight-through
gradient.

Weights have a scale for each row, or for each group of a row, stored in float16. Activations have a scale for each token,
computed as they appear and never stored.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from edkm_cli.clustering.grids import StraightThrough
from edkm_cli.research.baselines.grid import Uniform


def per_token(values: Tensor, bits: int) -> Tensor:
    """Activations (..., features), rounded with a scale for each token."""
    return StraightThrough.apply(values, Uniform(bits, 0, "absmax", "float32").round)


def quantize_inputs(layers: Iterable[nn.Module], bits: int) -> None:
    """From now on the layers see their input (..., features) quantized per token."""
    for layer in layers:
        layer.register_forward_pre_hook(lambda module, inputs: (per_token(inputs[0], bits), *inputs[1:]))


def quantize_outputs(layers: Iterable[nn.Module], bits: int) -> None:
    """From now on the layers give their output (..., features) quantized per token."""
    for layer in layers:
        layer.register_forward_hook(lambda module, inputs, output: per_token(output, bits))
