"""The training loop, by accelerate: read it from top to bottom."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edkm_cli.clustering import temperature_at
from edkm_cli.config import CompressConfig, UserError
from edkm_cli.data import Blocks
from edkm_cli.distributed import World, assign, full, gathered
from edkm_cli.errors import Preempted
from edkm_cli.memory import MarshalSavedTensors, Shard, Uniquify
from edkm_cli.nn.clustered import ClusteredLinear, clustered_layers
from edkm_cli.progress import Track, no_progress
from edkm_cli.train.losses import training_loss
from edkm_cli.train.optimizer import build_optimizer, learning_rate_factor
from edkm_cli.train.state import Checkpoints


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


class Metrics:
    """`metrics.jsonl`, a line a step, and the trackers of `--log-with`; on the first process only."""

    def __init__(self, path: Path, accelerator: Any, config: CompressConfig, first: int, world: World):
        self._file = None
        self._accelerator = accelerator if config.log_with else None
        if world.main:
            keep_metrics(path, first)
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by __exit__
        if self._accelerator is not None:
            settings = {name: value if _is_plain(value) else str(value) for name, value in asdict(config).items()}
            accelerator.init_trackers("edkm", config=settings, init_kwargs=_tracker_options(path.parent, first))

    def write(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        if self._accelerator is not None:
            self._accelerator.log({name: value for name, value in record.items() if name != "step"}, record["step"])

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        if self._accelerator is not None:
            self._accelerator.end_training()


def _tracker_options(staging: Path, first: int) -> dict[str, dict[str, Any]]:
    """What trackers write goes with the run; steps that a resumed run repeats replace the former ones."""
    return {
        "tensorboard": {"purge_step": first + 1},
        "wandb": {} if "WANDB_DIR" in os.environ else {"dir": str(staging)},
    }


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str))


def keep_metrics(path: Path, steps: int) -> None:
    """Drop the lines after step `steps`, which a resumed run writes again, and a last line that was cut."""
    if path.is_file():
        lines = path.read_text(encoding="utf-8").splitlines()[:steps]
        kept = path.with_name(path.name + ".tmp")
        kept.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        os.replace(kept, path)  # a kill in between loses no line


def require_trackers(config: CompressConfig) -> None:
    """Raises UserError for a tracker of `--log-with` whose package is missing."""
    if not config.log_with:
        return
    from accelerate.tracking import get_available_trackers

    available = [str(getattr(tracker, "value", tracker)) for tracker in get_available_trackers()]
    missing = [tracker for tracker in config.log_with if tracker not in available]
    if missing:
        raise UserError(
            f"--log-with {missing[0]} needs a package that is not installed; pip install {missing[0]}", everywhere=True
        )


def make_accelerator(config: CompressConfig, world: World, mixed_precision: str, project: Path) -> Any:
    """accelerate's part: data parallelism, autocast and trackers. Raises UserError for a tracker that is missing."""
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.state import AcceleratorState

    require_trackers(config)
    AcceleratorState._reset_state()  # a second run in one process may choose another precision
    # Buffers are packed indices, the same everywhere: nothing to broadcast before each forward.
    parallel = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
    return Accelerator(
        mixed_precision=mixed_precision,
        cpu=world.device == "cpu",
        log_with=list(config.log_with) or None,
        project_dir=str(project) if config.log_with else None,
        kwargs_handlers=[parallel],
    )


def train(
    model: Any,
    teacher: Any | None,
    blocks: Blocks,
    config: CompressConfig,
    *,
    world: World,
    staging: Path,
    mixed_precision: str = "no",
    track: Track = no_progress,
    show: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Train the clustered model in place for `config.steps` optimizer steps.

    Args:
        model: a causal LM with `ClusteredLinear` layers, on the world's device; sharded, or the same on all processes.
        teacher: gives the uncompressed model's logits, or None for next-token prediction.
        blocks: training data; a step takes `batch_size * gradient_accumulation` blocks for each process.
        staging: `metrics.jsonl` is appended there, a line a step, and checkpoints are kept: training goes on from the
            newest one; they are saved every `config.save_every` steps (0: never), at the last step, and on SIGTERM.
        mixed_precision: `no` or `bf16`.
        track, show: progress.

    Returns what offloading moved: empty without it. Raises UserError if the loss stops being finite, Preempted after
    SIGTERM.
    """
    accelerator = make_accelerator(config, world, mixed_precision, staging)
    freeze_dense_embeddings(model)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    layers = clustered_layers(model)
    if config.method == "dkm" and world.size > 1:
        share_saved_maps(layers)
    optimizer = build_optimizer(model, config, world)
    checkpoints = Checkpoints(staging, keep=config.keep, world=world)
    first = checkpoints.load_newest(model, optimizer)
    peaks = [group["lr"] for group in optimizer.param_groups]
    # FSDP2 has wrapped a sharded model already; of several whole ones accelerate averages the gradients.
    step_model = accelerator.prepare_model(model) if world.size > 1 and not world.sharded else model
    marshal = MarshalSavedTensors(device="cpu", keep=model.buffers()) if config.offload == "cpu" else None
    model.train()
    metrics = Metrics(staging / "metrics.jsonl", accelerator, config, first, world)
    with metrics, preemption() as stop:
        for step in track(range(first, config.steps), "training", config.steps - first):
            start = time.perf_counter()
            factor = learning_rate_factor(step, config.steps, config.warmup)
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
            temperature = set_temperature(layers, step, config)
            loss = torch.zeros((), dtype=torch.float64)
            for micro in range(config.gradient_accumulation):
                ids = _batch(blocks, step, micro, config, world)
                last = micro + 1 == config.gradient_accumulation
                waits = nullcontext() if last or world.size == 1 or world.sharded else step_model.no_sync()
                with waits, marshal or nullcontext():
                    with accelerator.autocast():
                        part = training_loss(
                            step_model,
                            teacher,
                            ids,
                            label_weight=config.label_weight,
                            hidden_weight=config.hidden_weight,
                        )
                    accelerator.backward(part / config.gradient_accumulation)
                loss += part.detach().double().cpu() / (config.gradient_accumulation * world.size)
            total = float(world.sum(loss))
            require_finite("training loss", total, step)
            hard = hard_loss(model, teacher, ids, step, config, world) if config.mode == "soft" else None
            norm = float(full(torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)))
            require_finite("gradient's norm", norm, step)  # before it reaches weights that a checkpoint would keep
            for layer in layers.values():
                layer.commit()
            optimizer.step()
            optimizer.zero_grad()

            done = step + 1
            record = {
                "step": done,
                "loss": total,
                **({"hard_loss": hard} if hard is not None else {}),
                "gradient_norm": norm,
                "learning_rate": config.learning_rate * factor,
                "temperature": temperature,
                "tokens": done * step_sequences(config, world) * config.sequence_length,
                "seconds": time.perf_counter() - start,
            }
            metrics.write(record)
            show(f"loss {total:.4f}")
            stopping = world.any(stop.is_set())
            due = config.save_every and (done % config.save_every == 0 or done == config.steps)
            if due or stopping:
                checkpoints.save(done, model, optimizer)
            if stopping:
                raise Preempted(f"SIGTERM: saved after step {done} of {config.steps}; go on with --resume")
    finish_centroids(model, world)
    model.eval()
    return marshal.statistics.as_dict() if marshal else {}


def require_finite(what: str, value: float, step: int) -> None:
    """Raises UserError for NaN or Inf, which all processes have at once."""
    if not math.isfinite(value):
        raise UserError(
            f"the {what} must stay finite, but is {value} at step {step + 1}; lower --learning-rate, or use "
            "--dtype float32",
            everywhere=True,
        )


def share_saved_maps(layers: dict[str, ClusteredLinear]) -> None:
    """eDKM's U and S for the dense reference: of the attention maps that clustering saves, which are the same on all
    processes, each keeps a share, of 16-bit weights as a table and a share of the index list."""
    import torch.distributed as dist

    group = dist.new_group()  # of its own, so that its order does not depend on the gradients' collectives

    def saving(weight: torch.Tensor) -> MarshalSavedTensors:
        uniquify = [Uniquify([weight])] if weight.dtype.itemsize == 2 else []
        return MarshalSavedTensors(codecs=[*uniquify, Shard(group)], force=True)

    for layer in layers.values():
        layer.saving = saving


def step_sequences(config: CompressConfig, world: World) -> int:
    """Sequences that one optimizer step sees, over all processes."""
    return config.batch_size * config.gradient_accumulation * world.size


def _batch(blocks: Blocks, step: int, micro: int, config: CompressConfig, world: World) -> torch.Tensor:
    """This process's part of a micro-batch. A step sees the same blocks however they are split over processes."""
    index = (step * config.gradient_accumulation + micro) * world.size + world.rank
    return blocks.batch(index, config.batch_size).to(world.device)


def set_temperature(layers: dict[str, ClusteredLinear], step: int, config: CompressConfig) -> float:
    """Give all layers the step's temperature, and return it."""
    temperature = temperature_at(
        step,
        config.steps,
        schedule=config.temperature_schedule,
        start=config.temperature,
        end=config.temperature_end,
    )
    for layer in layers.values():
        layer.temperature = temperature
    return temperature


@torch.no_grad()
def hard_loss(
    model: Any, teacher: Any | None, ids: torch.Tensor, step: int, config: CompressConfig, world: World
) -> float | None:
    """In soft mode, the loss of the snapped model on the step's last micro-batch: what export would give. Measured at
    about twenty steps of the run, None at the others."""
    every = max(1, config.steps // 20)
    if step % every and step + 1 != config.steps:
        return None
    model.eval()
    value = training_loss(model, teacher, ids, label_weight=config.label_weight).double().cpu() / world.size
    model.train()
    return float(world.sum(value))


@torch.no_grad()
def finish_centroids(model: Any, world: World) -> None:
    """The iterated centroids of the trained weights, where they are not trained themselves; layer by layer."""
    for layer in clustered_layers(model).values():
        if not layer.clustering.trains_luts:
            with gathered(layer):
                final = layer.iterated_centroids()
            assign(layer.centroids, final)
