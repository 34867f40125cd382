"""Checks of a weight and its centroids: shapes that fit the geometry, k in range, finite numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from edkm_cli.errors import UserError
from edkm_cli.granularity import Granularity
from edkm_cli.kernels import Tile

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_k(k: int, *, layer: str = "weight") -> None:
    """Raise UserError unless 2 <= k <= 256."""
    if not 2 <= k <= 256:
        raise UserError(f"a LUT has 2 to 256 entries (1 to 8 bits), got {k} for {layer}; choose bits in that range")


def checked_tile(
    shaped: Tensor, centroids: Tensor, granularity: str | Granularity, *, layer: str = "weight", indices: bool = False
) -> Tile:
    """The tile (R, C) of the geometry on a weight (or its indices). Raises UserError, naming `layer`, if unfit."""
    if shaped.dim() != 2 or shaped.numel() == 0:
        raise UserError(f"{layer} must be a matrix (out, in) that is not empty, got shape {tuple(shaped.shape)}")
    if not indices and shaped.dtype not in _DTYPES:
        raise UserError(f"{layer} must be float64, float32, bfloat16 or float16, got {shaped.dtype}; convert it first")
    tile = Granularity.parse(granularity).tile(*shaped.shape, layer=layer)
    groups = (shaped.shape[0] // tile[0]) * (shaped.shape[1] // tile[1])
    if centroids.dim() != 2 or centroids.shape[0] != groups:
        raise UserError(
            f"centroids of {layer} must be (groups, k) = ({groups}, k) at granularity {granularity}, "
            f"got {tuple(centroids.shape)}; make them with kmeans_start"
        )
    check_k(centroids.shape[1], layer=layer)
    return tile


def require_finite(tensor: Tensor, *, layer: str = "weight") -> None:
    """Raise UserError for NaN or Inf in what was computed from a weight.

    Not on a GPU: the answer would wait for all work queued before it, in every layer of every pass. There NaN spreads
    to the layer's output, and the trainer sees it in the loss and in the gradient's norm, once in each step.
    """
    if not tensor.is_cuda and not bool(tensor.isfinite().all()):
        raise non_finite(layer)


def non_finite(layer: str) -> UserError:
    """The error for NaN or Inf in a weight."""
    return UserError(
        f"weights must be finite, but {layer} or its centroids hold NaN or Inf; "
        "the checkpoint is damaged or training diverged: lower the learning rate or load an earlier checkpoint"
    )
