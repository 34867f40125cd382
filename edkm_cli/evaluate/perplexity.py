"""Perplexity by the GPTQ protocol of any Hugging Face causal LM, compressed or not, and its distance from a reference.

A perplexity on text that a model was trained on says little about what compression did to it. Two more figures compare
each prediction with that of a reference, the uncompressed model: the mean KL divergence per token, and how often both
have the same most likely token.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from edkm_cli.config import UserError
from edkm_cli.distributed import ALONE, World
from edkm_cli.progress import Track, no_progress

_CHUNK_TOKENS = 256


Logits = Callable[[Tensor], Tensor]
"""Token ids of a window (1, context) -> its logits or log-probabilities (context, vocabulary)."""


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
    reference: Logits | None = None,
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
            total[1:] += counts * _compare(logits, reference(ids)[:-1])
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


def _compare(logits: Tensor, theirs: Tensor) -> Tensor:
    """(sum of KL(theirs || logits), number of equal likeliest tokens), float64, on the CPU; logits (tokens, vocabulary)."""
    if logits.shape != theirs.shape:
        raise UserError(
            f"--reference must have the model's vocabulary, {logits.shape[-1]} tokens, got {theirs.shape[-1]}; give the "
            "model that was compressed"
        )
    sums = torch.zeros(2, dtype=torch.float64)
    for ours, wanted in zip(logits.split(_CHUNK_TOKENS), theirs.split(_CHUNK_TOKENS), strict=True):
        log_ours, log_theirs = ours.float().log_softmax(1), wanted.to(ours.device).float().log_softmax(1)
        sums[0] += ((log_theirs - log_ours) * log_theirs.exp()).sum(dtype=torch.float64).cpu()
        sums[1] += (log_ours.argmax(1) == log_theirs.argmax(1)).sum().cpu()
    return sums


def logits_of(model: Any) -> Logits:
    """A causal LM as a reference: run beside the model that is measured, window by window."""
    device = next(model.parameters()).device
    return lambda ids: model(input_ids=ids.to(device), use_cache=False).logits[0]


class RememberedLogits:
    """The uncompressed model's predictions on a few windows, kept on disk until the compressed model is measured.

    `remember` is given to `perplexity` as `seen`, the object as `reference`. Log-probabilities are kept in float16, which
    changes a KL by less than 0.001: 100 MB for 1,024 tokens and a vocabulary of 49,152. The file has no name and goes
    with the object.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the object
        self._places: dict[bytes, tuple[int, torch.Size]] = {}

    def remember(self, ids: Tensor, logits: Tensor) -> None:
        """Keep a window's log-probabilities, (context, vocabulary)."""
        kept = logits.float().log_softmax(1).clamp_min(torch.finfo(torch.float16).min).to("cpu", torch.float16)
        place = self._file.seek(0, os.SEEK_END)
        self._file.write(kept.contiguous().numpy().data)
        self._places[_key(ids)] = (place, kept.shape)

    def __call__(self, ids: Tensor) -> Tensor:
        """The log-probabilities of a window that was remembered; KeyError for another."""
        place, shape = self._places[_key(ids)]
        self._file.seek(place)
        return torch.frombuffer(bytearray(self._file.read(2 * shape.numel())), dtype=torch.float16).view(shape)


def _key(ids: Tensor) -> bytes:
    return ids.cpu().numpy().tobytes()
