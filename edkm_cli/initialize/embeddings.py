"""Rounding the output embedding so that the errors of a row compensate one another.

Of an embedding's error the output feels nearly all: each token is compared with every row. With final hidden states X the
error of the logits is tr((W - Q) H (W - Q)^T), H = X^T X, and columns are rounded one after the other as in
`edkm_cli.initialize.compensate` (GPTQ, arXiv 2210.17323), to the levels of the row's scale. At 6 bits that halves the KL
that rounding SmolLM2's embedding costs (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from edkm_cli.initialize.compensate import inverse_factor, rounded_in_order
from edkm_cli.nn.swap import EMBEDDING, HEAD, Swap
from edkm_cli.runtime.palettized import Rounded

_LAZY_COLUMNS = 64
_DAMPING = 0.01
_DAMPING_TIED = 0.1  # the input embedding's use of the same rows is served by small errors, whatever their direction


def output_embedding(swaps: Sequence[Swap]) -> list[str]:
    """The path of the output embedding that is rounded, if there is one."""
    return [swap.name for swap in swaps if swap.role == HEAD and not swap.reason]


def compensating_rounding(swaps: Sequence[Swap], moments: Mapping[str, Tensor]) -> dict[str, Rounded]:
    """How to round the embedding whose rows make the logits, by its path; empty without `moments`, path of the output
    embedding -> products of its inputs (in, in)."""
    found: dict[str, Rounded] = {}
    for swap in swaps:
        if swap.role == HEAD and not swap.reason and swap.name in moments:
            names = [other.name for other in swaps if other.role == EMBEDDING and not other.reason]
            name = names[0] if swap.tied else swap.name
            found[name] = _rounding(moments[swap.name], _DAMPING_TIED if swap.tied else _DAMPING)
    return found


def _rounding(moment: Tensor, damping: float) -> Rounded:
    by_size = moment.diagonal().argsort(descending=True, stable=True)
    inverse = inverse_factor(moment[by_size][:, by_size], damping=damping)
    inverse = (inverse / inverse.diagonal()[:, None]).float()

    def rounded(weight: Tensor, scale: Tensor, top: int) -> Tensor:
        """Levels -top..top of a weight, whose numbers each have a scale; all (rows, columns) float32."""
        factor, order = inverse.to(weight.device), by_size.to(weight.device)
        scales = scale.t()[order].contiguous()

        def round_block(block: Tensor, at: slice) -> Tensor:
            errors, passed = torch.empty_like(block), factor[at, at]
            for j, steps in enumerate(scales[at]):
                torch.sub(block[j], (block[j] / steps).round_().clamp_(-top, top).mul_(steps), out=errors[j])
                block[j + 1 :].addr_(passed[j, j + 1 :], errors[j], alpha=-1)
            return errors

        before = rounded_in_order(weight, factor, order, round_block, lazy_columns=_LAZY_COLUMNS)
        return (before / scale).round_().clamp_(-top, top)

    return rounded
