"""`HeldLinear`: the layer that trains while weights keep the table entries that the start gave them.

Its weight exists as packed indices only, as in the checkpoint: what trains are the tables, less than one percent of the
parameters. Products are those of inference (`edkm_cli.runtime.lut_linear`), and the gradient of an entry is the sum of
dL/dW over the weights that chose it. Tables are rounded to the checkpoint's number format in forward, and the gradient
passes straight through the rounding.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from edkm_cli.clustering.checks import require_finite
from edkm_cli.clustering.grids import stored_numbers
from edkm_cli.granularity import FREE
from edkm_cli.nn.clustered import ClusteredLinear, Clustering, LutLayer, clustered_layers, differentiable_lookup
from edkm_cli.packing import pack, packed_width, unpack
from edkm_cli.precision import as_autocast
from edkm_cli.runtime.lut_linear import lut_linear
from edkm_cli.runtime.palettized import PalettizedLinear


class HeldLinear(LutLayer):
    """`linear(x, centroids[indices], bias)` with packed indices (out, bytes) uint8 and trained centroids (groups,
    numbers) float32, in the place of a clustered or packed `layer`."""

    indices: Tensor

    def __init__(self, layer: Any, indices: Tensor, centroids: Tensor, clustering: Clustering, *, name: str):
        super().__init__()
        self.out_features, self.in_features, self.dtype = layer.out_features, layer.in_features, layer.weight.dtype
        self.clustering, self.name = clustering, name
        self.register_buffer("indices", indices)
        self.register_buffer("tokens", getattr(layer, "tokens", None))
        self.centroids = nn.Parameter(centroids.detach().float())
        self.register_parameter("bias", None if layer.bias is None else nn.Parameter(layer.bias.detach()))

    @classmethod
    def from_clustered(cls, layer: ClusteredLinear) -> "HeldLinear":
        """Each weight with the entry that it is nearest to now."""
        bits = layer.clustering.bits
        if layer.weight.is_meta:
            width = packed_width(layer.in_features, bits)
            packed = torch.empty(layer.out_features, width, dtype=torch.uint8, device="meta")
        else:
            packed = pack(layer.codes(), bits)
        return cls(layer, packed, layer.centroids, layer.clustering, name=layer.name).train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        tile = self.clustering.granularity.tile(self.out_features, self.in_features, layer=self.name)
        return lut_linear(as_autocast(x), self.indices, self._table(), self.bias, bits=self.clustering.bits, tile=tile)

    def _table(self) -> Tensor:
        """`lut()`, differentiable."""
        table = self.clustering.grid.tables(self.centroids)
        if not table.is_meta:
            require_finite(table.detach(), layer=self.name)
        return table

    @property
    def weight(self) -> Tensor:
        """The decoded weight (out, in), differentiable, for models that compute with it themselves (Mamba's blocks do)."""
        return differentiable_lookup(self._table(), self.codes(), self.clustering.granularity).to(self.dtype)

    def codes(self) -> Tensor:
        """The entry of each weight, (out, in) uint8."""
        return unpack(self.indices, self.clustering.bits, self.in_features)


def hold(model: nn.Module) -> None:
    """Put a `HeldLinear` in the place of each `ClusteredLinear`, one at a time, in place."""
    for name, layer in clustered_layers(model).items():
        model.set_submodule(name, HeldLinear.from_clustered(layer))


def hold_packed(model: nn.Module, clustering: Clustering) -> None:
    """Put a `HeldLinear` in the place of each packed linear, in place; what trains from then on are tables, norms and
    biases. float8 tables keep their scale where all have one, as some runtimes need it."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, PalettizedLinear)}
    scales = {float(scale) for m in layers.values() if (scale := m._buffers.get("lut_scale")) is not None}
    clustering = replace(clustering, lut_scale=scales.pop() if len(scales) == 1 else None)
    model.requires_grad_(False)
    for name, layer in layers.items():
        own = replace(clustering, bits=layer.bits, granularity=layer.granularity)
        model.set_submodule(name, HeldLinear(layer, layer.indices, parameters_of(layer), own, name=name))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.dim() == 1 or name.endswith(".centroids"))


def parameters_of(layer: PalettizedLinear) -> Tensor:
    """What the tables of a packed linear train as: (groups, numbers) float32, see `Grid`."""
    if layer.grid.palette == FREE:
        return layer.table().float()
    return layer.grid.parameters(*stored_numbers(dict(layer.named_buffers())))
