"""Text that the uncompressed model writes itself: what calibrates and trains where nobody has given text (docs/data.md).

It is sampled at temperature 1, from tokens that begin the model's documents or turns: each next token is a sample of its
own distribution, so that squared gradients of the next-token loss average to the Fisher matrix itself.

Sequences grow together, one token a step, with a cache of keys and values that is allocated once: as many as that has room
for. Where products are in bfloat16 it is, too: reading it is a third of a step's time and more. What each draws does not
depend on their number. What was written is kept in the user's cache directory under a digest of weights, configuration,
seed and sizes: a second run reads it.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from edkm_cli.config import head_size, known_positions
from edkm_cli.data import store_of
from edkm_cli.errors import UserError
from edkm_cli.files import digest, written_whole
from edkm_cli.models import config_digest
from edkm_cli.nn.hooks import changed, evaluating
from edkm_cli.precision import bfloat16_linears, multiplies_bfloat16
from edkm_cli.progress import Track, no_progress
from edkm_cli.runtime.decoder_step_c import attend, library
from edkm_cli.settings import cache_directory

# No divisor of the length of blocks: most blocks then begin inside a sequence. The first token of a text gets activations a
# thousand times as large as all others, whatever it is, and the model must not be fitted to those of two tokens alone.
SEQUENCE_TOKENS = 480
_TOGETHER = 64  # sequences in a batch, at most
_CACHE_BYTES = 1_000_000_000  # of keys and values, or half of what the weights take in 16 bits, if that is more


def first_tokens(tokenizer: Any, rows: int) -> list[int]:
    """The tokens, below `rows` of the embedding, that a document or a conversation may begin with, without repetition.

    Chat models may have two: `<|im_start|>` begins a turn, `<|endoftext|>` a page of what they learnt first. Where there is
    none, what ends a text stands between two; then a line break begins the text, or else token 0.
    """
    begins = [tokenizer.bos_token_id, tokenizer.convert_tokens_to_ids("<|endoftext|>")]
    unknown = tokenizer.unk_token_id if tokenizer.unk_token != "<|endoftext|>" else None
    for tokens in (begins, [tokenizer.eos_token_id], tokenizer.encode("\n", add_special_tokens=False)[-1:]):
        if usable := [token for token in tokens if isinstance(token, int) and token != unknown and 0 <= token < rows]:
            return list(dict.fromkeys(usable))[:2]
    return [0]


@torch.no_grad()
def write_text(
    model: Any, begins: Sequence[int | list[int]], *, sequences: int, length: int, seed: int, track: Track = no_progress
) -> Tensor:
    """Token ids (sequences, length) int64, on the CPU, sampled from a causal LM at temperature 1.

    Args:
        model: a Hugging Face causal LM, on any device; it is put into evaluation mode for the call.
        begins: the first token of each sequence, or lists of first tokens of one length, taken in turn.
        seed: of the sampling. The same model, seed and machine give the same text.
    """
    device = next(model.parameters()).device
    draws = torch.rand(sequences, length, generator=torch.Generator(device).manual_seed(seed), device=device)
    dtype = cache_dtype(model, device.type)
    write = partial(_continue, dtype=dtype) if dtype else _generate
    batches = _evenly(sequences, at_once(model, length, dtype))
    steps = iter(track(range(len(batches) * (length - 1)), "writing text", len(batches) * (length - 1)))
    written = []
    with evaluating(model), bfloat16_linears(model):
        for batch in batches:
            ids = torch.tensor([begins[row % len(begins)] for row in batch], device=device).view(len(batch), -1)
            written.append(write(model, ids, length, draws[batch], steps).cpu())
    list(steps)  # to the end of its bar
    return torch.cat(written)


def _evenly(sequences: int, most: int) -> list[list[int]]:
    """The numbers of sequences in batches of at most so many."""
    return [rows.tolist() for rows in np.array_split(range(sequences), -(-sequences // most))]


def cache_dtype(model: Any, device: str) -> torch.dtype | None:
    """Of keys and values in `_cache` where a model writes on a device: its own, or bfloat16 where `attend` reads
    them. None where the cache has to be transformers' own: layers with another state than keys and values of all tokens,
    or of the last ones (Mamba, linear attention, convolutions)."""
    try:
        layers = DynamicCache(config=model.config).layers
    except (AttributeError, KeyError, TypeError, ValueError):  # a configuration that came with the model's own files
        return None
    if not all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers):
        return None
    config, known = model.config.get_text_config(decoder=True), type(model).__module__.startswith("transformers.")
    rounds = device == "cpu" and model.dtype == torch.float32 and multiplies_bfloat16(device) and library() is not None
    known = known and not hasattr(config, "keep_window_size")  # Doge multiplies values before attention
    plain = known and config._attn_implementation == "sdpa" and not getattr(config, "kv_lora_rank", None)
    return torch.bfloat16 if rounds and plain and head_size(config) % 32 == 0 else model.dtype


def at_once(model: Any, length: int, dtype: torch.dtype | None) -> int:
    """How many sequences of `length` tokens are written together: as many as keys and values, of a `cache_dtype`, have room
    for."""
    config = model.config.get_text_config(decoder=True)
    weights = sum(parameter.numel() for parameter in model.parameters())
    try:
        heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        numbers = 2 * length * config.num_hidden_layers * heads * head_size(config)
    except (AttributeError, TypeError):  # no attention as others have it
        return _TOGETHER
    return max(1, min(_TOGETHER, max(_CACHE_BYTES, weights) // (dtype or model.dtype).itemsize // max(1, numbers)))


@torch.no_grad()
def rehearse_text(model: Any, *, tokens: int, device: str) -> None:
    """Two tokens of a batch of `self_text`, with room for all of its tokens: for a model on the meta device that will write
    on another one."""
    (sequences, length), dtype = text_shape(model.config, tokens), cache_dtype(model, device)
    rows = len(_evenly(sequences, at_once(model, length, dtype))[0])
    ids = torch.zeros(rows, 1, dtype=torch.int64, device=model.device)
    _continue(model, ids, 3, torch.zeros(rows, length, device=model.device), iter(()), dtype)


def _continue(model: Any, ids: Tensor, until: int, draws: Tensor, steps: Iterator, dtype: torch.dtype | None) -> Tensor:
    """`ids` (batch, tokens) continued until there are so many, in a cache with room for as many as there are `draws`."""
    cache = _cache(draws.shape[1], dtype) if dtype else DynamicCache(config=model.config)
    name, current = "cache" if "cache" in signature(model.forward).parameters else "past_key_values", ids
    with changed(functional, scaled_dot_product_attention=partial(_attention, functional.scaled_dot_product_attention)):
        while ids.shape[1] < until:
            logits = model(input_ids=current, use_cache=True, **{name: cache}).logits[:, -1].float()
            current = sample(logits, draws[:, ids.shape[1], None])
            ids = torch.cat((ids, current), 1)
            next(steps, None)
    return ids


def _generate(model: Any, ids: Tensor, length: int, draws: Tensor, steps: Iterator[Any]) -> Tensor:
    """As `_continue`, by transformers' own `generate`, which gives each family the cache that it needs."""

    def draw(written: Tensor, scores: Tensor) -> Tensor:
        next(steps, None)
        drawn = draws[:, written.shape[1], None]
        return torch.full_like(scores, -torch.inf).scatter_(1, sample(scores.float(), drawn), 0.0)

    # Nothing that the model's own settings add: penalties, tokens that end a text, an answer that is no tensor.
    with changed(model, generation_config=GenerationConfig()):
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), max_length=length, do_sample=False, logits_processor=[draw]
        )


def sample(logits: Tensor, uniform: Tensor) -> Tensor:
    """One token (batch, 1) int64 from each row of logits (batch, vocabulary) float32, at temperature 1, by a uniform number
    (batch, 1) each.

    By the inverse of the cumulative distribution: one uniform number a row, where `torch.multinomial` draws one for each
    entry of the vocabulary (0.18 s a step for 128 sequences of a vocabulary of 49,152, against 0.015 s).
    """
    cumulative = logits.sub(logits.amax(-1, keepdim=True)).exp_().cumsum(-1)
    if not logits.is_meta and not bool(cumulative[:, -1].isfinite().all()):
        rule = "the model must write text from logits that are numbers, but some are NaN or Inf"
        raise UserError(f"{rule}; use another --dtype")
    # The first entry above what was drawn: never one of probability 0, which adds nothing.
    return torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True).clamp_max_(logits.shape[-1] - 1)


def _attention(plain: Any, query: Tensor, key: Tensor, value: Tensor, *given: Any, **options: Any) -> Tensor:
    """`plain`, PyTorch's attention, that also takes a cache in bfloat16 beside a query in float32."""
    if key.dtype == query.dtype:
        return plain(query, key, value, *given, **options)
    out = None
    if not given and options.get("attn_mask") is None:
        out = attend(query.to(key.dtype), key, value, options.get("scale") or query.shape[-1] ** -0.5)
    if out is None:
        out = plain(query, key.to(query.dtype), value.to(query.dtype), *given, **options)
    return out.to(query.dtype)


def _cache(length: int, dtype: torch.dtype) -> Any:
    """transformers' growing cache, but with room for `length` positions from the start: it would copy all at each step."""

    class Layer(DynamicLayer):
        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
                both = (key_states, value_states)  # of other widths in multi-head latent attention
                self.room = [x.new_empty(*x.shape[:2], length, x.shape[3], dtype=dtype) for x in both]
            start = self.get_seq_length()
            end = start + key_states.shape[-2]
            for room, states in zip(self.room, (key_states, value_states), strict=True):
                room[:, :, start:end] = states
            self.keys, self.values = (room[:, :, :end] for room in self.room)
            return self.keys, self.values

    cache = DynamicCache()
    cache.layer_class_to_replicate = Layer
    return cache


def text_shape(config: Any, tokens: int) -> tuple[int, int]:
    """(sequences, tokens of each) of what a model writes where so many tokens are wanted: each is no longer than the model
    has positions for."""
    length = min(SEQUENCE_TOKENS, known_positions(config) or SEQUENCE_TOKENS)
    return -(-tokens // length), length


def self_text(
    model: Any,
    tokenizer: Any,
    *,
    tokens: int,
    seed: int,
    weights_sha256: str,
    gathered: AbstractContextManager[Any] | None = None,
    track: Track = no_progress,
) -> Tensor:
    """At least `tokens` token ids, of `text_shape`, that the model wrote, from the cache if it has written
    them before. `weights_sha256` and the model's configuration identify it; `gathered` has all weights of `model`, which
    may be in its files. A cache that cannot be written to is done without."""
    sequences, length = text_shape(model.config, tokens)
    begins = first_tokens(tokenizer, model.get_input_embeddings().weight.shape[0])
    parts = (weights_sha256, config_digest(model.config), begins, sequences, length, seed)
    key = hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()[:32]
    path = cache_directory() / "self-text" / f"{key}.safetensors"
    if (kept := kept_text(path)) is not None and kept.shape == (sequences, length):
        return kept
    with gathered or nullcontext():
        text = write_text(model, begins, sequences=sequences, length=length, seed=seed, track=track)
    with suppress(OSError):
        keep_text(path, text)
    return text


def kept_text(path: Path) -> Tensor | None:
    """What `keep_text` wrote; None where nothing can be read."""
    try:
        with safe_open(path, framework="pt") as file:
            text, sha256 = file.get_tensor("tokens"), (file.metadata() or {}).get("sha256")
    except (OSError, SafetensorError):
        return None
    whole = sha256 in (None, digest([("", text)]))  # None: it was kept by an earlier version
    return text if whole and text.ndim == 2 and text.dtype == torch.int64 else None


def keep_text(path: Path, text: Tensor) -> None:
    """Write a text in one step. Raises OSError where that fails; nothing is left then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path, f".{os.getpid()}") as partial:
        partial.write_bytes(save({"tokens": text.contiguous()}, {"sha256": digest([("", text)])}))


# Stands for the text of a run that the model is yet to write.
NOT_WRITTEN = store_of(np.empty((0, SEQUENCE_TOKENS), np.int64))
