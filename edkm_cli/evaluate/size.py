"""What a loaded model weighs: bytes, and bits per weight over the decoder's linears and over all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from edkm_cli.runtime.palettized import PALETTIZED, PalettizedLinear


@dataclass(frozen=True)
class Footprint:
    """Sizes of a loaded model: bytes of its weights and bits per weight, over the decoder's linears and over all."""

    weights_bytes: int
    decoder_bits_per_weight: float
    model_bits_per_weight: float
    parameters: int


def footprint(model: nn.Module) -> Footprint:
    """Count every tensor of the model once (ties share), as stored: indices, LUTs and scales included."""
    seen: set[int] = set()
    total_bytes = total_weights = decoder_bytes = decoder_weights = 0
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for module in model.modules():
        buffers = {k: t for k, t in module._buffers.items() if k not in module._non_persistent_buffers_set}
        held = {k: t for k, t in (*module._parameters.items(), *buffers.items()) if t is not None}
        fresh = {k: t for k, t in held.items() if _identity(t) not in seen}
        seen.update(map(_identity, fresh.values()))
        size = sum(t.numel() * t.element_size() for t in fresh.values())
        weights = sum(_dense_numel(module, k, t) for k, t in fresh.items())
        total_bytes, total_weights = total_bytes + size, total_weights + weights
        if isinstance(module, (nn.Linear, PalettizedLinear)) and module is not head:
            bias = fresh.get("bias")
            outside = (bias, fresh.get("lut_scale"))  # four bytes a matrix: no part of the design's bits per weight
            decoder_bytes += size - sum(t.numel() * t.element_size() for t in outside if t is not None)
            decoder_weights += weights - (0 if bias is None else bias.numel())
    return Footprint(
        total_bytes,
        8 * decoder_bytes / decoder_weights if decoder_weights else float("nan"),
        8 * total_bytes / max(total_weights, 1),
        total_weights,
    )


def _identity(tensor: Tensor) -> int:
    """Equal for tensors that share memory; on the meta device, for the same tensor."""
    return tensor.data_ptr() or id(tensor)


def _dense_numel(module: nn.Module, name: str, tensor: Tensor) -> int:
    """How many numbers of the dense model a tensor stands for: all weights for indices, none for LUTs and scales."""
    if not isinstance(module, PALETTIZED) or name == "bias":
        return tensor.numel()
    if name != "indices":
        return 0
    columns: Any = module.in_features if isinstance(module, PalettizedLinear) else module.columns
    return tensor.shape[0] * columns
