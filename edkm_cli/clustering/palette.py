"""Lookup tables: by k-means per LUT group for the start, the nearest entry of each weight, entries as they are stored.

Each weight counts by its squared gradient or by the mean squared input of its column (SqueezeLLM, arXiv 2306.07629).
Before any training this decides the perplexity: on SmolLM2-135M at 3 bits, unweighted k-means with one LUT for each
matrix gives about 400,000, k-means by squared gradients with one for each row 54 (docs/log.md). In one dimension the
global optimum can be computed; the C kernel does so (edkm_cli/kernels/kmeans.c).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from edkm_cli import kernels
from edkm_cli.clustering.checks import check_k, checked_tile, non_finite, usable_importance
from edkm_cli.errors import UserError
from edkm_cli.granularity import E3M4, LARGEST, LUT_DTYPES, Granularity
from edkm_cli.packing import rounded_to


@torch.no_grad()
def kmeans_start(
    weight: Tensor, k: int, *, granularity: str | Granularity, importance: Tensor | None = None, name: str = "weight"
) -> Tensor:
    """Centroids (groups, k) float32 that minimise the weighted squared error of snapping each weight (out, in) to its
    nearest, ascending in each group. With fewer distinct values than k the last one is repeated.

    The global optimum, where a compiler is at hand and a group has at most 65,536 distinct values; beyond that the
    optimum over 65,536 cut points, converged by Lloyd's iteration. Weights on a GPU are copied to the host for that:
    sorting them there costs less than many short iterations here. Without a compiler the best of several converged
    Lloyd runs, where the weight is.

    `importance` is a number for each column (in,), or for each weight (out, in), not negative. Weights of importance zero
    are ignored; a group that has no others is clustered unweighted. Raises UserError for k outside 2 to 256, shapes that do
    not fit, NaN or Inf, and negative importance.
    """
    return kmeans_starts(weight, [k], granularity=Granularity.parse(granularity), importance=importance, name=name)[0]


@torch.no_grad()
def kmeans_starts(
    weight: Tensor, ks: Sequence[int], *, granularity: Granularity, importance: Tensor | None = None, name: str
) -> list[Tensor]:
    """`kmeans_start` for each number k of some, ascending, at the cost of the largest."""
    for k in ks:
        check_k(k, layer=name)
    tile = granularity.tile(weight.shape[0], weight.shape[1], layer=name)
    home = weight.device
    if weight.is_cuda and kernels.build.library() is not None:  # finds the optimum, in host memory
        weight = weight.cpu()
    values = weight.detach().float()
    if not bool(values.sum(dtype=torch.float64).isfinite()):
        raise non_finite(name)
    masses = None
    if importance is not None:
        masses = kernels.to_groups(usable_importance(importance, weight, layer=name).expand(weight.shape), tile)
    return [centroids.to(home) for centroids in kernels.kmeans(kernels.to_groups(values, tile), masses, ks)]


def parse_lut_dtype(lut_dtype: str | None) -> str | None:
    """The name of a LUT dtype (`float8_e4m3fn`). Raises UserError for any other."""
    if lut_dtype is not None and lut_dtype not in LUT_DTYPES:
        raise UserError(f"lut_dtype must be one of {', '.join(LUT_DTYPES)}, got {lut_dtype}")
    return lut_dtype


def lut_scale(centroids: Tensor, lut_dtype: str | None, fixed: float | None = None) -> Tensor | None:
    """The power of two that a float8 table's stored entries are multiplied with, a float32 scalar, or of float8_e3m4 one for
    each table, (groups, 1); None for other dtypes.

    float8_e4m3fn has three bits of mantissa down to 2**-6, and steps of 2**-9 below, where the weights of a model lie;
    float8_e3m4 has four bits down to 2**-2, and steps of 2**-6 below. The scale puts the largest entry of the matrix, or
    table, between half the dtype's largest number and that, so that all entries down to 2**-14 of it keep their three
    bits, or down to 2**-5 their four: a matrix of which one row has a weight of 600 times the mean (Qwen2.5 has some) would
    have few entries left for its others. Being a power of two, it rounds nothing itself. A `fixed` one is taken as it is.
    """
    if (dtype := parse_lut_dtype(lut_dtype)) not in LARGEST:
        return None
    if fixed is not None:
        return torch.tensor(fixed, dtype=torch.float32, device=centroids.device)
    sizes = centroids.detach().float().abs()
    largest = (sizes.amax(1, keepdim=True) if dtype == E3M4 else sizes.amax()) / LARGEST[dtype]
    mantissa, exponent = torch.frexp(largest)
    exponent = (exponent - (mantissa == 0.5).int()).clamp(-100, 100)  # so that what is rounded already stays as it is
    return torch.where(largest > 0, torch.ldexp(torch.ones_like(largest), exponent), torch.ones_like(largest))


def round_lut(centroids: Tensor, lut_dtype: str | None, scale: float | None = None) -> Tensor:
    """The centroids as a LUT of `lut_dtype` stores them, as float32 (float64 stays if `lut_dtype` is None).

    Rounds to nearest; what is beyond the dtype's range becomes its largest finite value. float8 tables are scaled (see
    `lut_scale`), by a fixed `scale` where one is given.

    >>> round_lut(torch.tensor([[0.3, 1000.0]]), "float8_e4m3fn").tolist()
    [[0.3125, 1024.0]]
    """
    if (dtype := parse_lut_dtype(lut_dtype)) is None:
        return centroids if centroids.dtype == torch.float64 else centroids.float()
    held, factor = torch.finfo(getattr(torch, dtype, torch.float32)), lut_scale(centroids, dtype, scale)
    limit = LARGEST.get(dtype, held.max)
    least = held.tiny if dtype == "float8_e8m0fnu" else -limit  # which has no sign and no zero
    numbers = centroids.float() if factor is None else centroids.float() / factor
    rounded = rounded_to(numbers.clamp(least, limit), dtype)
    return rounded if factor is None else rounded * factor


@torch.no_grad()
def nearest_indices(weight: Tensor, centroids: Tensor, *, granularity: str | Granularity) -> Tensor:
    """Index of each weight's nearest centroid, (out, in) uint8.

    `centroids` (groups, k) need not be sorted; ties go to the lower index. Raises UserError if shapes do not fit.

    >>> weight, lut = torch.tensor([[-1.0, 0.2, 0.9]]), torch.tensor([[-1.0, 0.0, 1.0]])
    >>> nearest_indices(weight, lut, granularity="tensor").tolist()
    [[0, 1, 2]]
    """
    return kernels.nearest(weight, centroids, checked_tile(weight, centroids, granularity))


@torch.no_grad()
def lookup(indices: Tensor, centroids: Tensor, *, granularity: str | Granularity) -> Tensor:
    """The dense weight (out, in) of indices (out, in) uint8 and a LUT (groups, k), in the LUT's dtype: a gather.

    >>> lut = torch.tensor([[-1.0, 0.0, 1.0]])
    >>> lookup(torch.tensor([[0, 2, 2]], dtype=torch.uint8), lut, granularity="tensor").tolist()
    [[-1.0, 1.0, 1.0]]
    """
    tile = checked_tile(indices, centroids, granularity, layer="indices", indices=True)
    return kernels.lookup(indices, centroids, tile, centroids.dtype)


@torch.no_grad()
def snap(
    weight: Tensor,
    centroids: Tensor,
    *,
    granularity: str | Granularity,
    lut_dtype: str | None = None,
    scale: float | None = None,
    name: str = "weight",
) -> Tensor:
    """Each weight's nearest entry of the LUT rounded to `lut_dtype`, (out, in) float32 (float64 for float64 weights).

    Equal, bit for bit, to `lookup(nearest_indices(weight, lut), lut)` with `lut = round_lut(centroids, lut_dtype, scale)`.
    Raises UserError if shapes do not fit or the weight holds NaN or Inf.
    """
    tile = checked_tile(weight, centroids, granularity, layer=name)
    lut = round_lut(centroids, lut_dtype, scale).to(kernels.centroid_dtype(weight))
    snapped, finite = kernels.snap(weight, lut, tile, lut.dtype)
    if not (bool(snapped.isfinite().all()) if finite is None else finite):
        raise non_finite(name)
    return snapped
