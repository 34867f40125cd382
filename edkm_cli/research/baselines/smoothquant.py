"""SmoothQuant: activation outliers move into the weights, then both are rounded (arXiv 2211.10438).

Some input channels of a transformer's linears are a hundred times larger than the others. With one scale for each token,
the others are left with few levels. Dividing channel j of the input by s_j and multiplying column j of the weight by it
changes nothing in exact arithmetic,

    Y = (X diag(s)^-1) (diag(s) W^T),    s_j = max|X_j|^alpha / max|W_j|^(1 - alpha)        (section 4, equation 4)

and shares the outliers' range between the two. The division is folded into the weight of the norm before the linear, so
it costs nothing; linears that read the same norm share s, linears behind no norm (output and down projections) keep
their input as it is. max|X_j| is taken over calibration text.

Then weights are rounded by their largest magnitude, and activations, per token and while the model runs: the input of
every linear, and queries, keys and values as the inputs of the attention products (the paper's O1 setting, and what its
authors' evaluation does). `activation_bits=16` leaves activations alone, for comparison with methods that round weights
only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from edkm_cli.errors import UserError
from edkm_cli.progress import Track, no_progress
from edkm_cli.research.baselines.fake_quant import NO_QUANTIZATION, absmax, quantize_inputs, quantize_outputs
from edkm_cli.research.baselines.outcome import Outcome, check_bits, columns_in_group, count_uniform, decoder_linears

_CHECKED_TOKENS = 64
_ATTENTION_INPUTS = ("q_proj", "k_proj", "v_proj")


def quantize(
    model: Any,
    batches: list[Tensor],
    *,
    bits: int,
    group_size: int,
    seed: int = 0,
    track: Track = no_progress,
    alpha: float = 0.5,
    activation_bits: int = 8,
) -> Outcome:
    """Smooth and quantize `model` in place.

    Args:
        model: a dense causal LM in float32.
        batches: calibration ids, (1, length) int64 each.
        bits: of a weight, 2 to 8.
        group_size: weights of a row that share a scale, 0: the row (as the paper has it).
        seed: not used, nothing is drawn at random.
        alpha: how much of the outliers' range moves into the weights, 0 to 1.
        activation_bits: 2 to 8 bits an activation, hooks that stay on the model; 16: activations as they are.

    Raises UserError for a value out of range, without calibration text, or for a model whose norms cannot take the
    scales.
    """
    check_bits(bits)
    if activation_bits != NO_QUANTIZATION and not 2 <= activation_bits <= 8:
        raise UserError(
            f"activation_bits must be 2 to 8, or {NO_QUANTIZATION} for no quantization, got {activation_bits}"
        )
    if not 0 <= alpha <= 1:
        raise UserError(f"alpha must be from 0 to 1, got {alpha}")
    if not batches:
        raise UserError("smoothquant needs calibration text, got none; give more --data or --calibration-samples")
    linears = decoder_linears(model)
    for name, layer in linears.items():
        columns_in_group(group_size, layer.in_features, layer=name)
    smooth(model, linears, batches, alpha=alpha, track=track)
    with torch.no_grad():
        for layer in linears.values():
            layer.weight.copy_(absmax(layer.weight, bits=bits, group_size=group_size, scale_dtype=torch.float16))
    note = "weight-only"
    if activation_bits != NO_QUANTIZATION:
        quantize_inputs(linears.values(), activation_bits)
        attention = (layer for name, layer in linears.items() if name.endswith(_ATTENTION_INPUTS))
        quantize_outputs(attention, activation_bits)
        note = f"activations at {activation_bits} bits per token"
    shapes = [(layer.out_features, layer.in_features) for layer in linears.values()]
    bits_per_weight, stored_bytes = count_uniform(shapes, bits=bits, group_size=group_size, zero_bits=0)
    return Outcome(bits_per_weight, stored_bytes, calibration_tokens=sum(batch.numel() for batch in batches), note=note)


@torch.no_grad()
def smooth(
    model: Any, linears: dict[str, nn.Linear], batches: list[Tensor], *, alpha: float, track: Track = no_progress
) -> None:
    """Fold the scales into norms and weights, in place; what the model computes stays the same but for rounding.

    Raises UserError where no linear reads a norm, or where folding changes the logits: then something besides the
    linears reads a norm's output, or the norm does not multiply by its weight.
    """
    probe = batches[0][:, :_CHECKED_TOKENS]
    before = model(input_ids=probe, use_cache=False).logits
    calibration = _Calibration(model, linears)
    try:
        for batch in track(batches, "activation ranges", len(batches)):
            model.base_model(input_ids=batch, use_cache=False)
    finally:
        calibration.close()
    if not calibration.readers:
        raise UserError("smoothquant needs linears that read a norm's output, but this model has none; use rtn or gptq")
    for norm, names in calibration.readers.items():
        layers = [linears[name] for name in names]
        activations = calibration.largest[names[0]]
        weights = torch.stack([layer.weight.abs().amax(0) for layer in layers]).amax(0).clamp(min=1e-5)
        scales = (activations**alpha / weights ** (1 - alpha)).clamp(min=1e-5)  # (in,)
        norm.weight.div_(scales)
        if getattr(norm, "bias", None) is not None:
            norm.bias.div_(scales)
        for layer in layers:
            layer.weight.mul_(scales)
    after = model(input_ids=probe, use_cache=False).logits
    error = float((after - before).norm() / before.norm())
    if not error < 1e-3:
        raise UserError(
            f"smoothing must leave the logits as they are, but changes them by {error:.2g} of their norm: scales cannot "
            f"be folded into the norms of {type(model).__name__}; use another method"
        )


class _Calibration:
    """Hooks that find which linears read which norm, and the largest magnitude of every input channel, (in,)."""

    def __init__(self, model: nn.Module, linears: dict[str, nn.Linear]):
        self.readers: dict[Any, list[str]] = {}
        self.largest: dict[str, Tensor] = {}
        self._outputs: dict[Any, Tensor] = {}
        self._handles = [module.register_forward_hook(self._keep) for module in model.modules() if _is_norm(module)]
        self._handles += [layer.register_forward_pre_hook(self._reader(name)) for name, layer in linears.items()]

    def _keep(self, norm: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self._outputs[norm] = output

    def _reader(self, name: str) -> Any:
        def hook(layer: nn.Linear, inputs: tuple[Tensor, ...]) -> None:
            largest = inputs[0].reshape(-1, layer.in_features).abs().amax(0)
            self.largest[name] = torch.maximum(self.largest[name], largest) if name in self.largest else largest
            norm = next((norm for norm, output in self._outputs.items() if output is inputs[0]), None)
            if norm is not None and name not in self.readers.setdefault(norm, []):
                self.readers[norm].append(name)

        return hook

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._outputs.clear()


def _is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return type(module).__name__.endswith("Norm") and isinstance(weight, Tensor) and weight.dim() == 1
