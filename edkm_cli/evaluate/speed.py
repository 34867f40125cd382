"""How fast a causal LM reads and writes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from edkm_cli.nn.hooks import evaluating

_PREFILL_TOKENS = 512
_RUNS = 3


def _seconds(run: Callable[[], object], ids: Tensor) -> float:
    """How long `run` takes on the device of `ids`."""
    start = time.perf_counter()
    run()
    if ids.is_cuda:
        torch.cuda.synchronize(ids.device)
    return time.perf_counter() - start


@torch.no_grad()
def decode_speed(model: Any, prompt: Tensor, *, new_tokens: int = 16) -> float:
    """Tokens per second of greedy generation after a prompt (tokens,) int64, the prompt's time left out."""
    ids = prompt.to(model.device)[None]
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}

    def seconds(tokens: int) -> float:
        return _seconds(lambda: model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **options), ids)

    seconds(2)  # caches and kernels warm up
    first = min(seconds(1) for _ in range(_RUNS))
    return new_tokens / max(min(seconds(new_tokens + 1) for _ in range(_RUNS)) - first, 1e-9)


@torch.no_grad()
def prefill_speed(model: Any, tokens: Tensor) -> float:
    """Tokens per second of reading a prompt, of at most 512 of `tokens` (n,), up to its first new token."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", _PREFILL_TOKENS)
    ids = tokens[: min(_PREFILL_TOKENS, limit)].to(model.device)[None]
    times = [_seconds(lambda: model(ids, logits_to_keep=1, use_cache=True), ids) for _ in range(_RUNS + 1)]
    return ids.shape[1] / min(times[1:])  # the first warms up


def resident_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers in memory, shared ones once."""
    tensors = {t.data_ptr(): t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())}
    return sum(tensors.values())


def measure_speed(model: Any, tokens: Tensor) -> dict[str, float | int]:
    """The keys that `edkm eval --speed` adds, for a text (n,) of token ids."""
    with evaluating(model):
        return {
            "prefill_tokens_per_second": prefill_speed(model, tokens),
            "decode_tokens_per_second": decode_speed(model, tokens[:32]),
            "weights_resident_bytes": resident_bytes(model),
        }
