"""Where the files of a model hold each of its parameters.

transformers has other tensors in memory than in the files of some families: it renames them, and joins the matrices of all
experts. Here each expert's matrix is a parameter of its own (`edkm_cli.runtime.experts`), which files hold in a tensor of
all experts, or in one or two of its own. So any parameter is read alone.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from edkm_cli.model_files import TensorFiles
from edkm_cli.runtime.experts import Experts, split_experts

_JOINS = {"MergeModulelist", "Concatenate"}  # of the matrices of all experts, and of two matrices of one


class Place(NamedTuple):
    """A parameter: the rows of some tensors one after another, or one expert of a tensor, perhaps transposed."""

    names: tuple[str, ...]
    expert: int | None = None
    transposed: bool = False


class StoredModel:
    """The parameters and buffers of a dense `model`, by name, in the safetensors files of a directory, see `places`. Those
    that the files do not hold are not `in` it."""

    def __init__(self, model: Any, directory: Path, *, split: bool = True):
        self.files = TensorFiles(directory)
        self._places = places(model, split=split)

    def __contains__(self, name: str) -> bool:
        return all(part in self.files for part in self._places[name].names) if name in self._places else False

    def get(self, name: str) -> Tensor:
        """The tensor on the CPU as stored. Raises UserError where the files do not have it."""
        place = self._places.get(name, Place((name,)))
        if place.expert is not None:
            with self.files.opened(place.names[0]) as file:
                matrix = file.get_slice(place.names[0])[place.expert]
            return matrix.t().contiguous() if place.transposed else matrix
        parts = [self.files.get(part) for part in place.names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def strangers(self) -> list[str]:
        """The names of tensors in the files that are of none of the model's."""
        return sorted(self.files.tensors.keys() - {part for place in self._places.values() for part in place.names})


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
