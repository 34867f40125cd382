"""A decoder's step by one token in one call of C: what makes a small packed model write quickly.

transformers takes half a millisecond of Python for a decoder layer, whatever its weights; packed products are done in a
tenth of that. So the decoder of a model whose layers are LLaMA's (norm, attention with rotary embedding, norm, gated MLP)
gets a `forward` that takes one shortcut: one sequence, one new token, an ordinary cache, nobody watching (no gradient,
hook, adapter or recorded attention). Whatever differs goes to the forward of transformers, and nothing else changes:
`generate`, its cache and its options are those of transformers. EDKM_ONE_TOKEN=0 turns the shortcut off.
"""

import functools
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from edkm_cli.runtime import dispatch
from edkm_cli.runtime.decoder_step_c import DecoderStep, LayerWeights, Sizes, supports
from edkm_cli.runtime.lut_linear_c import recorded, unwatched
from edkm_cli.runtime.palettized import PalettizedLinear

# Decoder layers that compute exactly what decoder_step.c does; others may look alike and scale or clip something.
_LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
_ROOM = 256  # tokens for which a cache gets more room at a time
_PLAIN_OPTIONS = ("cache_position", "return_dict", "use_cache", "logits_to_keep")
_INPUTS = ("input_ids", "cache", "past_key_values")  # transformers 5.24 renamed the latter
_PATHS = (
    "input_layernorm", "self_attn", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "post_attention_layernorm", "mlp", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.act_fn",
)  # fmt: skip
_NUMBERS = ("scaling", "variance_epsilon", "sliding_window", "layer_idx")  # of modules, and of Mistral's configuration


def shorten(model: Any) -> None:
    """Let the decoder of a packed causal LM take the shortcut, where its layers are of a kind that can."""
    decoder = getattr(model, "base_model", None)
    layers: Any = getattr(decoder, "layers", None)
    known = isinstance(layers, nn.ModuleList) and len(layers) and {type(m).__name__ for m in layers} <= set(_LAYERS)
    if known and _as_written(decoder, layers[0]) and os.environ.get("EDKM_ONE_TOKEN") != "0":
        assert decoder is not None
        decoder._shortcut = _Shortcut()
        kind: Any = type(decoder)
        decoder.__class__ = _class_with_shortcut(kind)


def _as_written(*modules: Any) -> bool:
    """Whether these compute what transformers wrote: others change classes, too, and a wrapper takes over `__module__`."""
    forwards = (getattr(type(module).forward, "__globals__", {}) for module in modules)
    return all(known.get("__name__", "").startswith("transformers.") for known in forwards)


@functools.cache
def _class_with_shortcut(kind: Any) -> Any:
    plain = kind.forward

    @functools.wraps(plain)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        as_it_was = kind.forward is plain
        if as_it_was and not args and not recorded() and (out := self._shortcut.forward(self, kwargs)) is not None:
            return out
        return kind.forward(self, *args, **kwargs)

    def reduce(self: Any, protocol: Any) -> tuple:
        return _restore, (kind,), self.__dict__

    return type(kind.__name__, (kind,), {"forward": forward, "__reduce_ex__": reduce, "__module__": kind.__module__})


def _restore(kind: Any) -> Any:
    return object.__new__(_class_with_shortcut(kind))


class _Shortcut:
    """A decoder's weights for the kernel, and whether they are still those of its modules."""

    def __init__(self) -> None:
        self._step: DecoderStep | None = None
        self._clean = True  # untouched when it was prepared, without which there is no step
        self._members: list[tuple[Mapping, str, Any]] = []  # what the dictionaries of modules have to hold, still
        self._states: list[dict] = []  # of the modules themselves, in which no forward may appear
        self._hooks: list[dict] = []
        self._tensors: list[Tensor] = []  # that are read, and where they lay
        self._addresses: list[int] = []
        self._versions: list[tuple[Tensor, int]] = []  # of parts that a table was made of

    def __reduce__(self) -> tuple:  # of copies, too
        return _Shortcut, ()

    def forward(self, decoder: Any, given: dict[str, Any]) -> Any:
        """What `decoder.forward(**given)` returns, or None where that has to be asked."""
        ids, cache = given.get("input_ids"), given.get("cache", given.get("past_key_values"))
        if torch.is_grad_enabled() or decoder.training or type(ids) is not Tensor or tuple(ids.shape) != (1, 1):
            return None
        if not unwatched(ids) or _has_any_global_hook():
            return None
        past = _past(cache, len(decoder.layers))
        if past is None or not _plain(given, past, decoder.config) or not ids.is_cpu:
            return None
        if not self._fresh():
            self._prepare(decoder)
        step = self._step
        if step is None or len(step.layers) != len(decoder.layers):
            return None
        return self._run(step, decoder, ids, cache, past, given.get("position_ids"))

    def _run(self, step: DecoderStep, decoder: Any, ids: Tensor, cache: Any, past: int, positions: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPast

        embedded = decoder.embed_tokens(ids)
        if embedded.dtype != step.dtype or cache.layers[0].keys.dtype != step.dtype:
            return None
        positions = torch.tensor([[past]], device=ids.device) if positions is None else positions
        cosines, sines = (t.to(step.dtype).reshape(-1) for t in decoder.rotary_emb(embedded, positions))
        if cosines.numel() != cache.layers[0].keys.shape[-1]:
            return None
        hidden = embedded.reshape(-1).to(torch.float32, copy=True)
        rooms = [_room(layer, past) for layer in cache.layers]
        step.run(hidden, cosines, sines, [(room.keys, room.values) for room in rooms], past)
        for layer, room in zip(cache.layers, rooms, strict=True):
            room.seen = layer.keys, layer.values = room.keys.narrow(2, 0, past + 1), room.values.narrow(2, 0, past + 1)
        last = decoder.norm(hidden.to(step.dtype).view(1, 1, -1))
        return BaseModelOutputWithPast(last, cache)  # which has two names

    def _fresh(self) -> bool:
        """Whether what was prepared is still what the model computes with. Asked for each token, so by plain loops: asking
        the modules took a fifth of SmolLM2's time."""
        if not self._members:
            return False  # nothing was
        kept = all(tensor.is_inference() or tensor._version == version for tensor, version in self._versions)
        kept = kept and self._untouched() == self._clean
        return kept and list(map(Tensor.data_ptr, self._tensors)) == self._addresses

    def _untouched(self) -> bool:
        """Whether modules and their tensors are where they were, with no hook and no forward of their own."""
        kept = all(holder.get(name) is member for holder, name, member in self._members)
        return kept and not any(self._hooks) and not any("forward" in state for state in self._states)

    def _prepare(self, decoder: Any) -> None:
        self.__init__()  # type: ignore[misc]
        plain, weights, said = True, [], vars(decoder.config)
        self._members += [(said, key, said[key]) for key in _NUMBERS if key in said]
        self._members.append((decoder._modules, "layers", decoder.layers))
        for name, layer in decoder.layers._modules.items():
            self._note(decoder.layers._modules, name, layer)
            parts = dict(layer.named_modules())  # somebody's own around a layer has others
            for path in (*_PATHS, "self_attn.q_norm", "self_attn.k_norm"):
                parent, _, leaf = path.rpartition(".")
                holder = parts.get(parent, layer)._modules
                if leaf in holder:
                    self._note(holder, leaf, holder[leaf])
                elif leaf not in ("q_norm", "k_norm"):
                    plain = False
            found = _weights(layer) if plain else None
            if found is None:
                return
            weights.append(found)
        kinds = {type(member) for _, _, member in self._members if isinstance(member, nn.Module)}
        self._members += [(vars(kind), "forward", vars(kind).get("forward")) for kind in kinds]  # others change them
        sizes, dtype, self._clean = _sizes(decoder), weights[0].input_norm.dtype, self._untouched()
        if self._clean and sizes is not None and supports(weights, sizes, dtype):
            self._step = DecoderStep(weights, sizes, dtype)

    def _note(self, holder: dict, name: str, module: nn.Module) -> None:
        self._members.append((holder, name, module))
        self._states.append(module.__dict__)
        self._members += [(module.__dict__, key, module.__dict__[key]) for key in _NUMBERS if key in module.__dict__]
        self._hooks += [module._forward_hooks, module._forward_pre_hooks]
        for tensors in (module._buffers, module._parameters):
            self._members += [(tensors, *item) for item in {"bias": None, **tensors}.items()]
            there = [tensor for tensor in tensors.values() if tensor is not None]
            self._tensors += there
            self._addresses += map(Tensor.data_ptr, there)
        if isinstance(module, PalettizedLinear) and module.packed().table is not module._buffers.get("lut"):
            parts = [part for name, part in module._buffers.items() if name != "indices" and part is not None]
            self._versions += [(part, 0 if part.is_inference() else part._version) for part in parts]


def _past(cache: Any, layers: int) -> int | None:
    """Tokens in an ordinary cache that has all layers, or None for another one."""
    if type(cache).__name__ != "DynamicCache" or len(cache.layers) != layers or getattr(cache, "offloading", False):
        return None
    first = cache.layers[0]
    past = first.keys.shape[-2] if getattr(first, "is_initialized", False) and first.keys.dim() == 4 else 0
    for layer in cache.layers:
        if type(layer).__name__ != "DynamicLayer" or not layer.is_initialized or layer.keys.shape[-2] != past:
            return None
        if layer.keys.shape[0] != 1 or not layer.keys.is_cpu:
            return None
    return past or None


def _plain(given: dict[str, Any], past: int, config: Any) -> bool:
    """Whether nothing is asked for that only the forward of transformers does."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    rest = {name: value for name, value in given.items() if name not in _PLAIN_OPTIONS and value is not None}
    mask, positions = rest.pop("attention_mask", None), rest.pop("position_ids", None)
    if mask is not None and (type(mask) is not Tensor or tuple(mask.shape) != (1, past + 1) or not bool(mask.all())):
        return False
    if positions is not None and tuple(positions.shape) != (1, 1):
        return False
    more = [value for name, value in rest.items() if name not in _INPUTS]
    if given.get("use_cache") is False or any(isinstance(value, Tensor) or bool(value) for value in more):
        return False
    named = getattr(config, "_attn_implementation", None)
    if named not in (None, "eager") and ALL_ATTENTION_FUNCTIONS.get(named) is not sdpa_attention_forward:  # another
        return False
    wanted = ("output_attentions", "output_hidden_states")
    return not any(getattr(config, name, False) for name in wanted) and given.get("return_dict") is not False


class _Room:
    """Keys and values (1, heads, room, head size) of a cache's layer, with room for more tokens."""

    def __init__(self, keys: Tensor, values: Tensor, room: int):
        self.keys, self.values = (t.new_empty(1, t.shape[1], room, t.shape[3]) for t in (keys, values))
        self.keys[:, :, : keys.shape[2]], self.values[:, :, : values.shape[2]] = keys, values
        self.seen: tuple[Tensor, Tensor] = (keys, values)


def _room(layer: Any, past: int) -> _Room:
    """Room for one more token after `past`. A cache that somebody cropped, reordered or shares gets memory of its own."""
    room: Any = getattr(layer, "_edkm_room", None)
    mine = room is not None and room.seen[0] is layer.keys and room.seen[1] is layer.values
    if not mine or room.keys.shape[2] <= past:
        room = layer._edkm_room = _Room(layer.keys, layer.values, past + max(_ROOM, past // 2))
    return room


def _weights(layer: Any) -> LayerWeights | None:
    attention, mlp = layer.self_attn, layer.mlp
    linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    if not _as_written(layer, attention, mlp, layer.input_layernorm, layer.post_attention_layernorm):
        return None
    if not all(type(m) is PalettizedLinear and dispatch.computes_packed(m.packed()) for m in linears):
        return None
    if not isinstance(mlp.act_fn, nn.SiLU) and type(mlp.act_fn).__name__ != "SiLUActivation":
        return None
    q, k, v, o, gate, up, down = (m.packed() for m in linears)
    heads = [getattr(getattr(attention, name, None), "weight", None) for name in ("q_norm", "k_norm")]
    return LayerWeights(
        (q, k, v), o, (gate, up), down, layer.input_layernorm.weight, layer.post_attention_layernorm.weight, *heads
    )


def _sizes(decoder: Any) -> Sizes | None:
    """The sizes that all layers have in common, or None."""
    found = set()
    for index, layer in enumerate(decoder.layers):
        attention = layer.self_attn
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
        epsilons = {getattr(norm, "variance_epsilon", None) for norm in norms}
        size = attention.head_dim
        epsilon = epsilons.pop()
        mistral = type(layer).__name__ == "MistralDecoderLayer"  # whose attention asks the configuration
        window = decoder.config.sliding_window if mistral else getattr(attention, "sliding_window", None)
        if epsilons or epsilon is None or window is not None or attention.layer_idx != index:
            return None
        heads, kv_heads = attention.q_proj.out_features // size, attention.k_proj.out_features // size
        inner = layer.mlp.gate_proj.out_features
        found.add(Sizes(attention.q_proj.in_features, inner, heads, kv_heads, size, epsilon, attention.scaling))
    return found.pop() if len(found) == 1 else None
