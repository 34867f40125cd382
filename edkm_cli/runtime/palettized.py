"""Modules of a compressed model: indices stay packed in memory, and products are computed from them (runtime/lut_linear.py).

`PalettizedLinear` decodes with a LUT, the embeddings of `edkm_cli.runtime.embeddings` with one scale a row. Buffers, not
parameters: nothing here trains, and `model.to(dtype)` must not round a LUT: dtype casts leave `lut` and `scale` alone.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from edkm_cli.clustering.grids import Grid, stored_numbers
from edkm_cli.errors import UserError
from edkm_cli.format import QuantizationSpec
from edkm_cli.granularity import FREE
from edkm_cli.packing import Packed, Tile, as_kept
from edkm_cli.precision import as_autocast
from edkm_cli.runtime import dispatch
from edkm_cli.runtime.lut_linear import lut_linear
from edkm_cli.runtime.lut_linear_c import recorded

_MERGE = "an adapter is merged by edkm merge, or into the dense model that model.dequantize() makes"
_UNCHANGED = f"a packed weight cannot be changed in place; {_MERGE}"


class PackedModule(nn.Module):
    """What all packed modules are: packed indices, and buffers whose dtype no cast changes.

    `dtype` is that of the dense weight the module stands for, and follows casts of the model.
    """

    indices: Tensor
    bias: Any
    dtype: torch.dtype
    rows: int
    columns: int
    bits: int

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self._forget()

    def _forget(self) -> None:
        """Let go of what was made of the tensors."""
        raise NotImplementedError

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The dense weight (rows, columns): exactly the table's entries, rounded once if `dtype` is narrower."""
        raise NotImplementedError

    def to_dense(self, dtype: torch.dtype) -> nn.Module:
        """The ordinary `nn.Linear` with the decoded weight."""
        dense = nn.Linear(self.columns, self.rows, bias=self.bias is not None, device="meta")
        if self.bias is not None:
            dense.bias = nn.Parameter(self.bias.detach().to(dtype))
        dense.weight = nn.Parameter(self.dequantize(dtype))
        return dense

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
        self._forget()  # what is replaced must not stay in memory
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

    def __setitem__(self, where: Any, value: Any) -> None:
        raise UserError(_UNCHANGED)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        given = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **(kwargs or {})}
        for argument in func._schema.arguments:
            if argument.is_write and any(isinstance(one, cls) for one in tree_leaves(given.get(argument.name))):
                raise UserError(_UNCHANGED)  # what was decoded would change, and be forgotten

        def decoded(weight: _DecodedWeight) -> Tensor:
            return weight._module.dequantize(weight.dtype)

        return func(*tree_map_only(cls, decoded, args), **tree_map_only(cls, decoded, kwargs or {}))

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def room_of(bias: Tensor | None) -> nn.Parameter | None:
    return None if bias is None else nn.Parameter(torch.empty_like(bias), requires_grad=False)


class PalettizedLinear(PackedModule, nn.Linear):  # type: ignore[misc, override]
    """`linear(x, lut[indices], bias)`; see docs/format.md for `indices` (out, bytes) uint8 and `lut` (groups, 2**bits).

    An `nn.Linear`, so that what adapts linears (peft) adapts it.
    """

    lut: Tensor
    tile: Tile

    def __init__(self, dense: nn.Linear, spec: QuantizationSpec, *, name: str):
        PackedModule.__init__(self)
        self.out_features, self.in_features = self.rows, self.columns = dense.weight.shape
        self.bits, self.granularity, self.dtype = spec.bits_of(name), spec.granularity_of(name), dense.weight.dtype
        self.grid = Grid(spec.palette, self.bits, spec.lut_dtype)
        self.tile = self.granularity.tile(self.rows, self.columns, layer=name)
        self.bias = room_of(dense.bias)
        self._register(spec.linear_tensors(self.rows, self.columns, layer=name))
        self._table: Tensor | None = None
        self._table_key: tuple[tuple[int, int], ...] = ()

    def _forget(self) -> None:
        self._kept: Packed | None = None
        self._ready = dispatch.Ready()

    def packed(self) -> Packed:
        """The tensors as the kernels take them: the same object until one is replaced."""
        buffers: Any = self._buffers
        plain, kept, bias = "lut" in buffers and "lut_scale" not in buffers, self._kept, self.bias
        made = self.table if torch.compiler.is_compiling() else self._made_table  # an address is no number there
        indices, table = buffers["indices"], buffers["lut"] if plain else made()
        if kept is None or kept.indices is not indices or kept.table is not table or kept.bias is not bias:
            kept = self._kept = Packed(indices, table, bias, self.bits, self.tile)
        return kept

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """See `PackedModule.dequantize`."""
        return dispatch.dense(self.packed(), self.columns, dtype)

    def _made_table(self) -> Tensor:
        """`table()` of a palette or a float8 LUT with a scale, computed once for as long as its parts stay what they are."""
        parts = [part for name, part in self._buffers.items() if name != "indices" and part is not None]
        if torch.is_grad_enabled() and any(part.requires_grad for part in parts):  # each pass has its own graph
            return self.table()
        key = tuple((part.data_ptr(), 0 if part.is_inference() else part._version) for part in parts)
        if self._table_key != key or self._table is None:
            self._table_key, self._table = key, torch.inference_mode(False)(self.table)()
        return self._table

    def table(self) -> Tensor:
        """The LUT's entries as numbers (groups, 2**bits): in its dtype; of float8 see `as_kept`, of palettes float32."""
        if self.grid.palette != FREE:
            return self.grid.of_stored(*stored_numbers(self._buffers))
        return self.lut if self.lut.dtype.itemsize >= 2 else as_kept(self.lut, self._buffers.get("lut_scale"))

    def forward(self, x: Tensor) -> Tensor:
        packed, x = self.packed(), as_autocast(x)
        outs = None if recorded() else self._ready.product(x, (packed,), self.in_features)
        if outs is not None:
            return outs[0]
        indices, lut, bias, bits, _ = packed
        return lut_linear(x, indices, lut, bias, bits=bits, tile=self.tile)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}, {self.granularity}"


def is_plain_linear(linear: nn.Linear) -> bool:
    """Whether a linear computes `x @ weight.T + bias`, as a packed one does: another subclass (Falcon's does, routers may
    give more) is tried with a weight of its own."""
    if type(linear) is nn.Linear or isinstance(linear, PackedModule):
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
