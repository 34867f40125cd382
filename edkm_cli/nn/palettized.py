"""Modules of a compressed model: indices stay packed in memory, and products are computed from them (kernels/packed.py).

`PalettizedLinear` decodes with a LUT, `PalettizedEmbedding` (and the output embedding, `PalettizedHead`) with one scale
a row. Buffers, not parameters: nothing here trains, and `model.to(dtype)` must not round a LUT, so dtype casts leave
`lut` and `scale` as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from edkm_cli.format import QuantizationSpec
from edkm_cli.granularity import Granularity
from edkm_cli.kernels import packed as paths
from edkm_cli.kernels.lut_linear import check, lut_linear, row_scaled_embedding, row_scaled_linear, unwatched
from edkm_cli.kernels.lut_linear_c import Prepared
from edkm_cli.kernels.tiles import Packed
from edkm_cli.packing import pack

_FILL_ROWS = 1024
_SHARED_TOKENS = 16  # with more, a call for each matrix costs nothing beside the products


class _Packed(nn.Module):
    """Shared by the three modules: packed indices, and buffers whose dtype no cast changes."""

    indices: Tensor

    def _register(self, tensors: dict[str, tuple[torch.dtype, tuple]]) -> None:
        for name, (dtype, shape) in tensors.items():
            self.register_buffer(name, torch.zeros(shape, dtype=dtype))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            after = self._buffers[name]
            if buffer is not None and after is not None and after.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(after.device)
        return self


class _Ready:
    """A module's matrices as the kernel reads them, made again when a tensor has moved."""

    def __init__(self) -> None:
        self._addresses: tuple[int, ...] = ()
        self._prepared: Prepared | None = None

    def __deepcopy__(self, memo: dict) -> _Ready:
        return _Ready()

    def __reduce__(self) -> tuple:
        return _Ready, ()

    def product(self, x: Tensor, matrices: tuple[Packed, ...], columns: int) -> list[Tensor] | None:
        """x times each matrix, or None where the kernel is not the way."""
        addresses = tuple(t.data_ptr() for m in matrices for t in m[:3] if t is not None)
        if addresses != self._addresses:
            for packed in matrices:
                check(columns, packed)
            self._addresses, self._prepared = addresses, paths.prepare(matrices, columns)
        return None if self._prepared is None else paths.prepared_linears(x, self._prepared)


class SharedInput:
    """Linears that are called one after the other with one input (q, k, v; gate, up): the first call computes them all.

    The others' results wait until they are asked for with the same tensor, unchanged; anything else is computed anew.
    """

    def __init__(self, members: tuple[PalettizedLinear, ...]):
        self._members, self._ready = members, _Ready()
        self._state: tuple[Tensor, int, dict[int, Tensor]] | None = None  # one attribute, so that threads cannot mix

    def product(self, member: PalettizedLinear, x: Tensor) -> Tensor | None:
        """What `member` gives for x, or None where nothing can be shared."""
        if x.numel() > _SHARED_TOKENS * member.in_features or x.is_inference():
            return None
        state = self._state
        if state is not None and state[0] is x and state[1] == x._version and id(member) in state[2]:
            found = state[2].pop(id(member))
            if not state[2]:
                self._state = None
            return found
        outs = self._ready.product(x, tuple(m.packed() for m in self._members), member.in_features)
        if outs is None:
            return None
        results = {id(m): out for m, out in zip(self._members, outs, strict=True)}
        found = results.pop(id(member))
        self._state = (x, x._version, results)
        return found


class PalettizedLinear(_Packed):
    """`linear(x, lut[indices], bias)`; see docs/format.md for `indices` (out, bytes) uint8 and `lut` (groups, 2**bits)."""

    lut: Tensor

    def __init__(self, in_features: int, out_features: int, spec: QuantizationSpec, *, bias: Tensor | None, name: str):
        super().__init__()
        self.in_features, self.out_features, self.bits = in_features, out_features, spec.bits
        self.granularity = spec.granularity
        self.tile = Granularity.parse(spec.granularity).tile(out_features, in_features, layer=name)
        self.bias = None if bias is None else nn.Parameter(torch.empty_like(bias), requires_grad=False)
        self._register(spec.linear_tensors(out_features, in_features, layer=name))
        self._ready = _Ready()
        self.shared: SharedInput | None = None

    def packed(self) -> Packed:
        """The tensors as the kernels take them."""
        return Packed(self.indices, self.lut, self.bias, self.bits, self.tile)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The dense weight (out, in): exactly the LUT's entries, rounded once if `dtype` is narrower than the LUT's."""
        return paths.dense(self.packed(), self.in_features, dtype)

    def forward(self, x: Tensor) -> Tensor:
        if unwatched(x, self.bias):
            if self.shared is not None and (found := self.shared.product(self, x)) is not None:
                return found
            if (outs := self._ready.product(x, (self.packed(),), self.in_features)) is not None:
                return outs[0]
        return lut_linear(x, self.indices, self.lut, self.bias, bits=self.bits, tile=self.tile)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}, {self.granularity}"


class _RowScaled(_Packed):
    """value = scale[row] * (index - 2**(bits - 1)): the palette of embeddings, symmetric about zero."""

    scale: Tensor

    def __init__(self, rows: int, columns: int, spec: QuantizationSpec, *, own: bool = True):
        super().__init__()
        assert spec.embedding_bits is not None
        self.rows, self.columns, self.bits = rows, columns, spec.embedding_bits
        if own:
            self._register(spec.embedding_tensors(rows, columns))

    def packed(self) -> Packed:
        """The tensors as the kernels take them."""
        return Packed(self.indices, self.scale, None, self.bits, None)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The dense weight (rows, columns)."""
        return paths.dense(self.packed(), self.columns, dtype)

    def fill(self, weight: Tensor) -> None:
        """Round a dense weight (rows, columns) to the palette: the largest magnitude of a row gets the last level.

        Some rows at a time, since a vocabulary's weight may be larger than a decoder layer.
        """
        top = 2 ** (self.bits - 1) - 1
        for first in range(0, self.rows, _FILL_ROWS):
            rows = slice(first, first + _FILL_ROWS)
            part = weight[rows].detach().float()
            scale = (part.abs().amax(1, keepdim=True) / top).clamp_min(torch.finfo(torch.float32).tiny)
            levels = (part / scale).round_().clamp_(-top, top).add_(2 ** (self.bits - 1))
            self.scale[rows], self.indices[rows] = scale, pack(levels.to(torch.uint8), self.bits)

    def extra_repr(self) -> str:
        return f"{self.rows}, {self.columns}, bits={self.bits}"


class PalettizedEmbedding(_RowScaled):
    """`embedding(ids)` that decodes only the rows it is asked for."""

    def __init__(self, rows: int, columns: int, spec: QuantizationSpec, *, padding_idx: int | None, dtype: torch.dtype):
        super().__init__(rows, columns, spec)
        self.num_embeddings, self.embedding_dim, self.padding_idx = rows, columns, padding_idx
        self.dtype = dtype  # what the dense embedding had; it follows casts of the model

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        self.dtype = fn(torch.zeros(0, dtype=self.dtype)).dtype
        return super()._apply(fn, recurse)

    def forward(self, ids: Tensor) -> Tensor:
        return row_scaled_embedding(
            ids, self.indices, self.scale, columns=self.columns, bits=self.bits, dtype=self.dtype
        )


class PalettizedHead(_RowScaled):
    """The output embedding. Tied, it has no tensors of its own and decodes those of the input embedding.

    A reference, not shared buffers: moving a module to a device copies each buffer it holds, which would untie them.
    """

    def __init__(
        self,
        rows: int,
        columns: int,
        spec: QuantizationSpec,
        *,
        bias: Tensor | None,
        tied_to: PalettizedEmbedding | None = None,
    ):
        super().__init__(rows, columns, spec, own=tied_to is None)
        self.in_features, self.out_features = columns, rows
        self._tied_to = (tied_to,)  # in a tuple, so that it is not registered as a submodule
        self._ready = _Ready()
        self.bias = None if bias is None else nn.Parameter(torch.empty_like(bias), requires_grad=False)

    @property
    def tied_to(self) -> PalettizedEmbedding | None:
        return self._tied_to[0]

    def packed(self) -> Packed:
        """The tensors as the kernels take them, its own or those of the embedding it is tied to."""
        source = self if self.tied_to is None else self.tied_to
        return Packed(source.indices, source.scale, self.bias, self.bits, None)

    def forward(self, x: Tensor) -> Tensor:
        indices, scale, bias, bits, _ = packed = self.packed()
        if indices.device != x.device:  # a device map may part it from the embedding
            packed = Packed(indices.to(x.device), scale.to(x.device), bias, bits, None)
            indices, scale = packed[:2]
        elif unwatched(x, bias) and (outs := self._ready.product(x, (packed,), self.columns)) is not None:
            return outs[0]
        return row_scaled_linear(x, indices, scale, bias, bits=bits)


def share_inputs(model: nn.Module) -> None:
    """Let palettized q, k, v and gate, up of each block, which transformers calls with one tensor, share a call."""
    for parent in model.modules():
        for names in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            found = [getattr(parent, name, None) for name in names]
            members = tuple(m for m in found if isinstance(m, PalettizedLinear))
            if len(members) == len(names) and len({(m.in_features, m.bits) for m in members}) == 1:
                group = SharedInput(members)
                for member in members:
                    member.shared = group


PALETTIZED: tuple[type[nn.Module], ...] = (PalettizedLinear, PalettizedEmbedding, PalettizedHead)


def to_dense(module: Any, dtype: torch.dtype) -> nn.Module:
    """The ordinary `nn.Linear` or `nn.Embedding` with a palettized module's decoded weight."""
    weight = module.dequantize(dtype)
    rows, columns = weight.shape
    dense: nn.Module
    if isinstance(module, PalettizedEmbedding):
        dense = nn.Embedding(rows, columns, padding_idx=module.padding_idx, device="meta")
    else:
        dense = nn.Linear(columns, rows, bias=module.bias is not None, device="meta")
        if module.bias is not None:
            dense.bias = nn.Parameter(module.bias.detach().to(dtype))
    dense.weight = nn.Parameter(weight)
    return dense
