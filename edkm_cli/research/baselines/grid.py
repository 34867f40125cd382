"""Uniform quantization of groups of weights: `bits`-bit integers, with a float16 scale and a zero point for each group.

    q = clamp(round(w / scale) + zero, 0, 2**bits - 1)        w~ = scale * (q - zero)

Four rules choose scale and zero from a group's values:

- `minmax`: the grid spans [min, max], widened to contain 0 (GPTQ and AWQ). The zero point is stored, `bits` bits.
- `symmetric`: the grid spans [-a, a] with a the largest magnitude, and lacks its positive end: zero is 2**(bits - 1),
  the scale 2 a / (2**bits - 1) (GPTQ's symmetric option; llmcompressor).
- `autoround`: the weight of largest magnitude is met exactly by the one end of the grid that has 2**(bits - 1) steps; the
  scale is a / 2**(bits - 1), negative where that weight is positive (AutoRound, arXiv 2309.05516, its symmetric type).
- `absmax`: the grid spans [-a, a] with both ends and zero, so that one of the 2**bits integers is never used; the scale is
  a / (2**(bits - 1) - 1) (SmoothQuant, LLM-QAT).

Scales are stored in float16, and rounded to it before weights are rounded to their grid (docs/baselines.md).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from edkm_cli.clustering.grids import StraightThrough
from edkm_cli.errors import UserError
from edkm_cli.research.baselines.outcome import UNQUANTIZED, Outcome, check_bits, decoder_linears, stored_size

RULES = ("minmax", "symmetric", "autoround", "absmax")
_SCALE_DTYPES = {"float16": torch.float16, "float32": torch.float32}
_SMALLEST_SCALE = 2.0**-24  # float16's smallest number: a group of zeros must not divide by zero


class Grid(NamedTuple):
    """Scales and zero points (..., 1) of groups (..., n); `top` is the largest integer."""

    scale: Tensor
    zero: Tensor
    top: int

    def round(self, values: Tensor) -> Tensor:
        """The grid point nearest to each value, (..., n): what the stored integers decode to."""
        return self.scale * ((torch.round(values / self.scale) + self.zero).clamp_(0, self.top) - self.zero)


@dataclass(frozen=True)
class Uniform:
    """A stored form: integers of `bits` bits, a grid by `rule` for each `group_size` weights along a row (0: the row)."""

    bits: int
    group_size: int = 0
    rule: str = "minmax"
    scale_dtype: str = "float16"

    def linears(self, model: Any) -> dict[str, nn.Linear]:
        """`decoder_linears`. Raises UserError for a form that there is not, or groups that do not divide a layer's rows."""
        check_bits(bits=self.bits)
        for name, value, known in (("rule", self.rule, RULES), ("scale_dtype", self.scale_dtype, _SCALE_DTYPES)):
            if value not in known:
                raise UserError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        layers = decoder_linears(model)
        for name, layer in layers.items():
            if self.group_size < 0 or (self.group_size and layer.in_features % self.group_size):
                rule = f"group_size must divide the {layer.in_features} columns of {name}, got {self.group_size}"
                raise UserError(f"{rule}; choose a divisor, or 0 for one group per row")
        return layers

    def fit(self, groups: Tensor) -> Grid:
        """The grid of each group (..., n), float32 or float64, its scale as `scale_dtype` holds it."""
        low, high = groups.amin(-1, keepdim=True).clamp_max(0), groups.amax(-1, keepdim=True).clamp_min(0)
        half, top = 2 ** (self.bits - 1), 2**self.bits - 1
        if self.rule == "minmax":
            scale = self._as_stored((high - low) / top)
            return Grid(scale, torch.round(-low / scale).clamp_(0, top), top)
        largest = torch.maximum(-low, high)
        if self.rule == "absmax":
            scale = self._as_stored(largest / (half - 1))
            return Grid(scale, torch.full_like(scale, half - 1), top - 1)
        if self.rule == "symmetric":
            scale = self._as_stored(2 * largest / top)
        else:
            scale = self._as_stored(largest / half) * torch.where(high >= -low, -1.0, 1.0)
        return Grid(scale, torch.full_like(scale, half), top)

    def _as_stored(self, scale: Tensor) -> Tensor:
        dtype = _SCALE_DTYPES[self.scale_dtype]
        return scale.clamp(_SMALLEST_SCALE, torch.finfo(dtype).max).to(dtype).to(scale.dtype)

    def round(self, values: Tensor) -> Tensor:
        """Values (..., columns), each group along the last dimension rounded to its own grid."""
        groups = values.unflatten(-1, (-1, self.group_size or values.shape[-1]))
        return self.fit(groups).round(groups).flatten(-2)

    def outcome(self, layers: dict[str, nn.Linear], *, order_bits: int = 0, **facts: Any) -> Outcome:
        """The sizes of the layers in this form: each group has a scale, and a zero point where the rule does not fix it;
        each column has `order_bits`, where a method stores in which order the columns were quantized.

        >>> Uniform(3, 64).outcome({"layer": nn.Linear(128, 64)}).bits_per_weight  # 3 + (16 + 3) / 64
        3.296875
        """
        beside = torch.finfo(_SCALE_DTYPES[self.scale_dtype]).bits + (self.bits if self.rule == "minmax" else 0)

        def side_bits(rows: int, columns: int) -> int:
            return rows * (columns // (self.group_size or columns)) * beside + columns * order_bits

        return Outcome(*stored_size(layers, bits=self.bits, side_bits=side_bits), **facts)


def per_token(values: Tensor, bits: int) -> Tensor:
    """Activations (..., features), rounded with a scale for each token, which is computed as they appear and never stored.
    The gradient passes the rounding straight through."""
    return StraightThrough.apply(values, Uniform(bits, 0, "absmax", "float32").round)


def quantize_inputs(layers: Iterable[nn.Module], bits: int) -> None:
    """From now on the layers see their input (..., features) quantized per token; `UNQUANTIZED`: as it is."""
    for layer in layers if bits != UNQUANTIZED else ():
        layer.register_forward_pre_hook(lambda module, inputs: (per_token(inputs[0], bits), *inputs[1:]))


def quantize_outputs(layers: Mapping[str, nn.Module], leaves: tuple[str, ...], bits: int) -> None:
    """From now on the layers called `leaves` give their output (..., features) quantized per token, or as it is."""
    for name, layer in layers.items():
        if bits != UNQUANTIZED and name.endswith(leaves):
            layer.register_forward_hook(lambda module, inputs, output: per_token(output, bits))
