"""`ClusteredLinear`: a linear layer that is trained as the palettized layer it will become; `HeldLinear`: one whose weights
keep the table entries that the start gave them.

Training forwards cluster the weight (arXiv 2108.12659; closed form of docs/clustering.md) in one of three modes; in
evaluation the layer is what export writes: each weight at its nearest LUT entry. A forward pass never changes state, so
gradient accumulation and activation checkpointing are exact; the trainer calls `commit` once per optimizer step.

A held weight exists as packed indices only, as in the checkpoint: what trains are the tables, less than one percent of the
parameters. Products are those of inference (`edkm_cli.runtime.lut_linear`), and the gradient of an entry is the sum of
dL/dW over the weights that chose it. Tables are rounded to the checkpoint's number format in forward, and the gradient
passes straight through the rounding.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from edkm_cli.clustering import clustered_linear, dense_dkm, iterate_centroids, lookup, nearest_indices, snap
from edkm_cli.clustering.checks import require_finite
from edkm_cli.clustering.grids import Grid, stored_numbers, unit_of
from edkm_cli.clustering.linear import trains_luts
from edkm_cli.distributed import assign, local
from edkm_cli.granularity import E3M4, E4M3, FREE, Granularity
from edkm_cli.kernels import from_groups, to_groups
from edkm_cli.packing import pack, packed_width, to_stored, unpack
from edkm_cli.precision import as_autocast
from edkm_cli.runtime.experts import is_expert
from edkm_cli.runtime.lut_linear import lut_linear
from edkm_cli.runtime.palettized import PalettizedLinear


@dataclass(frozen=True)
class Clustering:
    """How the layers of a model are clustered.

    `method` is `edkm` (closed form, nothing weight-sized saved for backward) or `dkm` (the dense reference, which keeps
    every attention map); both compute the same. `mode` and `iterations` are those of `clustered_linear`. `granularity`
    may be given as a text, `row:1`. `lut_scale` fixes the scale of float8 tables; None: each matrix has its own. `palette`
    is a key of `PALETTES`; all but `free` need mode `straight-through`.
    """

    bits: int
    granularity: Granularity
    lut_dtype: str
    method: str = "edkm"
    mode: str = "straight-through"
    iterations: int = 1
    lut_scale: float | None = None
    palette: str = FREE

    def __post_init__(self) -> None:
        object.__setattr__(self, "granularity", Granularity.parse(self.granularity))

    @property
    def grid(self) -> Grid:
        """What the tables are a function of."""
        return Grid(self.palette, self.bits, self.lut_dtype, self.lut_scale)

    @property
    def trains_luts(self) -> bool:
        return trains_luts(self.mode, self.iterations)


class LutLayer(nn.Module):
    """What export, reports and measures see of a layer that trains: `centroids`, the entry of each weight, and what a
    checkpoint stores of both. `centroids` (groups, numbers) are table entries, or what these are a function of (`Grid`)."""

    out_features: int
    in_features: int
    clustering: Clustering
    centroids: nn.Parameter
    bias: nn.Parameter | None
    name: str
    tokens: Tensor | None  # of an expert: how many reached it when it was to be compensated, an int64

    def codes(self) -> Tensor:
        """The entry of each weight, (out, in) uint8, as a row of `lut()`."""
        raise NotImplementedError

    def lut(self) -> Tensor:
        """The tables (groups, 2**bits) float32 as export stores them."""
        return self.clustering.grid.tables(self.centroids.detach())

    @torch.no_grad()
    def hard_weight(self) -> Tensor:
        """The weight (out, in) float32 as export stores it."""
        return lookup(self.codes(), self.lut(), granularity=self.clustering.granularity)

    @torch.no_grad()
    def snapped(self) -> tuple[Tensor, Tensor | None]:
        """(indices (out, in) uint8, lut (groups, 2**bits) in the LUT's dtype, rows ascending): what export writes. A
        float8 LUT is divided by its `stored_scale`. Indices of a palette stay those of its template, which has no LUT.

        Entries are sorted after the assignment, so ties fall as in `hard_weight`.
        """
        if self.clustering.palette != FREE:
            return self.codes(), None
        ascending, order = self.lut().sort(dim=1, stable=True)
        rank = order.argsort(1).float()
        renamed = lookup(self.codes(), rank, granularity=self.clustering.granularity).to(torch.uint8)
        scale = self.clustering.grid.factor(self.centroids)
        return renamed, to_stored(ascending if scale is None else ascending / scale, self.clustering.lut_dtype)

    @torch.no_grad()
    def stored_scale(self) -> Tensor | None:
        """What stored entries are multiplied with: of an E4M3 LUT (1,) float32, of E3M4 (groups,) float8_e8m0fnu, of `int8`
        scales (out, super-blocks, numbers) float16; None for other dtypes."""
        if (scale := self.clustering.grid.factor(self.centroids)) is None or scale.dim() == 0:
            return None if scale is None else scale.reshape(1)
        if self.clustering.lut_dtype == E3M4:
            return scale.flatten().to(torch.float8_e8m0fnu)
        return scale.unflatten(0, (self.out_features, -1))

    @torch.no_grad()
    def stored_numbers(self) -> dict[str, Tensor]:
        """`scales` and `offsets` of a palette, (out, tiles) in the LUT's dtype, divided by `stored_scale`."""
        dtype, factor = getattr(torch, self.clustering.lut_dtype), self.stored_scale()
        stored = (numbers for numbers in self.clustering.grid.stored(self.centroids) if numbers is not None)
        tiled = [numbers.view(self.out_features, -1) for numbers in stored]
        divided = ((numbers / unit_of(factor, at, numbers.shape[1])).to(dtype) for at, numbers in enumerate(tiled))
        return dict(zip(("scales", "offsets"), divided, strict=False))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.clustering}"


class ClusteredLinear(LutLayer):
    """A linear layer with a weight (out, in) and centroids (groups, numbers), both parameters.

    While `dense` is set the layer is the plain linear on `weight` instead.

    `temperature` is relative to the variance of a group and may be changed between steps. Centroids require gradients
    in mode `straight-through` and without iterations, where they are trained; else they are the warm start of the
    iterations, and `importance` says how much each weight counts in them: (in,) or (out, in), as `relative_importance`
    gives it, a parameter that never trains (so that sharding shares it out); None: all alike.
    """

    importance: nn.Parameter | None

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        centroids: Tensor,
        clustering: Clustering,
        *,
        name: str,
        temperature: float = 1.0,
        importance: Tensor | None = None,
    ):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.clustering, self.temperature, self.name = clustering, temperature, name
        self.weight = nn.Parameter(weight.detach())
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach()))
        self.centroids = nn.Parameter(centroids.detach().float(), requires_grad=clustering.trains_luts)
        kept = None if importance is None else nn.Parameter(importance.detach(), requires_grad=False)
        self.register_parameter("importance", kept)
        self.dense = False
        counted = torch.zeros((), dtype=torch.int64, device=weight.device) if is_expert(name) else None
        self.register_buffer("tokens", counted)
        # Where the dense reference's saved tensors go (a context made from the weight); the trainer may set it.
        self.saving: Callable[[Tensor], AbstractContextManager[Any]] = nullcontext
        self._memo: tuple[tuple[object, ...], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        options = self.clustering
        if self.dense:
            return nn.functional.linear(x, self.weight, self.bias)
        if not self.training:
            return nn.functional.linear(x, self.hard_weight().to(x.dtype), self.bias)
        new_centroids = None if options.trains_luts else self._new_centroids()
        if options.method == "dkm":
            with self.saving(self.weight):
                clustered = self._dense_weight()
            return nn.functional.linear(x, clustered.to(x.dtype), self.bias)
        rounding = {"lut_dtype": options.lut_dtype if options.palette == FREE else None, "lut_scale": options.lut_scale}
        about: dict[str, Any] = {**self._updates, **rounding, "new_centroids": new_centroids, "name": self.name}
        return clustered_linear(x, self.weight, self._tables(), self.bias, mode=options.mode, **about)

    @property
    def _updates(self) -> dict[str, Any]:
        """What updates of the centroids depend on beside the weight."""
        options = self.clustering
        about = {"granularity": options.granularity, "iterations": options.iterations}
        return {**about, "temperature": self.temperature, "importance": self.importance}

    def _tables(self) -> Tensor:
        """What is trained in place of the tables, or the tables that it stands for; differentiable."""
        options = self.clustering
        return self.centroids if options.palette == FREE else options.grid.tables(self.centroids)

    def _dense_weight(self) -> Tensor:
        """The clustered weight by plain autograd operations, in the chosen mode: the reference for `clustered_linear`."""
        options, weight = self.clustering, self.weight
        if options.mode == "straight-through":
            # The value is the entry of each weight; the sum routes dL/dw~ to both the weight and its entry.
            indices = nearest_indices(weight, self.lut(), granularity=options.granularity)
            entries = differentiable_lookup(self._tables(), indices, options.granularity)
            return self.hard_weight().to(entries.dtype) + (entries - entries.detach()) + (weight - weight.detach())
        soft, final = dense_dkm(weight, self.centroids, **self._updates)
        if options.mode == "soft":
            return soft
        rounding: dict[str, Any] = {"lut_dtype": options.lut_dtype, "scale": options.lut_scale}
        hard = snap(weight, final, granularity=options.granularity, name=self.name, **rounding)
        return soft + (hard.to(soft.dtype) - soft).detach()

    def _new_centroids(self) -> Tensor:
        """The iterated centroids. They depend on parameters only, so micro-batches of one step share them."""
        key = (self.temperature, *((source._version, source.data_ptr()) for source in (self.weight, self.centroids)))
        if self._memo is None or self._memo[0] != key:
            self._memo = (key, self.iterated_centroids())
        return self._memo[1]

    def iterated_centroids(self) -> Tensor:
        """The centroids after this step's iterations (groups, k), computed anew."""
        return iterate_centroids(self.weight, self.centroids, name=self.name, **self._updates)

    @torch.no_grad()
    def commit(self) -> None:
        """Once per optimizer step: the iterated centroids start the next one. Nothing to do where gradients train them."""
        if not self.clustering.trains_luts:
            # Of sharded parameters only a forward sees the whole: what it computed is taken.
            sharded = local(self.weight) is not self.weight
            assign(self.centroids, self._memo[1] if sharded and self._memo else self._new_centroids())
            self._memo = None

    @torch.no_grad()
    def hard_weight(self) -> Tensor:
        """The same in one pass, with an error for weights that are not finite."""
        return snap(self.weight, self.lut(), granularity=self.clustering.granularity, name=self.name)

    def codes(self) -> Tensor:
        """The nearest entry of each weight, (out, in) uint8."""
        return nearest_indices(self.weight.detach(), self.lut(), granularity=self.clustering.granularity)


def differentiable_lookup(centroids: Tensor, indices: Tensor, granularity: Granularity) -> Tensor:
    """centroids[group of a weight, its index], (out, in), by a differentiable gather."""
    tile = granularity.tile(*indices.shape)
    grouped = to_groups(indices, tile).long()  # (groups, n)
    return from_groups(centroids.gather(1, grouped), tuple(indices.shape), tile)


def lut_layers(model: nn.Module) -> dict[str, LutLayer]:
    """Module path -> layer with tables, in the order of the model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LutLayer)}


def clustered_layers(model: nn.Module) -> dict[str, ClusteredLinear]:
    """Module path -> layer whose weights are free, in the order of the model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, ClusteredLinear)}


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
        if not (table := self.clustering.grid.tables(self.centroids)).is_meta:
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
    """Put a `HeldLinear` in the place of each `ClusteredLinear`, one at a time, in place; what trains from then on are
    tables, norms and biases, whatever stayed dense."""
    for name, layer in clustered_layers(model).items():
        model.set_submodule(name, HeldLinear.from_clustered(layer))
    _train_tables(model)


def _train_tables(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.dim() == 1 or name.endswith("centroids"))


def with_scale_of(layers: Iterable[PalettizedLinear], clustering: Clustering) -> Clustering:
    """E4M3 tables keep their scale where all have one, as some runtimes need it."""
    scales = {float(scale) for m in layers if (scale := m._buffers.get("lut_scale")) is not None and scale.numel() == 1}
    one = len(scales) == 1 and clustering.lut_dtype == E4M3
    return replace(clustering, lut_scale=scales.pop() if one else None)


def hold_packed(model: nn.Module, clustering: Clustering) -> None:
    """`hold` for packed linears."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, PalettizedLinear)}
    clustering = with_scale_of(layers.values(), clustering)
    for name, layer in layers.items():
        own = replace(clustering, bits=layer.bits, granularity=layer.granularity)
        model.set_submodule(name, HeldLinear(layer, layer.indices, parameters_of(layer), own, name=name))
    _train_tables(model)


def parameters_of(layer: PalettizedLinear) -> Tensor:
    """What the tables of a packed linear train as: (groups, numbers) float32, see `Grid`."""
    if layer.grid.palette == FREE:
        return layer.table().float()
    return layer.grid.parameters(*stored_numbers(dict(layer.named_buffers())))
