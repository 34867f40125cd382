"""Rounding embeddings so that the errors of a row compensate one another.

With final hidden states X the error of the logits is tr((W - Q) H (W - Q)^T), H = X^T X. What an error of an input
embedding's row e costs is, to second order, e^T G e with the products G of the loss's gradients in the rows (the Fisher
matrix). With either, columns are rounded one after the other as in `edkm_cli.initialize.compensate` (GPTQ, arXiv
2210.17323), to the levels of the row's scale, of which several are tried. That leaves a third of the KL that rounding
SmolLM2's embedding to 4 bits costs as an input, and half at 6 bits as an output (docs/log.md).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from edkm_cli.initialize.compensate import compensated, damping_of, inverse_factor
from edkm_cli.nn.swap import EMBEDDING, HEAD, Swap
from edkm_cli.precision import float32_products
from edkm_cli.runtime.embeddings import Rounding

_TOPS = (0.68, 0.74, 0.8, 0.86, 0.93, 1.0)  # the fewer bits, the smaller the best (docs/log.md)
_POWERS = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7)  # the fewer bits, the larger the best
_DAMPING = 0.01
_DAMPING_TIED = 0.1  # without gradients: the use as an input is served by small errors, whatever their direction
_ENTERING = 2.0  # tied rows' errors count so often on their way in: more than second order says (docs/log.md)


def rounded_embeddings(swaps: Sequence[Swap]) -> dict[str, Swap]:
    """The embeddings that are rounded, by their role: at most an input and an output embedding."""
    return {swap.role: swap for swap in swaps if swap.rounded}


def cost_of_errors(swaps: Sequence[Swap], moments: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, float]]:
    """Path of an embedding that is stored -> (what errors in a row cost, (columns, columns); its damping).

    `moments`: of an output embedding the products of its inputs, of an input embedding those of the loss's gradients in its
    rows; an embedding without any is left out. A tied one serves both.
    """
    rounded = rounded_embeddings(swaps)
    head, embedding = rounded.get(HEAD), rounded.get(EMBEDDING)
    if head is None or embedding is None or not head.tied or head.name not in moments:
        return {swap.name: (moments[swap.name], _DAMPING) for swap in rounded.values() if swap.name in moments}
    if embedding.name not in moments:
        return {embedding.name: (moments[head.name], _DAMPING_TIED)}
    return {embedding.name: (moments[head.name] + _ENTERING * moments[embedding.name], _DAMPING)}


def compensating_rounding(swaps: Sequence[Swap], moments: Mapping[str, Tensor], tokens: int) -> dict[str, Rounding]:
    """How to round the embeddings that `cost_of_errors` knows, by their paths; `moments` are of so many tokens."""
    costs = cost_of_errors(swaps, moments).items()
    return {name: _rounding(moment, damping_of(least, len(moment), tokens)) for name, (moment, least) in costs}


def _rounding(moment: Tensor, damping: float) -> Rounding:
    by_size = moment.diagonal().argsort(descending=True, stable=True)
    factor = inverse_factor(moment[by_size][:, by_size], damping=damping)
    effect = factor.diagonal()[by_size.argsort()].pow(-2).float()
    factor = factor.float()

    def rounded(weight: Tensor, scale: Tensor, factors: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
        """Levels low..high of a weight (rows, columns) with a scale for each group of a row; what their errors cost."""
        order = by_size.to(weight.device)
        # All numbers of a group have one table when columns are in units of their factors.
        entries = scale[..., None] * torch.arange(-high - 1, high + 1, device=weight.device).clamp_min(low)
        with float32_products():
            before = compensated(weight / factors, entries, factor.to(weight.device) / factors[order], order)
        steps = scale.repeat_interleave(weight.shape[1] // scale.shape[1], 1)
        levels = (before / steps).round_().clamp_(low, high)
        return levels, before.sub_(levels * steps).mul_(factors).square_() @ effect.to(before.device)[:, None]

    return Rounding(rounded, _POWERS, _TOPS)
