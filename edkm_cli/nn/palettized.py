"""Modules of a compressed model: indices stay packed in memory and are decoded inside forward.

`PalettizedLinear` decodes with a LUT, `PalettizedEmbedding` (and the output embedding, `PalettizedHead`) with one scale
a row. Buffers, not parameters: nothing here trains, and `model.to(dtype)` must not round a LUT, so dtype casts leave
`lut` and `scale` as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from edkm_cli.clustering import lookup
from edkm_cli.format import QuantizationSpec
from edkm_cli.packing import pack, unpack

_FILL_ROWS = 1024


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


class PalettizedLinear(_Packed):
    """`linear(x, lut[indices], bias)`; see docs/format.md for `indices` (out, bytes) uint8 and `lut` (groups, 2**bits)."""

    lut: Tensor

    def __init__(self, in_features: int, out_features: int, spec: QuantizationSpec, *, bias: Tensor | None, name: str):
        super().__init__()
        self.in_features, self.out_features, self.bits = in_features, out_features, spec.bits
        self.granularity = spec.granularity
        self.bias = None if bias is None else nn.Parameter(torch.empty_like(bias), requires_grad=False)
        self._register(spec.linear_tensors(out_features, in_features, layer=name))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The dense weight (out, in): exactly the LUT's entries, rounded once if `dtype` is narrower than the LUT's."""
        lut = self.lut if self.lut.dtype.itemsize >= 2 else self.lut.float()
        return lookup(unpack(self.indices, self.bits, self.in_features), lut, granularity=self.granularity).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.dequantize(x.dtype), self.bias)

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

    def _decode(self, packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        levels = unpack(packed, self.bits, self.columns).float() - 2 ** (self.bits - 1)
        return (levels * scale).to(dtype)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The dense weight (rows, columns)."""
        return self._decode(self.indices, self.scale, dtype)

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
        rows = ids.reshape(-1)
        return self._decode(self.indices[rows], self.scale[rows], self.dtype).view(*ids.shape, self.columns)


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
        self.bias = None if bias is None else nn.Parameter(torch.empty_like(bias), requires_grad=False)

    @property
    def tied_to(self) -> PalettizedEmbedding | None:
        return self._tied_to[0]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The dense weight (rows, columns)."""
        return super().dequantize(dtype) if self.tied_to is None else self.tied_to.dequantize(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.dequantize(x.dtype).to(x.device), self.bias)


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
