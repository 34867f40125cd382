"""A decoder of the LLaMA family as a Core ML program (MIL, iOS 18), written operation by operation.

Tracing a model would leave names, precisions and constant folding to a converter; here each compressed weight is one
`constexpr_lut_to_dense`, the embedding one `constexpr_blockwise_shift_scale`, and the rest about twenty kinds of
operations, which `coreml_run` computes again. Activations are float16, norms and their sums float32.

Inputs are `input_ids` (1, tokens) int32 and, with a cache, `position` (1) int32: how many tokens came before. Output is
`logits` (1, tokens, vocabulary) float16. A cache is two states, (layers, key-value heads, length, head size) float16.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from edkm_cli.config import head_size

_BLOCKED = np.float16(3e4)  # taken from a score, makes its share zero; within float16


def program(
    config: Any, lengths: tuple[int, int], cache: bool, weight: Callable[[str], Any], rotary: tuple[Any, Any]
) -> Any:
    """The MIL program.

    Args:
        lengths: the fewest and most tokens of a call; a cache has room for the most.
        weight: tensor name -> the variable that holds it, None for a bias or factors of columns that there are not; called
            inside the program, once for each name.
        rotary: cosines and sines, (length, head size) float16.
    """
    import coremltools as ct
    from coremltools.converters.mil.mil import Builder as mb
    from coremltools.converters.mil.mil import get_new_symbol, types

    first, last = lengths
    specs = [mb.TensorSpec(shape=(1, last if first == last else get_new_symbol()), dtype=types.int32)]
    if cache:
        state = (config.num_hidden_layers, config.num_key_value_heads, last, head_size(config))
        specs.append(mb.TensorSpec(shape=(1,), dtype=types.int32))
        specs += [mb.StateTensorSpec(state, dtype=types.fp16) for _ in ("keys", "values")]

    def cached(input_ids, position=None, key_cache=None, value_cache=None):  # type: ignore[no-untyped-def]
        return _Decoder(mb, config, cache, weight, rotary).run(input_ids, position, (key_cache, value_cache))

    def alone(input_ids):  # type: ignore[no-untyped-def]
        return cached(input_ids)

    return mb.program(input_specs=specs, opset_version=ct.target.iOS18)(cached if cache else alone)


class _Decoder:
    """One call's operations, in order; `n` is the number of its tokens, `end` that of all tokens so far."""

    def __init__(self, mb: Any, config: Any, cache: bool, weight: Any, rotary: tuple[Any, Any]):
        self.mb, self.config, self.cache, self.weight, self.rotary = mb, config, cache, weight, rotary
        self.heads, self.key_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_size = head_size(config)

    def run(self, input_ids: Any, position: Any, states: tuple[Any, Any]) -> Any:
        mb, config = self.mb, self.config
        embedding, factors = (self.weight(f"model.embed_tokens.{leaf}") for leaf in ("weight", "factors"))
        self.n = mb.expand_dims(x=mb.gather(x=mb.shape(x=input_ids), indices=1, axis=0), axes=[0])
        self.start = position if self.cache else mb.sub(x=self.n, y=self.n)
        self.end, self.states = mb.add(x=self.start, y=self.n), states
        x = self._times(mb.gather(x=embedding, indices=input_ids, axis=0), factors)
        size = mb.concat(values=[self.n, [self.head_size]], axis=0)
        begin = mb.concat(values=[self.start, [0]], axis=0)
        self.cosines, self.sines = (mb.slice_by_size(x=table, begin=begin, size=size) for table in self.rotary)
        self.mask = self._mask()
        for layer in range(config.num_hidden_layers):
            path = f"model.layers.{layer}"
            x = mb.add(x=x, y=self._attention(layer, self._norm(x, f"{path}.input_layernorm"), f"{path}.self_attn"))
            y = self._norm(x, f"{path}.post_attention_layernorm")
            y = mb.mul(x=mb.silu(x=self._linear(y, f"{path}.mlp.gate_proj")), y=self._linear(y, f"{path}.mlp.up_proj"))
            x = mb.add(x=x, y=self._linear(y, f"{path}.mlp.down_proj"))
        if not config.tie_word_embeddings:
            embedding, factors = (self.weight(f"lm_head.{leaf}") for leaf in ("weight", "factors"))
        return mb.linear(x=self._times(self._norm(x, "model.norm"), factors), weight=embedding, name="logits")

    def _times(self, x: Any, factors: Any) -> Any:
        """What an embedding gives, or takes, times the factors of its columns, if it has any."""
        return x if factors is None else self.mb.mul(x=x, y=factors)

    def _mask(self) -> Any:
        """(tokens, end) float16: 0 where a token sees another, else far below all scores."""
        mb = self.mb
        columns = mb.range_1d(start=0, end=mb.squeeze(x=self.end, axes=[0]), step=1)
        rows = mb.add(x=mb.range_1d(start=0, end=mb.squeeze(x=self.n, axes=[0]), step=1), y=self.start)
        sees = mb.less_equal(x=mb.expand_dims(x=columns, axes=[0]), y=mb.expand_dims(x=rows, axes=[1]))
        return mb.mul(x=mb.sub(x=mb.cast(x=sees, dtype="fp16"), y=np.float16(1)), y=_BLOCKED)

    def _norm(self, x: Any, path: str) -> Any:
        mb = self.mb
        wide = mb.cast(x=x, dtype="fp32")
        mean = mb.reduce_mean(x=mb.mul(x=wide, y=wide), axes=[-1], keep_dims=True)
        factor = mb.rsqrt(x=mb.add(x=mean, y=np.float32(self.config.rms_norm_eps)), epsilon=np.float32(1e-30))
        return mb.mul(x=mb.cast(x=mb.mul(x=wide, y=factor), dtype="fp16"), y=self.weight(f"{path}.weight"))

    def _linear(self, x: Any, path: str) -> Any:
        bias = self.weight(f"{path}.bias")
        return self.mb.linear(x=x, weight=self.weight(f"{path}.weight"), **({} if bias is None else {"bias": bias}))

    def _heads(self, x: Any, count: int) -> Any:
        """(1, tokens, count * size) -> (1, count, tokens, size)."""
        return self.mb.transpose(x=self.mb.reshape(x=x, shape=[1, -1, count, self.head_size]), perm=[0, 2, 1, 3])

    def _turned(self, x: Any) -> Any:
        """Rotary position embedding, the halves of a head as pairs."""
        mb = self.mb
        first, second = mb.split(x=x, num_splits=2, axis=-1)
        swapped = mb.concat(values=[mb.mul(x=second, y=np.float16(-1)), first], axis=-1)
        return mb.add(x=mb.mul(x=x, y=self.cosines), y=mb.mul(x=swapped, y=self.sines))

    def _kept(self, layer: int, index: int, new: Any) -> Any:
        """Keys or values of all tokens so far, (1, key heads, end, size); the state is updated."""
        if not self.cache:
            return new
        mb, state = self.mb, self.states[index]
        begin = mb.concat(values=[[layer, 0], self.start, [0]], axis=0)
        stop = mb.concat(values=[[layer + 1, self.key_heads], self.end, [self.head_size]], axis=0)
        updated = mb.slice_update(x=mb.read_state(input=state), update=new, begin=begin, end=stop)
        mb.coreml_update_state(state=state, value=updated)
        return mb.slice_by_index(x=updated, begin=[layer, 0, 0, 0], end=stop)

    def _attention(self, layer: int, x: Any, path: str) -> Any:
        mb = self.mb
        query = self._turned(self._heads(self._linear(x, f"{path}.q_proj"), self.heads))
        key = self._turned(self._heads(self._linear(x, f"{path}.k_proj"), self.key_heads))
        value = self._heads(self._linear(x, f"{path}.v_proj"), self.key_heads)
        key, value = self._kept(layer, 0, key), self._kept(layer, 1, value)
        groups = [1, self.key_heads, self.heads // self.key_heads, -1, self.head_size]
        query = mb.mul(x=query, y=np.float16(self.head_size**-0.5))
        scores = mb.matmul(x=mb.reshape(x=query, shape=groups), y=mb.expand_dims(x=key, axes=[2]), transpose_y=True)
        mixed = mb.matmul(x=mb.softmax(x=mb.add(x=scores, y=self.mask), axis=-1), y=mb.expand_dims(x=value, axes=[2]))
        mixed = mb.reshape(x=mixed, shape=[1, self.heads, -1, self.head_size])
        joined = mb.reshape(x=mb.transpose(x=mixed, perm=[0, 2, 1, 3]), shape=[1, -1, self.heads * self.head_size])
        return self._linear(joined, f"{path}.o_proj")
