"""Checks of a weight, its centroids and its importance: shapes that fit the geometry, k in range, finite numbers."""

import torch
from torch import Tensor

from edkm_cli import kernels
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
        rule = f"centroids of {layer} must be (groups, k) = ({groups}, k) at granularity {granularity}"
        raise UserError(f"{rule}, got {tuple(centroids.shape)}; make them with kmeans_start")
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
    rule = f"weights must be finite, but {layer} or its centroids hold NaN or Inf; the checkpoint is damaged"
    return UserError(f"{rule} or training diverged: lower the learning rate or load an earlier checkpoint")


def checked_importance(importance: Tensor | None, weight: Tensor, *, layer: str = "weight") -> Tensor | None:
    """The importance without its gradient. Raises UserError unless its shape is (in,) or (out, in)."""
    if importance is not None and importance.shape not in (weight.shape, weight.shape[1:]):
        raise UserError(f"importance of {layer} must be (in,) or {tuple(weight.shape)}, got {tuple(importance.shape)}")
    return None if importance is None else importance.detach()


def usable_importance(importance: Tensor, weight: Tensor, *, layer: str = "weight") -> Tensor:
    """The importance in float32, on the weight's device. Raises UserError unless it fits, is finite and not negative."""
    checked = checked_importance(importance, weight, layer=layer)
    assert checked is not None
    checked = checked.to(device=weight.device, dtype=torch.float32)
    if not bool(checked.sum(dtype=torch.float64).isfinite()) or bool((checked < 0).any()):
        raise UserError(f"importance of {layer} must be finite and not negative; check the calibration statistics")
    return checked


@torch.no_grad()
def relative_importance(
    importance: Tensor, weight: Tensor, *, granularity: str | Granularity, layer: str = "weight"
) -> Tensor:
    """The importance, (in,) for columns or (out, in), divided by its mean in each group, bfloat16: what `dense_dkm` and all
    that follow it take.

    Only the ratios inside a group decide where its centroids go, and an average of 1 keeps them far above the mass of an
    empty cluster. A group of zeros becomes one of ones. bfloat16 holds a ratio to 0.4%, and 1 exactly. Raises UserError if
    shapes do not fit, for NaN, Inf, and negative numbers.

    >>> relative_importance(torch.tensor([1.0, 3.0]), torch.zeros(2, 2), granularity="tensor").tolist()
    [0.5, 1.5]
    """
    masses = usable_importance(importance, weight, layer=layer)
    rows, columns = Granularity.parse(granularity).tile(weight.shape[0], weight.shape[1], layer=layer)
    matrix, tile = (masses[None], (1, columns)) if masses.dim() == 1 else (masses, (rows, columns))
    grouped = kernels.to_groups(matrix, tile)
    mean = grouped.mean(1, keepdim=True, dtype=torch.float64).float()
    relative = torch.where(mean > 0, grouped / mean, 1.0)
    return kernels.from_groups(relative, matrix.shape, tile).to(torch.bfloat16).reshape(masses.shape)
