"""Reading a dense model's weights tensor by tensor, and building it sharded: no process ever holds the whole of it.

transformers has other tensors in memory than in the files of some families: it renames them, and joins the matrices of all
experts. Here each expert's matrix is a parameter of its own (`edkm_cli.runtime.experts`), which files hold in a tensor of
all experts, or in one or two of its own. So any parameter is read alone.

Weights that come quantized are decoded as they are read: FP8, float8 times a scale of its block, and MXFP4, of which 32
numbers of four bits (E2M1) share a power of two.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from edkm_cli import model_files, models
from edkm_cli.distributed import World, shard
from edkm_cli.errors import UserError
from edkm_cli.initialize.layers import Layers
from edkm_cli.model_files import FP8, MXFP4, TensorFiles, as_if_dense, build, require_unquantized
from edkm_cli.nn.hooks import decoder_layers
from edkm_cli.runtime.experts import Experts, split_experts

_JOINS = {"MergeModulelist", "Concatenate"}  # of the matrices of all experts, and of two matrices of one
_PARTS = {FP8: ("", "_scale_inv"), MXFP4: ("_blocks", "_scales")}  # what files hold in place of a weight
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Place(NamedTuple):
    """A parameter: the rows of some tensors one after another, or one expert of a tensor, perhaps transposed; or so many
    `experts`, each in a tensor or two of its own."""

    names: tuple[str, ...]
    expert: int | None = None
    transposed: bool = False
    experts: int = 0


class StoredModel:
    """The parameters and buffers of a dense `model`, by name, in the safetensors files of a directory, see `places`. Those
    that the files do not hold are not `in` it. `quantized` is the `quantization_config` of files that are decoded."""

    def __init__(self, model: Any, directory: Path, *, split: bool = True, quantized: dict[str, Any] | None = None):
        self.files, self._quantized = TensorFiles(directory), quantized or {}
        self._places = places(model, split=split)

    def __contains__(self, name: str) -> bool:
        return name in self._places and all(part in self.files for part in self._stored_as(self._places[name]))

    def _stored_as(self, place: Place) -> list[str]:
        """The tensors of files that a parameter is made of."""
        ends = _PARTS.get(self._quantized.get("quant_method", ""), ("",))
        return [name + end for name in place.names for end in (ends if name + ends[-1] in self.files else ("",))]

    @torch.autocast("cpu", enabled=False)  # which joins no float16
    def get(self, name: str) -> Tensor:
        """The tensor on the CPU as stored, or decoded to float32. Raises UserError where the files do not have it."""
        place = self._places.get(name, Place((name,)))
        if place.experts:
            of_each = [place.names[expert :: place.experts] for expert in range(place.experts)]
            return torch.stack([torch.cat([self._matrix(part, None) for part in names]) for names in of_each])
        parts = [self._matrix(part, place.expert) for part in place.names]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole.t().contiguous() if place.transposed else whole

    def _matrix(self, name: str, expert: int | None) -> Tensor:
        stored = []
        for part in self._stored_as(Place((name,))):
            with self.files.opened(part) as file:
                stored.append(file.get_tensor(part) if expert is None else file.get_slice(part)[expert])
        if len(stored) == 1:
            return stored[0]
        if self._quantized["quant_method"] == MXFP4:
            return from_mxfp4(name, *stored).mT.contiguous()
        return from_fp8(name, *stored, block=self._quantized.get("weight_block_size"))

    def strangers(self) -> list[str]:
        """The names of tensors in the files that are of none of the model's; scales of activations are no weights."""
        known = {part for place in self._places.values() for part in self._stored_as(place)}
        rest = sorted(self.files.tensors.keys() - known)
        return [name for name in rest if not (self._quantized and name.endswith("activation_scale"))]


def from_mxfp4(name: str, blocks: Tensor, scales: Tensor) -> Tensor:
    """(..., 32 * n) in float32, of `blocks` (..., n, 16), uint8, the first of two numbers in the lower half of a byte, and
    `scales` (..., n), uint8, the exponents plus 127. Raises UserError, naming it, for a tensor that is none."""
    if blocks.shape[:-1] != scales.shape or {blocks.dtype, scales.dtype} != {torch.uint8}:
        raise UserError(f"{name} must have a byte of scale for each block of MXFP4, which it has not; fetch it again")
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    return torch.ldexp(table[codes.int()], scales[..., None].int() - 127).flatten(-2)


def from_fp8(name: str, weight: Tensor, scale: Tensor, *, block: list[int] | None) -> Tensor:
    """(..., rows, columns) in float32, of float8 `weight` and a `scale` for each `block` of rows and columns, the last ones
    perhaps smaller, or for all (None). Raises UserError, naming it, for scales of other blocks."""
    if block and not (isinstance(block, (list, tuple)) and [*map(type, block)] == [int, int] and min(block) > 0):
        raise UserError(f"weight_block_size must be two positive numbers, got {block!r:.60}; fetch config.json again")
    shape = weight.shape[-2:]
    counts = [-(-size // each) for size, each in zip(shape, block or shape, strict=True)]
    if not scale.is_floating_point() or (list(scale.shape[-2:]) != counts if block else scale.numel() != 1):
        raise UserError(f"{name} must have a scale for each block of {block}, got {tuple(scale.shape)}; fetch it again")
    scale = scale.float()
    for dim, each in zip((-2, -1), block or (), strict=False):
        scale = scale.repeat_interleave(each, dim).narrow(dim, 0, shape[dim])
    return weight.float() * scale


def places(model: Any, *, split: bool = True) -> dict[str, Place]:
    """Where files hold the parameters and buffers of a dense `model`, as transformers would write them. With `split` the
    model's experts are split, in place. What is held in a way that is not known here is not in it."""
    counts = {name: len(value) for name, value in model.named_parameters() if value.dim() == 3}
    held = {name: Place(names, experts=counts.get(name, 0) * (len(names) > 1)) for name, names in _held(model).items()}
    if split:
        split_experts(model)
    blocks = [(name, module) for name, module in model.named_modules() if isinstance(module, Experts)]
    for path, block in blocks:
        for leaf, linears in block.matrices().items():
            for suffix, kind in (("", "weight"), ("_bias", "bias")):
                place = held.pop(f"{path}.{leaf}{suffix}", Place(()))
                for expert in range(len(linears)) if place.names else ():
                    one = Place(place.names, expert, block.transposed and not suffix)
                    several = Place(place.names[expert :: len(linears)])  # the gates of all come first
                    held[f"{path}.{leaf}.{expert}.{kind}"] = one if len(place.names) == 1 else several
    return held


def _held(model: Any) -> dict[str, tuple[str, ...]]:
    """Name in the model, experts joined -> names in its files, as transformers would write them."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion

    conversions = get_model_conversion_mapping(model, add_legacy=False)
    steps = {type(step).__name__ for one in conversions for step in getattr(one, "operations", None) or ()}
    if steps - _JOINS:
        return {}
    empty = {name: value.to("meta") for name, value in model.state_dict().items()}
    if not conversions:
        return {name: (name,) for name in empty}
    return {name: tuple(revert_weight_conversion(model, {name: value})) for name, value in empty.items()}


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
    for path, block in decoder_layers(model).items():
        _read(reader, dtype, world.device, path, block)
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
    if not all(name in reader for name in names - tied):
        return None
    inside = tuple(f"{path}." for path in decoder_layers(model))
    _read_rest(model, reader, None, device, leave=tied | {name for name in names if name.startswith(inside)})
    model.config.dtype = dtype
    return Layers(model.eval(), partial(_read, reader, None, device))


def _empty(
    source: models.ModelSource, dtype: torch.dtype, *, trainable: bool, dequantize: bool = False
) -> tuple[Any, StoredModel, set[str]]:
    """(a causal LM whose parameters are on the meta device, its files, the tied parameters that they leave out)."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, GenerationConfig

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
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if model_files.stays_wide(model, name, dtype):
            value.data = value.data.float()
    if (directory / "generation_config.json").is_file():
        with models.loading(source):
            model.generation_config = GenerationConfig.from_pretrained(directory)
    model.config._name_or_path = source.name
    model.requires_grad_(trainable)
    reader = StoredModel(model, directory, split=source.splits, quantized=quantized)
    tied = set(model.all_tied_weights_keys) if getattr(architecture, "tie_word_embeddings", False) else set()
    return model, reader, {name for name in tied if name not in reader}


def _read(
    reader: StoredModel, dtype: torch.dtype | None, device: str, path: str, module: nn.Module, leave: Any = ()
) -> None:
    """Fill the parameters of the module at `path` that are still empty, but those in `leave`, and stored buffers; in
    `dtype`, or each in its own."""
    prefix = f"{path}." if path else ""
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if not parameter.is_meta or prefix + name in leave:
            continue
        if (tensor := reader.get(prefix + name)).shape != parameter.shape:
            rule = f"{prefix}{name} must have shape {tuple(parameter.shape)}, got {tuple(tensor.shape)}"
            raise UserError(f"{rule}; the weights do not belong to this config.json")
        inside, _, leaf = name.rpartition(".")
        owner = module.get_submodule(inside)
        # A copy: where a file holds it at an odd address, some processors' products differ in the last bit.
        tensor = tensor.to(device, dtype or parameter.dtype, copy=True)
        setattr(owner, leaf, nn.Parameter(tensor, requires_grad=parameter.requires_grad))
    state = module.state_dict()
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if name in state and prefix + name in reader:
            buffer.data = reader.get(prefix + name).to(buffer.device, buffer.dtype)  # a router's correction, say


def _read_rest(model: Any, reader: StoredModel, dtype: torch.dtype | None, device: str, *, leave: set[str]) -> None:
    """Fill what is left of a model but `leave`, on the device with its buffers. Raises UserError for a tensor that the model
    has no place for, but those that its family is known to carry."""
    _read(reader, dtype, device, "", model, leave)
    ignored = re.compile("|".join([*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]))
    if strangers := [name for name in reader.strangers() if not ignored.search(name)]:
        rule = f"the weights must hold the tensors of a {type(model).__name__}, but hold {strangers[0]}, too"
        raise UserError(f"{rule}; check that config.json belongs to them")
    model.tie_weights()
    for buffer in model.buffers():
        buffer.data = buffer.to(device)
