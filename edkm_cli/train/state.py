"""Training state on disk: saved atomically, checked before it is used, so that a killed run ends with the same result.

A checkpoint is a directory `checkpoints/step-000050` of safetensors (parameters that train, optimizer state, random
state) and `state.json`. Learning rate, temperature and data are functions of the step, so they need no state. Tensors
are stored whole, however many processes trained them: they are gathered and written one at a time by the first.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from edkm_cli.config import CHECKPOINTS
from edkm_cli.distributed import ALONE, World, assign, full, local
from edkm_cli.errors import UserError
from edkm_cli.format import SafetensorsWriter, sha256_of, sync, write_json

_RANDOM = "random.cpu"


class Checkpoints:
    """The checkpoints of one run, in `DIR.partial/checkpoints`; the newest `keep` stay. All processes call alike."""

    def __init__(self, staging: Path, *, keep: int, world: World = ALONE, name: str = ""):
        self.directory = staging / CHECKPOINTS / name
        self._keep, self._world = keep, world

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Write the state after `step` optimizer steps: to a temporary directory, fsync, rename, then prune.

        Raises UserError, and keeps what there is, if anything in it is NaN or Inf: a run could never go on from it.
        """
        target = self.directory / f"step-{step:06d}"
        unfinished = target.with_name(target.name + ".tmp")
        state = _State(model, optimizer)
        broken = state.first_broken()
        if self._world.any(broken is not None):
            raise UserError(
                f"the state after step {step} must be finite, but {broken or 'a tensor'} is not: training diverged and "
                f"nothing was saved of it; lower --learning-rate, or use --dtype float32{self.kept()}",
                everywhere=True,
            )
        with ExitStack() as stack:
            writer = None
            if self._world.main:
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir(parents=True)
                writer = stack.enter_context(SafetensorsWriter(unfinished / "state.safetensors", state.announced()))
            for name, read in state.readers():
                tensor = read()  # a collective where it is sharded
                if writer is not None:
                    writer.write(name, tensor)
        if self._world.main:
            sha256 = sha256_of(unfinished / "state.safetensors")
            write_json(unfinished / "state.json", {"step": step, "sha256": sha256, "numbers": state.numbers()})
            sync(unfinished)
            shutil.rmtree(target, ignore_errors=True)
            os.rename(unfinished, target)
            sync(self.directory)
            for old in self._all()[: -self._keep]:
                shutil.rmtree(old)

    def kept(self) -> str:
        """What a message adds about the newest checkpoint that is there."""
        found = self._all()
        return f" (the checkpoint {found[-1]} is kept)" if found else ""

    def _all(self) -> list[Path]:
        return sorted(path for path in self.directory.glob("step-*") if path.suffix != ".tmp")

    def _newest(self) -> dict[str, Any]:
        """state.json of the newest whole checkpoint, with its path; step 0 where there is none."""
        for candidate in reversed(self._all()):
            try:
                state = json.loads((candidate / "state.json").read_text(encoding="utf-8"))
                if sha256_of(candidate / "state.safetensors") == state["sha256"]:
                    return {**state, "step": int(state["step"]), "path": str(candidate / "state.safetensors")}
            except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
                continue  # damaged: an older one will do
        return {"step": 0}

    def load_newest(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Restore the newest whole checkpoint in place and return its step; 0 where there is none."""
        found = self._world.on_main(self._newest)
        if found["step"] == 0:
            return 0
        with ExitStack() as stack:
            opened: Any = None
            if self._world.main:
                try:
                    opened = stack.enter_context(safe_open(found["path"], framework="pt"))
                except (SafetensorError, OSError) as error:
                    raise UserError(f"{found['path']} cannot be read; start again without --resume") from error
            names = self._world.on_main(lambda: sorted(opened.keys()))

            def read(name: str) -> Tensor:
                """By the first process, handed to all, in host memory."""
                return self._world.broadcast_whole(opened.get_tensor(name) if opened else None)

            _restore(model, optimizer, found.get("numbers", {}), names, read)
        return found["step"]


def require_none(staging: Path, world: World) -> None:
    """Raises UserError for checkpoints of training: what they began from is gone, and tables mean nothing without it."""
    kept = world.on_main(Checkpoints(staging, keep=1).kept)
    if kept:
        raise UserError(
            f"--resume needs what training began from, but {staging / CHECKPOINTS / 'start'} is damaged or missing{kept}; "
            "start again with --overwrite",
            everywhere=True,
        )


class BestStep:
    """The state of the step whose measured perplexity was lowest so far, kept beside the checkpoints. All processes call
    alike. After a resume at step `first` it is known from metrics.jsonl what had been the best by then."""

    def __init__(self, staging: Path, first: int, world: World = ALONE):
        self._checkpoints = Checkpoints(staging, keep=1, world=world, name="best")
        self._lowest = float(world.on_main(lambda: _lowest_perplexity(staging / "metrics.jsonl", first)))

    def offer(self, step: int, value: float, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Keep the state after `step` steps if its perplexity is the lowest."""
        if value < self._lowest:
            self._lowest = value
            self._checkpoints.save(step, model, optimizer)

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Go back to the best step, in place, and return it; 0 where none was measured."""
        return self._checkpoints.load_newest(model, optimizer)


def _lowest_perplexity(metrics: Path, steps: int) -> float:
    """The lowest perplexity of the first text in the first lines of metrics.jsonl; infinity where none is there."""
    if not metrics.is_file():
        return math.inf
    try:
        records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()[:steps]]
        return min(
            (float(next(iter(r["perplexity"].values()))) for r in records if r.get("perplexity")), default=math.inf
        )
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError) as error:
        raise UserError(
            f"{metrics} must hold a JSON object for each step, but is damaged ({error}); without it the best step is not "
            "known: start again without --resume, or leave --keep-best out"
        ) from error


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """What training changes: parameters with gradients, and warm-start centroids without."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad or name.endswith(".centroids")
    }


class _State:
    """Everything a checkpoint holds: tensors by name, and the optimizer's plain numbers."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self._tensors: dict[str, Tensor] = {_RANDOM: torch.get_rng_state()}
        self._numbers: dict[str, int | float] = {}
        for name, parameter in _trained(model).items():
            self._tensors[f"parameter.{name}"] = parameter.detach()
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    self._tensors[f"optimizer.{key}.{name}"] = value
                elif isinstance(value, (int, float)):
                    self._numbers[f"optimizer.{key}.{name}"] = value

    def first_broken(self) -> str | None:
        """The name of the first tensor that holds NaN or Inf on this process."""
        for name, tensor in self._tensors.items():
            if tensor.is_floating_point() and not bool(local(tensor).isfinite().all()):
                return name
        return None

    def announced(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors.items()}

    def readers(self) -> Iterable[tuple[str, Callable[[], Tensor]]]:
        for name, tensor in self._tensors.items():
            yield name, partial(full, tensor)

    def numbers(self) -> dict[str, int | float]:
        return self._numbers


@torch.no_grad()
def _restore(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    numbers: Mapping[str, int | float],
    names: list[str],
    read: Callable[[str], Tensor],
) -> None:
    """Fill parameters and optimizer state, tensor by tensor, in the same order on all processes."""
    torch.set_rng_state(read(_RANDOM))
    states: dict[str, dict[str, Any]] = {}
    for key in [*names, *numbers]:
        if key.startswith("optimizer."):
            _, kind, name = key.split(".", 2)
            states.setdefault(name, {})[kind] = numbers.get(key)
    for name, parameter in _trained(model).items():
        assign(parameter, read(f"parameter.{name}").to(parameter.device))
        for kind, number in sorted(states.get(name, {}).items()):
            value: Any = number
            if number is None:
                whole = read(f"optimizer.{kind}.{name}")
                if kind == "step":  # on the CPU, but for fused optimizers
                    value = whole.to(parameter.device) if optimizer.defaults.get("fused") else whole
                else:  # moments are where, and sharded as, the parameter is
                    value = torch.zeros_like(parameter, dtype=whole.dtype) if whole.shape == parameter.shape else whole
                    value = value.to(parameter.device)
                    assign(value, whole.to(parameter.device))
            optimizer.state[parameter][kind] = value
