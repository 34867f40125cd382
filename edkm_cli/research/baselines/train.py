"""A small training loop for methods that train a model as a whole: AdamW without decay, gradients clipped to norm 1."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from edkm_cli.errors import UserError
from edkm_cli.nn.hooks import frozen
from edkm_cli.progress import Track, no_progress


def train(
    model: nn.Module,
    trained: list[Any],
    loss_at: Callable[[int], Tensor],
    *,
    steps: int,
    learning_rate: float,
    betas: tuple[float, float] = (0.9, 0.999),
    cosine: bool = False,
    before_step: Callable[[], None] = lambda: None,
    track: Track = no_progress,
) -> list[float]:
    """Train these parameters and no others of the model; returns the loss of every step.

    Args:
        cosine: the learning rate falls from its peak to zero; else it is constant.
        before_step: called when gradients are there, before the optimizer's step.

    Raises UserError if the loss stops being finite.
    """
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, betas=betas, weight_decay=0.0)
    losses = []
    with frozen(model):
        for parameter in trained:
            parameter.requires_grad_(True)
        for step in track(range(steps), "training", steps):
            if cosine:
                optimizer.param_groups[0]["lr"] = learning_rate * 0.5 * (1 + math.cos(math.pi * step / steps))
            loss = loss_at(step)
            losses.append(float(loss.detach()))
            if not math.isfinite(losses[-1]):
                raise UserError(f"loss must stay finite, but is {losses[-1]} at step {step}; lower learning_rate")
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            before_step()
            optimizer.step()
            optimizer.zero_grad()
    return losses
