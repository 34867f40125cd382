"""The compressed checkpoint: a Hugging Face directory, written tensor by tensor (docs/format.md)."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor, nn

from edkm_cli.evaluate import Track, no_progress
from edkm_cli.format import QuantizationSpec, SafetensorsWriter, write_checksums
from edkm_cli.hf import EdkmConfig, skeleton, skeleton_tensors
from edkm_cli.nn.clustered import ClusteredLinear
from edkm_cli.packing import pack

MAX_SHARD_SIZE = "5GB"


class _Source:
    """Tensors of the trained model under the checkpoint's names; holds one layer's indices at a time."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._current: tuple[str, dict[str, Tensor]] = ("", {})

    def __getitem__(self, name: str) -> Tensor:
        path, _, leaf = name.rpartition(".")
        module = self._model.get_submodule(path)
        if isinstance(module, ClusteredLinear) and leaf in ("indices", "lut"):
            if self._current[0] != path:
                indices, lut = module.snapped()
                self._current = (path, {"indices": pack(indices, module.clustering.bits), "lut": lut})
            return self._current[1][leaf]
        tensor = getattr(module, leaf)
        return tensor.detach()


def write_weights(
    model: Any,
    directory: Path,
    spec: QuantizationSpec,
    *,
    max_shard_size: str = MAX_SHARD_SIZE,
    track: Track = no_progress,
) -> list[str]:
    """Write the safetensors files (and their index, if there are several) and config.json; returns the files' names.

    Peak memory beyond the model is one layer's indices. The files are those that `save_pretrained` of the loaded
    checkpoint writes with the same `max_shard_size`.
    """
    target = skeleton(copy.deepcopy(model.config), spec, dtype=next(model.parameters()).dtype)
    tensors = skeleton_tensors(target)
    split = split_torch_state_dict_into_shards(
        tensors, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    )
    source = _Source(model)
    for file, names in split.filename_to_tensors.items():
        announced = {name: (tensors[name].dtype, tuple(tensors[name].shape)) for name in names}
        with SafetensorsWriter(directory / file, announced) as writer:
            for name in track(names, f"writing {file}", len(names)):
                writer.write(name, source[name])
    written = list(split.filename_to_tensors)
    if split.is_sharded:
        index = {
            "metadata": {"total_parameters": target.num_parameters(), **split.metadata},
            "weight_map": split.tensor_to_filename,
        }
        name = "model.safetensors.index.json"
        (directory / name).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        written.append(name)
    config = target.config
    config.quantization_config = EdkmConfig(**spec.to_mapping())
    config.architectures = [type(target).__name__]
    config.dtype = str(target.dtype).removeprefix("torch.")
    config.save_pretrained(directory)
    return [*written, "config.json"]


def write_checkpoint(
    model: Any,
    tokenizer: Any,
    directory: Path,
    spec: QuantizationSpec,
    *,
    max_shard_size: str = MAX_SHARD_SIZE,
    track: Track = no_progress,
) -> None:
    """Write the whole checkpoint into an existing directory: weights, config, tokenizer, generation config, checksums."""
    written = write_weights(model, directory, spec, max_shard_size=max_shard_size, track=track)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    write_checksums(directory, written)
