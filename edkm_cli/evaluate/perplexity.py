"""Perplexity by the GPTQ protocol of any Hugging Face causal LM, compressed or not, and its distance from a reference.

A perplexity on text that a model was trained on says little about what compression did to it. So each prediction can be
compared with that of a reference, the uncompressed model: `evaluate/distances.py` sums up how far they are apart. Logits
exist some tokens at a time (`nn/parts.py`): those of a whole window over 128,256 words would take more than a small model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from edkm_cli.distributed import ALONE, World
from edkm_cli.errors import UserError
from edkm_cli.evaluate.reference import CHUNK_TOKENS, Reference
from edkm_cli.nn.hooks import evaluating
from edkm_cli.nn.parts import Parts
from edkm_cli.progress import Track, no_progress


@dataclass(frozen=True)
class Perplexity:
    """`perplexity` over `windows` of `context` tokens; `tokens` is the length of the whole text.

    With a reference, `kl_per_token` is the mean of KL(reference || model) in nats, and `top1_agreement` the share of
    predictions whose likeliest token is the reference's. Both are over the predictions that the perplexity is over.
    `predictions` has their single figures, (windows, context - 1, 5) float32: loss, KL, whether the likeliest token is the
    reference's, the reference's loss and its highest probability.
    """

    perplexity: float
    windows: int
    context: int
    tokens: int
    seconds: float
    kl_per_token: float | None = None
    top1_agreement: float | None = None
    predictions: Tensor | None = field(default=None, compare=False, repr=False)


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
    seen: Callable[[Tensor, Tensor, Parts], None] = lambda ids, states, parts: None,
) -> Perplexity:
    """Perplexity over non-overlapping windows: within each, tokens 2..context are predicted (GPTQ, arXiv 2210.17323).

    Args:
        model: a causal LM, put into evaluation mode for the call.
        tokens: ids of the whole text, (tokens,) int64.
        context: tokens in a window; a text shorter than one window is one shorter window.
        max_windows: the first so many windows only.
        world: the processes that share the windows; all call this with the same model.
        reference: what the model's predictions are compared with, such as `RememberedPredictions`.
        seen: called with each window's ids (1, context), its states (context, n), and the parts that make logits of them.

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
    start = time.perf_counter()
    total = torch.zeros(3, dtype=torch.float64)  # negative log-likelihood, KL, agreements
    predictions = []
    turns = world.turns(list(windows))
    with evaluating(model):
        parts = Parts(model, frozen=world.sharded)
        for window, counts in track(turns, description, len(turns)):
            ids = window.to(model.device)[None]
            states = parts.states(input_ids=ids, use_cache=False)[0]
            seen(ids, states, parts)
            figures = _figures(states[:-1], ids[0, 1:], parts, None if reference is None else reference(ids))
            total[: figures.shape[1]] += counts * figures[:, :3].sum(0, dtype=torch.float64)
            predictions.append(figures)
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
    facts = (value, windows.shape[0], width, tokens.numel(), time.perf_counter() - start)
    if reference is None:
        return Perplexity(*facts)
    return Perplexity(*facts, float(total[1]) / count, float(total[2]) / count, torch.stack(predictions))


def _figures(states: Tensor, labels: Tensor, parts: Parts, reference: Iterable[Tensor] | None) -> Tensor:
    """The figures of the predictions that states (tokens, n) make of labels (tokens,): (tokens, 5) float32 on the CPU, as
    `Perplexity.predictions` has them, or (tokens, 1) without a reference, whose logits come CHUNK_TOKENS at a time."""
    rows = []
    for ours, picks, theirs in zip(
        states.split(CHUNK_TOKENS),
        labels.split(CHUNK_TOKENS),
        repeat(None) if reference is None else reference,
        strict=False,
    ):
        log_ours = parts.logits(ours[None])[0].float().log_softmax(1)
        columns = [-log_ours.gather(1, picks[:, None])[:, 0]]
        if theirs is not None:
            log_theirs = theirs[: len(ours)].to(ours.device).float().log_softmax(1)
            if log_ours.shape != log_theirs.shape:
                raise UserError(
                    f"--reference must have the model's vocabulary, {log_ours.shape[1]} tokens, got {log_theirs.shape[1]}; "
                    "give the model that was compressed"
                )
            highest, likeliest = log_theirs.max(1)
            same = log_ours.argmax(1) == likeliest
            loss = -log_theirs.gather(1, picks[:, None])[:, 0]
            kl = (log_theirs.exp() * log_theirs.sub_(log_ours)).sum(1)
            columns += [kl, same.float(), loss, highest.exp()]
        rows.append(torch.stack(columns, 1).cpu())
    return torch.cat(rows)
