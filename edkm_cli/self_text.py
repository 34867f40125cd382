"""Text that the uncompressed model writes itself: what calibrates and trains where nobody has given text.

A compressed model shall stay as it was on whatever it will be asked, and the text nearest to that is what the model
itself finds likely: sampled at temperature 1, from the token that begins its documents. Nothing has to be fetched, no
domain is preferred, and each next token is a sample of the model's own distribution, so that squared gradients of the
next-token loss average to the Fisher matrix itself (SqueezeLLM, arXiv 2306.07629, takes them on foreign text).

All sequences grow together, one token a step, with a cache of keys and values that is allocated once. What was written
is kept in the user's cache directory under a digest of weights, seed and sizes: a second run reads it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from edkm_cli.data.encode import Counts
from edkm_cli.data.store import TokenStore
from edkm_cli.models import cache_directory
from edkm_cli.precision import bfloat16_linears, bfloat16_products, float32_attention
from edkm_cli.progress import Track, no_progress

# No divisor of the length of blocks: most blocks then begin inside a sequence. The first token of a text gets activations a
# thousand times as large as all others, whatever it is, and the model must not be fitted to those of two tokens alone.
SEQUENCE_TOKENS = 480
_TOGETHER = 64  # sequences in a batch, at most: 1.5 GB of keys and values at 135M parameters


def first_tokens(tokenizer: Any) -> list[int]:
    """The tokens that a document or a conversation may begin with, without repetition.

    Chat models have two: `<|im_start|>` begins a turn, `<|endoftext|>` a page of what they learnt first.
    """
    begins = [tokenizer.bos_token_id, tokenizer.convert_tokens_to_ids("<|endoftext|>"), tokenizer.eos_token_id]
    unknown = tokenizer.unk_token_id if tokenizer.unk_token != "<|endoftext|>" else None
    found = [token for token in begins if isinstance(token, int) and token != unknown]
    return list(dict.fromkeys(found))[:2]


@torch.no_grad()
def write_text(
    model: Any,
    begins: list[int],
    *,
    sequences: int,
    length: int = SEQUENCE_TOKENS,
    seed: int,
    track: Track = no_progress,
) -> Tensor:
    """Token ids (sequences, length) int64, on the CPU, sampled from a causal LM at temperature 1.

    Args:
        model: a Hugging Face causal LM, on any device; it is put into evaluation mode for the call.
        begins: first tokens, taken in turn.
        seed: of the sampling. The same model, seed and machine give the same text.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    was_training = model.training
    model.eval()
    batches = [list(rows) for rows in np.array_split(range(sequences), -(-sequences // _TOGETHER))]
    steps = iter(track(range(len(batches) * (length - 1)), "writing text", len(batches) * (length - 1)))
    written = []
    try:
        with bfloat16_products(), bfloat16_linears(model), float32_attention(model):
            for batch in batches:
                ids = torch.tensor([[begins[row % len(begins)]] for row in batch], device=device)
                written.append(_continue(model, ids, length, generator, steps).cpu())
    finally:
        model.train(was_training)
    for _ in steps:
        pass
    return torch.cat(written)


def _continue(model: Any, ids: Tensor, length: int, generator: torch.Generator, steps: Iterator[Any]) -> Tensor:
    cache = _cache(length)
    current = ids
    while ids.shape[1] < length:
        logits = model(input_ids=current, past_key_values=cache, use_cache=True).logits[:, -1].float()
        current = sample(logits, generator)
        ids = torch.cat((ids, current), 1)
        next(steps, None)
    return ids


def sample(logits: Tensor, generator: torch.Generator) -> Tensor:
    """One token (batch, 1) int64 from each row of logits (batch, vocabulary) float32, at temperature 1.

    By the inverse of the cumulative distribution: one uniform number a row, where `torch.multinomial` draws one for each
    entry of the vocabulary (0.18 s a step for 128 sequences of a vocabulary of 49,152, against 0.015 s).
    """
    cumulative = logits.sub(logits.amax(-1, keepdim=True)).exp_().cumsum(-1)
    drawn = torch.rand(len(logits), 1, generator=generator, device=logits.device) * cumulative[:, -1:]
    # The first entry above what was drawn: never one of probability 0, which adds nothing.
    return torch.searchsorted(cumulative, drawn, right=True).clamp_max_(logits.shape[-1] - 1)


def _cache(length: int) -> Any:
    """transformers' growing cache, but with room for `length` positions from the start: it would copy all at each step."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    class Layer(DynamicLayer):
        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
                batch, heads, _, width = key_states.shape
                self.room = [states.new_empty(batch, heads, length, width) for states in (key_states, value_states)]
            start = self.get_seq_length()
            end = start + key_states.shape[-2]
            for room, states in zip(self.room, (key_states, value_states), strict=True):
                room[:, :, start:end] = states
            self.keys, self.values = (room[:, :, :end] for room in self.room)
            return self.keys, self.values

    cache = DynamicCache()
    cache.layer_class_to_replicate = Layer
    return cache


def self_text(
    model: Any,
    tokenizer: Any,
    *,
    tokens: int,
    seed: int,
    weights_sha256: str,
    track: Track = no_progress,
) -> Tensor:
    """At least `tokens` token ids (sequences, SEQUENCE_TOKENS) that the model wrote, from the cache if it has written
    them before. `weights_sha256` identifies the model. A cache that cannot be written to is done without."""
    sequences = -(-tokens // SEQUENCE_TOKENS)
    begins = first_tokens(tokenizer)
    key = hashlib.sha256(f"{weights_sha256} {begins} {sequences} {SEQUENCE_TOKENS} {seed}".encode()).hexdigest()[:32]
    path = cache_directory() / "self-text" / f"{key}.safetensors"
    kept = _read(path, (sequences, SEQUENCE_TOKENS))
    if kept is not None:
        return kept
    text = write_text(model, begins, sequences=sequences, seed=seed, track=track)
    _keep(path, text)
    return text


def _read(path: Path, shape: tuple[int, int]) -> Tensor | None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        text = load_file(path)["tokens"]
    except (OSError, SafetensorError, KeyError):
        return None
    return text if tuple(text.shape) == shape and text.dtype == torch.int64 else None


def _keep(path: Path, text: Tensor) -> None:
    from safetensors.torch import save_file

    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"tokens": text.contiguous()}, partial)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)


def store_of(text: Tensor) -> TokenStore:
    """What was written (sequences, length) as training data, a sequence a document."""
    sequences, length = text.shape
    ends = np.arange(1, sequences + 1, dtype=np.int64) * length
    counts = Counts(documents=sequences, tokens=text.numel(), trained=text.numel())
    return TokenStore(text.numpy().reshape(-1), None, ends, np.empty(0, np.uint64), counts)
