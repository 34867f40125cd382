"""Allocation: which linears get how many bits, in the room of a model that has an average number of bits in each.

With the squared gradients F of the loss (`initialize/importance.py`) the expected rise of the loss at a number of bits is
`1/2 sum_i F_i (w_i - w~_i)^2` (SqueezeLLM, arXiv 2306.07629, section 4.1). The choice is greedy: the next bit goes where
it lowers that most for the room that it takes, tables counted; for gains that shrink this is the best choice there is, up
to the room that is left at the end. Some of the eight bits of an embedding's weight go to the linears by default:
docs/clustering.md, "Who gets how many bits".
"""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor

from edkm_cli.clustering import Grid, snap
from edkm_cli.config import CompressConfig
from edkm_cli.errors import UserError
from edkm_cli.format import MOST_FACTORED_BITS, QuantizationSpec
from edkm_cli.granularity import E3M4, FOURS, FREE, Granularity, Override
from edkm_cli.nn.swap import OTHER, Swap
from edkm_cli.packing import MAX_BITS, MIN_BITS, packed_width, parts_of
from edkm_cli.runtime.experts import is_expert
from edkm_cli.settings import part_of
from edkm_cli.targets import TARGETS

UNIFORM, SENSITIVITY = "uniform", "sensitivity"
_MOST_BITS = 4  # above, errors are small everywhere
_EMBEDDING_BITS, _FEWEST_EMBEDDING_BITS = 8, 4
# KL from the uncompressed model at 0 bits, if it fell by four with each: of compensated linears, of embeddings with factors,
# and of those whose first rows have more.
_LINEARS_KL, _EMBEDDINGS_KL, _ROWS_KL = 18.6, 15.0, 2.6
_MORE_BITS = ((24, 3), (6, 2), (2, 1))  # of the first of so many equal parts of the rows: frequent tokens come first
_LAST_ROWS, _MORE_OF_LAST, _ROWS_STEP = 512, 2, 64  # where tokens stand that were added later, such as those of a chat
_MOST_ALIKE = 4096  # rows of a vocabulary too small for such parts
_LUT_DTYPE, _SHORT_LUT_DTYPE = "float16", E3M4
_SAVED_BITS = 0.03  # of a weight: tables of E4M3 raised the KL by 4%, as so many bits fewer do; E3M4 less (docs/log.md)
_MOST_MORE = 2.0  # bits that a linear's weight gets of those of small models' large embeddings
_REACH = 1  # numbers of bits tried beyond those next to the average
_BANDS = 128  # rows of tables that a sensitivity is measured on, at the least, where a matrix has so many


def choose_allocation(config: CompressConfig, start: str) -> str:
    """What `--allocation` means beside a start. `auto` is by sensitivity where a fraction of a bit is asked for, and up to
    4 bits beside the reconstructed start, which aims at the best model, too."""
    if config.allocation != "auto":
        return config.allocation
    if config.target_size:
        return SENSITIVITY
    suits = config.importance == "gradient" and config.target is None and config.palette not in FOURS
    best = suits and start == "reconstructed" and config.bits <= _MOST_BITS
    return SENSITIVITY if best or not isinstance(config.bits, int) else UNIFORM


def bits_by_row(bits: int | str, rows: int) -> tuple[list[list[int]], int]:
    """([[end, bits], ...], bits of the rows behind) of an embedding of `rows`: `4` is the same for all, `4+` more for those
    whose tokens are frequent. Those come first: tokens are numbered by how early the tokenizer learnt them.

    >>> bits_by_row(4, 49152), bits_by_row("4+", 49152)
    (([], 4), ([[8192, 6], [24576, 5], [48640, 4]], 6))
    """
    least = int(str(bits).removesuffix("+"))
    if not str(bits).endswith("+") or rows <= _MOST_ALIKE:
        return [], least
    ends = [[rows // share, min(least + more, MOST_FACTORED_BITS)] for share, more in _MORE_BITS]
    ends = [[end // _ROWS_STEP * _ROWS_STEP, own] for end, own in [*ends, [rows - _LAST_ROWS, least]]]
    last = min(least + _MORE_OF_LAST, MOST_FACTORED_BITS)
    return [one for one, (_, after) in zip(ends, [*ends[1:], [rows, last]], strict=True) if one[1] != after], last


def choose_embedding_bits(
    config: CompressConfig, swaps: Sequence[Swap], average: Callable[[int | str], float] | None = None
) -> int | str:
    """What `--embedding-bits` means. Where bits go where they are worth most: as many as leave the least expected distance.

    `average` says how many bits a linear's weight has beside so many of an embedding's, and raises UserError where there is
    no room for both; None: as many as `--bits`, and those that embeddings have less than 8.
    """
    if config.embedding_bits != "auto":
        return config.embedding_bits
    if config.allocation != SENSITIVITY or not embedding_bits_saved(swaps, _EMBEDDING_BITS, _FEWEST_EMBEDDING_BITS):
        return _EMBEDDING_BITS
    linears = sum(math.prod(swap.shape) for swap in swaps if swap.clustered)
    parts = config.palette == FREE and not config.embedding_group and _vocabulary(swaps) > _MOST_ALIKE
    fitting: list[int | str] = []

    def distance(few: int | str) -> float:
        try:
            more = min(embedding_bits_saved(swaps, _EMBEDDING_BITS, few) / linears, _MOST_MORE)
            of_linears = config.bits + more if average is None else average(few)
        except UserError:
            if few == choices[-1] and not fitting:
                raise
            return math.inf
        fitting.append(few)
        return _LINEARS_KL * 4.0**-of_linears + (_ROWS_KL if parts else _EMBEDDINGS_KL) * 4.0 ** -int(str(few)[0])

    plain: list[int | str] = [*range(MOST_FACTORED_BITS, _FEWEST_EMBEDDING_BITS - 1, -1)]
    choices = [f"{int(bits) - 1}+" for bits in plain] if parts else plain
    return min(choices, key=distance)


def _vocabulary(swaps: Sequence[Swap]) -> int:
    """The rows that compressed embeddings have, 0 where there are none, or their numbers differ."""
    rows = {swap.shape[0] for swap in swaps if swap.rounded}
    return rows.pop() if len(rows) == 1 else 0


def choose_lut_dtype(config: CompressConfig, swaps: Sequence[Swap], few: int | str) -> str:
    """What `--lut-dtype` means beside embeddings of `few` bits: 8 where what this saves is worth more to the linears."""
    if config.lut_dtype != "auto":
        return config.lut_dtype
    if config.target:
        return TARGETS[config.target].settings["lut_dtype"]
    if config.allocation == SENSITIVITY and config.palette == FREE:
        spec, average = planned_spec(replace(config, lut_dtype=_LUT_DTYPE, embedding_bits=few), swaps, asked=config)
        linears = [swap for swap in swaps if swap.clustered]
        saved = sum(size_bits(swap, spec, average) for swap in linears)
        short = replace(spec, lut_dtype=_SHORT_LUT_DTYPE, format_version=0)
        saved -= sum(size_bits(swap, short, average) for swap in linears)
        if saved > _SAVED_BITS * sum(math.prod(swap.shape) for swap in linears):
            return _SHORT_LUT_DTYPE
    return _LUT_DTYPE


def planned_spec(
    config: CompressConfig, swaps: Sequence[Swap], *, asked: CompressConfig
) -> tuple[QuantizationSpec, float]:
    """(the checkpoint's, bits of a linear on average) of a resolved configuration; where matrices will differ in bits, with
    any that take the same room. What embeddings and tables save goes to the linears where their bits were not asked for."""
    ends, last = bits_by_row(config.embedding_bits, _vocabulary(swaps))
    few = last <= MOST_FACTORED_BITS  # columns get factors where rows make up for their errors
    spec = part_of(
        QuantizationSpec,
        config,
        bits=math.floor(config.bits),
        embedding_bits=last,
        embedding_rows=ends,
        embedding_group=config.embedding_group or None,
        embedding_factors=few and config.palette == FREE and not config.embedding_group and config.importance != "none",
        skipped=[swap.name for swap in swaps if swap.reason and swap.role != OTHER],
        split_experts=any(is_expert(swap.name) for swap in swaps),
    )
    linears = [swap for swap in swaps if swap.clustered]
    overrides = {swap.name: Override.of(config.overrides, swap.name) for swap in linears}
    for text in config.overrides:
        if not any(fnmatch(name, Override.parse(text).pattern) for name in overrides):
            raise UserError(f"--override must match a compressed linear, but {text!r} matches none; see --dry-run")
    tiles = {name: str(one.granularity) for name, one in overrides.items() if one.granularity}
    spec = replace(spec, module_granularity=tiles, format_version=0) if tiles else spec
    fixed = {name: one.bits for name, one in overrides.items() if one.bits}
    free = [swap for swap in linears if swap.name not in fixed]
    average: float = config.bits
    more: float = 0
    if asked.embedding_bits == "auto" and not asked.target_size:
        more = embedding_bits_saved(swaps, _EMBEDDING_BITS, config.embedding_bits)
    if asked.lut_dtype == "auto" and not asked.target_size:
        usual = replace(spec, lut_dtype=_LUT_DTYPE, format_version=0)
        more += sum(size_bits(swap, usual, average) - size_bits(swap, spec, average) for swap in free)
    if config.allocation == SENSITIVITY:
        given = [swap for swap in linears if swap.name in fixed]
        more += sum(size_bits(swap, spec, average) - size_bits(swap, spec, fixed[swap.name]) for swap in given)
    if more and free:
        room = sum(size_bits(swap, spec, average) for swap in free) + more
        most = MAX_BITS if asked.target_size else average + (1.0 if config.target else _MOST_MORE)
        average = min(average_in(free, spec, room), most)
    return spec.with_bits({**spread_evenly(free, spec, average), **fixed}), average


def bits_for_size(
    config: CompressConfig, swaps: Sequence[Swap], skeleton: Any, size_of: Callable[[str], int], *, target_bytes: int
) -> float:
    """The average number of bits of a linear at which the result's weights take so many bytes.

    Raises UserError for a size that no average gives.
    """
    linears = [swap for swap in swaps if swap.clustered]
    if all(Override.of(config.overrides, swap.name).bits for swap in linears):
        raise UserError("--target-size is met by bits that --override leaves open, but it gives all; leave one out")
    tiles = [(one.pattern, one.granularity) for one in map(Override.parse, config.overrides) if one.granularity]
    config = replace(config, overrides=tuple(f"{pattern}: granularity={tile}" for pattern, tile in tiles))
    spec, _ = planned_spec(config, swaps, asked=config)
    others = other_bytes(skeleton, swaps, spec, size_of)
    least, most = (others + sum(size_bits(swap, spec, bits) for swap in linears) / 8 for bits in (MIN_BITS, MAX_BITS))
    if not least <= target_bytes <= most:
        sizes = f"{least / 1e6:.1f} to {most / 1e6:.1f} MB"
        rule = f"--target-size must be {sizes} for this model with --embedding-bits {config.embedding_bits}"
        raise UserError(f"{rule}, got {target_bytes / 1e6:.1f} MB; give another size, or other --embedding-bits")
    return average_in(linears, spec, 8.0 * (target_bytes - others))


def other_bytes(skeleton: Any, swaps: Sequence[Swap], spec: QuantizationSpec, size_of: Callable[[str], int]) -> int:
    """Bytes of what a result stores beside its clustered linears, parameters that stay dense with `size_of` a number."""
    packed = {f"{swap.name}.weight" for swap in swaps if not swap.reason and swap.role != OTHER}
    kept = sum(p.numel() * size_of(name) for name, p in skeleton.named_parameters() if name not in packed)
    parameters = dict(skeleton.named_parameters(remove_duplicate=False))
    kept += sum(t.numel() * t.element_size() for name, t in skeleton.state_dict().items() if name not in parameters)
    embeddings = [swap for swap in swaps if swap.rounded and not swap.tied]
    tensors = [pair for swap in embeddings for pair in spec.embedding_tensors(*swap.shape[:2]).values()]
    return kept + sum(dtype.itemsize * math.prod(shape) for dtype, shape in tensors)


def tried_bits(average: float) -> range:
    """The numbers of bits among which linears are given one.

    >>> list(tried_bits(3.0)), list(tried_bits(2.5)), list(tried_bits(1.0))
    ([2, 3, 4], [1, 2, 3, 4], [1, 2])
    """
    return range(max(MIN_BITS, math.floor(average) - _REACH), min(MAX_BITS, math.ceil(average) + _REACH) + 1)


def size_bits(swap: Swap, spec: QuantizationSpec, bits: float) -> float:
    """Bits of a linear's indices and tables. Between whole numbers of bits it is the mean, weighted by nearness."""
    low, high = math.floor(bits), math.ceil(bits)
    if low != high:
        return (high - bits) * size_bits(swap, spec, low) + (bits - low) * size_bits(swap, spec, high)
    return spec.linear_bits(swap.shape[0], swap.shape[1], low, layer=swap.name)


def embedding_bits_saved(swaps: Sequence[Swap], usual: int | str, fewer: int | str) -> int:
    """Bits that embeddings and output head take less at `fewer` bits a weight than at the `usual` number."""
    stored = [swap.shape for swap in swaps if swap.rounded and not swap.tied]

    def taken(bits: int | str, rows: int, columns: int) -> int:
        parts = parts_of(rows, *bits_by_row(bits, _vocabulary(swaps)))
        return sum(8 * (part.end - part.first) * packed_width(columns, part.bits) for part in parts)

    return sum(taken(usual, *shape) - taken(fewer, *shape) for shape in stored)


def average_in(swaps: Sequence[Swap], spec: QuantizationSpec, room: float) -> float:
    """The average at which linears take `room` bits in sum, at most 8. Raises UserError where less than one is left."""
    low, at_low = MIN_BITS, sum(size_bits(swap, spec, MIN_BITS) for swap in swaps)
    if at_low > room * (1 + 1e-9):
        raise UserError("--override leaves less than one bit for each of the other matrices; give less, or more --bits")
    while low < MAX_BITS:  # sizes grow in proportion between whole numbers
        if (at_high := sum(size_bits(swap, spec, low + 1) for swap in swaps)) >= room:
            return low + (room - at_low) / (at_high - at_low)
        low, at_low = low + 1, at_high
    return MAX_BITS


def spread_evenly(swaps: Sequence[Swap], spec: QuantizationSpec, average: float) -> dict[str, int]:
    """Bits without any measurement, in the same room: for planning, where only sizes count."""
    low, high = math.floor(average), math.ceil(average)
    if low == high:
        return {} if low == spec.bits else {swap.name: low for swap in swaps}
    return choose(swaps, {swap.name: {low: 1.0, high: 0.0} for swap in swaps}, spec, average)


def choose(
    swaps: Sequence[Swap], rises: Mapping[str, Mapping[int, float]], spec: QuantizationSpec, average: float
) -> dict[str, int]:
    """Module path -> bits, in the room of `average` bits for each linear.

    `rises[path][bits]` is what the loss is expected to rise by. Ties fall to the linear that comes first.
    """
    chosen = {swap.name: min(rises[swap.name]) for swap in swaps}
    room = sum(size_bits(swap, spec, average) for swap in swaps)
    room -= sum(size_bits(swap, spec, chosen[swap.name]) for swap in swaps)
    waiting: list[tuple[float, int]] = []

    def step_bits(swap: Swap) -> float:
        """The room that one more bit takes."""
        bits = chosen[swap.name]
        return size_bits(swap, spec, bits + 1) - size_bits(swap, spec, bits)

    def offer(number: int) -> None:
        """Put the next bit of a linear in the queue, by what it gains for its room."""
        swap = swaps[number]
        by_bits, bits = rises[swap.name], chosen[swap.name]
        if bits + 1 in by_bits:
            heapq.heappush(waiting, (-(by_bits[bits] - by_bits[bits + 1]) / step_bits(swap), number))

    for number in range(len(swaps)):
        offer(number)
    while waiting:
        _, number = heapq.heappop(waiting)
        needed = step_bits(swaps[number])
        if needed <= room * (1 + 1e-12):  # one that does not fit stays as it is; smaller ones may
            room -= needed
            chosen[swaps[number].name] += 1
            offer(number)
    return chosen


def expected_rise(weight: Tensor, tables: Tensor, importance: Tensor, granularity: Granularity) -> float:
    """`1/2 sum F (w - w~)^2` of a weight (out, in) that snaps to its tables (groups, 2**bits)."""
    snapped = snap(weight, tables, granularity=granularity)
    difference = (weight.detach().float() - snapped).square_().mul_(importance.to(weight.device))
    return 0.5 * float(difference.sum(dtype=torch.float64))


@torch.no_grad()
def rises_of(
    name: str, weight: Tensor, importance: Tensor | None, spec: QuantizationSpec, starts: Mapping[int, Tensor]
) -> dict[int, float]:
    """Bits -> what the loss is expected to rise by, of one linear with a weight (out, in), for each number whose tables
    start as given. `importance` are the squared gradients of one loss, (out, in).

    Some hundred bands of tables stand for all. A mean over so many is within a few percent, and errors differ by factors
    of four from one number of bits to the next. Raises UserError where the importance is missing or not that of weights.
    """
    if importance is None or importance.shape != weight.shape:
        rule = f"bits by sensitivity need the squared gradients of {name}, but there are none: the model does not call"
        raise UserError(f"{rule} it as a layer; give --skip '*.{name.rpartition('.')[2]}', or --allocation uniform")
    granularity = spec.granularity_of(name)
    bands = weight.shape[0] // granularity.tile(*weight.shape)[0]
    chosen = slice(None, None, (max(bands // _BANDS, 1) - 1) | 1)  # odd: rows of a head differ by their rotary angle
    weights, weighing = (full.detach().unflatten(0, (bands, -1))[chosen].flatten(0, 1) for full in (weight, importance))
    share, rises = weights.shape[0] / weight.shape[0], {}
    for bits, start in starts.items():
        tables = Grid(spec.palette, bits, spec.lut_dtype).tables(start).unflatten(0, (bands, -1))[chosen].flatten(0, 1)
        rises[bits] = expected_rise(weights, tables, weighing, granularity) / share
    return rises
