"""How much each weight counts in clustering: its importance, checked and made relative to the others of its group."""

from __future__ import annotations

import torch
from torch import Tensor

from edkm_cli import kernels
from edkm_cli.errors import UserError
from edkm_cli.granularity import Granularity


def checked_importance(importance: Tensor | None, weight: Tensor, *, layer: str = "weight") -> Tensor | None:
    """The importance without its gradient. Raises UserError unless its shape is (in,) or (out, in)."""
    if importance is not None and importance.shape not in (weight.shape, weight.shape[1:]):
        raise UserError(
            f"importance of {layer} must be (in,) or (out, in) = {tuple(weight.shape)}, got {tuple(importance.shape)}"
        )
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
    """The importance divided by its mean in each group, bfloat16: what `dense_dkm` and all that follow it take.

    Only the ratios inside a group decide where its centroids go, and an average of 1 keeps them far above the mass of an
    empty cluster. A group of zeros becomes one of ones. bfloat16 holds a ratio to 0.4%, and 1 exactly.

    Args:
        importance: (in,) for columns, or (out, in); not negative.
        weight: (out, in), for shape and device.

    Raises UserError if shapes do not fit, for NaN, Inf, and negative numbers.

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
