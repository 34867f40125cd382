"""What a loaded model weighs: bytes, and bits per weight over the decoder's linears and over all; and how its lookup tables
are used: entries that no weight takes, tables of a single value."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from edkm_cli.packing import to_groups, unpack
from edkm_cli.runtime.palettized import PackedModule, PalettizedLinear


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
        size = sum(t.nbytes for t in fresh.values())
        weights = sum(_dense_numel(module, k, t) for k, t in fresh.items())
        total_bytes, total_weights = total_bytes + size, total_weights + weights
        if isinstance(module, (nn.Linear, PalettizedLinear)) and module is not head:
            bias = fresh.get("bias")
            # Not the bias, nor the four bytes that scale a matrix's float8 tables: no part of the design's bits per weight.
            one = [t for t in [fresh.get("lut_scale")] if t is not None and t.dtype == torch.float32]
            outside = one if bias is None else [bias, *one]
            decoder_bytes += size - sum(t.nbytes for t in outside)
            decoder_weights += weights - (0 if bias is None else bias.numel())
    of_decoder = 8 * decoder_bytes / decoder_weights if decoder_weights else float("nan")
    return Footprint(total_bytes, of_decoder, 8 * total_bytes / max(total_weights, 1), total_weights)


def _identity(tensor: Tensor) -> int:
    """Equal for tensors that share memory; on the meta device, for the same tensor."""
    return tensor.data_ptr() or id(tensor)


def _dense_numel(module: Any, name: str, tensor: Tensor) -> int:
    """How many numbers of the dense model a tensor stands for: all weights for indices, none for LUTs and scales."""
    if not isinstance(module, PackedModule) or name == "bias":
        return tensor.numel()
    return tensor.shape[0] * module.columns if name.startswith("indices") else 0


_UNUSED_WARNING = 0.25  # of a layer's entries


@torch.no_grad()
def table_use(model: nn.Module) -> list[dict[str, Any]]:
    """For each palettized linear `name`, `tables`, `collapsed` (all entries are one value), `entries`, `unused_entries`."""
    found = ((name, module) for name, module in model.named_modules() if isinstance(module, PalettizedLinear))
    return [{"name": name, **layer_use(module)} for name, module in found]


def layer_use(module: PalettizedLinear) -> dict[str, int]:
    """The counts of `table_use` for one layer; memory is that of a few rows of the weight."""
    lut = module.table().float()
    groups, entries = lut.shape
    rows = max(module.tile[0], 64 // module.tile[0] * module.tile[0])
    unused = 0
    for first in range(0, module.out_features, rows):
        indices = unpack(module.indices[first : first + rows], module.bits, module.in_features)
        tiles = to_groups(indices, module.tile).long()
        used = torch.zeros(len(tiles), entries, dtype=torch.bool, device=tiles.device).scatter_(1, tiles, True)
        unused += int((~used).sum())
    collapsed = int((lut.amax(1) == lut.amin(1)).sum())
    return {"tables": groups, "collapsed": collapsed, "entries": groups * entries, "unused_entries": unused}


def table_warnings(use: list[dict[str, Any]]) -> list[str]:
    """A line for each layer whose tables have collapsed, or with many entries that no weight takes."""
    return [
        f"{one['name']}: {one['collapsed']} of {one['tables']} tables have collapsed to one value"
        if one["collapsed"]
        else f"{one['name']}: {one['unused_entries']} of {one['entries']} table entries are not used"
        for one in use
        if one["collapsed"] or one["unused_entries"] > _UNUSED_WARNING * one["entries"]
    ]
