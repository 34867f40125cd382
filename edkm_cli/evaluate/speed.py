"""How fast a causal LM generates text."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def decode_speed(model: Any, prompt: Tensor, *, new_tokens: int = 16) -> float:
    """Tokens per second of greedy generation after a prompt (tokens,) int64."""
    ids = prompt.to(model.device)[None]
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
    model.generate(ids, attention_mask=torch.ones_like(ids), **{**options, "max_new_tokens": 1, "min_new_tokens": 1})
    start = time.perf_counter()
    model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return new_tokens / (time.perf_counter() - start)
