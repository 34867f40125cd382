"""`--dry-run`: what a run would swap, write and need, from the configuration alone (meta device, no weights)."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import torch

from edkm_cli.compress import choose_device, choose_dtype, embedding_bits, plan, spec_of
from edkm_cli.config import CompressConfig
from edkm_cli.hf import skeleton, skeleton_tensors
from edkm_cli.nn.swap import EMBEDDING, LINEAR, Swap, decoder_bits_per_weight

_RUNTIME_BYTES = 400_000_000  # Python, torch and transformers themselves, measured on a CPU


def dry_run(config: CompressConfig) -> dict[str, Any]:
    """The plan of a run as the JSON of `edkm compress --dry-run` (design section 9's keys). Raises UserError."""
    device = choose_device(config.device)
    dtype = getattr(torch, choose_dtype(config.dtype, device))
    model, swaps = plan(config)
    spec = spec_of(config, swaps)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    target = skeleton(model.config, spec, dtype=dtype)
    weights_bytes = sum(t.numel() * t.element_size() for t in skeleton_tensors(target).values())
    memory = memory_by_part(config, model.config.get_text_config(decoder=True), swaps, parameters, dtype.itemsize)
    available = available_bytes(device)
    return {
        "model": config.model,
        "modules": _grouped(swaps, config),
        "skipped": [swap.to_mapping() for swap in swaps if swap.reason],
        "peak_memory_bytes": {**memory, "total": sum(memory.values())},
        "weights_bytes": weights_bytes,
        "original_weights_bytes": 2 * parameters,
        "decoder_bits_per_weight": decoder_bits_per_weight(
            swaps, bits=config.bits, granularity=config.granularity, lut_dtype=config.lut_dtype
        ),
        "steps": config.steps,
        "training_tokens": config.steps * config.batch_size * config.gradient_accumulation * config.sequence_length,
        "device": device,
        "available_bytes": available,
        "fits": sum(memory.values()) <= available,
        "config": asdict(config),
    }


def memory_by_part(
    config: CompressConfig, architecture: Any, swaps: list[Swap], parameters: int, itemsize: int
) -> dict[str, int]:
    """Estimated peak bytes of training, by part."""
    clustered = sum(s.shape[0] * s.shape[1] for s in swaps if s.role == LINEAR and not s.reason)
    widest = max(s.shape[0] * s.shape[1] for s in swaps if s.role == LINEAR)
    tokens = config.batch_size * config.sequence_length
    hidden, layers = architecture.hidden_size, architecture.num_hidden_layers
    inner, vocabulary = architecture.intermediate_size, architecture.vocab_size
    training = config.steps > 0
    # A decoder layer keeps its inputs, norms, attention and MLP intermediates: about 14 hidden and 4 inner vectors.
    per_layer = tokens * (14 * hidden + 4 * inner) * itemsize
    activations = (
        tokens * hidden * itemsize * layers + per_layer if config.gradient_checkpointing else per_layer * layers
    )
    logits = tokens * vocabulary * (itemsize * 3 + 4)
    importance = 4 * clustered if config.importance == "gradient" else 0
    dense_embeddings = 0 if embedding_bits(config) is None else parameters - clustered
    trainable = parameters - dense_embeddings if training else 0
    return {
        "weights": parameters * itemsize,
        "teacher": parameters * itemsize if training and config.distill else 0,
        "gradients": trainable * itemsize,
        "optimizer": 2 * trainable * itemsize,
        "activations": activations,
        "logits": logits,
        "clustering": max(importance if not training else 0, 3 * widest * 4),
        "runtime": _RUNTIME_BYTES,
    }


def available_bytes(device: str) -> int:
    """Memory of the device: a GPU's total, or what a CPU machine has."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _grouped(swaps: list[Swap], config: CompressConfig) -> list[dict[str, Any]]:
    """The swapped modules, counted by role and shape."""
    counts: dict[tuple[str, tuple[int, int]], int] = {}
    for swap in swaps:
        if not swap.reason:
            counts[swap.role, swap.shape] = counts.get((swap.role, swap.shape), 0) + 1
    linear = f"{config.bits}-bit indices, {config.lut_dtype} LUT, {config.granularity}"
    other = f"{config.embedding_bits}-bit, a float32 scale a row"
    return [
        {"role": role, "shape": list(shape), "count": count, "becomes": linear if role == LINEAR else other}
        for (role, shape), count in sorted(counts.items(), key=lambda item: (item[0][0] == EMBEDDING, item[0]))
    ]
