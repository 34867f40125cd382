"""Which linears get how many bits, in the room of a model that has an average number of bits in each.

The choice is greedy: all linears start at the fewest bits, and the next bit goes where it lowers the expected loss most for
the room that it takes, tables counted. An error falls by about four with each bit, so that gains shrink, and for shrinking
gains this is the best choice there is, up to the room that is left over at the end.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence

from edkm_cli.format import LUT_DTYPES, QuantizationSpec
from edkm_cli.nn.swap import EMBEDDING, HEAD, Swap
from edkm_cli.packing import MAX_BITS, MIN_BITS, packed_width

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


def embedding_bits_saved(swaps: Sequence[Swap], usual: int, fewer: int) -> int:
    """Bits that embeddings and output head take less at `fewer` bits a weight than at the `usual` number."""
    stored = [swap.shape for swap in swaps if swap.role in (EMBEDDING, HEAD) and not swap.reason and not swap.tied]
    return sum(8 * rows * (packed_width(columns, usual) - packed_width(columns, fewer)) for rows, columns in stored)


def average_with(swaps: Sequence[Swap], spec: QuantizationSpec, bits: float, more: float) -> float:
    """The average at which linears take `more` bits in sum than at `bits` each; at most one above `bits`."""
    room = sum(size_bits(swap, spec, bits) for swap in swaps) + more
    low, most = bits, min(bits + 1.0, MAX_BITS)
    while low < most:  # sizes grow in proportion between whole numbers
        high = min(math.floor(low) + 1.0, most)
        at_low, at_high = (sum(size_bits(swap, spec, at) for swap in swaps) for at in (low, high))
        if at_high >= room:
            return low + (high - low) * (room - at_low) / (at_high - at_low)
        low = high
    return most


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
        return {} if low == spec.bits else {swap.name: low for swap in swaps}
    return choose(swaps, {swap.name: {low: 1.0, high: 0.0} for swap in swaps}, spec, average)
