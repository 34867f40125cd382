"""Perplexity by the GPTQ protocol, of any Hugging Face causal LM, compressed or not."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from edkm_cli.config import UserError
from edkm_cli.distributed import ALONE, World
from edkm_cli.progress import Track, no_progress


@dataclass(frozen=True)
class Perplexity:
    """`perplexity` over `windows` of `context` tokens; `tokens` is the length of the whole text."""

    perplexity: float
    windows: int
    context: int
    tokens: int
    seconds: float


@torch.no_grad()
def perplexity(
    model: Any,
    tokens: Tensor,
    *,
    context: int = 2048,
    max_windows: int | None = None,
    track: Track = no_progress,
    description: str = "perplexity",
    world: World = ALONE,
) -> Perplexity:
    """Perplexity over non-overlapping windows: within each, tokens 2..context are predicted (GPTQ, arXiv 2210.17323).

    Args:
        model: a causal LM, put into evaluation mode for the call.
        tokens: ids of the whole text, (tokens,) int64.
        context: tokens in a window; a text shorter than one window is one shorter window.
        max_windows: the first so many windows only.
        world: the processes that share the windows; all call this with the same model.

    Raises UserError if the text has fewer than two tokens, or the model's loss on it is NaN or Inf.
    """
    if tokens.numel() < 2:
        raise UserError(f"perplexity needs at least 2 tokens of text, got {tokens.numel()}; give more --data")
    width = min(context, tokens.numel())
    windows = tokens[: tokens.numel() // width * width].view(-1, width)[:max_windows]
    was_training = model.training
    model.eval()
    device = model.device
    start = time.perf_counter()
    total = torch.zeros((), dtype=torch.float64)
    turns = world.turns(list(windows))
    for window, counts in track(turns, description, len(turns)):
        ids = window.to(device)[None]
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        loss = nn.functional.cross_entropy(logits.float(), ids[0, 1:], reduction="sum")
        total += counts * loss.double().cpu()
    model.train(was_training)
    world.sum(total)
    count = windows.shape[0] * (width - 1)
    loss_per_token = float(total) / count
    if not math.isfinite(loss_per_token):
        raise UserError(
            f"{description} must be a number, but the model's mean loss is {loss_per_token}: its weights are broken, or "
            "its activations do not fit its dtype; use --dtype float32 or bfloat16",
            everywhere=True,
        )
    value = math.exp(min(loss_per_token, 700.0))
    return Perplexity(value, windows.shape[0], width, tokens.numel(), time.perf_counter() - start)
