"""A linear layer on a clustered weight as one autograd function: the clustered weight lives only inside a call.

`y = x w~^T + b` needs w~ in backward (for dL/dx) and would keep it, one number per weight. Clustering costs a small
part of the matrix product, so backward computes w~ again from the weight, which is a parameter and in memory anyway.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from edkm_cli import kernels
from edkm_cli.clustering.checks import checked_importance, checked_tile, non_finite, require_finite
from edkm_cli.clustering.fused import Settings, gradients, iterated, open_passes
from edkm_cli.clustering.palette import parse_lut_dtype, round_lut
from edkm_cli.errors import UserError
from edkm_cli.granularity import Granularity
from edkm_cli.precision import as_autocast

MODES = ("soft", "hard", "straight-through")


def trains_luts(mode: str, iterations: int) -> bool:
    """Whether centroids are trained by gradient: in mode `straight-through`, and where no iteration moves them."""
    return mode == "straight-through" or iterations == 0


def _forward_weight(weight: Tensor, final: Tensor, options: Settings, dtype: torch.dtype) -> Tensor:
    """The weight that forward multiplies with, in `dtype`: computed in float32 and rounded once."""
    if options.mode == "soft":
        passes, spread = open_passes(weight, final.shape[1], options)
        return passes.soft(final, spread.tau, dtype)
    lut = round_lut(final, options.lut_dtype, options.lut_scale).to(final.dtype)
    snapped, finite = kernels.snap(weight.detach(), lut, options.tile, dtype)
    if finite is False:  # None where a GPU has not been asked
        raise non_finite(options.name)
    return snapped


class _ClusteredLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        centroids: Tensor,
        bias: Tensor | None,
        importance: Tensor | None,
        final: Tensor | None,
        options: Settings,
    ) -> Tensor:
        if final is None:
            final = iterated(weight, centroids, importance, options)[0]
        require_finite(final, layer=options.name)
        forward_weight = _forward_weight(weight, final, options, x.dtype)
        # The last centroids are k numbers for each group; in straight-through mode they are the start itself.
        saved = None if options.mode == "straight-through" else final
        ctx.save_for_backward(x, weight, centroids, importance, saved)
        ctx.options, ctx.bias_dtype = options, None if bias is None else bias.dtype
        return torch.nn.functional.linear(x, forward_weight, None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with _without_autocast(grad):
            (x, weight, centroids, importance, final), options = ctx.saved_tensors, ctx.options
            needs_x, needs_weight, needs_centroids, needs_bias = ctx.needs_input_grad[:4]
            grad_x = grad_weight = grad_centroids = grad_bias = None
            flat = grad.reshape(-1, grad.shape[-1])  # (tokens, out)
            if final is None:
                final = centroids.detach().to(kernels.centroid_dtype(weight))
            if needs_x:
                grad_x = grad @ _forward_weight(weight, final, options, x.dtype)
            if needs_weight or needs_centroids:
                grad_weight = flat.t() @ x.reshape(-1, x.shape[-1])  # (out, in), of the forward weight first
                if options.mode != "straight-through":
                    grad_weight, grad_centroids = gradients((weight, centroids, importance), options, grad_weight)
                elif needs_centroids:
                    lut = round_lut(final, options.lut_dtype, options.lut_scale).to(final.dtype)
                    entries = kernels.sum_by_entry(weight.detach(), lut, grad_weight, options.tile)
                    grad_centroids = entries.to(centroids.dtype)
            if needs_bias:
                grad_bias = flat.sum(0).to(ctx.bias_dtype)
            grad_weight = grad_weight.to(weight.dtype) if needs_weight and grad_weight is not None else None
            return grad_x, grad_weight, grad_centroids if needs_centroids else None, grad_bias, None, None, None


def _without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """Autocast off on the tensor's device; the meta device has none."""
    return nullcontext() if tensor.is_meta else torch.autocast(tensor.device.type, enabled=False)


def clustered_linear(
    x: Tensor,
    weight: Tensor,
    centroids: Tensor,
    bias: Tensor | None = None,
    *,
    granularity: str | Granularity,
    temperature: float = 1.0,
    iterations: int = 1,
    mode: str = "soft",
    lut_dtype: str | None = None,
    lut_scale: float | None = None,
    new_centroids: Tensor | None = None,
    importance: Tensor | None = None,
    name: str = "weight",
) -> Tensor:
    """`linear(x, w~, bias)` on the clustered weight w~, which is not saved but computed again in backward.

    Kept for backward: references to x, weight and centroids, and the last centroids (groups, k).
    Gradients go to x, weight, bias and the starting centroids, to each if it requires one.

    Args:
        x: (..., in). Its dtype is that of the matrix product and of the result; the weight's may differ.
        weight: (out, in), float64, float32, bfloat16 or float16. Its gradient has its dtype.
        centroids: (groups, k), the start of the iterations; the LUT itself in mode `straight-through`.
        temperature: relative to the population variance of the group; unused in mode `straight-through`.
        iterations: number of centroid updates; unused like `importance` in mode `straight-through`.
        mode: `soft` (DKM, arXiv 2108.12659): w~ is the attention-weighted sum of the centroids. `hard`: forward uses
            the nearest entry of the last centroids rounded to `lut_dtype`, backward DKM's gradient. `straight-through`:
            forward uses the nearest entry of the rounded LUT; the weight gets dL/dw~ as it is, an entry the sum of
            dL/dw~ over the weights assigned to it.
        lut_dtype: what the exported LUT is stored as (float32, float16, bfloat16, float8_e4m3fn, float8_e3m4); None:
            not rounded.
        lut_scale: fixed scale of float8 tables; None: the matrix's own.
        new_centroids: what `iterate_centroids` returned for the same arguments, to be computed once for all
            micro-batches of an optimizer step. Exact: they depend on weight and start only.
        importance: how much each weight counts in the centroid updates, (in,) or (out, in), as for `dense_dkm`.

    Returns (..., out) in x's dtype. Raises UserError for an unknown mode or LUT dtype, shapes that do not fit, and a weight
    that holds NaN or Inf (on a GPU, NaN comes out instead: see `require_finite`).
    """
    if mode not in MODES:
        raise UserError(f"mode must be one of {', '.join(MODES)}, got {mode!r} for {name}")
    tile = checked_tile(weight, centroids, granularity, layer=name)
    options = Settings(tile, temperature, iterations, name, mode, parse_lut_dtype(lut_dtype), lut_scale)
    final = centroids if mode == "straight-through" else new_centroids
    if final is not None:
        if final.shape != centroids.shape:
            raise UserError(f"new_centroids of {name} must be {tuple(centroids.shape)}, got {tuple(final.shape)}")
        final = final.detach().to(kernels.centroid_dtype(weight))
    mass = None if mode == "straight-through" else checked_importance(importance, weight, layer=name)
    x = as_autocast(x)
    with _without_autocast(x):
        return _ClusteredLinear.apply(x, weight, centroids, bias, mass, final, options)
