"""How many bits what gets: what `--bits`, `--allocation` and `--embedding-bits` resolve to.

By default two of the eight bits of an embedding's weight go to the linears. On SmolLM2-135M at 3 bits that leaves the size
as it is and nearly halves the distance from the uncompressed model (docs/log.md): the rows of the output embedding
compensate their errors, and the linears are rounded far more coarsely.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from edkm_cli.config import CompressConfig
from edkm_cli.format import QuantizationSpec
from edkm_cli.granularity import Granularity
from edkm_cli.nn.allotment import average_with, embedding_bits_saved, spread_evenly
from edkm_cli.nn.swap import OTHER, Swap

_MOST_BITS_ALLOTTED = 4
_EMBEDDING_BITS, _EMBEDDING_BITS_ALLOTTED = 8, 6


def planned_spec(
    config: CompressConfig, granularity: Granularity, swaps: Sequence[Swap], start: str
) -> tuple[QuantizationSpec, float]:
    """(the checkpoint's, bits of a linear on average); where matrices will differ in bits, with any that take the same
    room."""
    spec = QuantizationSpec(
        bits=math.floor(config.bits),
        granularity=granularity,
        lut_dtype=config.lut_dtype,
        embedding_bits=embedding_bits(config, start),
        embedding_group=config.embedding_group or None,
        skipped=[swap.name for swap in swaps if swap.reason and swap.role != OTHER],
    )
    clustered = [swap for swap in swaps if swap.clustered]
    average: float = config.bits
    if config.embedding_bits is None and spec.embedding_bits:
        more = embedding_bits_saved(swaps, _EMBEDDING_BITS, spec.embedding_bits)
        average = average_with(clustered, spec, average, more) if more else average
    return spec.with_bits(spread_evenly(clustered, spec, average)), average


def allots_bits(config: CompressConfig, start: str) -> bool:
    """Whether linears get bits by sensitivity. `auto`: where a fraction of a bit is asked for, and up to 4 bits (above,
    errors are small everywhere) beside the reconstructed start, which aims at the best model, too."""
    if config.allocation != "auto":
        return config.allocation == "sensitivity"
    if not isinstance(config.bits, int):
        return True
    suits = config.importance == "gradient" and config.target is None
    return suits and start == "reconstructed" and config.bits <= _MOST_BITS_ALLOTTED


def embedding_bits(config: CompressConfig, start: str) -> int | None:
    """16 in the configuration means dense. Where bits go where they are worth most, two of an embedding's eight are worth
    more in the linears (docs/log.md)."""
    if config.embedding_bits is None:
        return _EMBEDDING_BITS_ALLOTTED if allots_bits(config, start) else _EMBEDDING_BITS
    return None if config.embedding_bits == 16 else config.embedding_bits
