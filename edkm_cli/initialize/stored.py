"""Where the files of a model hold each of its parameters.

transformers has other tensors in memory than in the files of some families: it renames them, and joins the matrices of all
experts. Here each expert's matrix is a parameter of its own (`edkm_cli.runtime.experts`), which files hold in a tensor of
all experts, or in one or two of its own. So any parameter is read alone.

Weights that come quantized are decoded as they are read: FP8, float8 times a scale of its block, and MXFP4, of which 32
numbers of four bits (E2M1) share a power of two.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from edkm_cli.errors import UserError
from edkm_cli.model_files import FP8, MXFP4, TensorFiles
from edkm_cli.runtime.experts import Experts, split_experts

_JOINS = {"MergeModulelist", "Concatenate"}  # of the matrices of all experts, and of two matrices of one
_PARTS = {FP8: ("", "_scale_inv"), MXFP4: ("_blocks", "_scales")}  # what files hold in place of a weight
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Place(NamedTuple):
    """A parameter: the rows of some tensors one after another, or one expert of a tensor, perhaps transposed."""

    names: tuple[str, ...]
    expert: int | None = None
    transposed: bool = False


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

    def get(self, name: str) -> Tensor:
        """The tensor on the CPU as stored, or decoded to float32. Raises UserError where the files do not have it."""
        place = self._places.get(name, Place((name,)))
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
    held = {name: Place(names) for name, names in _held(model).items()}
    if split:
        split_experts(model)
    blocks = [(name, module) for name, module in model.named_modules() if isinstance(module, Experts)]
    for path, block in blocks:
        for leaf, linears in block.matrices().items():
            for suffix, kind in (("", "weight"), ("_bias", "bias")):
                place = held.pop(f"{path}.{leaf}{suffix}", Place(()))
                for expert in range(len(linears)) if place.names else ():
                    # Of several names: the gates of all experts, then what they gate.
                    one = Place(place.names, expert, block.transposed and not suffix)
                    several = Place(place.names[expert :: len(linears)])
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
