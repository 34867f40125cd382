"""Differentiable k-means without its memory: the closed form of DKM's forward and backward (docs/clustering.md).

Nothing of size (weights, k) is kept, and nothing of the weight's size either: backward keeps references to the weight
and the starting centroids, and computes the intermediate centroids again. See `edkm_cli.kernels.closed_form`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from edkm_cli import kernels
from edkm_cli.clustering.checks import checked_importance, checked_tile, require_finite
from edkm_cli.granularity import Granularity
from edkm_cli.kernels import Spread, Tile
from edkm_cli.kernels.closed_form import Passes


class Settings(NamedTuple):
    """Of a clustering: the tile, the relative temperature, the number of centroid updates, the layer in error messages; of a
    linear also its mode, and what its tables are rounded to."""

    tile: Tile
    temperature: float
    iterations: int
    name: str
    mode: str = "soft"
    lut_dtype: str | None = None
    lut_scale: float | None = None


def open_passes(weight: Tensor, k: int, settings: Settings, importance: Tensor | None = None) -> tuple[Passes, Spread]:
    """The passes over a weight and its groups' temperatures. See `require_finite` for NaN and Inf."""
    passes = kernels.passes(weight.detach(), settings.tile, k, importance)
    mean, variance = passes.spread()
    require_finite(variance, layer=settings.name)
    return passes, kernels.relative_temperature(mean, variance, settings.temperature)


def iterated(
    weight: Tensor, centroids: Tensor, importance: Tensor | None, settings: Settings
) -> tuple[Tensor, Passes, Spread]:
    """(the centroids after the updates in their own dtype of computation, what `open_passes` returns)."""
    passes, spread = open_passes(weight, centroids.shape[1], settings, importance)
    final = passes.iterate(centroids.detach().to(kernels.centroid_dtype(weight)), spread.tau, settings.iterations)
    require_finite(final, layer=settings.name)
    # Without an update they would be an input that is returned as an output.
    return final.clone() if settings.iterations == 0 else final, passes, spread


def gradients(
    saved: Sequence[Any], settings: Settings, grad: Tensor | None, grad_centroids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(dL/dweight in any dtype, dL/dcentroids) from the gradients of the clustered weight and of the last centroids; `saved`
    are weight, centroids and importance."""
    weight, centroids, importance = saved
    passes, spread = open_passes(weight, centroids.shape[1], settings, importance)
    start = centroids.detach().to(kernels.centroid_dtype(weight))
    grad_weight, grad_start = passes.backward(start, spread, settings.iterations, grad, grad_centroids)
    return grad_weight, grad_start.to(centroids.dtype)


class _FusedDkm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, centroids: Tensor, importance: Tensor | None, settings: Settings
    ) -> tuple[Tensor, Tensor]:
        final, passes, spread = iterated(weight, centroids, importance, settings)
        ctx.save_for_backward(weight, centroids, importance)
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        return passes.soft(final, spread.tau, weight.dtype), final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_centroids: Tensor | None) -> tuple[Tensor | None, ...]:
        return *gradients(ctx.saved_tensors, ctx.settings, grad, grad_centroids), None, None


def fused_dkm(
    weight: Tensor,
    centroids: Tensor,
    *,
    granularity: str | Granularity,
    temperature: float,
    iterations: int,
    importance: Tensor | None = None,
    name: str = "weight",
) -> tuple[Tensor, Tensor]:
    """`dense_dkm` with its values and gradients, saving nothing but references to its inputs for backward.

    A bfloat16 or float16 weight with one LUT goes by a table of its distinct values, every other weight is attended
    to again in backward (eDKM, arXiv 2309.00964, section 2.2, taken to its end: docs/clustering.md).

    Arguments and results are those of `dense_dkm`; both results are differentiable with respect to weight and start. `name`
    is the layer's in error messages. Raises UserError for a weight that holds NaN or Inf, too (on a GPU, NaN comes out).
    """
    tile = checked_tile(weight, centroids, granularity, layer=name)
    mass = checked_importance(importance, weight, layer=name)
    return _FusedDkm.apply(weight, centroids, mass, Settings(tile, temperature, iterations, name))


@torch.no_grad()
def iterate_centroids(
    weight: Tensor,
    centroids: Tensor,
    *,
    granularity: str | Granularity,
    temperature: float,
    iterations: int,
    importance: Tensor | None = None,
    name: str = "weight",
) -> Tensor:
    """The centroids after `iterations` updates (groups, k), without a gradient: what a trainer keeps once in each step.

    They depend on the weight and the start only, so one call serves all micro-batches of an optimizer step
    (`clustered_linear(new_centroids=...)`). Arguments and errors as for `fused_dkm`.
    """
    tile = checked_tile(weight, centroids, granularity, layer=name)
    mass = checked_importance(importance, weight, layer=name)
    return iterated(weight, centroids, mass, Settings(tile, temperature, iterations, name))[0]
