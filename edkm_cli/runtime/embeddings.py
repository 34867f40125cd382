"""Embeddings of a compressed model, packed as all its modules are (runtime/palettized.py): a row has one scale, or one for
each group of its columns, and levels about zero. Parts of the rows may have bits of their own."""

import copy
import math
from collections import defaultdict
from collections.abc import Callable
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from edkm_cli.format import QuantizationSpec
from edkm_cli.packing import Packed, pack, row_parts
from edkm_cli.precision import as_autocast
from edkm_cli.runtime import dispatch
from edkm_cli.runtime.lut_linear import decoded_rows, joined, logits
from edkm_cli.runtime.lut_linear_c import recorded
from edkm_cli.runtime.palettized import PackedModule, room_of

_FILL_ROWS = 2048
_SAMPLE_ROWS = 256  # of each part, on which factors of columns are chosen
_MOST_APART = 64.0  # times the median that a column's size is taken for, or its inverse
_LEAST = 1e-30  # beside a mean error


def to_nearest(weight: Tensor, scale: Tensor, factors: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
    """Each number rounded by itself; the error is that of the weight."""
    steps = scale.repeat_interleave(weight.shape[1] // scale.shape[1], 1) * factors
    levels = (weight / steps).round_().clamp_(low, high)
    return levels, (levels * steps).sub_(weight).square_().sum(1, keepdim=True)


class Rounding(NamedTuple):
    """How an embedding's weight (rows, columns) is rounded.

    Attributes:
        levels: (some rows; the scales of their groups, (rows, groups); the factors of columns, (columns,); the first level,
            the last) -> (levels; the error of each row, (rows, 1)), all in float32.
        powers: of the size of a column's numbers, one of which is the factor of its scales: that of the least error.
        tops: shares of the largest number that the first level is tried at; each row takes that of the least error.
    """

    levels: Callable[[Tensor, Tensor, Tensor, int, int], tuple[Tensor, Tensor]] = to_nearest
    powers: tuple[float, ...] = (0.0,)
    tops: tuple[float, ...] = (1.0,)


NEAREST = Rounding()


class _RowScaled(PackedModule):
    """value = scale[row, group of the column] * factor[column] * (index - 2**(bits - 1)): the palette of embeddings.

    Without `factors` all are 1, index 0 is not used, and levels are symmetric about zero. With them a scale has the sign
    that puts the largest number at index 0.
    """

    scale: Tensor

    def __init__(self, dense: nn.Module, spec: QuantizationSpec, *, tied_to: "PalettizedEmbedding | None" = None):
        PackedModule.__init__(self)
        weight: Any = dense.weight
        (self.rows, self.columns), self.bits, self.dtype = weight.shape, spec.embedding_bits, weight.dtype
        self.row_parts, self.scale_dtype = spec.embedding_parts(self.rows), spec.embedding_scale_dtype
        self.signs_scales = spec.signs_scales
        self._tied_to = (tied_to,)  # in a tuple, so that it is not registered as a submodule
        if tied_to is None:
            self._register(spec.embedding_tensors(self.rows, self.columns))

    def _forget(self) -> None:
        self._kept: tuple[list[Tensor], list[Packed]] | None = None
        self._ready: dict[int, dispatch.Ready] = defaultdict(dispatch.Ready)

    @property
    def tied_to(self) -> "PalettizedEmbedding | None":
        return self._tied_to[0]

    @property
    def _source(self) -> "_RowScaled":
        """The module that holds the tensors."""
        return self if self.tied_to is None else self.tied_to

    def parts(self) -> list[Packed]:
        """The tensors as the kernels take them, some rows each: the same objects until one is replaced."""
        buffers: Any = self._source._buffers
        tensors = [buffers[leaf] for leaf in ("scale", *(part.leaf for part in self.row_parts))]
        if tensors[0].requires_grad and torch.is_grad_enabled():
            raise ValueError("the scales of an embedding do not train; detach them")
        if self._kept is None or not all(map(is_, self._kept[0], tensors)):
            self._kept = tensors, row_parts(tensors[1:], tensors[0], self.row_parts)
        return self._kept[1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """See `PackedModule.dequantize`."""
        if (factors := self._factors()) is None:
            decoded = [dispatch.dense(part, self.columns, dtype) for part in self.parts()]
        else:  # rounded once
            parts = (dispatch.dense(part, self.columns, torch.float32) for part in self.parts())
            decoded = [part.mul_(factors).to(dtype) for part in parts]
        return decoded[0] if len(decoded) == 1 else torch.cat(decoded)

    def _factors(self) -> Tensor | None:
        return self._source._buffers.get("factors")

    def fill(self, weight: Tensor, rounding: Rounding = NEAREST) -> None:
        """Round a dense weight (rows, columns) to the palette: the largest number of a row, or of each of its groups, or a
        share of it, gets the first level, or its opposite. Some rows at a time: vocabularies may be large."""
        factors = torch.ones(self.columns, device=weight.device)
        if (stored := self._buffers.get("factors")) is not None:
            stored.copy_(self._best_factors(weight.detach(), rounding))
            factors = stored.float()
        for where, first in ((p, at) for p in self.row_parts for at in range(p.first, p.end, _FILL_ROWS)):
            rows = slice(first, min(first + _FILL_ROWS, where.end))
            self.scale[rows], levels, _ = self._rounded(weight[rows].detach().float(), factors, where.bits, rounding)
            indices: Any = self._buffers[where.leaf]
            packed = pack(levels.add_(2 ** (where.bits - 1)).to(torch.uint8), where.bits)
            indices[first - where.first :][: len(packed)] = packed

    def _rounded(self, part: Tensor, factors: Tensor, bits: int, rounding: Rounding) -> list[Tensor]:
        """(scales, levels, errors (rows, 1)) of some rows in float32, each with the best of its steps."""
        groups, top, kind = self.scale.shape[1], 2 ** (bits - 1) - 1, torch.finfo(self.scale_dtype)
        tiny = max(kind.tiny * kind.eps, torch.finfo(torch.float32).tiny)  # float16 goes below its normal numbers
        bottom = -top - self.signs_scales
        low, high = (part / factors).unflatten(1, (groups, -1)).aminmax(dim=2)
        largest = torch.where(high > -low, high, low) if self.signs_scales else torch.minimum(low, -high)
        best = [torch.zeros_like(largest), torch.zeros_like(part), torch.full_like(largest[:, :1], math.inf)]
        for share in dict.fromkeys((*rounding.tops, -bottom / top)):  # the last one gives the largest an opposite
            scale = (largest / bottom * share).to(self.scale_dtype).float()
            scale = torch.where(scale.abs() < tiny, tiny, scale)
            found = (scale, *rounding.levels(part, scale, factors, bottom, top))
            best = [torch.where(found[2] > best[2], *two) for two in zip(best, found, strict=True)]
        return best

    def _best_factors(self, weight: Tensor, rounding: Rounding) -> Tensor:
        """The factor of each column, (columns,) bfloat16, by what rounding some rows of each part would cost.

        A few columns of a language model's embedding are several times as large as the others. With steps as long as
        those of all, large columns decide on every row's step; in proportion to their size, they are rounded too coarsely.
        """
        samples = [weight[p.first : p.end : -(-(p.end - p.first) // _SAMPLE_ROWS)].float() for p in self.row_parts]
        sizes = torch.cat(samples).square().mean(0).sqrt()
        sizes = (sizes / sizes.median().clamp_min(torch.finfo(torch.float32).tiny)).clamp_(1 / _MOST_APART, _MOST_APART)

        def cost(factors: Tensor) -> float:
            """What matters of a part is by how much its errors shrink: its bits are chosen by what they cost."""
            parts = zip(self.row_parts, samples, strict=True)
            errors = ((p, self._rounded(rows, factors.float(), p.bits, rounding)[2]) for p, rows in parts)
            return sum((p.end - p.first) * math.log(float(found.mean()) + _LEAST) for p, found in errors)

        tried = [sizes.pow(power).bfloat16() for power in rounding.powers]
        return tried[0] if len(tried) == 1 else min(tried, key=cost)

    def extra_repr(self) -> str:
        return f"{self.rows}, {self.columns}, bits={self.bits}"


def embedding_scale(embedding: nn.Embedding) -> float | Tensor | None:
    """What an embedding multiplies its rows with: 1.0 for a plain one; None for a subclass that does something else.

    Gemma's and MiniCPM3's embeddings are scaled. Whether a subclass only scales is tried, with rows of its own. A scale
    that the class keeps as a tensor is returned as one: it is rounded to the weight's dtype before it multiplies.
    """
    if type(embedding) is nn.Embedding:
        return 1.0 if embedding.max_norm is None and not embedding.scale_grad_by_freq else None
    kept = getattr(embedding, "embed_scale", None)
    value = getattr(embedding, "scalar_embed_scale", kept)
    if isinstance(value, Tensor) and not value.is_meta and value.numel() == 1:
        value = value.item()
    if not isinstance(value, (int, float)):
        return None
    with torch.device("cpu"):  # a model may be in the making on the meta device
        scale = torch.tensor(float(value), dtype=torch.float32) if isinstance(kept, Tensor) else float(value)
        rows = torch.arange(12, dtype=torch.float32).reshape(3, 4) - 5.5
        try:
            same = torch.equal(_subclass_with(embedding, rows, scale)(torch.arange(3)), rows * scale)
        except Exception:  # whatever it does, it is not scaling
            return None
    return scale if same else None


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
        values = decoded_rows(ids, self.parts(), self._factors(), columns=self.columns, dtype=self.dtype)
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

    def __init__(self, dense: nn.Linear, spec: QuantizationSpec, *, tied_to: PalettizedEmbedding | None = None):
        super().__init__(dense, spec, tied_to=tied_to)
        self.in_features, self.out_features, self.bias = self.columns, self.rows, room_of(dense.bias)

    def weight_like(self) -> tuple[tuple[int, int], torch.dtype, torch.device]:
        return super().weight_like() if self.tied_to is None else self.tied_to.weight_like()

    def forward(self, x: Tensor) -> Tensor:
        parts, factors, x = self.parts(), self._factors(), as_autocast(x)
        x = x if factors is None else x * factors.to(x)
        if parts[0].indices.device != x.device:  # a device map may part it from the embedding
            parts = [part._replace(indices=part.indices.to(x.device), table=part.table.to(x.device)) for part in parts]
        if not recorded():
            outs = [self._ready[i].product(x, (part,), self.columns) for i, part in enumerate(parts)]
            if all(outs):
                return joined([out[0] for out in outs if out], self.bias)
        return logits(x, parts, self.bias)
