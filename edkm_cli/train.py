"""The training loop, by accelerate: read it from top to bottom."""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edkm_cli.clustering import temperature_at
from edkm_cli.config import CompressConfig, UserError
from edkm_cli.data import Blocks
from edkm_cli.distill import training_loss
from edkm_cli.errors import Preempted
from edkm_cli.evaluate import Track, no_progress
from edkm_cli.memory import MarshalSavedTensors
from edkm_cli.nn.clustered import clustered_layers
from edkm_cli.resume import Checkpoints


def parameter_groups(model: nn.Module, config: CompressConfig) -> list[dict[str, Any]]:
    """AdamW's groups: clustered weights, LUT entries, and the rest (norms, biases), which is not decayed."""
    layers = clustered_layers(model).values()
    luts = {id(layer.centroids) for layer in layers}
    weights = {id(layer.weight) for layer in layers}
    groups: dict[str, list[nn.Parameter]] = {"weights": [], "luts": [], "other": []}
    for parameter in model.parameters():
        if parameter.requires_grad:
            kind = "luts" if id(parameter) in luts else "weights" if id(parameter) in weights else "other"
            groups[kind].append(parameter)
    return [
        {"params": groups["weights"], "lr": config.learning_rate, "weight_decay": config.weight_decay},
        {"params": groups["luts"], "lr": config.lut_learning_rate, "weight_decay": 0.0},
        {"params": groups["other"], "lr": config.learning_rate, "weight_decay": 0.0},
    ]


def learning_rate_factor(step: int, steps: int, warmup: float) -> float:
    """Linear warm-up over the first `warmup` of the steps, then a cosine to a tenth of a percent of the peak."""
    warm = max(1, round(warmup * steps))
    if step < warm:
        return (step + 1) / warm
    progress = (step - warm) / max(1, steps - warm)
    return 0.001 + 0.999 * 0.5 * (1 + math.cos(math.pi * progress))


def freeze_dense_embeddings(model: Any) -> None:
    """Embeddings are palettized before training and do not train; dense ones (embedding_bits 16) do not either."""
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        if isinstance(module, (nn.Embedding, nn.Linear)):
            module.weight.requires_grad_(False)


@contextmanager
def preemption() -> Iterator[threading.Event]:
    """An event that SIGTERM sets, as schedulers send it before they kill; the former handler comes back at the end."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    former = signal.signal(signal.SIGTERM, lambda number, frame: asked.set())
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, former)


def keep_metrics(path: Path, steps: int) -> None:
    """Drop the lines after step `steps`, which a resumed run writes again, and a last line that was cut."""
    if path.is_file():
        lines = path.read_text(encoding="utf-8").splitlines()[:steps]
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def train(
    model: Any,
    teacher: Any | None,
    blocks: Blocks,
    config: CompressConfig,
    *,
    device: str,
    metrics: Path,
    checkpoints: Checkpoints,
    track: Track = no_progress,
    show: Callable[[str], None] = lambda text: None,
) -> tuple[Any, dict[str, Any]]:
    """Train the clustered model in place for `config.steps` optimizer steps.

    Args:
        model: a causal LM with `ClusteredLinear` layers, on `device`.
        teacher: the uncompressed model on `device`, or None for next-token prediction.
        blocks: training data; a step takes `batch_size * gradient_accumulation` blocks.
        metrics: one JSON line a step is appended here.
        checkpoints: training goes on from the newest one; they are saved every `config.save_every` steps (0: never), at
            the last step, and on SIGTERM.
        track, show: progress.

    Returns (the model, what offloading moved: empty without it). Raises UserError if the loss stops being
    finite, Preempted after SIGTERM.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()  # a second run in one process may choose another precision
    accelerator = Accelerator(
        mixed_precision=config.mixed_precision,
        gradient_accumulation_steps=config.gradient_accumulation,
        cpu=device == "cpu",
    )
    freeze_dense_embeddings(model)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    optimizer = torch.optim.AdamW(parameter_groups(model, config), betas=(0.9, 0.95), eps=1e-8)
    first = checkpoints.load_newest(model, optimizer)
    keep_metrics(metrics, first)
    peaks = [group["lr"] for group in optimizer.param_groups]
    model, optimizer = accelerator.prepare(model, optimizer)
    layers = clustered_layers(model)
    marshal = MarshalSavedTensors(device="cpu", keep=model.buffers()) if config.offload == "cpu" else None
    model.train()
    with open(metrics, "a", encoding="utf-8") as log, preemption() as stop:
        for step in track(range(first, config.steps), "training", config.steps - first):
            start = time.perf_counter()
            factor = learning_rate_factor(step, config.steps, config.warmup)
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
            temperature = temperature_at(
                step,
                config.steps,
                schedule=config.temperature_schedule,
                start=config.temperature,
                end=config.temperature_end,
            )
            for layer in layers.values():
                layer.temperature = temperature

            total = 0.0
            for micro in range(config.gradient_accumulation):
                index = step * config.gradient_accumulation + micro
                ids = blocks.batch(index, config.batch_size).to(accelerator.device)
                with accelerator.accumulate(model):
                    with marshal or nullcontext():
                        with accelerator.autocast():
                            loss = training_loss(model, teacher, ids)
                        accelerator.backward(loss)
                    total += float(loss.detach()) / config.gradient_accumulation
                    if not math.isfinite(total):
                        raise UserError(
                            f"the training loss must stay finite, but is {total} at step {step}; "
                            "lower --learning-rate, or use --dtype float32"
                        )
                    if accelerator.sync_gradients:
                        norm = accelerator.clip_grad_norm_(model.parameters(), config.max_grad_norm)
                        for layer in layers.values():
                            layer.commit()
                    optimizer.step()
                    optimizer.zero_grad()

            record = {
                "step": step + 1,
                "loss": total,
                "gradient_norm": float(norm),
                "learning_rate": config.learning_rate * factor,
                "temperature": temperature,
                "tokens": (step + 1) * config.gradient_accumulation * config.batch_size * config.sequence_length,
                "seconds": time.perf_counter() - start,
            }
            log.write(json.dumps(record) + "\n")
            log.flush()
            show(f"loss {total:.4f}")
            due = config.save_every and ((step + 1) % config.save_every == 0 or step + 1 == config.steps)
            if due or stop.is_set():
                checkpoints.save(step + 1, accelerator.unwrap_model(model), optimizer)
            if stop.is_set():
                raise Preempted(f"SIGTERM: saved after step {step + 1} of {config.steps}; go on with --resume")
    for layer in layers.values():
        layer.commit()
    moved = marshal.statistics.as_dict() if marshal else {}
    return accelerator.unwrap_model(model, keep_fp32_wrapper=False).eval(), moved
