"""Perplexity by the GPTQ protocol, sizes and speed, for any Hugging Face causal LM, compressed or not."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from edkm_cli.config import UserError
from edkm_cli.distributed import ALONE, World
from edkm_cli.nn.palettized import PALETTIZED, PalettizedLinear

Track = Callable[[Iterable[Any], str, int], Iterable[Any]]


def no_progress(items: Iterable[Any], description: str, total: int) -> Iterable[Any]:
    """The default of `track` arguments: iterate, show nothing."""
    return items


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

    Raises UserError if the text has fewer than two tokens.
    """
    if tokens.numel() < 2:
        raise UserError(f"perplexity needs at least 2 tokens of text, got {tokens.numel()}; give more --data")
    width = min(context, tokens.numel())
    windows = tokens[: tokens.numel() // width * width].view(-1, width)[:max_windows]
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
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
    value = math.exp(min(float(total) / count, 700.0))
    return Perplexity(value, windows.shape[0], width, tokens.numel(), time.perf_counter() - start)


@torch.no_grad()
def decode_speed(model: Any, prompt: Tensor, *, new_tokens: int = 16) -> float:
    """Tokens per second of greedy generation after a prompt (tokens,) int64."""
    ids = prompt.to(next(model.parameters()).device)[None]
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
    model.generate(ids, attention_mask=torch.ones_like(ids), **{**options, "max_new_tokens": 1, "min_new_tokens": 1})
    start = time.perf_counter()
    model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return new_tokens / (time.perf_counter() - start)


@dataclass(frozen=True)
class Footprint:
    """Sizes of a loaded model: bytes of its weights and bits a weight, over the decoder's linears and over all."""

    weights_bytes: int
    decoder_bits_per_weight: float
    model_bits_per_weight: float
    parameters: int


def footprint(model: nn.Module) -> Footprint:
    """Count every tensor of the model once (ties share), as stored: indices, LUTs and scales included."""
    seen: set[int] = set()
    total_bytes = total_weights = decoder_bytes = decoder_weights = 0
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for module in model.modules():
        buffers = {k: t for k, t in module._buffers.items() if k not in module._non_persistent_buffers_set}
        own = {k: t for k, t in (*module._parameters.items(), *buffers.items()) if t is not None}
        fresh = {k: t for k, t in own.items() if _identity(t) not in seen}
        seen.update(map(_identity, fresh.values()))
        size = sum(t.numel() * t.element_size() for t in fresh.values())
        weights = sum(_dense_numel(module, k, t) for k, t in fresh.items())
        total_bytes, total_weights = total_bytes + size, total_weights + weights
        if isinstance(module, (nn.Linear, PalettizedLinear)) and module is not head:
            bias = fresh.get("bias")
            decoder_bytes += size - (0 if bias is None else bias.numel() * bias.element_size())
            decoder_weights += weights - (0 if bias is None else bias.numel())
    return Footprint(
        total_bytes,
        8 * decoder_bytes / decoder_weights if decoder_weights else float("nan"),
        8 * total_bytes / max(total_weights, 1),
        total_weights,
    )


def _identity(tensor: Tensor) -> int:
    """Equal for tensors that share memory; on the meta device, for the same tensor."""
    return tensor.data_ptr() or id(tensor)


def _dense_numel(module: nn.Module, name: str, tensor: Tensor) -> int:
    """How many numbers of the dense model a tensor stands for: all weights for indices, none for LUTs and scales."""
    if not isinstance(module, PALETTIZED) or name == "bias":
        return tensor.numel()
    if name != "indices":
        return 0
    columns: Any = module.in_features if isinstance(module, PalettizedLinear) else module.columns
    return tensor.shape[0] * columns


def peak_memory_bytes(device: str) -> int:
    """Peak memory of the process: allocated on a CUDA device, resident on a CPU."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    try:
        # Not getrusage where there is better: its maximum survives exec, so it may be that of the parent process.
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        pass  # not Linux
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
