"""The compressed checkpoint: a Hugging Face directory, written tensor by tensor (docs/format.md)."""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor, nn

from edkm_cli.distributed import ALONE, Gatherer, World
from edkm_cli.evaluate import Track, no_progress
from edkm_cli.format import QuantizationSpec, SafetensorsWriter, write_checksums
from edkm_cli.hf import EdkmConfig, skeleton, skeleton_tensors
from edkm_cli.nn.clustered import ClusteredLinear
from edkm_cli.packing import pack

MAX_SHARD_SIZE = "5GB"
_INDEX = "model.safetensors.index.json"


class _Source:
    """Tensors of the trained model under the checkpoint's names; holds one layer's indices at a time.

    `gather` makes whole what a name needs, where the model is sharded: all processes ask for the same names in turn.
    """

    def __init__(self, model: nn.Module, gatherer: Gatherer):
        self._model, self._gatherer = model, gatherer
        self._current: tuple[str, dict[str, Tensor]] = ("", {})

    def gather(self, name: str) -> None:
        self._gatherer.open(name.rpartition(".")[0])

    def __getitem__(self, name: str) -> Tensor:
        path, _, leaf = name.rpartition(".")
        module = self._model.get_submodule(path)
        if isinstance(module, ClusteredLinear) and leaf in ("indices", "lut"):
            if self._current[0] != path:
                indices, lut = module.snapped()
                self._current = (path, {"indices": pack(indices, module.clustering.bits), "lut": lut})
            return self._current[1][leaf]
        tensor = getattr(module, leaf).detach()
        # Memory that numpy has seen (the writer's way to its bytes) cannot be let go again by FSDP2.
        return tensor.clone() if self._gatherer.sharded else tensor


def write_weights(
    model: Any,
    directory: Path,
    spec: QuantizationSpec,
    *,
    max_shard_size: str = MAX_SHARD_SIZE,
    track: Track = no_progress,
    world: World = ALONE,
) -> list[str]:
    """Write the safetensors files (and their index, if there are several) and config.json; returns the files' names.

    Peak memory beyond the model (beyond this process's shards of it) is one decoder layer. All processes of `world`
    call this, the first one writes. The files are those that `save_pretrained` of the loaded
    checkpoint writes with the same `max_shard_size`.
    """
    target = skeleton(copy.deepcopy(model.config), spec, dtype=next(model.parameters()).dtype)
    tensors = skeleton_tensors(target)
    split = split_torch_state_dict_into_shards(
        tensors, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    )
    with Gatherer(model) as gatherer:
        source = _Source(model, gatherer)
        for file, names in split.filename_to_tensors.items():
            announced = {name: (tensors[name].dtype, tuple(tensors[name].shape)) for name in names}
            with SafetensorsWriter(directory / file, announced) if world.main else nullcontext() as writer:
                for name in track(names, f"writing {file}", len(names)):
                    source.gather(name)
                    if writer is not None:
                        writer.write(name, source[name])
    if world.main:
        _write_index_and_config(target, spec, split, directory)
    files = list(split.filename_to_tensors)
    return [*files, *([_INDEX] if split.is_sharded else []), "config.json"]


def _write_index_and_config(target: Any, spec: QuantizationSpec, split: Any, directory: Path) -> None:
    if split.is_sharded:
        index = {
            "metadata": {"total_parameters": target.num_parameters(), **split.metadata},
            "weight_map": split.tensor_to_filename,
        }
        (directory / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    config = target.config
    config.quantization_config = EdkmConfig(**spec.to_mapping())
    config.architectures = [type(target).__name__]
    config.dtype = str(target.dtype).removeprefix("torch.")
    config.save_pretrained(directory)


def write_checkpoint(
    model: Any,
    tokenizer: Any,
    directory: Path,
    spec: QuantizationSpec,
    *,
    max_shard_size: str = MAX_SHARD_SIZE,
    track: Track = no_progress,
    world: World = ALONE,
) -> None:
    """Write the whole checkpoint into an existing directory: weights, config, tokenizer, generation config, checksums.

    All processes of `world` call this; the first one writes.
    """
    written = write_weights(model, directory, spec, max_shard_size=max_shard_size, track=track, world=world)
    if not world.main:
        return
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    write_checksums(directory, written)
