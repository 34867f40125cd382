"""What training begins from, on disk: a resumed run takes it from there and does not compute the start again.

The tensors of training's checkpoints mean something only beside the start that they belong to: a table beside the entries
that weights chose, weights beside embeddings that were rounded once. Another processor or another number of processes
computes another start in the last bits. So all tensors of the model that training begins from are written once:

    checkpoints/start/model.layers.0.safetensors     a file for each decoder layer, by its module path
    checkpoints/start/rest.safetensors               everything outside of them, and the state of the random numbers
    checkpoints/start/state.json                     SHA-256 of each file, bits of the linears; written last
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from edkm_cli.distributed import World, assign, full
from edkm_cli.errors import UserError
from edkm_cli.format import SafetensorsWriter, sha256_of, sync, write_json
from edkm_cli.initialize.build import Recipe, initialize
from edkm_cli.nn.clustered import ClusteredLinear
from edkm_cli.nn.decoder import decoder_layers

STATE = "state.json"
_REST = "rest"
_RANDOM = "random.cpu"


class KeptStart:
    """The start in `directory`. All processes of `world` call alike; the first one reads and writes."""

    def __init__(self, directory: Path, world: World):
        self.directory, self._world = directory, world

    def state(self) -> dict[str, Any] | None:
        """state.json of a whole start, every file checked; None where there is none."""

        def read() -> dict[str, Any] | None:
            try:
                state = json.loads((self.directory / STATE).read_text(encoding="utf-8"))
                whole = all(sha256_of(self.directory / name) == sha256 for name, sha256 in state["files"].items())
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
                return None
            return state if whole and isinstance(state.get("module_bits"), dict) else None

        return self._world.on_main(read)

    def write(self, model: Any, module_bits: dict[str, int]) -> None:
        """Write all tensors of a model, file by file and tensor by tensor."""
        if self._world.main:
            shutil.rmtree(self.directory, ignore_errors=True)
            self.directory.mkdir(parents=True)
        tensors = tensors_of(model)
        files = {}
        for file, names in _files(model, tensors).items():
            announced = {name: (tensors[name].dtype, tuple(tensors[name].shape)) for name in names}
            path = self.directory / file
            with SafetensorsWriter(path, announced) if self._world.main else nullcontext() as writer:
                for name in names:
                    tensor = full(tensors[name])  # a collective where it is sharded
                    if writer is not None:
                        writer.write(name, tensor)
            if self._world.main:
                sync(path)
                files[file] = sha256_of(path)
        if self._world.main:
            write_json(self.directory / STATE, {"files": files, "module_bits": module_bits})
            sync(self.directory)

    @torch.no_grad()
    def fill(self, model: Any) -> None:
        """Give a model of the same modules the tensors that were kept. Raises UserError where one is missing."""
        for layer in (module for module in model.modules() if isinstance(module, ClusteredLinear)):
            layer.importance = None
        for module in model.modules():  # of a model whose layers are in its files
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.is_meta:
                    room = torch.empty_like(parameter, device=self._world.device)
                    module.register_parameter(name, nn.Parameter(room, parameter.requires_grad))
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_meta:
                    module._buffers[name] = torch.empty_like(buffer, device=self._world.device)
        tensors = tensors_of(model)
        for name, value in self._read():
            if name.endswith(".importance"):
                kept = nn.Parameter(value.to(self._world.device), requires_grad=False)
                model.get_submodule(name.rpartition(".")[0]).importance = kept
            elif name == _RANDOM:
                torch.set_rng_state(value)
            elif name not in tensors or tensors[name].shape != value.shape:
                raise UserError(
                    f"{self.directory} is of another model: {name} does not fit; start again without --resume"
                )
            else:
                assign(tensors.pop(name), value.to(self._world.device))
        missing = sorted(set(tensors) - {_RANDOM})
        if missing:
            raise UserError(f"{self.directory} must hold {missing[0]}, but does not; start again without --resume")

    def _read(self) -> Iterator[tuple[str, Tensor]]:
        """Name and value of each tensor, by the first process, handed to all, in host memory."""
        state: Any = self.state()
        for file in state["files"]:
            opened: Any = safe_open(self.directory / file, framework="pt") if self._world.main else None
            names = sorted(opened.keys()) if opened else []
            for name in self._world.on_main(partial(list, names)):
                yield name, self._world.broadcast_whole(opened.get_tensor(name) if opened else None)


def restore(dense: Any, recipe: Recipe, kept: KeptStart, **options: Any) -> Any:
    """As `initialize`, with what is kept in place of what it computes. `recipe` has the bits of all linears."""

    def empty(weight: Tensor, k: int, *, granularity: Any, **_: Any) -> Tensor:
        return torch.zeros(granularity.groups(*weight.shape), k, device=weight.device)

    model, _ = initialize(
        dense,
        recipe,
        start=empty,
        collect=lambda *_, **__: {},
        rounding_of=lambda *_, **__: {},
        **options,
    )
    kept.fill(model)
    return model


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters (shared ones once) and the buffers that are state, by name, and the state of the random numbers."""
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    state = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._buffers.keys() - module._non_persistent_buffers_set
    }
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in state}
    return {**tensors, _RANDOM: torch.get_rng_state()}


def _files(model: Any, tensors: dict[str, Tensor]) -> dict[str, list[str]]:
    """File name -> names of its tensors."""
    try:
        paths = list(decoder_layers(model))
    except UserError:  # a model that does not name its layers
        paths = []
    files: dict[str, list[str]] = {}
    for name in tensors:
        path = next((path for path in paths if name.startswith(f"{path}.")), _REST)
        files.setdefault(f"{path}.safetensors", []).append(name)
    return files
