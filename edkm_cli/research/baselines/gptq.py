"""GPTQ (arXiv 2210.17323): round columns one by one, and change the remaining columns to make up for each error.

For a layer with inputs X the error of a quantized weight is tr((W - Q) H (W - Q)^T) with H = X X^T. Rounding column j
leaves the best correction of the remaining columns in closed form, through the inverse of H over them:

    W[:, j:] -= (W[:, j] - Q[:, j]) / U[j, j] * U[j, j:]          U^T U = H^-1, U upper triangular

All rows share H, so one Cholesky factor replaces the updates of the inverse (section 3.3, step 3). Errors reach columns
beyond the current block of 128 in one product (step 2). Options and departures: docs/baselines.md.
"""

from typing import Any

import torch
from torch import Tensor, nn

from edkm_cli.errors import UserError
from edkm_cli.initialize.compensate import inverse_factor, rounded_in_order
from edkm_cli.nn.hooks import Reached, hooked
from edkm_cli.research.baselines.blocks import BlockStream, Gram
from edkm_cli.research.baselines.grid import Uniform
from edkm_cli.research.baselines.outcome import Outcome, Task, check_positive

ORDERS = ("natural", "activation", "within-groups")
_LAZY_COLUMNS = 128
_ORDER_BITS = 16


@torch.no_grad()
def quantize(
    task: Task, *, symmetric: bool = False, order: str = "natural", static_groups: bool = False, damping: float = 0.01
) -> Outcome:
    """Quantize a model's decoder linears in place, calibrated on the task's text.

    Args:
        symmetric: grids of the rule `symmetric` in place of `minmax` (see `grid`).
        static_groups: fit all groups' grids to the weights as they were, before the first column is rounded.
        damping: share of the mean diagonal added to H's diagonal.

    Raises UserError for bits, order or damping out of range, no calibration text, or a group size that does not divide
    a layer.
    """
    if order not in ORDERS:
        raise UserError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")
    check_positive(damping=damping)
    form = Uniform(task.bits, task.group_size, "symmetric" if symmetric else "minmax")
    layers, stream = form.linears(task.model), BlockStream(task.model, task.batches)
    for index, (path, block) in enumerate(task.track(stream.blocks.items(), "gptq", len(stream.blocks))):
        for stage in stream.stages(index):
            members: list[Any] = [block.get_submodule(name) for name in stage if f"{path}.{name}" in layers]
            if not members:
                continue
            stacked = torch.cat([layer.weight.float() for layer in members])  # they share an input, and so a Hessian
            how: dict[str, Any] = {"order": order, "static_groups": static_groups, "damping": damping}
            quantized = quantize_weight(stacked, _hessian(stream, index, members[0]), form, **how)
            for layer, part in zip(members, quantized.split([layer.out_features for layer in members]), strict=True):
                layer.weight.copy_(part)
        stream.hidden = stream.run(index)
    stores_order = order == "activation" and task.group_size > 0 and not static_groups
    return form.outcome(layers, order_bits=_ORDER_BITS * stores_order, calibration_tokens=stream.tokens)


def _hessian(stream: BlockStream, index: int, layer: nn.Linear) -> Tensor:
    gram = Gram()
    with hooked([layer], gram), hooked([layer], _leave):
        stream.run(index)
    # Of a layer that is never called on this text nothing is known of its inputs.
    return gram.products if gram.tokens else torch.eye(layer.in_features, device=layer.weight.device)


def _leave(layer: nn.Module, args: tuple[Any, ...]) -> None:
    raise Reached


def quantize_weight(
    weight: Tensor, hessian: Tensor, form: Uniform, *, order: str, static_groups: bool, damping: float
) -> Tensor:
    """The GPTQ rounding of a weight (out, in) to a stored form, for a Hessian (in, in).

    Computed in the weight's dtype (float32 or float64), the factor in float64.
    """
    columns, diagonal = weight.shape[1], hessian.diagonal()
    width = form.group_size or columns
    permutation = _order(diagonal, width, order)
    grids = [form.fit(part) for part in weight.split(width, 1)] if static_groups else []
    factor = inverse_factor(hessian[permutation][:, permutation], damping=damping).to(weight.dtype)
    # Lazy blocks hold whole groups, so that a group's scale is fitted to weights that are up to date.
    lazy = width * max(1, _LAZY_COLUMNS // width) if width < columns else _LAZY_COLUMNS
    whole_rows = form.fit(weight)

    def round_block(block: Tensor, at: slice) -> Tensor:
        errors, grid = torch.empty_like(block), whole_rows
        for i, j in enumerate(range(at.start, at.stop)):
            if static_groups:
                grid = grids[int(permutation[j]) // width]
            elif width < columns and j % width == 0:
                grid = form.fit(block[i : i + width].t())
            rounded = grid.round(block[i][:, None])[:, 0]
            error = torch.div(block[i] - rounded, factor[j, j], out=errors[i])
            block[i:].addr_(factor[j, j : at.stop], error, alpha=-1)
            block[i] = rounded
        return errors

    return rounded_in_order(weight, factor, permutation, round_block, lazy_columns=lazy)


def _order(diagonal: Tensor, width: int, order: str) -> Tensor:
    """The columns in the order in which they are rounded, (in,)."""
    if order == "natural":
        return torch.arange(diagonal.numel(), device=diagonal.device)
    if order == "activation":
        return diagonal.argsort(descending=True, stable=True)
    values, inside = diagonal.view(-1, width).sort(dim=1, descending=True, stable=True)
    groups = values[:, 0].argsort(descending=True, stable=True)
    return (torch.arange(0, diagonal.numel(), width, device=diagonal.device)[:, None] + inside)[groups].flatten()
