"""Perplexity by the GPTQ protocol of any Hugging Face causal LM, compressed or not, and its distance from a reference.

A perplexity on text that a model was trained on says little about what compression did to it. So each prediction can be
compared with that of a reference, the uncompressed model. Perplexity and mean KL can stay while single answers fail (arXiv
2407.09141), so there are the upper percentiles, the KL by how sure the reference was (an error where it was sure changes
text, one where it was not hardly does), and figures along the window, which show a model that fails far from its beginning.
Logits exist some tokens at a time (`nn/parts.py`): of a whole window over 128,256 words they outweigh small models.
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from edkm_cli.distributed import ALONE, World
from edkm_cli.errors import UserError
from edkm_cli.evaluate.reference import CHUNK_TOKENS, Reference, other_vocabulary
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
        raise UserError(f"the text has token {int(tokens.max())}, the model has {rows} embeddings; use its tokenizer")
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
    if not math.isfinite(loss_per_token := float(total[0]) / count):
        rule = f"{description} must be a number, but the model's mean loss is {loss_per_token}"
        why = "its weights are broken, or its activations do not fit its dtype"
        raise UserError(f"{rule}: {why}; use --dtype float32 or bfloat16", everywhere=True)
    facts = (math.exp(min(loss_per_token, 700.0)), windows.shape[0], width, tokens.numel(), time.perf_counter() - start)
    if reference is None:
        return Perplexity(*facts)
    return Perplexity(*facts, float(total[1]) / count, float(total[2]) / count, torch.stack(predictions))


def _figures(states: Tensor, labels: Tensor, parts: Parts, reference: Iterable[Tensor] | None) -> Tensor:
    """The figures of the predictions that states (tokens, n) make of labels (tokens,): (tokens, 5) float32 on the CPU, as
    `Perplexity.predictions` has them, or (tokens, 1) without a reference, whose logits come CHUNK_TOKENS at a time."""
    rows = []
    beside = repeat(None) if reference is None else reference
    for ours, picks, theirs in zip(states.split(CHUNK_TOKENS), labels.split(CHUNK_TOKENS), beside, strict=False):
        log_ours = parts.logits(ours[None])[0].float().log_softmax(1)
        columns = [-log_ours.gather(1, picks[:, None])[:, 0]]
        if theirs is not None:
            log_theirs = theirs[: len(ours)].to(ours.device).float().log_softmax(1)
            if log_ours.shape != log_theirs.shape:
                raise other_vocabulary(log_ours.shape[1], log_theirs.shape[1])
            highest, likeliest = log_theirs.max(1)
            same = log_ours.argmax(1) == likeliest
            loss = -log_theirs.gather(1, picks[:, None])[:, 0]
            kl = (log_theirs.exp() * log_theirs.sub_(log_ours)).sum(1)
            columns += [kl, same.float(), loss, highest.exp()]
        rows.append(torch.stack(columns, 1).cpu())
    return torch.cat(rows)


CONFIDENCE = (0.0, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 0.99, 1.0)
_POSITIONS = 16  # stretches of a window


def distribution(predictions: Tensor) -> dict[str, Any]:
    """What `edkm eval --reference` says of a text beside the means.

    Args:
        predictions: (windows, context - 1, 5), as `Perplexity.predictions`.

    Returns:
        `reference_perplexity`; `kl`: `median`, `p90`, `p99` and `largest`, in nats; `by_confidence`: for stretches (`from`,
        `to`] of the reference's highest probability the `share` of predictions, their mean `kl` and their `agreement`, None
        where there are none.
    """
    _, kl, same, theirs, confidence = predictions.flatten(0, 1).double().numpy().T
    median, p90, p99, largest = np.percentile(kl, (50, 90, 99, 100)).tolist()
    rows = []
    for low, high in pairwise(CONFIDENCE):
        inside = (confidence > low) & (confidence <= high if high < 1 else True)
        means = (float(kl[inside].mean()), float(same[inside].mean())) if inside.any() else (None, None)
        rows.append({"from": low, "to": high, "share": float(inside.mean()), "kl": means[0], "agreement": means[1]})
    return {
        "reference_perplexity": _perplexity(theirs),
        "kl": {"median": median, "p90": p90, "p99": p99, "largest": largest},
        "by_confidence": rows,
    }


def by_position(predictions: Tensor) -> list[dict[str, Any]]:
    """Figures of stretches of equal length along the windows: `from`, `to` (tokens before the predicted one),
    `perplexity`, `reference_perplexity`, `kl`. `predictions` as in `distribution`."""
    rows, first = [], 1
    for part in predictions.double().tensor_split(min(_POSITIONS, predictions.shape[1]), dim=1):
        loss, kl, _, theirs, _ = part.flatten(0, 1).numpy().T
        figures = {"perplexity": _perplexity(loss), "reference_perplexity": _perplexity(theirs), "kl": float(kl.mean())}
        rows.append({"from": first, "to": first + part.shape[1] - 1, **figures})
        first += part.shape[1]
    return rows


def _perplexity(losses: np.ndarray) -> float:
    return float(np.exp(min(losses.mean(), 700.0)))
