"""Packed linears and embeddings inside vLLM's layers: room for the tensors, loading this process's piece, computing.

A layer of vLLM may stand for several modules of the checkpoint (q, k, v), one module may stand for several parts of the
layer (Phi-3 stores q, k, v as one), and of each part a process holds a piece (pieces.py). While files are read a layer has
parameters of the names that files have: `indices` and `lut` for all pieces one after the other, `weight` for modules that
stayed dense. Afterwards they are joined into as few packed matrices as possible. Tables start as NaN, so that what was not
loaded is found.

Products are operators (pieces.py) that look at the number of tokens themselves: vLLM traces its graphs once, for any number.
"""

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.custom_op import maybe_get_oot_by_class
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearMethodBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.utils import set_weight_attrs

from edkm_cli.errors import UserError
from edkm_cli.format import QuantizationSpec
from edkm_cli.integrity import AGAIN
from edkm_cli.packing import Packed, as_kept, fault, row_parts
from edkm_cli.runtime.lut_linear import decoded_rows, logits
from edkm_cli.serve.pieces import PackedRows, Piece, Rows, piece_of, stacked_table, stacked_tile, stacks

_LOG = init_logger("vllm.edkm")
_KNOWN = (ReplicatedLinear, ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear)


class DenseRows(nn.Module):
    """Rows of a merged layer that stayed dense."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.rows, self.weight = weight.shape[0], _fixed(weight)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x @ W.T + bias for x (..., in)."""
        return functional.linear(x, self.weight, bias)


class _Room:
    """A layer's pieces while files are read, and which of their tensors have come.

    `shards`: what vLLM calls each piece; `dense`: whether its module stayed dense.
    """

    def __init__(self, pieces: list[Piece], shards: list[Any], dense: list[bool], spec: QuantizationSpec):
        self.pieces, self.shards, self.dense = pieces, shards, dense
        packed = ("indices", "lut", "lut_scale") if spec.scales_luts else ("indices", "lut")
        self.scales_tables = spec.scales_tables
        self.leaves = [("weight",) if whole else packed for whole in dense]
        named = zip(pieces, self.leaves, strict=True)
        self.missing = {f"{piece.name}.{leaf}" for piece, leaves in named for leaf in leaves}

    def sizes(self, leaf: str) -> list[int]:
        """Elements that each piece takes of the flat parameter `leaf`."""
        both = zip(self.pieces, self.leaves, strict=True)
        return [_size(leaf, piece, self.scales_tables) if leaf in leaves else 0 for piece, leaves in both]

    def views(self, leaf: str, flat: Tensor) -> list[Tensor]:
        """Each piece's part of it."""
        return list(flat.split(self.sizes(leaf)))

    def load(self, leaf: str, parameter: Tensor, stored: Tensor, shard: Any = None) -> None:
        """Take this process's piece of a tensor from the files. `shard` None: the layer has one module."""
        for piece, own, room in zip(self.pieces, self.shards, self.views(leaf, parameter.data), strict=True):
            if (shard is None or shard == own) and room.numel():
                room.copy_(_cut(leaf, piece, stored, self.scales_tables).reshape(-1))
                self.missing.discard(f"{piece.name}.{leaf}")


def _size(leaf: str, piece: Piece, scales_tables: bool) -> int:
    if leaf == "weight":
        return len(piece.rows) * len(piece.columns)
    if leaf == "indices":
        return len(piece.rows) * piece.bytes_a_row
    if leaf == "lut_scale":
        return piece.groups if scales_tables else 1
    return piece.groups * 2**piece.bits


def _cut(leaf: str, piece: Piece, stored: Tensor, scales_tables: bool) -> Tensor:
    if leaf == "indices":
        return piece.cut_indices(stored)
    if leaf == "lut":
        return piece.cut_table(stored)
    if leaf == "lut_scale" and scales_tables:  # as bytes: PyTorch does not index this format
        return piece.cut_table(stored.view(torch.uint8)[:, None], leaf).view(torch.float8_e8m0fnu)
    wanted = piece.shape if leaf == "weight" else (1,)
    if tuple(stored.shape) != wanted:
        raise refused(f"{piece.name}.{leaf} must be {wanted}, got {tuple(stored.shape)}")
    if leaf == "lut_scale":
        return stored
    return stored[piece.rows.start : piece.rows.stop, piece.columns.start : piece.columns.stop]


class PackedLinearMethod(LinearMethodBase):
    """The weight of a linear, or of several with one input, by lookup tables. `names`: its modules in the checkpoint."""

    def __init__(self, spec: QuantizationSpec, names: list[str]):
        self.spec, self.names = spec, names

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Make room for the pieces of this process. Raises UserError for a layer that cannot be cut as asked."""
        first = layer.tp_rank * input_size_per_partition if input_size_per_partition != input_size else 0
        columns = range(first, first + input_size_per_partition)
        pieces = []
        shards, outputs = _outputs(layer, output_partition_sizes)
        fused = len(self.names) == 1 and len(outputs) > 1  # stored as one matrix
        if len(self.names) not in (1, len(outputs)):
            raise refused(f"{layer.prefix} has {len(outputs)} parts, which cannot be those of {', '.join(self.names)}")
        names, before = self.names * len(outputs) if fused else self.names, 0
        for name, (full, rows) in zip(names, outputs, strict=True):
            shape = (sum(size for size, _ in outputs) if fused else full, input_size)
            rows = range(before + rows.start, before + rows.stop) if fused else rows
            before += full
            bits, granularity = self.spec.bits_of(name), self.spec.granularity_of(name)
            try:
                pieces.append(piece_of(name, shape, bits, granularity, rows=rows, columns=columns))
            except UserError as error:
                raise refused(str(error), remedy="") from None
        layer.edkm_room = room = _Room(pieces, shards, [name in self.spec.skipped for name in names], self.spec)
        scales = torch.float8_e8m0fnu if self.spec.scales_tables else torch.float32
        dtypes = {"indices": torch.uint8, "lut": self.spec.torch_lut_dtype, "lut_scale": scales}
        for leaf in ("indices", "lut", "lut_scale", "weight"):
            if size := sum(room.sizes(leaf)):
                parameter = _fixed(_unfilled((size,), dtypes.get(leaf, params_dtype), entries=leaf == "lut"))
                set_weight_attrs(parameter, {"weight_loader": partial(room.load, leaf)})
                layer.register_parameter(leaf, parameter)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that everything was loaded and is finite; join what can be one matrix."""
        room: _Room = layer.edkm_room
        _require_loaded(room.missing)
        loaded = {leaf: room.views(leaf, getattr(layer, leaf).data) for leaf in ("indices", "lut", "lut_scale", "weight")
                  if hasattr(layer, leaf)}  # fmt: skip
        for leaf, views in loaded.items():
            for piece, view in zip(room.pieces, views, strict=True):
                _require_finite(f"{piece.name}.{leaf}", view)
        parts: list[nn.Module] = []
        for dense, run in groupby(range(len(room.dense)), key=room.dense.__getitem__):
            if dense:
                parts += [DenseRows(loaded["weight"][i].view(len(room.pieces[i].rows), -1)) for i in run]
            else:
                parts.append(_packed_rows(room.pieces, list(run), loaded))
        for leaf in loaded:
            delattr(layer, leaf)
        del layer.edkm_room
        layer.parts = nn.ModuleList(parts)
        _stand_in(layer)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ W.T + bias for x (..., in)."""
        if len(layer.parts) == 1:
            return layer.parts[0](x, bias)
        biases = [None] * len(layer.parts) if bias is None else bias.split([part.rows for part in layer.parts])
        return torch.cat([part(x, own) for part, own in zip(layer.parts, biases, strict=True)], dim=-1)


def _packed_rows(pieces: Sequence[Piece], run: Sequence[int], loaded: dict[str, list[Tensor]]) -> PackedRows:
    """The pieces of `run` as packed matrices; their indices lie in memory one behind the other, as they are needed."""
    tables = [loaded["lut"][i].view(pieces[i].groups, -1) for i in run]
    if "lut_scale" in loaded:  # as PalettizedLinear keeps them
        kept = [as_kept(table, loaded["lut_scale"][i]) for i, table in zip(run, tables, strict=True)]
        tables = kept if all(table.dtype == torch.float16 for table in kept) else [table.float() for table in kept]
    members, joined, left = [], [], iter(tables)
    for stack in stacks([pieces[i] for i in run]):
        members.append(Rows(sum(len(piece.rows) for piece in stack), stack[0].bits, stacked_tile(stack)))
        joined += [part.flatten() for part in stacked_table(stack, [next(left) for _ in stack])]
    luts = torch.cat([part.view(torch.uint8) for part in joined]).view(joined[0].dtype)  # float8 cannot be joined
    views = [loaded["indices"][i] for i in run]
    indices = views[0].as_strided((sum(view.numel() for view in views),), (1,))
    return PackedRows(indices, luts, members, len(pieces[run[0]].columns))


def _outputs(layer: Any, sizes: list[int]) -> tuple[list[Any], list[tuple[int, range]]]:
    """What vLLM calls each part of a layer, and each part's rows: (in the checkpoint, those of this process). Raises
    UserError for a kind of layer whose parts are not known."""
    if type(layer) not in _KNOWN:
        raise refused(f"{layer.prefix} is a {type(layer).__name__}, which edkm does not serve", remedy="")
    rank, size = layer.tp_rank, layer.tp_size
    shards: list[Any] = list(range(len(sizes)))
    if isinstance(layer, QKVParallelLinear):
        heads = (layer.total_num_heads, layer.total_num_kv_heads, layer.total_num_kv_heads)
        widths = (layer.head_size, layer.head_size, layer.v_head_size)
        ranks = [rank, rank // layer.num_kv_head_replicas, rank // layer.num_kv_head_replicas]
        fulls = [count * width for count, width in zip(heads, widths, strict=True)]
        shards = ["q", "k", "v"]
    elif isinstance(layer, ColumnParallelLinear):
        fulls, ranks = [own * size for own in sizes], [rank] * len(sizes)
    else:
        fulls, ranks = sizes, [0] * len(sizes)
    rows = [range(r * own, (r + 1) * own) for r, own in zip(ranks, sizes, strict=True)]
    return shards, list(zip(fulls, rows, strict=True))


class PackedEmbeddingMethod(QuantizeMethodBase):
    """The input or output embedding, by levels and row scales; a process holds the rows of its part of the vocabulary."""

    def __init__(self, spec: QuantizationSpec, name: str):
        self.spec, self.name = spec, name

    def create_weights(
        self, layer: Any, width: int, output_partition_sizes: list[int], input_size: int, *more: Any, **extra: Any
    ) -> None:
        """Make room for this process's rows, and for those with which vLLM fills up the vocabulary."""
        rows, layer.edkm_missing = sum(output_partition_sizes), set()
        own = slice(layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index)
        self._parts = self.spec.embedding_parts(layer.org_vocab_size)
        spans, counts = {"scale": own}, {"scale": rows}
        for part in self._parts:
            low, high = (min(max(row, part.first), part.end) - part.first for row in (own.start, own.stop))
            spans[part.leaf], counts[part.leaf] = slice(low, high), high - low
        counts[self._parts[-1].leaf] += rows - (own.stop - own.start)
        for leaf, (dtype, shape) in self.spec.embedding_tensors(layer.org_vocab_size, input_size).items():
            parameter = _fixed(_unfilled((counts.get(leaf, shape[0]), *shape[1:]), dtype))
            loader = partial(self._load, layer, leaf, shape, spans.get(leaf, slice(None)))
            set_weight_attrs(parameter, {"weight_loader": loader})
            layer.register_parameter(leaf, parameter)
            layer.edkm_missing.add(f"{self.name}.{leaf}")

    def _load(self, layer: Any, leaf: str, wanted: tuple, own: slice, parameter: Tensor, stored: Tensor) -> None:
        if tuple(stored.shape) != wanted:
            raise refused(f"{self.name}.{leaf} must be {wanted}, got {tuple(stored.shape)}")
        part = stored[own]
        parameter.data[: len(part)] = part
        parameter.data[len(part) :] = 0
        layer.edkm_missing.discard(f"{self.name}.{leaf}")

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """The output embedding decodes the tensors of the input embedding."""
        for leaf, parameter in embed_tokens.named_parameters(recurse=False):
            setattr(layer, leaf, parameter)
        layer.edkm_missing = embed_tokens.edkm_missing
        return layer

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that everything was loaded and is finite."""
        _require_loaded(layer.edkm_missing)
        for leaf in ("scale", "factors") if self.spec.embedding_factors else ("scale",):
            _require_finite(f"{self.name}.{leaf}", getattr(layer, leaf))
        _stand_in(layer)

    def embedding(self, layer: Any, ids: Tensor) -> Tensor:
        """Rows `ids` (...), decoded."""
        factors = layer.factors if self.spec.embedding_factors else None
        return decoded_rows(ids, self._packed(layer), factors, columns=layer.embedding_dim, dtype=layer.params_dtype)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits x @ W.T + bias for x (..., in)."""
        x = x * layer.factors.to(x.dtype) if self.spec.embedding_factors else x
        return logits(x, self._packed(layer), bias)

    def _packed(self, layer: Any) -> list[Packed]:
        return row_parts([getattr(layer, part.leaf) for part in self._parts], layer.scale, self._parts)


class _Embedding(VocabParallelEmbedding):
    """An input embedding that its model gives no configuration, as vLLM's Mixtral and Gemma 2 do, has that of the model."""

    def __init__(self, *args: Any, quant_config: QuantizationConfig | None = None, **more: Any):
        super().__init__(*args, quant_config=quant_config or get_current_vllm_config().quant_config, **more)


def pack_embeddings() -> None:
    """From now on vLLM makes input embeddings as above."""
    if maybe_get_oot_by_class(VocabParallelEmbedding) is VocabParallelEmbedding:
        VocabParallelEmbedding.register_oot(_Embedding)


def _fixed(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _unfilled(shape: tuple[int, ...], dtype: torch.dtype, *, entries: bool = False) -> Tensor:
    """NaN, or zeros for integers that are no table's `entries`."""
    made = torch.zeros(shape, dtype=dtype)
    if entries and dtype.itemsize == 1:
        made.view(torch.uint8).fill_(0x7F)  # of E3M4 and E4M3
    elif dtype.is_floating_point:
        made.fill_(float("nan"))
    return made


def _require_loaded(missing: set[str]) -> None:
    if missing:
        raise refused(f"{min(missing)} is missing from the checkpoint")


def _require_finite(name: str, tensor: Tensor) -> None:
    if rule := fault(name.rpartition(".")[2], tensor):
        raise refused(f"{name} must be {rule}")


def _stand_in(layer: Any) -> None:
    """An empty `weight`: vLLM's LoRA layers ask it for its device."""
    layer.weight = torch.empty(0, dtype=layer.params_dtype, device=next(layer.parameters()).device)


def refused(rule: str, remedy: str = AGAIN) -> UserError:
    """The error of one line, which is in vLLM's log, too."""
    message = f"{rule}; {remedy}" if remedy else rule
    _LOG.error("edkm: %s", message)
    return UserError(message)
