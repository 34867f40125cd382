"""Bits by sensitivity: which linears get more bits and which fewer, in no more room than the same number for all.

Each linear is clustered at several widths. With the squared gradients F of the loss (the diagonal Fisher matrix of
`importance.py`) the expected rise of the loss is `1/2 sum_i F_i (w_i - w~_i)^2`, the second-order term that a Hessian of
that diagonal gives (SqueezeLLM, arXiv 2306.07629, section 4.1). `edkm_cli.nn.allotment` chooses among the
widths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from edkm_cli.clustering import kmeans_start, snap
from edkm_cli.errors import UserError
from edkm_cli.format import QuantizationSpec
from edkm_cli.nn.allotment import choose, widths
from edkm_cli.nn.swap import Swap
from edkm_cli.progress import Track, no_progress

_BANDS = 128  # rows of tables that a sensitivity is measured on, at the least, where a matrix has so many


def expected_rise(weight: Tensor, centroids: Tensor, importance: Tensor, spec: QuantizationSpec) -> float:
    """`1/2 sum F (w - w~)^2` of a weight (out, in) that snaps to its tables (groups, 2**bits)."""
    snapped = snap(weight, centroids, granularity=spec.granularity, lut_dtype=spec.lut_dtype)
    difference = (weight.detach().float() - snapped).square_().mul_(importance.to(weight.device))
    return 0.5 * float(difference.sum(dtype=torch.float64))


def sampled_rows(weight: Tensor, spec: QuantizationSpec) -> Tensor:
    """Rows of a weight (out, in) that stand for all of them, ascending: whole tables, some hundred of them or all. A mean
    over so many is within a few percent, and widths differ by factors of four."""
    tile = spec.granularity.tile(weight.shape[0], weight.shape[1])[0]
    bands = torch.arange(weight.shape[0], device=weight.device).view(-1, tile)
    return bands[:: max(1, bands.shape[0] // _BANDS)].flatten()


@torch.no_grad()
def allocate(
    model: Any,
    swaps: Sequence[Swap],
    importance: Mapping[str, Tensor],
    spec: QuantizationSpec,
    average: float,
    *,
    track: Track = no_progress,
) -> dict[str, int]:
    """The bits of each linear of a dense model, by module path.

    Args:
        swaps: the linears.
        importance: of each linear's weights, (out, in), the squared gradients of one loss.
        spec: geometry and number format of the tables.
        average: bits, at least 1 and at most 8; the result takes no more room than a model with so many everywhere.

    Raises UserError where the importance is missing or not that of weights.
    """
    rises: dict[str, dict[int, float]] = {}
    for swap in track(list(swaps), "sensitivity", len(swaps)):
        weight, weighing = model.get_submodule(swap.name).weight, importance.get(swap.name)
        if weighing is None or weighing.shape != weight.shape:
            raise UserError(
                f"--allocation sensitivity needs the squared gradients of {swap.name}, but there are none; use "
                "--importance gradient, and --skip for modules that the text does not reach"
            )
        rows = sampled_rows(weight, spec)
        some, its = weight.detach()[rows], weighing[rows]
        share = some.shape[0] / weight.shape[0]
        rises[swap.name] = {}
        for bits in widths(average):
            tables = kmeans_start(some, 2**bits, granularity=spec.granularity, importance=its, name=swap.name)
            rises[swap.name][bits] = expected_rise(some, tables, its, spec) / share
    return choose(swaps, rises, spec, average)
