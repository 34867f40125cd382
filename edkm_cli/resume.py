"""Training state on disk: saved atomically, checked before it is used, so that a killed run ends with the same result.

A checkpoint is a directory `checkpoints/step-000050` of safetensors (parameters that train, optimizer moments, random
states) and `state.json`. Learning rate, temperature and data are functions of the step, so they need no state.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from edkm_cli.config import CompressConfig
from edkm_cli.errors import UserError
from edkm_cli.format import sha256_of, sync, write_json

# What may differ between a run and its resumption without changing the result.
_FREE = ("output", "save_every", "keep", "trust_remote_code", "model")


def fingerprint(config: CompressConfig, model: nn.Module, tokens: Tensor) -> dict[str, Any]:
    """What decides a run's result: settings, and digests of the dense model and of the training tokens."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    data = hashlib.sha256(tokens.cpu().contiguous().numpy().data).hexdigest()
    settings = {key: value for key, value in asdict(config).items() if key not in _FREE}
    settings = json.loads(json.dumps(settings))
    return {**settings, "model_sha256": digest.hexdigest(), "tokens_sha256": data}


def require_same(found: Mapping[str, Any], wanted: Mapping[str, Any], where: Path) -> None:
    """Raises UserError naming every setting that differs."""
    names = [name for name in sorted({*found, *wanted}) if found.get(name) != wanted.get(name)]
    if names:
        changes = ", ".join(f"{name} was {found.get(name)!r} and is {wanted.get(name)!r}" for name in names)
        raise UserError(
            f"--resume needs the settings, model and data of the run in {where}, but {changes}; "
            "give the same ones, or start again without --resume"
        )


class Checkpoints:
    """The checkpoints of one run, in `DIR.partial/checkpoints`; the newest `keep` stay."""

    def __init__(self, staging: Path, *, keep: int):
        self.directory = staging / "checkpoints"
        self._keep = keep

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Write the state after `step` optimizer steps: to a temporary directory, fsync, rename, then prune."""
        target = self.directory / f"step-{step:06d}"
        partial = target.with_name(target.name + ".tmp")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file(_tensors(model, optimizer), partial / "state.safetensors")
        write_json(partial / "state.json", {"step": step, "sha256": sha256_of(partial / "state.safetensors")})
        sync(partial / "state.safetensors")
        sync(partial)
        shutil.rmtree(target, ignore_errors=True)
        os.rename(partial, target)
        sync(self.directory)
        for old in self._all()[: -self._keep]:
            shutil.rmtree(old)

    def _all(self) -> list[Path]:
        return sorted(path for path in self.directory.glob("step-*") if path.suffix != ".tmp")

    def load_newest(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Restore the newest whole checkpoint in place and return its step; 0 where there is none."""
        for candidate in reversed(self._all()):
            try:
                state = json.loads((candidate / "state.json").read_text(encoding="utf-8"))
                if sha256_of(candidate / "state.safetensors") != state["sha256"]:
                    continue
                tensors = load_file(candidate / "state.safetensors")
            except (OSError, ValueError, KeyError, SafetensorError):
                continue  # damaged: an older one will do
            _restore(tensors, model, optimizer)
            return int(state["step"])
        return 0

    def remove(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """What training changes: parameters with gradients, and warm-start centroids without."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad or name.endswith(".centroids")
    }


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors = {"random.cpu": torch.get_rng_state()}
    for name, parameter in _trained(model).items():
        tensors[f"parameter.{name}"] = parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{key}.{name}"] = value
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


@torch.no_grad()
def _restore(tensors: dict[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.set_rng_state(tensors["random.cpu"])
    moments: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if key.startswith("optimizer."):
            _, kind, name = key.split(".", 2)
            moments.setdefault(name, {})[kind] = tensor
    for name, parameter in _trained(model).items():
        parameter.copy_(tensors[f"parameter.{name}"])
        if name in moments:
            # AdamW keeps its step count on the CPU, the moments beside the parameter.
            optimizer.state[parameter] = {
                kind: tensor if kind == "step" else tensor.to(parameter.device)
                for kind, tensor in moments[name].items()
            }
