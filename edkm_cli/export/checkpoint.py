"""The compressed checkpoint: a Hugging Face directory, written tensor by tensor (docs/format.md), and what export records of
each tensor, so that it can be recognised later: tensors.json.

The end of a run is tried before its beginning: swap, export and reload on the meta device, without a weight. What a
checkpoint needs is known from shapes alone: that each tensor it will hold is in the clustered model under the same name,
and that the configuration, written and read again, describes the same tensors. A family for which that does not hold is
refused then, not after training.
"""

import copy
import inspect
import shutil
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from edkm_cli.distributed import ALONE, World, full, gathered, local
from edkm_cli.errors import UserError, named, shortage
from edkm_cli.export.formats import find
from edkm_cli.export.formats.folder import MAX_SHARD_SIZE, write_tensors
from edkm_cli.export.source import Described
from edkm_cli.files import digest, write_checksums, write_json
from edkm_cli.format import QuantizationSpec
from edkm_cli.hf import EdkmConfig
from edkm_cli.initialize.build import Recipe, Tables, no_tables
from edkm_cli.initialize.layers import Layers
from edkm_cli.integrity import describe_tensors, expected_tensors, skeleton, skeleton_tensors
from edkm_cli.model_files import TensorFiles
from edkm_cli.nn.clustered import LutLayer
from edkm_cli.nn.swap import palettize_embeddings, palettize_skeleton
from edkm_cli.packing import pack, packed_width
from edkm_cli.preflight import RunPlan
from edkm_cli.progress import Track, no_progress
from edkm_cli.runtime.palettized import PackedModule

_PACKED = ("indices", "lut", "lut_scale", "scales", "offsets")
RECORD = "tensors.json"
_CHUNK = 2**22


def tensor_record(tensor: Tensor) -> dict[str, Any]:
    """dtype, shape and sha256 of a tensor; of floating ones their mean magnitude and the largest, of integers the sum."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    record: dict[str, Any] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    record["sha256"] = digest([("", flat)])
    if flat.numel() == 0:
        return record
    if not flat.is_floating_point():
        return {**record, "sum": int(flat.sum(dtype=torch.int64))}
    total = largest = 0.0
    for part in flat.split(_CHUNK):  # of a vocabulary's rows a copy would be as large as the model
        magnitude = part.float().abs()
        total += float(magnitude.sum(dtype=torch.float64))
        largest = max(largest, float(magnitude.amax()))
    return {**record, "mean_magnitude": total / flat.numel(), "largest": largest}


@dataclass(frozen=True)
class DenseFormat:
    """The dtype that uncompressed tensors are stored in, and the names of those that the source holds more exactly."""

    dtype: torch.dtype
    wider: frozenset[str] = frozenset()

    @classmethod
    def of(cls, layers: Layers, dtype: torch.dtype, stored: Mapping[str, torch.dtype], world: World = ALONE) -> Self:
        """Of a model as it was loaded, before anything trains. What the source has `stored` with more bytes keeps them, and
        so does a tensor that its files do not name, or that are not at hand, where `dtype` would round it."""
        wider = {name for name, kind in stored.items() if kind.itemsize > dtype.itemsize}
        tensors = chain(layers.model.named_parameters(), layers.model.named_buffers())
        unknown = {name for name, tensor in tensors if name not in stored and tensor.dtype.itemsize > dtype.itemsize}
        buffers = dict(layers.model.named_buffers())
        for name, value in chain(layers.named_parameters() if unknown - buffers.keys() else (), buffers.items()):
            tensor = local(value.detach())
            narrower = name in unknown and tensor.is_floating_point()
            if world.any(narrower and not torch.equal(tensor, tensor.to(dtype).to(tensor.dtype))):
                wider.add(name)
        return cls(dtype, frozenset(wider))

    @classmethod
    def as_it_is(cls, model: Any) -> Self:
        """Every tensor in the dtype that `model` has it in."""
        dtypes = [parameter.dtype for name, parameter in model.named_parameters() if not name.endswith(".centroids")]
        return cls(dtypes[0] if dtypes else model.config.dtype, frozenset(model.state_dict()))

    def dtype_of(self, name: str, tensor: Tensor) -> torch.dtype:
        """What `tensor` is stored in: never in a wider format than it has."""
        narrower = tensor.is_floating_point() and self.dtype.itemsize < tensor.dtype.itemsize
        return self.dtype if narrower and name not in self.wider else tensor.dtype

    @torch.no_grad()
    def settle(self, model: nn.Module) -> None:
        """Round what trained and is not packed on writing, in place: what is measured is then what is exported."""
        for path, module in model.named_modules():
            for leaf, parameter in module.named_parameters(path, recurse=False):
                if leaf.endswith(".bias") or not isinstance(module, LutLayer):
                    parameter.copy_(parameter.to(self.dtype_of(leaf, parameter)))


def _tensors(model: nn.Module, names: Iterable[str], world: World) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the trained model under the checkpoint's names, for the first process; others get some of them.
    Holds one module's at a time."""
    for path, inside in groupby(names, lambda name: name.rpartition(".")[0]):
        module = model.get_submodule(path)
        packed: dict[str, Tensor | None] = {}  # the last one is let go before the next is made
        if isinstance(module, LutLayer):
            with gathered(module):
                packed = _packed(module) if world.main else dict.fromkeys(_PACKED)
        for name in inside:
            leaf = name.rpartition(".")[2]
            tensor = packed[leaf] if leaf in packed else full(getattr(module, leaf).detach())
            if tensor is not None:
                yield name, tensor


def _packed(layer: LutLayer) -> dict[str, Tensor | None]:
    """What is stored of a layer's weight."""
    indices, lut = layer.snapped()
    numbers = layer.stored_numbers() if lut is None else {"lut": lut}
    return {"indices": pack(indices, layer.clustering.bits), **numbers, "lut_scale": layer.stored_scale()}


def _like(model: nn.Module, name: str, like: Tensor, dense: DenseFormat) -> Tensor:
    """`like`, a meta tensor, in the dtype that it will be stored in. Raises ValueError where the model's has another
    shape."""
    path, _, leaf = name.rpartition(".")
    module: Any = model.get_submodule(path)
    shape = tuple(like.shape) if leaf in _PACKED else tuple(getattr(module, leaf).shape)
    if leaf == "indices" and isinstance(module, LutLayer):
        shape = (module.out_features, packed_width(module.in_features, module.clustering.bits))
    if shape != tuple(like.shape):
        raise ValueError(f"{name} is {shape} in the model, and {tuple(like.shape)} by its configuration")
    if isinstance(module, LutLayer) and leaf in _PACKED:
        return like
    tensor = getattr(module, leaf)
    own = isinstance(module, PackedModule) and leaf != "bias"
    return like.to(tensor.dtype if own else dense.dtype_of(name, tensor))


def _remote_class(model: nn.Module) -> type | None:
    """The class of a model that came with its files (`--trust-remote-code`); None of transformers' own."""
    return next((kind for kind in type(model).__mro__ if kind.__module__.startswith("transformers_modules")), None)


def announced_tensors(model: Any, target: Any, dense: DenseFormat) -> dict[str, Tensor]:
    """What a checkpoint of the clustered `model` holds by name, as meta tensors. `target` is the palettized model on the
    meta device; a few dense tensors may be kept in another dtype than the model's.

    Raises AttributeError for a tensor that the model does not have.
    """
    return {name: _like(model, name, like, dense) for name, like in skeleton_tensors(target).items()}


def copy_code(model: nn.Module, directory: Path) -> list[str]:
    """The Python files of a model that is none of transformers' own, copied beside its weights, without which nothing could
    load them; returns their names."""
    if (kind := _remote_class(model)) is None:
        return []
    folder = Path(inspect.getfile(kind)).parent
    names = sorted(path.name for path in folder.glob("*.py") if path.name != "__init__.py")
    for name in names:
        shutil.copyfile(folder / name, directory / name)
    return names


def write_config(target: Any, spec: QuantizationSpec, directory: Path) -> None:
    """Write the config.json of a palettized model."""
    config = target.config
    config.quantization_config = EdkmConfig(**spec.to_mapping())
    config.architectures = [type(target).__name__]
    config.dtype = str(target.dtype).removeprefix("torch.")
    if getattr(config, "auto_map", None):  # "owner/name--file.Class" of a hub model: the files are here now
        config.auto_map = {key: str(value).rpartition("--")[2] for key, value in config.auto_map.items()}
    config.save_pretrained(directory)


def write_checkpoint(
    model: Any,
    tokenizer: Any,
    directory: Path,
    spec: QuantizationSpec,
    *,
    dense: DenseFormat | None = None,
    max_shard_size: str = MAX_SHARD_SIZE,
    track: Track = no_progress,
    world: World = ALONE,
) -> None:
    """Write the whole checkpoint into an existing directory: weights (with an index where they are several files), config,
    tokenizer, generation config, checksums.

    What is not compressed is stored in the `dense` format, without one as the model has it. The files are those that
    `save_pretrained` of the loaded checkpoint writes with the same `max_shard_size`. Peak memory beyond the model (beyond
    this process's shards of it) is what one module needs. All processes of `world` call this; the first one writes.
    """
    dense = dense or DenseFormat.as_it_is(model)
    trust = _remote_class(model) is not None
    target = skeleton(copy.deepcopy(model.config), spec, dtype=dense.dtype, trust_remote_code=trust)
    tensors = announced_tensors(model, target, dense)
    read = _tensors(model, track(tensors, "writing the checkpoint", len(tensors)), world)
    if not world.main:
        deque(read, maxlen=0)  # what is sharded is gathered from all, which ask for it in the same order
        return
    announced = {name: (like.dtype, tuple(like.shape)) for name, like in tensors.items()}
    converted = ((name, tensor.to(tensors[name].dtype)) for name, tensor in read)
    parameters = target.num_parameters()
    files = write_tensors(directory, announced, converted, max_shard_size=max_shard_size, total_parameters=parameters)
    write_config(target, spec, directory)
    files += ["config.json", *copy_code(model, directory)]
    if model.can_generate() and model.generation_config is not None:  # as it is: `save_pretrained` may refuse some
        model.generation_config.to_json_file(directory / "generation_config.json")
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    stored = TensorFiles(directory)  # read back from the disk
    write_json(directory / RECORD, {name: tensor_record(stored.get(name)) for name in stored.tensors})
    write_checksums(directory, [*files, RECORD])


def rehearse_export(plan: RunPlan) -> None:
    """Swap a copy of the dense model on the meta device, and try whether what it becomes can be written and read again.

    Raises UserError naming what does not fit.
    """
    model, target, swaps, spec = copy.deepcopy(plan.skeleton), copy.deepcopy(plan.skeleton), plan.swaps, plan.spec
    tables = Tables(Recipe(swaps, spec, plan.clustering), ALONE, no_tables)
    tables.add("", model, {})
    tables.swap("", model)
    palettize_embeddings(model, swaps, spec, rounded=None)
    try:
        palettize_skeleton(target, spec)
        announced = announced_tensors(model, target, DenseFormat.as_it_is(model))
        with tempfile.TemporaryDirectory(prefix="edkm-rehearsal-") as folder:
            write_config(target, spec, Path(folder))
            copy_code(model, Path(folder))
            trust = plan.config.trust_remote_code
            expected = expected_tensors(Path(folder), spec, limit=len(announced), trust_remote_code=trust)
    except Exception as error:  # whatever a model's own code, or a check of its configuration, runs into
        if shortage(error) is not None:
            raise
        raise _refused(model, str(error) if isinstance(error, UserError) else named(error)) from error
    written = describe_tensors(target, announced)
    for name in sorted(written.keys() | expected.keys()):
        before, after = written.get(name, "not there"), expected.get(name, "not there")
        if before != after:
            raise _refused(model, f"{name} is {before}, and {after} when read again")
    if plan.config.target is not None:
        find(plan.config.target).check(Described(target, plan.architecture, spec, trust_remote_code=trust), None)


def _refused(model: Any, why: str) -> UserError:
    why = " ".join(why.split())[:300]
    rule = f"a compressed {type(model).__name__} cannot be exported and loaded ({why}); nothing was trained"
    return UserError(f"{rule}; leave what it names dense with --skip, or report it with the model's name")
