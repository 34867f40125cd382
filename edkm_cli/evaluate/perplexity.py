"""Perplexity by the GPTQ protocol of any Hugging Face causal LM, compressed or not, and its distance from a reference.

A perplexity on text that a model was trained on says little about what compression did to it. Two more figures compare
each prediction with that of a reference, the uncompressed model: the mean KL divergence per token, and how often both
have the same most likely token.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from edkm_cli.distributed import ALONE, World
from edkm_cli.errors import UserError
from edkm_cli.evaluate.reference import CHUNK_TOKENS, Reference
from edkm_cli.progress import Track, no_progress


@dataclass(frozen=True)
class Perplexity:
    """`perplexity` over `windows` of `context` tokens; `tokens` is the length of the whole text.

    With a reference, `kl_per_token` is the mean of KL(reference || model) in nats, and `top1_agreement` the share of
    predictions whose likeliest token is the reference's. Both are over the predictions that the perplexity is over.
    """

    perplexity: float
    windows: int
    context: int
    tokens: int
    seconds: float
    kl_per_token: float | None = None
    top1_agreement: float | None = None


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
    reference: Reference | None = None,
    seen: Callable[[Tensor, Tensor], None] = lambda ids, logits: None,
) -> Perplexity:
    """Perplexity over non-overlapping windows: within each, tokens 2..context are predicted (GPTQ, arXiv 2210.17323).

    Args:
        model: a causal LM, put into evaluation mode for the call.
        tokens: ids of the whole text, (tokens,) int64.
        context: tokens in a window; a text shorter than one window is one shorter window.
        max_windows: the first so many windows only.
        world: the processes that share the windows; all call this with the same model.
        reference: what the model's predictions are compared with, such as `logits_of(uncompressed model)`.
        seen: called with each window's ids (1, context) and logits (context, vocabulary).

    Raises UserError if the text has fewer than two tokens, the model's loss on it is NaN or Inf, or the reference has
    another vocabulary.
    """
    if tokens.numel() < 2:
        raise UserError(f"perplexity needs at least 2 tokens of text, got {tokens.numel()}; give more --data")
    width = min(context, tokens.numel())
    rows = getattr(model.config.get_text_config(decoder=True), "vocab_size", None)
    if rows is not None and int(tokens.max()) >= rows:
        raise UserError(
            f"the text has token {int(tokens.max())}, but the model has {rows} rows of embeddings; use its own tokenizer"
        )
    windows = tokens[: tokens.numel() // width * width].view(-1, width)[:max_windows]
    was_training = model.training
    model.eval()
    device = model.device
    start = time.perf_counter()
    total = torch.zeros(3, dtype=torch.float64)  # negative log-likelihood, KL, agreements
    turns = world.turns(list(windows))
    for window, counts in track(turns, description, len(turns)):
        ids = window.to(device)[None]
        logits = model(input_ids=ids, use_cache=False).logits[0]
        seen(ids, logits)
        logits = logits[:-1]
        loss = nn.functional.cross_entropy(logits.float(), ids[0, 1:], reduction="sum")
        total[0] += counts * loss.double().cpu()
        if reference is not None:
            total[1:] += counts * _compare(logits, reference(ids))
    model.train(was_training)
    world.sum(total)
    count = windows.shape[0] * (width - 1)
    loss_per_token = float(total[0]) / count
    if not math.isfinite(loss_per_token):
        raise UserError(
            f"{description} must be a number, but the model's mean loss is {loss_per_token}: its weights are broken, or "
            "its activations do not fit its dtype; use --dtype float32 or bfloat16",
            everywhere=True,
        )
    value = math.exp(min(loss_per_token, 700.0))
    compared = (None, None) if reference is None else (float(total[1]) / count, float(total[2]) / count)
    return Perplexity(value, windows.shape[0], width, tokens.numel(), time.perf_counter() - start, *compared)


def _compare(logits: Tensor, reference: Iterable[Tensor]) -> Tensor:
    """(sum of KL(reference || logits), number of equal likeliest tokens), float64, on the CPU.

    Logits (tokens, vocabulary); those of the reference in parts, perhaps of more tokens.
    """
    sums = torch.zeros(2, dtype=torch.float64)
    for ours, theirs in zip(logits.split(CHUNK_TOKENS), reference, strict=False):
        theirs = theirs[: ours.shape[0]]
        if ours.shape != theirs.shape:
            raise UserError(
                f"--reference must have the model's vocabulary, {ours.shape[-1]} tokens, got {theirs.shape[-1]}; give the "
                "model that was compressed"
            )
        log_ours, log_theirs = ours.float().log_softmax(1), theirs.to(ours.device).float().log_softmax(1)
        sums[1] += (log_ours.argmax(1) == log_theirs.argmax(1)).sum().cpu()
        sums[0] += (log_theirs.exp() * log_theirs.sub_(log_ours)).sum(dtype=torch.float64).cpu()
    return sums
