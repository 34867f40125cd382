"""The training loop, by accelerate: read it from top to bottom. Each step leaves a line in `metrics.jsonl`, and the same for
the trackers of `--log-with`."""

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from edkm_cli.clustering.schedule import learning_rate_factor
from edkm_cli.config import CHECKPOINTS, CompressConfig, TrainingSettings
from edkm_cli.data import Batch, Blocks
from edkm_cli.distributed import World, assign, full, gathered
from edkm_cli.errors import Preempted, UserError, explained
from edkm_cli.files import written_whole
from edkm_cli.memory import MarshalSavedTensors, Shard, Uniquify
from edkm_cli.nn.clustered import ClusteredLinear, clustered_layers
from edkm_cli.nn.hooks import evaluating, without_dropout
from edkm_cli.nn.parts import Parts
from edkm_cli.nn.swap import freeze_dense_embeddings
from edkm_cli.progress import Track, no_progress
from edkm_cli.settings import part_of
from edkm_cli.train.losses import Objective, Teacher
from edkm_cli.train.optimizer import build_optimizer, relative_size
from edkm_cli.train.state import BestStep, Checkpoints
from edkm_cli.train.teacher import micro_batch

_DENSE_RATE = 1e-4  # of a dense model: weights that are not rounded in each forward pass want a lower one


class Metrics:
    """`metrics.jsonl`, a line for each step, and the trackers of `--log-with`; on the first process only."""

    def __init__(self, path: Path, accelerator: Any, config: TrainingSettings, first: int, world: World):
        self._file = None
        self._accelerator = accelerator if config.log_with else None
        if world.main:
            keep_metrics(path, first)
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close
        if self._accelerator is not None:
            plain = (bool, int, float, str)
            settings = {name: one if isinstance(one, plain) else str(one) for name, one in asdict(config).items()}
            # What trackers write goes with the run; steps that a resumed run repeats replace the former ones.
            here = {"dir": str(path.parent), "settings": {"symlink": False}}  # a link would be somebody's
            options = {"tensorboard": {"purge_step": first + 1}, "wandb": {} if "WANDB_DIR" in os.environ else here}
            accelerator.init_trackers("edkm", config=settings, init_kwargs=options)

    def write(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        if self._accelerator is not None:
            self._accelerator.log({name: value for name, value in record.items() if name != "step"}, record["step"])

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        for tracker in self._accelerator.trackers if self._accelerator else ():  # not `end_training`: the group stays
            tracker.finish()


def keep_metrics(path: Path, steps: int) -> None:
    """Drop the lines after step `steps`, which a resumed run writes again, and a last line that was cut."""
    if path.is_file():
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:steps]
        with written_whole(path) as kept:  # a kill in between loses no line
            kept.write_text("".join(line + "\n" for line in lines if line), encoding="utf-8")


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


def make_accelerator(config: TrainingSettings, world: World, mixed_precision: str, project: Path) -> Any:
    """accelerate's part: autocast and trackers."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()  # a second run in one process may choose another precision
    trackers = {"log_with": list(config.log_with), "project_dir": str(project)} if config.log_with else {}
    return Accelerator(mixed_precision=mixed_precision, cpu=world.device == "cpu", **trackers)


def require_launch(config: TrainingSettings, world: World) -> None:
    """Raises UserError for a tracker of `--log-with` that is not installed, a machine that accelerate refuses, and where
    `accelerate launch` was told another accumulation than this run."""
    if config.steps and world.gpu:
        from accelerate import PartialState

        with explained("accelerate does not take this machine", "; update the driver, or set what it names"):
            PartialState()
    if config.log_with:
        from accelerate.tracking import get_available_trackers

        available = [str(getattr(tracker, "value", tracker)) for tracker in get_available_trackers()]
        for name in (name for name in config.log_with if name not in available):
            why = f"--log-with {name} needs a package that is not installed; pip install {name}"
            raise UserError(why, everywhere=True)
    asked, ours = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1"), str(config.gradient_accumulation)
    if asked not in ("1", ours):
        rule = f"accelerate launch says {asked} gradient accumulation steps and --gradient-accumulation {ours}"
        raise UserError(f"{rule}; give both the same number, or only --gradient-accumulation", everywhere=True)


def train(
    model: Any,
    objective: Objective,
    blocks: Blocks,
    config: TrainingSettings,
    *,
    world: World,
    staging: Path,
    mixed_precision: str = "no",
    temperature: Callable[[int], float] | None = None,
    measure: Callable[[Any], dict[str, Any]] = lambda model: {},
    track: Track = no_progress,
    show: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Train the clustered model in place for `config.steps` optimizer steps.

    Args:
        model: a causal LM, on the world's device; sharded, or the same on all processes. What requires gradients trains.
        config: of any command that trains, with no `auto` in it.
        blocks: training data; a step takes `batch_size * gradient_accumulation` blocks for each process.
        staging: `metrics.jsonl` is appended there, a line a step, and checkpoints are kept: training goes on from the
            newest one; they are saved every `config.save_every` steps (0: never), at the last step, and on SIGTERM.
        temperature: of the clustered layers at a step, from 0, in modes that have one.
        measure: figures of the model, each a map by text, for the step's line; called every `config.eval_every` steps (0:
            never) and at the last one. With `config.keep_best` training ends with the weights of the step at which the
            `perplexity` of the first text was lowest.

    Returns what offloading moved: empty without it. Raises UserError if the loss stops being finite, Preempted after
    SIGTERM.
    """
    accelerator = make_accelerator(config, world, mixed_precision, staging)
    prepare(model, config, world)
    optimizer = build_optimizer(model, config, world)
    checkpoints = Checkpoints(staging, keep=config.keep, world=world)
    first = checkpoints.load_newest(model, optimizer)
    training = _Training(model, objective, blocks, config, world, accelerator, optimizer, temperature)
    best = BestStep(staging, first, world) if config.keep_best else None
    metrics = Metrics(staging / "metrics.jsonl", accelerator, config, first, world)
    with closing(metrics), preemption() as stop:
        for step in track(range(first, config.steps), "training", config.steps - first):
            try:
                record = training.step(step)
            except UserError as error:
                raise UserError(f"{error}{checkpoints.kept()}", everywhere=error.everywhere) from error
            done = step + 1
            if config.eval_every and (done % config.eval_every == 0 or done == config.steps):
                record.update(measure(model))
                if best is not None:
                    best.offer(done, next(iter(record["perplexity"].values())), model, optimizer)
            metrics.write(record)
            show(f"loss {record['loss']:.4f}")
            stopping = world.any(stop.is_set())
            due = config.save_every and (done % config.save_every == 0 or done == config.steps)
            if due or (stopping and config.keep):
                checkpoints.save(done, model, optimizer)
            if stopping:
                raise Preempted(f"SIGTERM: saved after step {done} of {config.steps}; go on with --resume")
    restored = 0 if best is None else best.restore(model, optimizer)  # its tables are those that were measured
    training.heat(config.steps - 1)  # a run that goes on behind its last step has not had it yet
    with torch.no_grad():  # the iterated centroids of the trained weights, where they are not trained; layer by layer
        for layer in () if restored else clustered_layers(model).values():
            if not layer.clustering.trains_luts:
                with gathered(layer):
                    final = layer.iterated_centroids()
                assign(layer.centroids, final)
    model.eval()
    return training.marshal.statistics.as_dict() if training.marshal else {}


def prepare(model: Any, config: TrainingSettings, world: World) -> None:
    """Make a clustered model ready to train, in place."""
    freeze_dense_embeddings(model)
    if config.gradient_checkpointing and model.supports_gradient_checkpointing:  # a few families have none
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)  # since 5.2x
        enable({"use_reentrant": False})
        model.enable_input_require_grads()
    layers = clustered_layers(model)
    if world.size > 1 and any(layer.clustering.method == "dkm" for layer in layers.values()):
        share_saved_maps(layers)
    model.train()
    without_dropout(model)


@dataclass
class _Training:
    """One optimizer step after the other: `step` is the order of things in each."""

    model: Any
    objective: Objective
    blocks: Blocks
    config: TrainingSettings
    world: World
    accelerator: Any
    optimizer: torch.optim.Optimizer
    temperature: Callable[[int], float] | None

    def __post_init__(self) -> None:
        self._layers = clustered_layers(self.model)
        self._soft = any(layer.clustering.mode == "soft" for layer in self._layers.values())
        self._peaks = [group["lr"] for group in self.optimizer.param_groups]
        self._parts = Parts(self.model, whole=self.world.sharded)
        self.marshal = MarshalSavedTensors(keep=self.model.buffers()) if self.config.offload == "cpu" else None

    def heat(self, step: int) -> float | None:
        """Give the layers the temperature of a step, in modes that have one."""
        temperature = self.temperature(step) if self.temperature is not None else None
        if temperature is not None:
            for layer in self._layers.values():
                layer.temperature = temperature
        return temperature

    def step(self, step: int) -> dict[str, Any]:
        """Step number `step`, from 0; returns its line of metrics.jsonl. Raises UserError for NaN or Inf."""
        config, world, start = self.config, self.world, time.perf_counter()
        factor = learning_rate_factor(step, config.steps, config.warmup)
        for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * factor
        temperature = self.heat(step)
        loss, last = self._accumulate(step)
        require_finite("training loss", loss, step)
        hard = self.hard_loss(last, step) if self._soft else None
        norm = float(full(torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.max_grad_norm)))
        require_finite("gradient's norm", norm, step)  # before it reaches weights that a checkpoint would keep
        for layer in self._layers.values():
            layer.commit()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {
            "step": step + 1,
            "loss": loss,
            **({"hard_loss": hard} if hard is not None else {}),
            "gradient_norm": norm,
            "learning_rate": max(self._peaks) * factor,
            **({"temperature": temperature} if temperature is not None else {}),
            "tokens": (step + 1) * config.step_sequences(world.size) * config.sequence_length,
            "seconds": time.perf_counter() - start,
        }

    def _accumulate(self, step: int) -> tuple[float, Batch]:
        """Forward and backward of all micro-batches: (the loss over all processes, the last micro-batch).

        The loss is a mean over all tokens that the step learns: a micro-batch counts by how many it has.
        """
        count = self.config.gradient_accumulation
        loss = torch.zeros((), dtype=torch.float64)
        found = (micro_batch(self.blocks, self.config, self.world, step, micro) for micro in range(count))
        batches = [batch.to(self.world.device) for batch in found]
        shares = [1.0] * count
        if batches[0].labels is not None:
            learnt = torch.tensor(float(sum(batch.learnt for batch in batches)), dtype=torch.float64)
            total = max(float(self.world.sum(learnt)), 1.0)
            shares = [batch.learnt * count * self.world.size / total for batch in batches]
        for batch, share in zip(batches, shares, strict=True):
            with self.marshal or nullcontext():
                with self.accelerator.autocast():
                    part = self.objective.loss(self._parts, batch)
                    part = part if share == 1.0 else part * share
                (part / count).backward()
            loss += part.detach().double().cpu() / (count * self.world.size)
        for parameter in () if self.world.sharded else self.model.parameters():  # else FSDP2 has averaged them
            if parameter.requires_grad:  # one that no token used, an expert's, takes part with zeros
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                if self.world.size > 1:
                    self.world.sum(parameter.grad).div_(self.world.size)
        return float(self.world.sum(loss)), batches[-1]

    @torch.no_grad()
    def hard_loss(self, batch: Batch, step: int) -> float | None:
        """In soft mode, the objective of the snapped model on the step's last micro-batch: what export would give. Measured
        at about twenty steps of the run, None at the others."""
        if step % max(1, self.config.steps // 20) and step + 1 != self.config.steps:
            return None
        with evaluating(self.model), self.accelerator.autocast():
            value = self.objective.loss(self._parts, batch).double().cpu() / self.world.size
        return float(self.world.sum(value))


def require_finite(what: str, value: float, step: int) -> None:
    """Raises UserError for NaN or Inf, which all processes have at once."""
    if not math.isfinite(value):
        rule = f"the {what} must stay finite, but is {value} at step {step + 1}"
        raise UserError(f"{rule}; lower --learning-rate, or use --dtype float32", everywhere=True)


def share_saved_maps(layers: dict[str, ClusteredLinear]) -> None:
    """eDKM's U and S for the dense reference: of the attention maps that clustering saves, which are the same on all
    processes, each keeps a share, of 16-bit weights as a table and a share of the index list."""
    group = dist.new_group()  # of its own, so that its order does not depend on the gradients' collectives

    def saving(weight: torch.Tensor) -> MarshalSavedTensors:
        uniquify = [Uniquify([weight])] if weight.dtype.itemsize == 2 else []
        return MarshalSavedTensors(codecs=[*uniquify, Shard(group)], force=True)

    for layer in layers.values():
        layer.saving = saving


def dense_directory(staging: Path, config: CompressConfig) -> Path:
    """Where the training keeps its own metrics and checkpoints, one directory for each learning rate that was tried: what
    is below goes when the run is finished."""
    return staging / CHECKPOINTS / f"dense-{config.dense_learning_rate or 'auto'}"


def train_dense(model: Any, teacher: Teacher | None, blocks: Blocks, config: CompressConfig, **options: Any) -> None:
    """`--compare-dense`: train a dense causal LM in place by the settings of a compressed one, to tell what compression
    costs from what training gives; `options` are the other arguments of `train`.

    Only the learning rate differs. A killed run goes on from its newest checkpoint, and a finished one only loads its last.
    The lines of its metrics end in `staging`.
    """
    world, staging = options["world"], options["staging"]
    directory = dense_directory(staging, config)
    if world.main:
        directory.mkdir(parents=True, exist_ok=True)
    world.any(False)  # all wait until it is there
    matrices = (module.weight for module in model.modules() if isinstance(module, nn.Linear))
    rate = config.dense_learning_rate or _DENSE_RATE * relative_size(matrices)
    settings = part_of(TrainingSettings, config, learning_rate=rate, log_with=())
    objective = Objective(teacher, label_weight=config.label_weight or 0.0)
    train(model, objective, blocks, settings, **{**options, "staging": directory})
    if world.main:
        (staging / "metrics_dense.jsonl").write_bytes((directory / "metrics.jsonl").read_bytes())
