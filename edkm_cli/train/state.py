"""Training state on disk: saved atomically, checked before it is used, so that a killed run ends with the same result.

A checkpoint is a directory `checkpoints/step-000050` of safetensors (parameters that train, optimizer state, random
state) and `state.json`. Learning rate, temperature and data are functions of the step, so they need no state. Tensors
are stored whole, however many processes trained them: they are gathered and written one at a time by the first.
"""

import json
import math
import os
import shutil
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from edkm_cli.config import CHECKPOINTS
from edkm_cli.distributed import ALONE, World, assign, local
from edkm_cli.errors import UserError
from edkm_cli.files import sha256_of, sync, whole_record, write_json
from edkm_cli.initialize.kept import read_whole
from edkm_cli.model_files import save_tensors

_RANDOM, _RANDOM_OF_GPU = "random.cpu", "random.cuda"


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
        tensors, numbers = _state(model, optimizer)
        broken = next((name for name, tensor in tensors.items() if not bool(local(tensor).isfinite().all())), None)
        if self._world.any(broken is not None):
            rule = f"the state after step {step} must be finite, but {broken or 'a tensor'} is not"
            remedy = f"lower --learning-rate, or use --dtype float32{self.kept()}"
            raise UserError(f"{rule}: training diverged and nothing was saved of it; {remedy}", everywhere=True)
        if self._world.main:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        save_tensors(unfinished / "state.safetensors", tensors, self._world)
        if self._world.main:
            files = {"state.safetensors": sha256_of(unfinished / "state.safetensors")}
            write_json(unfinished / "state.json", {"step": step, "files": files, "numbers": numbers})
            sync(unfinished)
            shutil.rmtree(target, ignore_errors=True)
            os.rename(unfinished, target)
            sync(self.directory)
            for old in sorted(self._all(), key=target.__eq__)[: -self._keep]:  # never the one just written
                shutil.rmtree(old, ignore_errors=True)

    def kept(self) -> str:
        """What a message adds about the newest checkpoint that is there."""
        there = self._all()
        return f" (the checkpoint {there[-1]} is kept)" if there else ""

    def _all(self) -> list[Path]:
        return sorted(path for path in self.directory.glob("step-*") if path.suffix != ".tmp")

    def _newest(self) -> dict[str, Any]:
        """state.json of the newest whole checkpoint, with its path; step 0 where there is none."""
        for candidate in reversed(self._all()):  # where one is damaged, an older one will do
            if (state := whole_record(candidate / "state.json")) and isinstance(state.get("step"), int):
                return {**state, "path": str(candidate / "state.safetensors")}
        return {"step": 0}

    def load_newest(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Restore the newest whole checkpoint in place and return its step; 0 where there is none."""
        newest = self._world.on_main(self._newest)
        if newest["step"]:
            _restore(model, optimizer, newest.get("numbers", {}), read_whole(Path(newest["path"]), self._world))
        return newest["step"]


def require_none(staging: Path, world: World) -> None:
    """Raises UserError for checkpoints of training: what they began from is gone, and tables mean nothing without it."""
    if kept := world.on_main(Checkpoints(staging, keep=1).kept):
        rule = f"--resume needs what training began from, but {staging / CHECKPOINTS / 'start'} is damaged or missing{kept}"
        raise UserError(f"{rule}; start again with --overwrite", everywhere=True)


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
        """Go back to the best step, in place, and return it; 0 where none was. Raises UserError where it is lost."""
        step = self._checkpoints.load_newest(model, optimizer)
        if not step and self._lowest < math.inf:
            rule = "--keep-best needs the checkpoint of the best step, but it is damaged"
            raise UserError(f"{rule}; start again with --overwrite, or leave --keep-best out", everywhere=True)
        return step


def _lowest_perplexity(metrics: Path, steps: int) -> float:
    """The lowest perplexity of the first text in the first lines of metrics.jsonl; infinity where none is there."""
    if not metrics.is_file():
        return math.inf
    try:
        records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()[:steps]]
        measured = (float(next(iter(r["perplexity"].values()))) for r in records if r.get("perplexity"))
        return min(measured, default=math.inf)
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError) as error:
        rule = f"{metrics} must hold a JSON object for each step, but is damaged ({error}); without it the best step is"
        raise UserError(f"{rule} not known: start again with --overwrite, or leave --keep-best out") from error


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """What training changes: parameters with gradients, and warm-start centroids without."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad or name.endswith(".centroids")}


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, int | float]]:
    """Everything a checkpoint holds: tensors by name, and the optimizer's plain numbers."""
    tensors: dict[str, Tensor] = {_RANDOM: torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors[_RANDOM_OF_GPU] = torch.cuda.get_rng_state()
    numbers: dict[str, int | float] = {}
    for name, parameter in _trained(model).items():
        tensors[f"parameter.{name}"] = parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            kind: Any = tensors if isinstance(value, Tensor) else numbers
            kind[f"optimizer.{key}.{name}"] = value
    return tensors, numbers


@torch.no_grad()
def _restore(
    model: nn.Module, optimizer: torch.optim.Optimizer, numbers: dict[str, float], tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Fill parameters and optimizer state, tensor by tensor, in the same order on all processes. Raises UserError where
    other parameters train than when the checkpoint was written."""
    trained = _trained(model)
    missing = set(trained)
    stored: Iterable[tuple[str, Any]] = chain(numbers.items(), tensors)
    for key, value in stored:
        if key in (_RANDOM, _RANDOM_OF_GPU):
            if key == _RANDOM:
                torch.set_rng_state(value)
            elif torch.cuda.is_available():
                torch.cuda.set_rng_state(value)
            continue
        of, _, name = key.partition(".")
        kind, name = ("", name) if of == "parameter" else name.split(".", 1)
        if name not in trained:
            raise _other(name)
        if kind:
            optimizer.state[trained[name]][kind] = _as_state(value, kind, trained[name], optimizer)
        else:
            assign(trained[name], value.to(trained[name].device))
            missing.remove(name)
    if missing:
        raise _other(min(missing))


def _other(name: str) -> UserError:
    rule = f"the checkpoint must be of the parameters that train now, but in one of both is no {name}"
    remedy = "go on with the version of edkm that wrote it, or start again with --overwrite"
    return UserError(f"{rule}; {remedy}", everywhere=True)


def _as_state(value: Any, kind: str, parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> Any:
    """A whole value as the optimizer has it: moments where, and sharded as, the parameter is; the number of steps in host
    memory, but for fused optimizers."""
    if not isinstance(value, Tensor) or (kind == "step" and not optimizer.defaults.get("fused")):
        return value.clone() if isinstance(value, Tensor) else value  # not a view of the file
    whole = value.to(parameter.device)
    if kind == "step" or whole.shape != parameter.shape:
        return whole
    state = torch.zeros_like(parameter, dtype=whole.dtype)
    assign(state, whole)
    return state
