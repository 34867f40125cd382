"""SmoothQuant: activation outliers move into the weights, then both are rounded (arXiv 2211.10438).

    Y = (X diag(s)^-1) (diag(s) W^T),    s_j = max|X_j|^alpha / max|W_j|^(1 - alpha)        (section 4, equation 4)

The division is folded into the weight of the norm before the linear, so it costs nothing; linears that read the same norm
share s, linears behind no norm (output and down projections) keep their input as it is. What is rounded: docs/baselines.md.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from edkm_cli.errors import UserError
from edkm_cli.nn.hooks import hooked
from edkm_cli.research.baselines.grid import Uniform, quantize_inputs, quantize_outputs
from edkm_cli.research.baselines.outcome import UNQUANTIZED, Outcome, Task, check_bits

_CHECKED_TOKENS = 64
_ATTENTION_INPUTS = ("q_proj", "k_proj", "v_proj")


def quantize(task: Task, *, alpha: float = 0.5, activation_bits: int = 8) -> Outcome:
    """Smooth and quantize a model in place; the paper has groups of whole rows.

    Args:
        alpha: how much of the outliers' range moves into the weights, 0 to 1.
        activation_bits: 2 to 8 bits an activation, hooks that stay on the model; 16: activations as they are.

    Raises UserError for a value out of range, without calibration text, or where norms cannot take the scales.
    """
    check_bits(activation_bits=activation_bits)
    if not 0 <= alpha <= 1:
        raise UserError(f"alpha must be from 0 to 1, got {alpha}")
    if not task.batches:
        raise UserError("smoothquant needs calibration text, got none; give more --data or --calibration-samples")
    form = Uniform(task.bits, task.group_size, "absmax")
    linears = form.linears(task.model)
    smooth(task, linears, alpha=alpha)
    with torch.no_grad():
        for layer in linears.values():
            layer.weight.copy_(form.round(layer.weight))
    quantize_inputs(linears.values(), activation_bits)
    quantize_outputs(linears, _ATTENTION_INPUTS, activation_bits)
    note = "weight-only" if activation_bits == UNQUANTIZED else f"activations at {activation_bits} bits per token"
    return form.outcome(linears, calibration_tokens=sum(batch.numel() for batch in task.batches), note=note)


@torch.no_grad()
def smooth(task: Task, linears: dict[str, nn.Linear], *, alpha: float) -> None:
    """Fold the scales into norms and weights, in place; what the model computes stays the same but for rounding.

    Raises UserError where no linear reads a norm, or where folding changes the logits: then something besides the
    linears reads a norm's output, or the norm does not multiply by its weight.
    """
    model, probe = task.model, task.batches[0][:, :_CHECKED_TOKENS]
    before = model(input_ids=probe, use_cache=False).logits
    readers, largest = _calibrate(task, linears.values())
    if not readers:
        raise UserError("smoothquant needs linears that read a norm's output, but this model has none; use rtn or gptq")
    for norm, layers in readers.items():
        weights = torch.stack([layer.weight.abs().amax(0) for layer in layers]).amax(0).clamp(min=1e-5)
        scales = (largest[layers[0]] ** alpha / weights ** (1 - alpha)).clamp(min=1e-5)  # (in,)
        norm.weight.div_(scales)
        if getattr(norm, "bias", None) is not None:
            norm.bias.div_(scales)
        for layer in layers:
            layer.weight.mul_(scales)
    error = float((model(input_ids=probe, use_cache=False).logits - before).norm() / before.norm())
    if not error < 1e-3:
        rule = f"smoothing must leave the logits as they are, but changes them by {error:.2g} of their norm"
        raise UserError(f"{rule}: scales cannot be folded into the norms of {type(model).__name__}; use another method")


def _calibrate(task: Task, linears: Iterable[nn.Linear]) -> tuple[dict[Any, list[nn.Linear]], dict[nn.Linear, Tensor]]:
    """Which linears read which norm, and the largest magnitude of every input channel of each linear, (in,)."""
    readers: dict[Any, list[nn.Linear]] = {}
    largest: dict[nn.Linear, Tensor] = {}
    outputs: dict[nn.Module, Tensor] = {}

    def given(norm: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        outputs[norm] = output

    def read(layer: Any, inputs: tuple[Tensor, ...]) -> None:
        magnitudes = inputs[0].reshape(-1, layer.in_features).abs().amax(0)
        largest[layer] = torch.maximum(largest.get(layer, magnitudes), magnitudes)
        norm = next((norm for norm, output in outputs.items() if output is inputs[0]), None)
        if norm is not None and layer not in readers.setdefault(norm, []):
            readers[norm].append(layer)

    with hooked(filter(_is_norm, task.model.modules()), given, after=True), hooked(linears, read):
        for batch in task.track(task.batches, "activation ranges", len(task.batches)):
            task.model.base_model(input_ids=batch, use_cache=False)
    return readers, largest


def _is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return type(module).__name__.endswith("Norm") and isinstance(weight, Tensor) and weight.dim() == 1
