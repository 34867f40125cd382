"""A compressed checkpoint, read tensor by tensor: what every other format is made from and compared with.

The tensors of a checkpoint stand under the names of the dense model here: `P.weight` for a module that stores `P.indices`.
Memory holds what one of them needs.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edkm_cli.clustering import lookup
from edkm_cli.clustering.grids import Grid, stored_numbers
from edkm_cli.errors import UserError
from edkm_cli.format import QuantizationSpec
from edkm_cli.granularity import E4M3, FREE
from edkm_cli.initialize.sharded import Place, places
from edkm_cli.integrity import AGAIN, check_checkpoint, read_config, skeleton_tensors, stored_skeleton
from edkm_cli.model_files import TensorFiles, build, stays_wide
from edkm_cli.packing import as_kept, fault, unpack
from edkm_cli.runtime.palettized import PackedModule, PalettizedLinear


@dataclass(frozen=True)
class DenseTensor:
    """A tensor of the dense model: its `shape`, and the `module` path if the checkpoint stores it packed.

    `linear` says that it is a weight with lookup tables; an embedding or output embedding has a scale for each row.
    """

    name: str
    shape: tuple[int, ...]
    module: str = ""
    linear: bool = False


class Described:
    """What a checkpoint holds of a palettized `model`, which may be on the meta device; `packed`: its packed modules, by
    path; `tensors`: those of the dense model, by name, in its order, a tied head not among them."""

    def __init__(self, model: Any, config: Any, spec: QuantizationSpec, *, trust_remote_code: bool = False):
        self.model, self.config, self.spec, self.trust_remote_code = model, config, spec, trust_remote_code
        modules = model.named_modules()
        self.packed: dict[str, Any] = {path: module for path, module in modules if isinstance(module, PackedModule)}
        self.tensors: dict[str, DenseTensor] = {}
        for name, like in skeleton_tensors(model).items():
            path, _, leaf = name.rpartition(".")
            if path not in self.packed or leaf == "bias":
                self.tensors[name] = DenseTensor(name, tuple(like.shape))
            elif leaf == "indices":
                module, weight = self.packed[path], f"{path}.weight"
                shape, linear = (module.rows, module.columns), isinstance(module, PalettizedLinear)
                self.tensors[weight] = DenseTensor(weight, shape, path, linear)

    @cached_property
    def places(self) -> dict[str, Place]:
        """Where the files of the model's family hold the tensors of the dense model, where that is known; without packed
        experts, under the names that these have in memory."""
        as_here = {name: Place((name,)) for name in self.tensors}
        return places(self.dense_skeleton()) if self.spec.split_experts else as_here

    def dense_skeleton(self) -> Any:
        """The dense model of transformers on the meta device."""
        with torch.device("meta"):
            return build(self.config, trust_remote_code=self.trust_remote_code)

    def dense_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """What a tensor of the dense model in `dtype` has."""
        return torch.float32 if stays_wide(self.model, name, dtype) else dtype

    def bits_of(self, path: str) -> int:
        """Bits of an index of a packed module."""
        return self.packed[path].bits


class Compressed(Described):
    """The checkpoint in `directory`; `files`: the tensors as they are stored.

    Raises UserError on construction for a directory that is none, truncated or altered.
    """

    def __init__(self, directory: str | Path, *, trust_remote_code: bool = False):
        self.directory = Path(directory).expanduser()
        spec = check_checkpoint(self.directory, trust_remote_code=trust_remote_code)
        config = read_config(self.directory, trust_remote_code=trust_remote_code)
        model = stored_skeleton(self.directory, trust_remote_code=trust_remote_code)
        super().__init__(model, config, spec, trust_remote_code=trust_remote_code)
        self.files = TensorFiles(self.directory, remedy=AGAIN)

    @property
    def linears(self) -> list[DenseTensor]:
        """The weights with lookup tables."""
        return [tensor for tensor in self.tensors.values() if tensor.linear]

    def stored(self, name: str) -> Tensor:
        """A tensor as the files hold it. Raises UserError where it is not finite, say."""
        tensor = self.files.get(name)
        if rule := fault(name.rpartition(".")[2], tensor):
            raise UserError(f"{self.directory}: {name} must be {rule}; {AGAIN}")
        return tensor

    def indices(self, path: str) -> Tensor:
        """The indices of a linear, or of an embedding whose rows all have the same bits, (rows, columns) uint8."""
        return unpack(self.stored(f"{path}.indices"), self.bits_of(path), self.packed[path].columns)

    def words(self, path: str) -> Tensor:
        """The packed indices of a module as 32-bit words, (rows, columns * bits / 32) int32."""
        return self.stored(f"{path}.indices").view(torch.int32)

    def levels(self, path: str) -> Tensor:
        """What the indices of an embedding stand for, (rows, columns) int16: multiples of a scale, about zero."""
        columns, parts = self.packed[path].columns, self.packed[path].row_parts
        indices = (unpack(self.stored(f"{path}.{part.leaf}"), part.bits, columns).to(torch.int16) for part in parts)
        levels = torch.cat([index - 2 ** (part.bits - 1) for index, part in zip(indices, parts, strict=True)])
        whole = self.spec.embedding_factors and not self.spec.signs_scales
        return levels * self.stored(f"{path}.factors") if whole else levels

    def factors(self, path: str) -> Tensor | None:
        """The factors of an embedding's columns that are not in its levels, (columns,) float32; None: all are 1."""
        signed = self.spec.signs_scales and f"{path}.factors" in self.files
        return self.stored(f"{path}.factors").float() if signed else None

    def scale(self, path: str) -> float:
        """What a linear's stored table entries are all multiplied with: a power of two for E4M3, else 1."""
        return float(self.stored(f"{path}.lut_scale")) if self.spec.lut_dtype == E4M3 and self.spec.scales_luts else 1.0

    def table(self, path: str) -> Tensor:
        """The lookup tables of a linear as numbers, (groups, 2**bits) float32, the scale multiplied in."""
        if self.spec.palette == FREE:
            scale = self.stored(f"{path}.lut_scale") if self.spec.scales_luts else None
            return as_kept(self.stored(f"{path}.lut"), scale).float()
        scales, offsets = self.numbers(path)
        grid = Grid(self.spec.palette, self.spec.bits_of(path), self.spec.lut_dtype)
        return grid.of_stored(scales.flatten(), None if offsets is None else offsets.flatten())

    def numbers(self, path: str) -> tuple[Tensor, Tensor | None]:
        """Scales and, where its palette has any, offsets of a linear, (out, tiles) float32, the factor multiplied in."""
        names = (leaf for leaf in ("scales", "offsets", "lut_scale") if f"{path}.{leaf}" in self.files)
        stored = {leaf: self.stored(f"{path}.{leaf}") for leaf in names}
        scales, offsets = stored_numbers(stored)
        return scales.view_as(stored["scales"]), None if offsets is None else offsets.view_as(stored["scales"])

    def dense(self, name: str) -> Tensor:
        """A tensor of the dense model in float32, exactly as docs/format.md defines it."""
        if not (tensor := self.tensors[name]).module:
            return self.stored(name).float()
        if tensor.linear:
            granularity = self.spec.granularity_of(tensor.module)
            return lookup(self.indices(tensor.module), self.table(tensor.module), granularity=granularity)
        levels, scale = self.levels(tensor.module), self.stored(f"{tensor.module}.scale")  # scale (rows, groups)
        values = (scale[:, :, None] * levels.float().view(*scale.shape, -1)).view(levels.shape)
        return values if (factors := self.factors(tensor.module)) is None else values * factors
