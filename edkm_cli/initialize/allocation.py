"""Bits by sensitivity: which linears get more bits and which fewer, in no more room than the same number for all.

Each linear is clustered at several widths. With the squared gradients F of the loss (the diagonal Fisher matrix of
`importance.py`) the expected rise of the loss is `1/2 sum_i F_i (w_i - w~_i)^2`, the second-order term that a Hessian of
that diagonal gives (SqueezeLLM, arXiv 2306.07629, section 4.1). Widths are then chosen greedily: all linears start at the
fewest bits, and the next bit goes where it lowers that sum most for the room that it takes, tables counted. Errors fall by
about four with each bit, so that gains shrink, and for shrinking gains greedy choice is best but for the last linear.

The room is that of a model with the average number of bits in each linear.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from edkm_cli.clustering import kmeans_start, snap
from edkm_cli.config import UserError
from edkm_cli.format import LUT_DTYPES, QuantizationSpec
from edkm_cli.nn.swap import Swap
from edkm_cli.packing import MAX_BITS, MIN_BITS
from edkm_cli.progress import Track, no_progress

_REACH = 1  # widths tried beyond those next to the average


def widths(average: float) -> range:
    """The numbers of bits among which linears are given one.

    >>> list(widths(3.0)), list(widths(2.5)), list(widths(1.0))
    ([2, 3, 4], [1, 2, 3, 4], [1, 2])
    """
    return range(max(MIN_BITS, math.floor(average) - _REACH), min(MAX_BITS, math.ceil(average) + _REACH) + 1)


def size_bits(swap: Swap, spec: QuantizationSpec, bits: float) -> float:
    """Bits of a linear's indices and tables. Between whole numbers of bits it is the mean, weighted by nearness."""
    low, high = math.floor(bits), math.ceil(bits)
    if low != high:
        return (high - bits) * size_bits(swap, spec, low) + (bits - low) * size_bits(swap, spec, high)
    rows, columns = swap.shape[:2]
    lut_bits = 8 * LUT_DTYPES[spec.lut_dtype].itemsize
    return rows * columns * spec.granularity.bits_per_weight(rows, columns, bits=low, lut_bits=lut_bits)


def expected_rise(weight: Tensor, centroids: Tensor, importance: Tensor, spec: QuantizationSpec) -> float:
    """`1/2 sum F (w - w~)^2` of a weight (out, in) that snaps to its tables (groups, 2**bits)."""
    snapped = snap(weight, centroids, granularity=spec.granularity, lut_dtype=spec.lut_dtype)
    difference = (weight.detach().float() - snapped).square_().mul_(importance.to(weight.device))
    return 0.5 * float(difference.sum(dtype=torch.float64))


def choose(
    swaps: Sequence[Swap], rises: Mapping[str, Mapping[int, float]], spec: QuantizationSpec, average: float
) -> dict[str, int]:
    """Module path -> bits, in the room of `average` bits for each linear.

    `rises[path][bits]` is what the loss is expected to rise by. Ties fall to the linear that comes first.
    """
    room = sum(size_bits(swap, spec, average) for swap in swaps)
    chosen = {swap.name: min(rises[swap.name]) for swap in swaps}
    room -= sum(size_bits(swap, spec, chosen[swap.name]) for swap in swaps)
    waiting: list[tuple[float, int]] = []

    def offer(number: int) -> None:
        """Put the next bit of a linear in the queue, by what it gains for its room."""
        swap = swaps[number]
        bits = chosen[swap.name]
        if bits + 1 in rises[swap.name]:
            gain = rises[swap.name][bits] - rises[swap.name][bits + 1]
            heapq.heappush(waiting, (-gain / _step(swap, spec, bits), number))

    for number in range(len(swaps)):
        offer(number)
    while waiting:
        _, number = heapq.heappop(waiting)
        swap = swaps[number]
        needed = _step(swap, spec, chosen[swap.name])
        if needed <= room * (1 + 1e-12):  # one that does not fit stays as it is; smaller ones may
            room -= needed
            chosen[swap.name] += 1
            offer(number)
    return chosen


def _step(swap: Swap, spec: QuantizationSpec, bits: int) -> float:
    """The room that one more bit takes."""
    return size_bits(swap, spec, bits + 1) - size_bits(swap, spec, bits)


def spread_evenly(swaps: Sequence[Swap], spec: QuantizationSpec, average: float) -> dict[str, int]:
    """Bits without any measurement, in the same room: for planning, where only sizes count."""
    low, high = math.floor(average), math.ceil(average)
    if low == high:
        return {}
    return choose(swaps, {swap.name: {low: 1.0, high: 0.0} for swap in swaps}, spec, average)


@torch.no_grad()
def allocate(
    model: Any,
    swaps: Sequence[Swap],
    importance: Mapping[str, Tensor],
    spec: QuantizationSpec,
    average: float,
    *,
    track: Track = no_progress,
) -> tuple[dict[str, int], dict[str, Tensor]]:
    """(bits, tables (groups, 2**bits)) of each linear of a dense model, by module path.

    Args:
        swaps: the linears.
        importance: of each linear's weights, (out, in), the squared gradients of one loss.
        spec: geometry and number format of the tables.
        average: bits, at least 1 and at most 8; the result takes no more room than a model with so many everywhere.

    Raises UserError where the importance is missing or not that of weights.
    """
    rises: dict[str, dict[int, float]] = {}
    tables: dict[str, dict[int, Tensor]] = {}
    for swap in track(list(swaps), "sensitivity", len(swaps)):
        weight, weighing = model.get_submodule(swap.name).weight, importance.get(swap.name)
        if weighing is None or weighing.shape != weight.shape:
            raise UserError(
                f"--allocation sensitivity needs the squared gradients of {swap.name}, but there are none; use "
                "--importance gradient, and --skip for modules that the text does not reach"
            )
        tables[swap.name] = {
            bits: kmeans_start(
                weight.detach(), 2**bits, granularity=spec.granularity, importance=weighing, name=swap.name
            )
            for bits in widths(average)
        }
        rises[swap.name] = {
            bits: expected_rise(weight, table, weighing, spec) for bits, table in tables[swap.name].items()
        }
    chosen = choose(swaps, rises, spec, average)
    return chosen, {name: tables[name][bits] for name, bits in chosen.items()}
