"""Reading a dense model's weights tensor by tensor, and building it sharded: no process ever holds the whole of it."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from edkm_cli import model_files, models
from edkm_cli.distributed import World, shard
from edkm_cli.errors import UserError
from edkm_cli.initialize.layers import Layers
from edkm_cli.initialize.stored import StoredModel
from edkm_cli.model_files import as_if_dense, build, require_unquantized
from edkm_cli.nn.hooks import decoder_layers


def build_sharded(
    source: models.ModelSource,
    world: World,
    *,
    dtype: torch.dtype,
    trainable: bool,
    prepare: Callable[[str, nn.Module], None] = lambda path, block: None,
    finish: Callable[[Any], None] = lambda model: None,
) -> Any:
    """A causal LM whose parameters are sharded over the processes, in evaluation mode.

    Block by block: read whole, given to `prepare(path, block)`, which may swap modules inside, then sharded. Last the
    rest (embeddings, final norm): read, given to `finish(model)`, sharded. Beside its shards a process holds one block.
    Raises UserError for weights that are not plain safetensors.
    """
    model, reader, tied = _empty(source, dtype, trainable=trainable)
    blocks = decoder_layers(model)
    for path, block in blocks.items():
        _read(block, f"{path}.", reader, dtype, world.device)
        block.to(world.device)
        prepare(path, block)
        shard(block, world)
    _read_rest(model, reader, dtype, world.device, leave=tied)
    finish(model)
    shard(model, world)
    return model.eval()


def open_layers(
    source: models.ModelSource, *, dtype: torch.dtype, device: str, dequantize: bool = False
) -> Layers | None:
    """A causal LM in evaluation mode whose decoder layers stay in its files until they are needed; all else is read.

    With `dequantize` files in FP8 and MXFP4 are decoded as they are read. None where files hold the tensors under other
    names, or in another layout, than the model: such a one is loaded whole.
    Raises UserError for weights that do not belong to the configuration.
    """
    if source.gguf_file and not source.architecture:
        return None
    model, reader, tied = _empty(source, dtype, trainable=True, dequantize=dequantize)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    widened = dtype == torch.float16 and getattr(model, "_keep_in_fp32_modules", None)  # by transformers, from float16
    if widened or not all(name in reader for name in names - tied):
        return None
    inside = tuple(f"{path}." for path in decoder_layers(model))
    _read_rest(model, reader, dtype, device, leave=tied | {name for name in names if name.startswith(inside)})
    model.config.dtype = dtype

    def read(path: str, layer: nn.Module) -> None:
        _read(layer, f"{path}.", reader, dtype, device)

    return Layers(model.eval(), read)


def _empty(
    source: models.ModelSource, dtype: torch.dtype, *, trainable: bool, dequantize: bool = False
) -> tuple[Any, StoredModel, set[str]]:
    """(a causal LM whose parameters are on the meta device, its files, the tied parameters that they leave out)."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig

    directory, trust = models.safetensors_directory(source), source.trust_remote_code
    architecture = AutoConfig.from_pretrained(directory, trust_remote_code=trust, local_files_only=True)
    if not dequantize:
        require_unquantized(source.name, architecture)
    quantized = as_if_dense(source.name, architecture)
    model_files.check_model_files(directory)
    model_files.settle_ties(architecture, directory)
    # Parameters only: buffers (rotary frequencies) are in no file, they are computed when the model is built.
    with init_empty_weights(include_buffers=False):
        model = build(architecture, dtype=dtype, trust_remote_code=trust)
    model.config._name_or_path = source.name
    model.requires_grad_(trainable)
    reader = StoredModel(model, directory, split=source.splits, quantized=quantized)
    tied = set(model.all_tied_weights_keys) if getattr(architecture, "tie_word_embeddings", False) else set()
    return model, reader, {name for name in tied if name not in reader}


def _read(
    module: nn.Module, prefix: str, reader: StoredModel, dtype: torch.dtype, device: str, leave: Any = ()
) -> None:
    """Fill the parameters that are still empty, all but those in `leave`, and the buffers that files hold."""
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if not parameter.is_meta or prefix + name in leave:
            continue
        tensor = reader.get(prefix + name)
        if tensor.shape != parameter.shape:
            rule = f"{prefix}{name} must have shape {tuple(parameter.shape)}, got {tuple(tensor.shape)}"
            raise UserError(f"{rule}; the weights do not belong to this config.json")
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        # A copy: where a file holds it at an odd address, some processors' products differ in the last bit.
        value = tensor.to(device, dtype, copy=True)
        setattr(owner, leaf, nn.Parameter(value, requires_grad=parameter.requires_grad))
    for path, owner in module.named_modules():
        for leaf, buffer in owner._buffers.items():
            name = f"{prefix}{path}.{leaf}" if path else prefix + leaf
            if buffer is not None and leaf not in owner._non_persistent_buffers_set and name in reader:
                owner._buffers[leaf] = reader.get(name).to(buffer.device, buffer.dtype)  # a router's correction, say


def _read_rest(model: Any, reader: StoredModel, dtype: torch.dtype, device: str, *, leave: set[str]) -> None:
    """Fill what is left of a model but `leave`, on the device with its buffers. Raises UserError for a tensor that the model
    has no place for, but those that its family is known to carry."""
    _read(model, "", reader, dtype, device, leave)
    ignored = re.compile("|".join([*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]))
    strangers = [name for name in reader.strangers() if not ignored.search(name)]
    if strangers:
        rule = f"the weights must hold the tensors of a {type(model).__name__}, but hold {strangers[0]}, too"
        raise UserError(f"{rule}; check that config.json belongs to them")
    model.tie_weights()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
