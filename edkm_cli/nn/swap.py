"""Which modules of a causal language model are compressed, and swapping them.

The decoder stack's linears become LUT layers; the input and output embeddings are rounded to scales of rows and factors of
columns at `embedding_bits`. The rule is the same for a dense model that is to be clustered, for the skeleton a checkpoint
is loaded into, and for a dry run on the meta device.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn

from edkm_cli.errors import UserError
from edkm_cli.format import DENSE_BITS, QuantizationSpec
from edkm_cli.granularity import Granularity, Override
from edkm_cli.nn.hooks import language_model
from edkm_cli.runtime import embeddings
from edkm_cli.runtime.experts import fuse_experts, is_expert, split_experts
from edkm_cli.runtime.palettized import PackedModule, PalettizedLinear, is_plain_linear
from edkm_cli.targets import falls_back

LINEAR, EMBEDDING, HEAD, OTHER = "linear", "embedding", "head", "other"


@dataclass(frozen=True)
class Swap:
    """One module of the plan: what it becomes, or why it stays (`reason` not empty).

    A weight that belongs to neither a linear nor an embedding (role `other`: fused experts, convolutions) always stays;
    its `name` is that of the parameter. An output embedding that is the input embedding is `tied`: it stores nothing.
    """

    name: str
    role: str
    shape: tuple[int, ...]
    reason: str = ""
    tied: bool = False

    @property
    def clustered(self) -> bool:
        """Whether it becomes a layer with lookup tables."""
        return self.role == LINEAR and not self.reason

    @property
    def rounded(self) -> bool:
        """Whether it becomes a row-scaled embedding or head; one that is tied decodes the embedding's rows."""
        return self.role in (EMBEDDING, HEAD) and not self.reason

    def to_mapping(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value != "" and key != "tied"}


def is_tied(model: Any) -> bool:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if isinstance(head, embeddings.PalettizedHead):
        return head.tied_to is not None
    return head is not None and getattr(head, "weight", None) is getattr(embedding, "weight", ())


def plan_swaps(model: Any, *, embedding_bits: int = DENSE_BITS, skip: tuple[str, ...] = ()) -> list[Swap]:
    """All linears and embeddings of a dense causal LM with their roles, and its other matrices, in model order.

    `skip` holds module paths or shell patterns. Raises UserError for a pattern that matches nothing, or if nothing is
    left to compress.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    inside, swaps, unused = language_model(model), [], set(skip)
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            swaps += _other_matrices(name, module)
            continue
        hits = {pattern for pattern in skip if fnmatch(name, pattern)}
        unused -= hits
        role = HEAD if module is head else EMBEDDING if isinstance(module, nn.Embedding) else LINEAR
        reason = f"matches --skip {sorted(hits)[0]}" if hits else ""
        if not reason and role != LINEAR and embedding_bits == DENSE_BITS:
            reason = "embedding_bits is 16: embeddings stay dense"
        if not reason and role == EMBEDDING and module is not embedding:
            reason = "an embedding that is not the token embedding"
        if not reason and role != HEAD and not name.startswith(inside):
            reason = "no part of the language model, which alone is compressed"
        if not reason and not _is_known(module):
            reason = f"is a {type(module).__name__}, not a plain Linear or Embedding"
        parent, _, leaf = name.rpartition(".")
        if not reason and leaf in ("prediction_coefs", "correction_coefs"):
            reason = "coefficients of Gemma 3n, which training clips in place"
        if not reason and leaf == "dt_proj" and hasattr(model.get_submodule(parent), "x_proj"):
            reason = "a Mamba time step, which multiplies by the weight and is not called"
        if not reason and not is_expert(name) and _is_router(model, name):
            reason = "a router, which chooses experts or tokens"
        swaps.append(Swap(name, role, (module.weight.shape[0], module.weight.shape[1]), reason))
    if unused:
        raise UserError(f"--skip must match a linear or embedding, but {sorted(unused)} match none; see --dry-run")
    if not any(swap.clustered for swap in swaps):
        others = sorted({swap.reason for swap in swaps if swap.role == OTHER})
        instead = f" (it has {others[0]})" if others else ""
        raise UserError(f"the model must have nn.Linear layers to compress, but none is left{instead}; see --dry-run")
    return _keep_ties(swaps) if is_tied(model) else swaps


def _is_known(module: nn.Module) -> bool:
    """Whether the palettized module computes what this one does: a subclass may do something else."""
    if isinstance(module, nn.Embedding):
        return embeddings.embedding_scale(module) is not None
    return isinstance(module, nn.Linear) and is_plain_linear(module)


def _is_router(model: nn.Module, name: str) -> bool:
    """Whether this linear chooses among the experts beside it, or among tokens (an indexer): it has no gradient there."""
    *path, leaf = name.split(".")
    blocks: list[Any] = [model.get_submodule(".".join(parent)) for parent in (path, path[:-1])]
    linear: Any = model.get_submodule(name)
    counts = {getattr(child, "num_experts", None) for block in blocks for child in block.children()}
    counted = leaf not in ("gate_proj", "up_proj") and linear.weight.shape[0] in counts
    named = any(part.startswith(("router", "indexer")) for part in (*path[-2:], leaf))
    return counted or named or any("Router" in type(block).__name__ for block in blocks)


def _other_matrices(path: str, module: nn.Module) -> list[Swap]:
    """The weights of two and more dimensions that a module holds itself, all of which stay dense."""
    why = f"a weight of {type(module).__name__}, which is no Linear"
    own = {f"{path}.{name}" if path else name: value for name, value in module.named_parameters(recurse=False)}
    return [Swap(name, OTHER, tuple(value.shape), why) for name, value in own.items() if value.dim() >= 2]


def _keep_ties(swaps: list[Swap]) -> list[Swap]:
    """A tied head shares the embedding's fate: where one stays dense, both do."""
    swaps = [replace(swap, tied=True) if swap.role == HEAD else swap for swap in swaps]
    ends = [swap for swap in swaps if swap.role in (EMBEDDING, HEAD) and "not the token embedding" not in swap.reason]
    if not (reasons := [swap.reason for swap in ends if swap.reason]):
        return swaps
    return [replace(swap, reason=swap.reason or reasons[0]) if swap in ends else swap for swap in swaps]


def fall_back(swaps: Iterable[Swap], target: str | None, granularity: str, embedding_group: int) -> list[Swap]:
    """The plan with what the target stores otherwise, since its rows are no multiple of a group. Raises UserError where
    nothing is left."""

    def settled(swap: Swap) -> Swap:
        linear = swap.role == LINEAR
        width = Granularity.parse(granularity).columns if linear else embedding_group
        reason = "" if swap.reason or swap.role == OTHER else falls_back(target, swap.shape[1], width, linear=linear)
        return replace(swap, reason=reason) if reason else swap

    before = list(swaps)
    planned = [settled(swap) for swap in before]
    if not any(swap.clustered for swap in planned):
        swap = next(swap for swap, former in zip(planned, before, strict=True) if former.clustered)
        raise UserError(f"nothing is left to compress, as {swap.name}: {swap.reason}; choose another --target")
    return planned


def check_geometry(swaps: Iterable[Swap], granularity: Granularity, overrides: Sequence[str] = ()) -> None:
    """Raises UserError naming the first linear that the geometry does not divide."""
    for swap in swaps:
        if swap.clustered:
            own = Override.of(overrides, swap.name).granularity or granularity
            own.tile(*swap.shape, layer=swap.name)


def decoder_bits_per_weight(
    swaps: Iterable[Swap], spec: QuantizationSpec, size_of: Callable[[str], int] = lambda name: 2
) -> float:
    """Bits a weight over the decoder's linears as `footprint` counts them, those that stay dense with `size_of` a number."""
    total = weights = 0
    for swap in swaps:
        if swap.role == LINEAR:
            size = math.prod(swap.shape)
            stored = spec.linear_tensors(*swap.shape[:2], layer=swap.name).values() if swap.clustered else ()
            packed = sum(dtype.itemsize * math.prod(shape) for dtype, shape in stored if shape != (1,))
            own = packed if swap.clustered else size_of(f"{swap.name}.weight") * size
            total, weights = total + own, weights + size
    return 8 * total / weights


def palettize_embeddings(
    model: Any, swaps: Iterable[Swap], spec: QuantizationSpec, rounded: Mapping[str, embeddings.Rounding] | None
) -> None:
    """Round the planned embeddings to their palette, in place; a tied head keeps decoding the embedding's.

    `rounded`: module path -> how, where not each number to its nearest level; None: no weight is read, only shapes count.
    """
    tied = is_tied(model)
    for swap in swaps:
        if not swap.rounded:
            continue
        dense: Any = model.get_submodule(swap.name)
        swapped = _empty(model, dense, swap.name, swap.role, spec, tied=tied).to(dense.weight.device)
        if rounded is not None and not (tied and swap.role == HEAD):
            swapped.fill(dense.weight, rounded.get(swap.name, embeddings.NEAREST))
        if rounded is not None and swap.role == HEAD and dense.bias is not None:
            swapped.bias.data.copy_(dense.bias.data)
        model.set_submodule(swap.name, swapped)
    _keep_dtype_and_device(model)


def freeze_dense_embeddings(model: Any) -> None:
    """Embeddings are palettized before training and do not train; dense ones (embedding_bits 16) do not either."""
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        if isinstance(module, (nn.Embedding, nn.Linear)) and not isinstance(module, PackedModule):
            module.weight.requires_grad_(False)


def _empty(model: Any, dense: Any, name: str, role: str, spec: QuantizationSpec, *, tied: bool) -> Any:
    """The palettized module for a dense one, with room for its tensors. Embeddings come before a tied head."""
    if role == LINEAR:
        return PalettizedLinear(dense, spec, name=name)
    if role == EMBEDDING:
        return embeddings.PalettizedEmbedding(dense, spec)
    if not tied:
        return embeddings.PalettizedHead(dense, spec)
    # transformers ties parameters by name; here there is nothing left for it to tie.
    model._tied_weights_keys, model.all_tied_weights_keys = {}, {}
    return embeddings.PalettizedHead(dense, spec, tied_to=model.get_input_embeddings())


def palettize_skeleton(model: Any, spec: QuantizationSpec) -> None:
    """Turn a dense model (usually on the meta device) into the empty palettized model that a checkpoint fills."""
    if spec.split_experts:
        split_experts(model)
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    skipped, unknown = set(spec.skipped), {*spec.module_bits, *spec.module_granularity}
    for name, module in list(model.named_modules()):
        if not isinstance(module, (nn.Linear, nn.Embedding)) or name in skipped:
            continue
        role = HEAD if module is head else EMBEDDING if isinstance(module, nn.Embedding) else LINEAR
        if (role == EMBEDDING and module is not embedding) or not _is_known(module):
            rule = f"{name} is a {type(module).__name__}, which the format does not know"
            raise UserError(f"{rule}; quantization_config must skip it, or the file was altered")
        if role != LINEAR and not spec.packs_embeddings:
            raise UserError(f"quantization_config must skip {name} or give embedding_bits; the file was altered")
        unknown -= {name} if role == LINEAR else set()
        with torch.device(module.weight.device):
            model.set_submodule(name, _empty(model, module, name, role, spec, tied=tied))
    if unknown:
        rule = "quantization_config: module_bits and module_granularity must name linears that are compressed"
        raise UserError(f"{rule}, but {sorted(unknown)[0]!r:.100} is none; the file was altered")
    _keep_dtype_and_device(model)


def _keep_dtype_and_device(model: Any) -> None:
    """Let a model say its dtype and device that has no parameter left to ask: norms of some families have none."""
    for part in {id(part): part for part in (model, model.base_model)}.values():
        if any(parameter.is_floating_point() for parameter in part.parameters()):
            continue
        kind = type(part)
        asked = {
            "dtype": property(lambda self: self.get_input_embeddings().weight.dtype),
            "device": property(lambda self: self.get_input_embeddings().weight.device),
        }
        part.__class__ = type(kind.__name__, (kind,), {**asked, "__module__": kind.__module__})


def is_packed(model: nn.Module) -> bool:
    """Whether any module computes from packed weights."""
    return any(isinstance(module, PackedModule) for module in model.modules())


def dequantize_model(model: Any, dtype: torch.dtype) -> None:
    """Replace palettized modules by dense ones, in place, keeping ties."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    names = {id(module): name for name, module in model.named_modules()}
    for name, module in list(model.named_modules()):
        if isinstance(module, PackedModule):
            model.set_submodule(name, module.to_dense(dtype))
    fuse_experts(model)
    if isinstance(head, embeddings.PalettizedHead) and head.tied_to is not None:
        head_name, embedding_name = names[id(head)], names[id(embedding)]
        model.get_submodule(head_name).weight = model.get_submodule(embedding_name).weight
        model._tied_weights_keys = {f"{head_name}.weight": f"{embedding_name}.weight"}
        model.all_tied_weights_keys = dict(model._tied_weights_keys)
