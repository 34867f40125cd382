"""The surroundings of a rehearsal: the meta device, a ledger of its tensors, and replacements for what it lacks.

Code that only computes runs on the meta device as it is. Code that looks at a value does not: whether weights are finite,
what a loss is. Such code gets the value of a run without errors. Attention is the kernel that the planned device would
choose, since the generic one of the meta device keeps matrices that no GPU keeps.

Storages are labelled with the part of memory they belong to, by hooks on the modules that make them.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from edkm_cli.distributed import World
from edkm_cli.dryrun.ledger import DEVICE, HOST, STANDS_FOR, Ledger
from edkm_cli.nn.clustered import ClusteredLinear, clustered_layers, lut_layers
from edkm_cli.nn.hooks import changed, hooked
from edkm_cli.runtime.experts import Experts

WEIGHTS, TEACHER, GRADIENTS, OPTIMIZER = "weights", "teacher", "gradients", "optimizer"
ACTIVATIONS, LOGITS, CLUSTERING = "activations", "logits", "clustering"
OFFLOAD, SHARDING, FILES = "offload", "sharding", "files"
PARTS = (WEIGHTS, TEACHER, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOGITS, CLUSTERING, OFFLOAD, SHARDING, FILES)

META = torch.device("meta")
_CUDA_GRANULE = 512  # bytes: the caching allocator rounds each block up to it
_KEPT_BYTES = 1024  # saved tensors below that are not offloaded
_aten = torch.ops.aten


class Stage:
    """Use as a context manager around a rehearsal."""

    def __init__(self, world: World, shapes: Iterable[tuple[int, ...]]) -> None:
        """`shapes` are those of the clustered weights."""
        self.world = world
        self.ledger = Ledger(call=self._call, part_of=self._part_of, granule=_CUDA_GRANULE if world.gpu else 1)
        self.ledger.part = ACTIVATIONS
        self._shapes = set(shapes)
        self._experts: dict[torch.Size, int] = {}  # shape of an expert's matrix -> for how many of a block it stands
        self._backward_part = ACTIVATIONS
        self._clustering, self._place, self._share = False, DEVICE, 1.0
        self._autocast: torch.dtype | None = None
        self._made: dict[Any, list[tuple[Any, ...]]] = {}
        self._exits = ExitStack()

    def __enter__(self) -> "Stage":
        self._exits.enter_context(warnings.catch_warnings(action="ignore"))
        functional: Any = torch.nn.functional
        attention = partial(self._attention, functional.scaled_dot_product_attention)
        self._exits.enter_context(changed(functional, scaled_dot_product_attention=attention))
        self._exits.enter_context(self.ledger)
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def __deepcopy__(self, memo: Any) -> "Stage":
        return self  # hooks of a copied model belong to the same stage

    # What the meta device cannot tell.

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.ledger.share = self._share
        if func in _QUESTIONS and args[0].is_meta:
            return _QUESTIONS[func](args[0])
        if func is _aten._to_copy.default and args[0].is_meta and kwargs.get("device") == torch.device("cpu"):
            return self._to_host(args[0], kwargs)
        if self.world.gpu:
            on_host = any(isinstance(a, Tensor) and a.dim() and self.ledger.holds(a, HOST) for a in args)
            self.ledger.place = HOST if on_host else self._place
        if (effect := _effect(func)) == "writes" and args[0].is_meta:
            return args[0]
        return self._again(func, args, kwargs) if effect == "makes" else func(*args, **kwargs)

    def _again(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operation makes: the first time by PyTorch's rules for the meta device, which are written in Python and
        would take most of a rehearsal's time, then as it was for arguments of the same shapes."""
        key = (func, torch.get_default_dtype(), *_described(args), *_described(kwargs.items()))
        if (known := self._made.get(key)) is None:
            result = func(*args, **kwargs)
            several = result if isinstance(result, tuple) else (result,)
            # _unsafe_view's schema hides that it gives a view.
            held = {x.untyped_storage()._cdata for x in tree_leaves(args) if isinstance(x, Tensor)}
            new = all(type(x) is Tensor and x.is_meta and x.untyped_storage()._cdata not in held for x in several)
            self._made[key] = [(x.shape, x.stride(), x.dtype) for x in several] if new else []
            return result
        made = [torch.empty_strided(*layout, dtype=dtype, device=META) for *layout, dtype in known]
        return func(*args, **kwargs) if not made else made[0] if len(made) == 1 else tuple(made)

    def _to_host(self, tensor: Tensor, kwargs: dict[str, Any]) -> Tensor:
        dtype = kwargs.get("dtype") or tensor.dtype
        if tensor.numel() == 1:
            return torch.ones(tensor.shape, dtype=dtype)
        if not self.world.gpu and not self.world.sharded:
            return tensor if dtype == tensor.dtype else tensor.to(dtype)
        # What is collected from a sharded model is sharded, too.
        self.ledger.place, self.ledger.share = HOST if self.world.gpu else DEVICE, self.world.share
        return torch.empty_like(tensor, dtype=dtype)

    def _attention(
        self,
        generic: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """`scaled_dot_product_attention` as the planned device dispatches it; `generic` is PyTorch's own."""
        gpu = self.world.gpu
        if query.is_meta and self._autocast is not None:
            query, key, value = (tensor.to(self._autocast) for tensor in (query, key, value))
        fast = query.is_meta and query.shape[-1] == value.shape[-1]  # the fast kernels are for heads of one width
        if fast and gpu and attn_mask is None and query.dtype.itemsize == 2 and query.shape[-1] <= 256:
            flash = _aten._scaled_dot_product_flash_attention
            return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        if fast and gpu and query.shape[1] == key.shape[1]:
            efficient = _aten._scaled_dot_product_efficient_attention
            return efficient(query, key, value, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal)[0]
        if fast and not gpu and _takes_flash_on_cpu(query, key, attn_mask, is_causal):
            flash = _aten._scaled_dot_product_flash_attention_for_cpu
            return flash(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
        return generic(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    def on_host(self) -> AbstractContextManager[None]:
        """Inside, a run on a GPU works in host memory."""
        return changed(self, _place=HOST if self.world.gpu else DEVICE)

    def on_shards(self) -> AbstractContextManager[None]:
        """Inside, new storages are a process's share."""
        return changed(self, _share=self.world.share)

    # Which part a storage belongs to.

    def _part_of(self, tensor: Tensor) -> str:
        node = torch._C._current_autograd_node()
        in_backward = node is not None and not torch.is_grad_enabled()
        clustered = self._clustering or (in_backward and "ClusteredLinear" in node.name())
        if clustered and tensor.shape in self._shapes:
            if torch.is_grad_enabled() and not in_backward:  # it is kept for the gradient, as those of all experts are
                self.ledger.share = self._share * self._experts.get(tensor.shape, 1)
            return CLUSTERING
        return self._backward_part if in_backward else self.ledger.part

    def clustering(self) -> AbstractContextManager[None]:
        """Inside, what has the shape of a clustered weight belongs to clustering."""
        return changed(self, _clustering=True)

    def label(self, model: Any) -> None:
        """Hook the modules that begin a part: decoder, head, clustered layers. A module is hooked once. What the one expert
        of a block has stands for that of all."""
        hooks: dict[Any, Any] = {model.base_model: self._enter_decoder, model.get_output_embeddings(): self._enter_head}
        for module, hook in (hooks | dict.fromkeys(clustered_layers(model).values(), self._enter_clustered)).items():
            if module is not None and not getattr(module, "_labelled", False):
                module.register_forward_pre_hook(hook)
                if isinstance(module, ClusteredLinear):
                    module.register_forward_hook(self._leave_clustered)
                module._labelled = True
        for module in model.modules():
            for linears in module.matrices().values() if isinstance(module, Experts) else ():
                self._experts[torch.Size((linears[0].out_features, linears[0].in_features))] = module.count
                for tensor in (*linears.parameters(), *linears.buffers()):
                    setattr(tensor, STANDS_FOR, module.count)

    def _enter_decoder(self, module: nn.Module, inputs: Any) -> None:
        self.ledger.part = ACTIVATIONS

    def _enter_head(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.ledger.part = self._backward_part = LOGITS
        if inputs[0].requires_grad:
            inputs[0].register_hook(self._leave_head_backward)

    def _leave_head_backward(self, grad: Tensor) -> None:
        self._backward_part = ACTIVATIONS

    def _enter_clustered(self, module: nn.Module, inputs: Any) -> None:
        self._clustering = True

    def _leave_clustered(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self._clustering = False
        self.ledger.move([output], ACTIVATIONS)

    # What the meta device lacks.

    @contextmanager
    def autocast(self, model: nn.Module, enabled: bool) -> Iterator[None]:
        """bfloat16 products of float32 models: layers and attention get their inputs as autocast gives them."""

        def cast(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (inputs[0].to(torch.bfloat16), *inputs[1:])

        layers = lut_layers(model).values() if enabled else ()
        with hooked(layers, cast), changed(self, _autocast=torch.bfloat16 if enabled else None):
            yield

    @contextmanager
    def offload(self, model: nn.Module, enabled: bool) -> Iterator[None]:
        """Saved tensors go to host memory, each storage once, as `MarshalSavedTensors` moves them."""
        if not (enabled and self.world.gpu):
            yield
            return
        stay = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
        moved: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # storage -> its copy, each as long as it lives

        def pack(tensor: Tensor) -> Any:
            storage = tensor.untyped_storage()
            if not tensor.is_meta or storage._cdata in stay or storage.nbytes() < _KEPT_BYTES:
                return tensor
            copied = moved[storage]() if storage in moved else None
            if copied is None:
                copied = torch.empty(storage.nbytes(), dtype=torch.uint8, device=META)
                self.ledger.move([copied], OFFLOAD, place=HOST)
                moved[storage] = ref(copied)
            return copied, tensor.shape, tensor.stride(), tensor.dtype

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            _, shape, stride, dtype = packed
            return torch.empty_strided(shape, stride, dtype=dtype, device=META)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield


# All is finite, nothing is odd, two tensors are equal; a number is 1 if it is real, 0 if it is an index.
_QUESTIONS: dict[Any, Callable[[Tensor], Any]] = {
    _aten.all.default: lambda tensor: torch.tensor(True),
    _aten.any.default: lambda tensor: torch.tensor(False),
    _aten.equal.default: lambda tensor: True,
    _aten._local_scalar_dense.default: lambda x: x.dtype == torch.bool or (1.0 if x.is_floating_point() else 0),
}


@cache
def _effect(func: Any) -> str:
    """By an operation's schema, that it `makes` tensors, no views, or `writes` into the first one it gets and returns it."""
    if (schema := getattr(func, "_schema", None)) is None or torch.Tag.inplace_view in func.tags:
        return ""
    if schema.is_mutable:
        return "writes" if schema.name.endswith("_") and len(schema.returns) == 1 else ""
    return "" if any(one.alias_info for one in schema.returns) else "makes"


def _described(values: Iterable[Any]) -> Iterator[Any]:
    """What shapes follow from; of a tensor whose numbers, or whose class, could matter, something that never comes again."""
    for value in values:
        if isinstance(value, Tensor):
            plain = value.is_meta and type(value) in (Tensor, nn.Parameter)
            yield (value.shape, value.stride(), value.dtype) if plain else object()
        elif isinstance(value, (list, tuple)):
            yield tuple(_described(value))
        else:
            yield type(value), value  # 1 is 1.0, but gives another dtype


def _takes_flash_on_cpu(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    """Ask PyTorch, with tensors of two tokens: its choice depends on dtypes, heads and the mask."""
    q, k = (
        x.new_empty(1, x.shape[1], 2, x.shape[-1], device="cpu").requires_grad_(x.requires_grad) for x in (query, key)
    )
    small = None if mask is None else torch.empty(1, 1, 2, 2, dtype=mask.dtype, device="cpu")
    options = {"is_causal": is_causal, "enable_gqa": query.shape[1] != key.shape[1]}
    return bool(torch._fused_sdp_choice(q, k, k, small, 0.0, **options) == 1)
