"""What all baselines share: the layers they quantize, the checks of their options, and the count of what is stored."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from edkm_cli.errors import UserError
from edkm_cli.nn.swap import plan_swaps
from edkm_cli.packing import packed_width
from edkm_cli.progress import Track, no_progress

UNQUANTIZED = 16  # bits of activations that stay as they are


@dataclass(frozen=True)
class Task:
    """What every method gets: a dense causal LM in float32, and calibration text, token ids (1, length) int64 each.

    `group_size` is the number of weights along a row that share a scale; 0 means the whole row.
    """

    model: Any
    batches: list[Tensor]
    bits: int
    group_size: int = 0
    seed: int = 0
    track: Track = no_progress


@dataclass(frozen=True)
class Outcome:
    """What a method made of a model.

    Attributes:
        bits_per_weight: of the quantized linears, all side information (scales, zero points, LUTs, stored orders)
            counted.
        stored_bytes: of the quantized linears as they would be packed, rows of indices padded to whole bytes.
        training_tokens: tokens the method trained on; 0 for post-training methods.
    """

    bits_per_weight: float
    stored_bytes: int
    training_tokens: int = 0
    calibration_tokens: int = 0
    note: str = ""


def decoder_linears(model: Any) -> dict[str, nn.Linear]:
    """Module path -> layer of every linear a method quantizes: all but the output embedding, in model order."""
    return {swap.name: model.get_submodule(swap.name) for swap in plan_swaps(model) if swap.clustered}


def check_bits(**bits: int) -> None:
    """Raises UserError unless 2 <= bits <= 8; those of activations may be `UNQUANTIZED` instead."""
    for name, value in bits.items():
        optional = name != "bits"
        if not 2 <= value <= 8 and not (optional and value == UNQUANTIZED):
            rule = f"2 to 8, or {UNQUANTIZED} for no quantization" if optional else "2 to 8"
            raise UserError(f"{name} must be {rule}, got {value}")


def check_at_least(least: int, **values: float) -> None:
    """Raises UserError for the first value that is smaller."""
    for name, value in values.items():
        if value < least:
            raise UserError(f"{name} must be at least {least}, got {value}")


def check_positive(**values: float) -> None:
    """Raises UserError for the first value that is not above zero."""
    for name, value in values.items():
        if not value > 0:
            raise UserError(f"{name} must be positive, got {value}")


def stored_size(layers: dict[str, nn.Linear], *, bits: int, side_bits: Callable[[int, int], int]) -> tuple[float, int]:
    """(bits per weight, stored bytes) of layers at `bits` a weight, and `side_bits(out, in)` beside each."""
    total_bits = weights = stored_bytes = 0
    for rows, columns in ((layer.out_features, layer.in_features) for layer in layers.values()):
        beside = side_bits(rows, columns)
        total_bits += rows * columns * bits + beside
        stored_bytes += rows * packed_width(columns, bits) + (beside + 7) // 8
        weights += rows * columns
    return total_bits / weights, stored_bytes
