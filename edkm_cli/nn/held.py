"""`HeldLinear`: the layer that trains while weights keep the table entries that the start gave them.

Its weight exists as packed indices only, as in the checkpoint: what trains are the tables, less than one percent of the
parameters. Products are those of inference (`edkm_cli.runtime.lut_linear`), and the gradient of an entry is the sum of
dL/dW over the weights that chose it. Tables are rounded to the checkpoint's number format in forward, and the gradient
passes straight through the rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from edkm_cli.clustering import lookup, nearest_indices, round_lut
from edkm_cli.clustering.checks import require_finite
from edkm_cli.nn.clustered import ClusteredLinear, Clustering, LutLayer
from edkm_cli.packing import pack, packed_width, unpack
from edkm_cli.runtime import dispatch
from edkm_cli.runtime.packed import Packed


class HeldLinear(LutLayer):
    """`linear(x, centroids[indices], bias)` with packed indices (out, bytes) uint8 and trained centroids (groups, 2**bits)
    float32."""

    indices: Tensor

    def __init__(
        self,
        indices: Tensor,
        centroids: Tensor,
        bias: Tensor | None,
        clustering: Clustering,
        *,
        in_features: int,
        name: str,
    ):
        super().__init__()
        self.out_features, self.in_features = indices.shape[0], in_features
        self.clustering, self.name = clustering, name
        self.register_buffer("indices", indices)
        self.centroids = nn.Parameter(centroids.detach().float())
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach()))

    @classmethod
    def from_clustered(cls, layer: ClusteredLinear) -> HeldLinear:
        """Each weight with the entry that it is nearest to now."""
        bits, columns = layer.clustering.bits, layer.in_features
        if layer.weight.is_meta:
            packed = torch.empty(layer.out_features, packed_width(columns, bits), dtype=torch.uint8, device="meta")
        else:
            codes = nearest_indices(
                layer.effective_weight().detach(), layer.lut(), granularity=layer.clustering.granularity
            )
            packed = pack(codes, bits)
        held = cls(packed, layer.centroids, layer.bias, layer.clustering, in_features=columns, name=layer.name)
        return held.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        clustering = self.clustering
        table = _Rounded.apply(self.centroids, clustering.lut_dtype, clustering.lut_scale)
        if not table.is_meta:
            require_finite(table.detach(), layer=self.name)
        tile = clustering.granularity.tile(self.out_features, self.in_features, layer=self.name)
        return _Product.apply(x, table, self.bias, self.indices, clustering.bits, tile)

    def codes(self) -> Tensor:
        """The entry of each weight, (out, in) uint8."""
        return unpack(self.indices, self.clustering.bits, self.in_features)

    @torch.no_grad()
    def hard_weight(self) -> Tensor:
        """The weight (out, in) float32 as export stores it."""
        return lookup(self.codes(), self.lut(), granularity=self.clustering.granularity)


def hold(model: nn.Module) -> None:
    """Put a `HeldLinear` in the place of each `ClusteredLinear`, one at a time, in place."""
    for name, layer in [
        (name, module) for name, module in model.named_modules() if isinstance(module, ClusteredLinear)
    ]:
        model.set_submodule(name, HeldLinear.from_clustered(layer))


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, centroids: Tensor, lut_dtype: str, scale: float | None) -> Tensor:
        return round_lut(centroids, lut_dtype, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class _Product(torch.autograd.Function):
    """x @ W.T + bias, with a gradient for the table: dL/dW is made and summed by entry in blocks of rows, never whole."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, table: Tensor, bias: Tensor | None, indices: Tensor, bits: int, tile: Any
    ) -> Tensor:
        ctx.save_for_backward(x, table, indices)
        ctx.bits, ctx.tile, ctx.bias_dtype = bits, tile, None if bias is None else bias.dtype
        if x.is_meta:
            return x.new_empty(*x.shape[:-1], len(indices))
        return dispatch.linear(x, Packed(indices, table, bias, bits, tile))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, table, indices = ctx.saved_tensors
        columns, (height, width) = x.shape[-1], ctx.tile
        flat, entering = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, columns)
        grad_x = grad_table = grad_bias = None
        if x.is_meta:
            grad_bias = None if ctx.bias_dtype is None else grad.new_empty(len(indices), dtype=ctx.bias_dtype)
            return torch.empty_like(x), torch.empty_like(table), grad_bias, None, None, None
        if ctx.needs_input_grad[0]:
            grad_x = dispatch.input_gradient(grad, Packed(indices, table, None, ctx.bits, ctx.tile), columns)
        if ctx.needs_input_grad[1]:
            across = columns // width
            sums = torch.zeros(table.shape, dtype=torch.float64, device=x.device).view(-1, across, table.shape[1])
            block = height * max(1, _BLOCK_WEIGHTS // (columns * height)) if height < len(indices) else _BLOCK_ROWS
            for first in range(0, len(indices), block):
                rows = slice(first, first + block)
                part = (flat[:, rows].t() @ entering).double()
                codes = unpack(indices[rows], ctx.bits, columns).long()
                group = torch.arange(first, first + len(part), device=x.device) // height
                place = (group[:, None] * across + torch.arange(columns, device=x.device) // width) * table.shape[1]
                sums.view(-1).scatter_add_(0, (place + codes).view(-1), part.view(-1))
            grad_table = sums.view(table.shape).to(table.dtype)
        if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
            grad_bias = flat.sum(0).to(ctx.bias_dtype)
        return grad_x, grad_table, grad_bias, None, None, None


_BLOCK_WEIGHTS, _BLOCK_ROWS = 1 << 20, 256
