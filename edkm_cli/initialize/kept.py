"""What training begins from, on disk: a resumed run takes it from there and does not compute the start again.

The tensors of training's checkpoints mean something only beside the start that they belong to: a table beside the entries
that weights chose, weights beside embeddings that were rounded once. Another processor or another number of processes
computes another start in the last bits. So all tensors of the model that training begins from are written once:

    checkpoints/start/model.layers.0.safetensors     a file for each decoder layer, by its module path
    checkpoints/start/rest.safetensors               everything outside of them, and the state of the random numbers
    checkpoints/start/state.json                     SHA-256 of each file, bits of the linears; written last

A start that works layer by layer writes each file when its layer is done, and until the last one is there what the others
need: tables and rounded embeddings, and the hidden states of the text at the end of the last layer that is done:

    checkpoints/start/begun.safetensors, states.N.safetensors, progress.json
"""

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from edkm_cli.distributed import World, assign
from edkm_cli.errors import UserError
from edkm_cli.files import sha256_of, sync, whole_record, write_json
from edkm_cli.model_files import save_tensors
from edkm_cli.nn.clustered import clustered_layers
from edkm_cli.nn.hooks import decoder_layers

STATE = "state.json"
_PROGRESS, _BEGUN = "progress.json", "begun"
_REST, _RANDOM = "rest", "random.cpu"
# Of a start that was interrupted: how many layers are done, bits, what `begin` was given, what `add` was given last.
Begun = tuple[int, dict[str, int], dict[str, Tensor], dict[str, Tensor] | None]


class KeptStart:
    """The start in `directory`. All processes of `world` call alike; the first one reads and writes."""

    def __init__(self, directory: Path, world: World):
        self.directory, self._world = directory, world
        self._progress: dict[str, Any] = {"files": {}, "module_bits": {}, "layers": 0}

    def begin(self, tensors: dict[str, Tensor], module_bits: dict[str, int]) -> None:
        """Keep what a start layer by layer needs of what comes before the layers."""
        if self._world.main:
            shutil.rmtree(self.directory, ignore_errors=True)
            self.directory.mkdir(parents=True)
            self._progress["module_bits"] = module_bits
            self._save({_BEGUN: {**tensors, _RANDOM: torch.get_rng_state()}})

    def add(self, path: str, layer: nn.Module, states: dict[str, Tensor]) -> None:
        """Keep a layer that is done, and what the next one goes on from."""
        if self._world.main:
            done = self._progress["layers"]
            self._progress["files"].pop(f"states.{done}.safetensors", None)
            self._progress["layers"] = done + 1
            held = {f"{path}.{name}": tensor for name, tensor in tensors_of(layer).items()}
            self._save({path: held, f"states.{done + 1}": {**states, _RANDOM: torch.get_rng_state()}})
            (self.directory / f"states.{done}.safetensors").unlink(missing_ok=True)

    def _save(self, files: dict[str, dict[str, Tensor]]) -> None:
        for name, tensors in files.items():
            path = self.directory / f"{name}.safetensors"
            save_tensors(path, tensors)
            self._progress["files"][path.name] = sha256_of(path)
        write_json(self.directory / _PROGRESS, self._progress)
        sync(self.directory)

    def begun(self) -> Begun | None:
        """What there is of a start that was interrupted; None where there is none."""
        if (state := self.state(_PROGRESS)) is None:
            return None
        self._progress, done = state, state["layers"]
        tensors = dict(self._read([f"{_BEGUN}.safetensors"]))
        last = dict(self._read([f"states.{done}.safetensors"])) if done else None
        torch.set_rng_state((last or tensors)[_RANDOM])
        return done, state["module_bits"], tensors, last

    def state(self, file: str = STATE) -> dict[str, Any] | None:
        """state.json of a whole start, every file checked; None where there is none."""

        def read() -> dict[str, Any] | None:
            state = whole_record(self.directory / file)
            return state if state and isinstance(state.get("module_bits"), dict) else None

        return self._world.on_main(read)

    def write(self, model: Any, module_bits: dict[str, int]) -> None:
        """Write all tensors of a model, file by file and tensor by tensor, but those that are there already."""
        files = {name: sha256 for name, sha256 in self._progress["files"].items() if self._progress["layers"]}
        if self._world.main:
            if not files:
                shutil.rmtree(self.directory, ignore_errors=True)
            self.directory.mkdir(parents=True, exist_ok=True)
        tensors = {**tensors_of(model), _RANDOM: torch.get_rng_state()}
        names_of = _files(model, tensors)
        for file in [file for file in names_of if file not in files]:
            path = self.directory / file
            save_tensors(path, {name: tensors[name] for name in names_of[file]}, self._world)
            if self._world.main:
                files[file] = sha256_of(path)
        if self._world.main:
            whole = {file: files[file] for file in names_of}
            write_json(self.directory / STATE, {"files": whole, "module_bits": module_bits})
            sync(self.directory)
            for file in [_PROGRESS, *(files.keys() - whole.keys())]:
                (self.directory / file).unlink(missing_ok=True)

    @torch.no_grad()
    def fill(self, model: nn.Module, path: str = "") -> None:
        """Give a model of the same modules, or its layer at `path`, what was kept. UserError where one is missing."""
        state: Any = {"files": [f"{path}.safetensors"]} if path else self.state()
        for layer in clustered_layers(model).values():
            layer.importance = None
        if not self._world.sharded:  # room for the tensors of layers that are in a model's files until then
            model._apply(lambda one: torch.empty_like(one, device=self._world.device) if one.is_meta else one)
        tensors = tensors_of(model)
        for stored, value in self._read(state["files"]):
            name = stored.removeprefix(f"{path}.")
            if name.endswith(".importance"):
                kept = nn.Parameter(value.to(self._world.device), requires_grad=False)
                model.get_submodule(name.rpartition(".")[0]).register_parameter("importance", kept)
            elif name == _RANDOM:
                torch.set_rng_state(value)
            elif name not in tensors or tensors[name].shape != value.shape:
                raise UserError(f"{self.directory} is of another model: {name} does not fit; start without --resume")
            else:
                assign(tensors.pop(name), value.to(self._world.device))
        if tensors:
            raise UserError(f"{self.directory} must hold {min(tensors)}, but does not; start again with --overwrite")

    def _read(self, files: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for file in files:
            yield from read_whole(self.directory / file, self._world)


def read_whole(path: Path, world: World) -> Iterator[tuple[str, Tensor]]:
    """Name and value of each tensor of a file, read by the first process and handed to all, in host memory, by name."""
    opened: Any = safe_open(path, framework="pt") if world.main else None
    for name in world.on_main(lambda: sorted(opened.keys())):
        yield name, world.broadcast_whole(opened.get_tensor(name) if opened else None)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters (shared ones once) and the buffers that are state, by name."""
    state = model.state_dict()
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return tensors | {name: buffer for name, buffer in model.named_buffers() if name in state}


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
