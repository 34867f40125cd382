"""Modules of a compressed model: indices stay packed in memory, and products are computed from them (runtime/packed.py).

`PalettizedLinear` decodes with a LUT, `PalettizedEmbedding` (and the output embedding, `PalettizedHead`) with one scale
a row. Buffers, not parameters: nothing here trains, and `model.to(dtype)` must not round a LUT, so dtype casts leave
`lut` and `scale` as they are.
"""

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from edkm_cli.clustering.grids import Grid, stored_numbers
from edkm_cli.errors import UserError
from edkm_cli.format import QuantizationSpec
from edkm_cli.granularity import FREE
from edkm_cli.kernels.tiles import Tile
from edkm_cli.packing import pack
from edkm_cli.precision import as_autocast
from edkm_cli.runtime import dispatch
from edkm_cli.runtime.lut_linear import lut_linear, row_scaled_embedding, row_scaled_linear
from edkm_cli.runtime.packed import Packed

_FILL_ROWS = 2048
_UNCHANGED = (
    "a packed weight cannot be changed in place; an adapter is merged by edkm merge, or into the dense model that "
    "model.dequantize() makes"
)


class _Packed(nn.Module):
    """Shared by the three modules: packed indices, and buffers whose dtype no cast changes.

    `dtype` is that of the dense weight the module stands for, and follows casts of the model.
    """

    indices: Tensor
    dtype: torch.dtype
    rows: int
    columns: int
    bits: int
    tile: Tile | None = None

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self._ready = dispatch.Ready()
        self._kept: Packed | None = None

    def packed(self) -> Packed:
        """The tensors as the kernels take them: the same object until one is replaced."""
        raise NotImplementedError

    def _same(self, indices: Tensor, table: Tensor, bias: Tensor | None) -> Packed:
        kept = self._kept
        if kept is None or kept.indices is not indices or kept.table is not table or kept.bias is not bias:
            kept = self._kept = Packed(indices, table, bias, self.bits, self.tile)
        return kept

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The dense weight (rows, columns): exactly the table's entries, rounded once if `dtype` is narrower."""
        return dispatch.dense(self.packed(), self.columns, dtype)

    def weight_like(self) -> tuple[tuple[int, int], torch.dtype, torch.device]:
        """(shape, dtype, device) of `weight`."""
        return (self.rows, self.columns), self.dtype, self.indices.device

    @property
    def weight(self) -> Tensor:
        """The dense weight as some models look at it, for its device, dtype or shape. It is decoded only when it is
        computed with, and nothing is written back."""
        return _DecodedWeight.of(self)

    def _register(self, tensors: dict[str, tuple[torch.dtype, tuple]]) -> None:
        for name, (dtype, shape) in tensors.items():
            self.register_buffer(name, torch.zeros(shape, dtype=dtype))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        self._kept, self._ready = None, dispatch.Ready()  # what is replaced must not stay in memory
        self.dtype = fn(torch.zeros(0, dtype=self.dtype)).dtype
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            after = self._buffers[name]
            if buffer is not None and after is not None and after.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(after.device)
        return self


class _DecodedWeight(Tensor):
    """A tensor without memory that stands for a packed module's dense weight: any operation on it decodes it first."""

    _module: Any

    @staticmethod
    def of(module: Any) -> "_DecodedWeight":
        shape, dtype, device = module.weight_like()
        made = Tensor._make_wrapper_subclass(_DecodedWeight, shape, dtype=dtype, device=device)  # type: ignore[attr-defined]
        made._module = module
        return made

    _is_hf_initialized = True  # what the files hold is not drawn at random, nor is any other weight of a packed module

    @property  # type: ignore[override]
    def data(self) -> "_DecodedWeight":
        """Itself: nothing here requires a gradient."""
        return self

    @data.setter
    def data(self, value: Tensor) -> None:
        raise UserError(_UNCHANGED)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        given = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **(kwargs or {})}
        for argument in func._schema.arguments:
            if argument.is_write and isinstance(given.get(argument.name), cls):
                raise UserError(_UNCHANGED)  # what was decoded would change, and be forgotten

        def decoded(weight: _DecodedWeight) -> Tensor:
            return weight._module.dequantize(weight.dtype)

        return func(*tree_map_only(cls, decoded, args), **tree_map_only(cls, decoded, kwargs or {}))

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def _room_of(bias: Tensor | None) -> nn.Parameter | None:
    return None if bias is None else nn.Parameter(torch.empty_like(bias), requires_grad=False)


class PalettizedLinear(_Packed, nn.Linear):  # type: ignore[misc, override]
    """`linear(x, lut[indices], bias)`; see docs/format.md for `indices` (out, bytes) uint8 and `lut` (groups, 2**bits).

    An `nn.Linear`, so that what adapts linears (peft) adapts it.
    """

    lut: Tensor
    bias: Any
    tile: Tile

    def __init__(self, dense: nn.Linear, spec: QuantizationSpec, *, name: str):
        _Packed.__init__(self)
        self.out_features, self.in_features = self.rows, self.columns = dense.weight.shape
        self.bits, self.granularity, self.dtype = spec.bits_of(name), spec.granularity_of(name), dense.weight.dtype
        self.grid = Grid(spec.palette, self.bits, spec.lut_dtype)
        self.tile = self.granularity.tile(self.rows, self.columns, layer=name)
        self.bias = _room_of(dense.bias)
        self._register(spec.linear_tensors(self.rows, self.columns, layer=name))
        self._table: Tensor | None = None
        self._table_key: tuple[int, ...] = ()

    def packed(self) -> Packed:
        buffers: Any = self._buffers
        plain = "lut" in buffers and "lut_scale" not in buffers
        return self._same(buffers["indices"], buffers["lut"] if plain else self._made_table(), self.bias)

    def _made_table(self) -> Tensor:
        """`table()` of a palette or a float8 LUT with a scale, computed once for as long as its parts stay what they are."""
        parts = [part for name, part in self._buffers.items() if name != "indices" and part is not None]
        key = tuple(number for part in parts for number in (part.data_ptr(), part._version))
        if self._table_key != key or self._table is None:
            self._table_key, self._table = key, self.table()
        return self._table

    def table(self) -> Tensor:
        """The LUT's entries as numbers (groups, 2**bits): float32 for float8 and palettes, else in the LUT's dtype."""
        if self.grid.palette != FREE:
            return self.grid.of_stored(*stored_numbers(self._buffers))
        if self.lut.dtype.itemsize >= 2:
            return self.lut
        scale = self._buffers.get("lut_scale")
        return self.lut.float() if scale is None else self.lut.float() * scale

    def forward(self, x: Tensor) -> Tensor:
        packed, x = self.packed(), as_autocast(x)
        outs = None if torch.compiler.is_compiling() else self._ready.product(x, (packed,), self.in_features)
        if outs is not None:
            return outs[0]
        indices, lut, bias, bits, _ = packed
        return lut_linear(x, indices, lut, bias, bits=bits, tile=self.tile)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}, {self.granularity}"


def to_nearest(weight: Tensor, scale: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Each number rounded by itself; the error is that of the weight."""
    levels = (weight / scale).round_().clamp_(-top, top)
    return levels, (levels * scale).sub_(weight).square_().sum(1, keepdim=True)


class Rounding(NamedTuple):
    """How an embedding's weight (rows, columns) is rounded.

    Attributes:
        levels: (some rows in float32, the scale of each of their numbers, the last level) -> (levels -last..last, float32;
            the error of each row, (rows, 1)).
        factors: the weight -> the factor of each column's scales, (columns,) uint8; None: 1 for all.
        tops: shares of the largest magnitude that the last level is tried at; each row takes that of the least error.
    """

    levels: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]] = to_nearest
    factors: Callable[[Tensor], Tensor] | None = None
    tops: tuple[float, ...] = (1.0,)


NEAREST = Rounding()


class _RowScaled(_Packed):
    """value = scale[row, group of the column] * factor[column] * (index - 2**(bits - 1)): the palette of embeddings,
    symmetric about zero.

    Factors are powers of two, so the product is the same to the bit whether weights are multiplied with them or what
    enters. Without `factors` all are 1.
    """

    scale: Tensor

    def __init__(self, dense: nn.Module, spec: QuantizationSpec, *, own: bool = True):
        _Packed.__init__(self)
        weight: Any = dense.weight
        (self.rows, self.columns), self.bits, self.dtype = weight.shape, spec.embedding_bits, weight.dtype
        self.scale_dtype = spec.embedding_scale_dtype
        if own:
            self._register(spec.embedding_tensors(self.rows, self.columns))

    def packed(self) -> Packed:
        return self._same(self.indices, self.scale, None)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """As of all packed weights."""
        return self._times_factors(super().dequantize(dtype))

    def _times_factors(self, values: Tensor) -> Tensor:
        factors = self._buffers.get("factors")
        return values if factors is None else values * factors.to(values)

    def fill(self, weight: Tensor, rounding: Rounding = NEAREST) -> None:
        """Round a dense weight (rows, columns) to the palette: the largest magnitude of a row, or of each of its groups,
        or a share of it, gets the last level. Some rows at a time: a vocabulary's weight may be larger than a decoder layer.
        """
        top = 2 ** (self.bits - 1) - 1
        factors = torch.ones(self.columns, device=weight.device)
        if (stored := self._buffers.get("factors")) is not None:
            factors = factors if rounding.factors is None else rounding.factors(weight).float()
            stored.copy_(factors)
        for first in range(0, self.rows, _FILL_ROWS):
            rows = slice(first, first + _FILL_ROWS)
            part = weight[rows].detach().float()
            largest = (part / factors).unflatten(1, (self.scale.shape[1], -1)).abs().amax(2) / top
            best = [torch.zeros_like(largest), torch.zeros_like(part), torch.full_like(largest[:, :1], math.inf)]
            for share in rounding.tops:
                scale = (largest * share).clamp_min_(torch.finfo(self.scale_dtype).tiny).to(self.scale_dtype).float()
                steps = scale.repeat_interleave(self.columns // scale.shape[1], 1) * factors
                found = (scale, *rounding.levels(part, steps, top))
                best = [torch.where(found[2] > best[2], *two) for two in zip(best, found, strict=True)]
            self.scale[rows], levels, _ = best
            self.indices[rows] = pack(levels.add_(2 ** (self.bits - 1)).to(torch.uint8), self.bits)

    def extra_repr(self) -> str:
        return f"{self.rows}, {self.columns}, bits={self.bits}"


def embedding_scale(embedding: nn.Embedding) -> float | Tensor | None:
    """What an embedding multiplies its rows with: 1.0 for a plain one; None for a subclass that does something else.

    Gemma's and MiniCPM3's embeddings are scaled. Whether a subclass only scales is tried, with rows of its own. A scale
    that the class keeps as a tensor is returned as one: it is rounded to the weight's dtype before it multiplies.
    """
    if type(embedding) is nn.Embedding:
        plain = embedding.max_norm is None and not embedding.scale_grad_by_freq
        return 1.0 if plain else None
    kept = getattr(embedding, "embed_scale", None)
    value = getattr(embedding, "scalar_embed_scale", kept)
    if isinstance(value, Tensor) and not value.is_meta and value.numel() == 1:
        value = value.item()
    if not isinstance(value, (int, float)):
        return None
    with torch.device("cpu"):  # a model may be in the making on the meta device
        as_float32 = torch.tensor(float(value), dtype=torch.float32)
        scale = as_float32 if isinstance(kept, Tensor) else float(value)
        rows = torch.arange(12, dtype=torch.float32).reshape(3, 4) - 5.5
        try:
            same = torch.equal(_subclass_with(embedding, rows, scale)(torch.arange(3)), rows * scale)
        except Exception:  # whatever it does, it is not scaling
            return None
    return scale if same else None


def is_plain_linear(linear: nn.Linear) -> bool:
    """Whether a linear computes `x @ weight.T + bias`: a subclass (Falcon's does) is tried with a weight of its own."""
    if type(linear) is nn.Linear:
        return True
    other = copy.copy(linear)
    with torch.device("cpu"):
        weight = torch.arange(12, dtype=torch.float32).reshape(3, 4) - 5.5
        bias = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float32)
        x = torch.tensor([[0.5, -1.5, 2.0, 3.0], [1.0, 0.0, -1.0, 4.0]], dtype=torch.float32)
        other._parameters = {"weight": nn.Parameter(weight), "bias": nn.Parameter(bias)}
        other.out_features, other.in_features = weight.shape
        try:
            return torch.allclose(other(x), nn.functional.linear(x, weight, bias))
        except Exception:  # whatever it does, it is not that
            return False


def _subclass_with(embedding: nn.Embedding, weight: Tensor, scale: float | Tensor) -> nn.Embedding:
    """An embedding of the same class with another weight; the scale, which may be on the meta device, filled in."""
    other = copy.copy(embedding)
    other._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
    other._buffers = {name: torch.as_tensor(scale).to(weight.device) for name in embedding._buffers}
    other.num_embeddings, other.embedding_dim = weight.shape
    if other.padding_idx is not None and other.padding_idx >= weight.shape[0]:
        other.padding_idx = None
    return other


class PalettizedEmbedding(_RowScaled):
    """`embedding(ids)` that decodes only the rows it is asked for, of a dense embedding that is plain or scaled."""

    def __init__(self, dense: nn.Embedding, spec: QuantizationSpec):
        super().__init__(dense, spec)
        self.num_embeddings, self.embedding_dim, self.padding_idx = self.rows, self.columns, dense.padding_idx
        self.embed_scale = embedding_scale(dense)  # not a buffer: in no checkpoint, and no cast rounds it twice
        like = copy.copy(dense)
        like._parameters = {}
        self._like = (like,)  # without its weight; in a tuple, so that it is not registered as a submodule

    def forward(self, ids: Tensor) -> Tensor:
        values = row_scaled_embedding(
            ids, self.indices, self.scale, columns=self.columns, bits=self.bits, dtype=self.dtype
        )
        values = self._times_factors(values)
        if isinstance(self.embed_scale, Tensor):
            return values * self.embed_scale.to(values.device, self.dtype)
        return values if self.embed_scale in (1.0, None) else values * self.embed_scale

    def to_dense(self, dtype: torch.dtype) -> nn.Embedding:
        """The dense embedding, of the class it was, with the decoded weight."""
        weight = self.dequantize(dtype)
        return _subclass_with(self._like[0], weight, 1.0 if self.embed_scale is None else self.embed_scale)


class PalettizedHead(_RowScaled, nn.Linear):  # type: ignore[misc, override]
    """The output embedding. Tied, it has no tensors of its own and decodes those of the input embedding.

    A reference, not shared buffers: moving a module to a device copies each buffer it holds, which would untie them.
    """

    bias: Any

    def __init__(self, dense: nn.Linear, spec: QuantizationSpec, *, tied_to: PalettizedEmbedding | None = None):
        super().__init__(dense, spec, own=tied_to is None)
        self.in_features, self.out_features, self.bias = self.columns, self.rows, _room_of(dense.bias)
        self._tied_to = (tied_to,)  # in a tuple, so that it is not registered as a submodule

    @property
    def tied_to(self) -> PalettizedEmbedding | None:
        return self._tied_to[0]

    def weight_like(self) -> tuple[tuple[int, int], torch.dtype, torch.device]:
        return super().weight_like() if self.tied_to is None else self.tied_to.weight_like()

    def _times_factors(self, values: Tensor) -> Tensor:
        return super()._times_factors(values) if self.tied_to is None else self.tied_to._times_factors(values)

    def packed(self) -> Packed:
        source = self if self.tied_to is None else self.tied_to
        return self._same(source.indices, source.scale, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        indices, scale, bias, bits, _ = packed = self.packed()
        x = self._times_factors(as_autocast(x))
        if indices.device != x.device:  # a device map may part it from the embedding
            indices, scale = indices.to(x.device), scale.to(x.device)
            packed = Packed(indices, scale, bias, bits, None)
        outs = None if torch.compiler.is_compiling() else self._ready.product(x, (packed,), self.columns)
        return outs[0] if outs is not None else row_scaled_linear(x, indices, scale, bias, bits=bits)


PALETTIZED: tuple[type[nn.Module], ...] = (PalettizedLinear, PalettizedEmbedding, PalettizedHead)


def to_dense(module: Any, dtype: torch.dtype) -> nn.Module:
    """The ordinary `nn.Linear` or embedding with a palettized module's decoded weight."""
    if isinstance(module, PalettizedEmbedding):
        return module.to_dense(dtype)
    weight = module.dequantize(dtype)
    rows, columns = weight.shape
    dense = nn.Linear(columns, rows, bias=module.bias is not None, device="meta")
    if module.bias is not None:
        dense.bias = nn.Parameter(module.bias.detach().to(dtype))
    dense.weight = nn.Parameter(weight)
    return dense
