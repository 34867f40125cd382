"""Grids: tables that are a function of fewer numbers, as the formats of other engines have them.

Entry j of a group's table is `scale * template[j]`, or `scale * j + offset` (affine). What trains are two numbers of a group
in the units of its entries, so that tables of any kind move alike: the *spread* is the root mean square of the entries about
their middle, the *center* is where that is (zero without an offset). Scale and offset follow from them, rounded to the
number format in which they are stored; gradients pass the rounding straight through, times the template.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from edkm_cli import kernels
from edkm_cli.clustering.checks import non_finite, usable_importance
from edkm_cli.clustering.palette import kmeans_start, kmeans_starts, lut_scale, round_lut
from edkm_cli.granularity import AFFINE, FREE, MULTIPLES, SUPER_BLOCK, Granularity, table_numbers

_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_GROUPS = 1 << 14  # worked on at a time
# Scales that are tried, as shares of the one at which entries reach the largest weight.
_SHARES = tuple(0.55 + 0.05 * step for step in range(12))
_SHARES_E2M1 = tuple(0.7 + 0.06 * step for step in range(16))  # whose outer entries are far apart
_REFITS = 3  # of a scale to the entries that weights chose


@dataclass(frozen=True)
class Grid:
    """The tables of a linear: `palette` is a key of `PALETTES`, `lut_dtype` the number format of what is stored, and
    `lut_scale` a fixed factor of float8 numbers."""

    palette: str
    bits: int
    lut_dtype: str
    lut_scale: float | None = None

    @property
    def numbers(self) -> int:
        """Numbers that a table is trained as."""
        return table_numbers(self.palette, self.bits)

    def template(self) -> Tensor:
        """(2**bits,) float32: what a scale is multiplied with."""
        if self.palette == "iq4_nl":
            return torch.tensor(_IQ4_NL, dtype=torch.float32)
        if self.palette == "e2m1":  # code 8 is zero again, and chosen by no weight
            return torch.tensor([*_E2M1, 0.0, *(-value for value in _E2M1[1:])])
        return torch.arange(2**self.bits).float() - (0 if self.palette == AFFINE else 2 ** (self.bits - 1))

    def _middle(self) -> float:
        return (2**self.bits - 1) / 2 if self.palette == AFFINE else 0.0

    def basis(self) -> Tensor:
        """(numbers, 2**bits): what spread and center are multiplied with before anything is rounded."""
        about = self.template() - self._middle()
        rows = [about / self._unit()]
        return torch.stack([*rows, torch.ones_like(about)] if self.palette == AFFINE else rows)

    def _unit(self) -> float:
        return float((self.template() - self._middle()).square().mean().sqrt())

    def parameters(self, scale: Tensor, offset: Tensor | None) -> Tensor:
        """(groups, numbers) float32 of scales and offsets (groups,): the inverse of `stored`."""
        spread = scale.float() * self._unit()
        if offset is None:
            return spread[:, None]
        return torch.stack([spread, offset.float() + self._middle() * scale.float()], 1)

    def stored(self, parameters: Tensor) -> tuple[Tensor, Tensor | None]:
        """(scale, offset or None), (groups,) float32 each, as their number format holds them; differentiable."""
        scale, offset = self._numbers(parameters)
        return self._rounded(scale), None if offset is None else self._rounded(offset, least=True)

    def _rounded(self, numbers: Tensor, *, least: bool = False) -> Tensor:
        rounding = partial(round_lut, lut_dtype=self.lut_dtype, scale=self.lut_scale)
        return StraightThrough.apply(numbers, partial(self._multiples, least=least) if self.super_tiles else rounding)

    @property
    def super_tiles(self) -> int:
        """Tiles whose scales are whole multiples of one number; 0: a scale is a number by itself."""
        return SUPER_BLOCK // MULTIPLES[self.palette, self.bits][0] if self.lut_dtype == "int8" else 0

    def _numbers(self, parameters: Tensor) -> tuple[Tensor, Tensor | None]:
        scale = parameters[:, 0] / self._unit()
        return scale, parameters[:, 1] - self._middle() * scale if self.palette == AFFINE else None

    def _unit_of(self, numbers: Tensor, least: bool) -> Tensor:
        """(groups / super_tiles, 1) float32 that float16 holds: the unit of which `numbers` become multiples. Where
        multiples have a sign the extreme number is the least of them; else the highest, or with `least` the lowest, is
        the largest."""
        _, low, high = MULTIPLES[self.palette, self.bits]
        blocks = numbers.detach().float().view(-1, self.super_tiles)
        if low:
            unit = blocks.gather(1, blocks.abs().argmax(1, keepdim=True)) / low
        elif least:
            unit = blocks.amin(1, keepdim=True).clamp_max(0) / high
        else:
            unit = blocks.amax(1, keepdim=True).clamp_min(0) / high
        unit = round_lut(unit, "float16")
        return torch.where(unit == 0, 2.0**-24, unit)  # float16's smallest number

    def _multiples(self, numbers: Tensor, *, least: bool) -> Tensor:
        _, low, high = MULTIPLES[self.palette, self.bits]
        unit = self._unit_of(numbers, least)
        return (numbers.view(-1, self.super_tiles) / unit).round_().clamp_(low, high).mul_(unit).view_as(numbers)

    def tables(self, parameters: Tensor) -> Tensor:
        """The tables (groups, 2**bits) float32 that parameters (groups, numbers) stand for; differentiable."""
        if self.palette == FREE:
            return self._rounded(parameters)
        return self.of_stored(*self.stored(parameters))

    def of_stored(self, scale: Tensor, offset: Tensor | None) -> Tensor:
        """The tables (groups, 2**bits) float32 of stored scales and offsets (groups,)."""
        table = scale[:, None] * self.template().to(scale.device)
        return table if offset is None else table + offset[:, None]

    def factor(self, parameters: Tensor) -> Tensor | None:
        """What stored numbers are multiplied with: of float8 ones see `lut_scale`, of multiples their units (groups /
        super_tiles, numbers) float16; None for other formats."""
        if self.super_tiles:
            named = zip(self._numbers(parameters), (False, True), strict=True)
            return torch.cat([self._unit_of(each, least) for each, least in named if each is not None], 1).half()
        return lut_scale(self.scaled_numbers(parameters), self.lut_dtype, self.lut_scale)

    def scaled_numbers(self, parameters: Tensor) -> Tensor:
        """What has a factor beside it in float8: the entries of free tables, (groups, 2**bits), else scales, (groups,)."""
        return parameters if self.palette == FREE else self._numbers(parameters)[0]

    @torch.no_grad()
    def start(
        self, weight: Tensor, *, granularity: Granularity, importance: Tensor | None = None, name: str = "weight"
    ) -> Tensor:
        """Parameters (groups, numbers) float32 that represent a weight (out, in) well: k-means where tables are free, else
        the best of some scales that can be stored, fitted to the entries that it makes weights choose.

        `importance` is as `kmeans_start` takes it. Raises UserError as that does.
        """
        options: dict[str, Any] = {"granularity": granularity, "importance": importance, "name": name}
        if self.palette == FREE:
            return kmeans_start(weight, 2**self.bits, **options)
        tile = granularity.tile(weight.shape[0], weight.shape[1], layer=name)
        values = kernels.to_groups(weight.detach().float(), tile)
        if weight.is_meta:
            return values.new_empty(len(values), self.numbers)
        if not bool(values.sum(dtype=torch.float64).isfinite()):
            raise non_finite(name)
        masses = torch.ones_like(values)
        if importance is not None:
            masses = kernels.to_groups(usable_importance(importance, weight, layer=name).expand(weight.shape), tile)
            masses = torch.where(masses.sum(1, keepdim=True) > 0, masses, 1.0)
        parts = zip(values.split(_GROUPS), masses.split(_GROUPS), strict=True)
        # A scale's unit depends on its neighbours'.
        grid = replace(self, lut_dtype="float16") if self.super_tiles else self
        found = torch.cat([grid._search(part, mass) for part, mass in parts])
        offsets = self._numbers(found)[1] if self.super_tiles else None
        if offsets is not None:  # of multiples none is above zero: such tiles reach from zero to their largest number
            from_zero = self.parameters(values.amax(1) / (2**self.bits - 1), torch.zeros_like(offsets))
            found = torch.where(offsets[:, None] > 0, from_zero, found)
        return found

    def starts(self, weight: Tensor, widths: Sequence[int], **options: Any) -> list[Tensor]:
        """`start` of the grid with other numbers of bits, ascending; tables that are free are found together."""
        if self.palette == FREE:
            return kmeans_starts(weight, [2**bits for bits in widths], **options)
        return [replace(self, bits=bits).start(weight, **options) for bits in widths]

    def _search(self, values: Tensor, masses: Tensor) -> Tensor:
        """`start` of some groups, (groups, n) each."""
        tile = (1, values.shape[1])

        def entries(candidate: Tensor) -> Tensor:
            tables = self.tables(candidate)
            return kernels.lookup(kernels.nearest(values, tables, tile), tables, tile, torch.float32)

        def better(candidate: Tensor, best: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
            error = entries(candidate).sub_(values).square_().mul_(masses).sum(1)
            return torch.where((error < least)[:, None], candidate, best), torch.minimum(error, least)

        best, least = values.new_zeros(len(values), self.numbers), values.new_full((len(values),), torch.inf)
        for candidate in self._candidates(values):
            best, least = better(candidate, best, least)
            if self.palette == AFFINE:  # both ends matter, and candidates move them alike
                best, least = better(self._fitted(candidate, entries(candidate), values, masses), best, least)
        for _ in range(_REFITS):
            best, least = better(self._fitted(best, entries(best), values, masses), best, least)
        return best

    def _fitted(self, candidate: Tensor, entries: Tensor, values: Tensor, masses: Tensor) -> Tensor:
        """Parameters of least weighted error for the entries that a candidate makes weights choose, (groups, n) each."""
        scale, offset = self.stored(candidate)
        center = shift = torch.zeros_like(scale)
        if offset is not None:
            total = masses.sum(1)
            center, shift = (entries * masses).sum(1) / total, (values * masses).sum(1) / total
        about = entries - center[:, None]
        weighted = about * masses
        spread = (weighted * about).sum(1)
        slope = torch.where(spread > 0, (weighted * values).sum(1) / spread, 1.0)
        return self.parameters(slope * scale, None if offset is None else slope * (offset - center) + shift)

    def _candidates(self, values: Tensor) -> list[Tensor]:
        if self.palette == AFFINE:
            low, high = values.amin(1), values.amax(1)
            middle, half = (low + high) / 2, (high - low) / 2
            steps = 2**self.bits - 1
            return [self.parameters(2 * share * half / steps, middle - share * half) for share in _SHARES[:10:2]]
        largest = values.gather(1, values.abs().argmax(1, keepdim=True))[:, 0]
        template = self.template()
        ends = {float(template.min()), float(template.max())}
        if -min(ends) == max(ends):
            largest, ends = largest.abs(), {max(ends)}
        shares = _SHARES_E2M1 if self.palette == "e2m1" else _SHARES
        return [self.parameters(share * largest / end, None) for end in sorted(ends) for share in shares]


def stored_numbers(stored: Mapping[str, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """(scales, offsets or None) of a palette, (groups,) float32 each, of what a checkpoint stores of it by name."""
    factor = stored.get("lut_scale")
    scales, offsets = (
        None if numbers is None else (numbers.float() * unit_of(factor, which, numbers.shape[-1])).flatten()
        for which, numbers in enumerate((stored.get("scales"), stored.get("offsets")))
    )
    assert scales is not None
    return scales, offsets


def unit_of(factor: Tensor | None, which: int, tiles: int) -> Tensor | float:
    """What stored scales (`which` 0) or offsets (rows, tiles) are multiplied with, of a `lut_scale` (1,) or, where they are
    multiples, (rows, super-blocks, numbers)."""
    if factor is None or factor.dim() < 3:
        return 1.0 if factor is None else factor
    return factor[:, :, which].float().repeat_interleave(tiles // factor.shape[1], 1)


def search_bytes(grid: Grid, weights: int, group: int) -> int:
    """What the search of a start holds beside so many weights, in groups of `group`: weights and their importance by
    groups, and of `_GROUPS` of them some numbers of each."""
    return 2 * 4 * weights + 4 * _GROUPS * (group * (4 + 2 * grid.numbers) + 2**grid.bits)


class StraightThrough(torch.autograd.Function):
    """What `rounding` makes of numbers, with the gradient of the identity (straight-through estimator)."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
        return rounding(numbers)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
