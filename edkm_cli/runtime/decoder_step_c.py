"""decoder_step.c as a Python class: one new token through all layers of a decoder whose linears are packed.

The structs of decoder_step.c are arrays of 64-bit numbers here, filled once; a call changes the addresses of the caches.
"""

import ctypes
import itertools
import struct
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from edkm_cli.kernels.layout_c import DTYPES
from edkm_cli.packing import Packed, check
from edkm_cli.runtime import lut_linear_c
from edkm_cli.runtime.lut_linear_c import library

_LANES, _MOST_HEAD_SIZE = 16, 256
_STEP = struct.Struct("7q2d2Q")
_LAYER = 14  # numbers in struct Layer
_KEYS, _VALUES, _STRIDE = 11, 12, 13


class LayerWeights(NamedTuple):
    """The weights of one decoder layer: packed matrices by the input they share, and the weights of its norms."""

    qkv: tuple[Packed, ...]
    o: Packed
    gate_up: tuple[Packed, ...]
    down: Packed
    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None


class Sizes(NamedTuple):
    """Sizes of a decoder, in elements; `scale` multiplies the product of query and key."""

    width: int
    inner: int
    heads: int
    kv_heads: int
    head_size: int
    epsilon: float
    scale: float


class DecoderStep:
    """A decoder's weights as the kernel reads them. They must stay where they are: the caller keeps them, and looks
    whether they do."""

    def __init__(self, layers: Sequence[LayerWeights], sizes: Sizes, dtype: torch.dtype):
        self.dtype, self._sizes, self.layers = dtype, sizes, tuple(layers)
        self._blocks: list[ctypes.Array] = []
        self._numbers = array("q", bytes(8 * _LAYER * len(layers)))
        for index, layer in enumerate(layers):
            norms = (layer.input_norm, layer.post_norm, layer.q_norm, layer.k_norm)
            blocks = (
                *self._shared(layer.qkv, sizes.width),
                self._block((layer.o,), sizes.heads * sizes.head_size),
                *self._shared(layer.gate_up, sizes.width),
                self._block((layer.down,), sizes.inner),
            )
            first = index * _LAYER
            addresses = (0 if norm is None else norm.data_ptr() for norm in norms)
            self._numbers[first : first + _KEYS] = array("q", (*blocks, *addresses))
        self._function = library().edkm_decoder_step  # callers ask `supports` first

    def _shared(self, matrices: tuple[Packed, ...], columns: int) -> list[int]:
        """As many addresses as matrices: neighbours of equal bits are in one block, and zeros fill up."""
        alike = [tuple(group) for _, group in itertools.groupby(matrices, lambda m: (m.bits, m.tile is None))]
        return [self._block(group, columns) for group in alike] + [0] * (len(matrices) - len(alike))

    def _block(self, matrices: tuple[Packed, ...], columns: int) -> int:
        block = lut_linear_c.prepare(matrices, columns).block
        self._blocks.append(ctypes.create_string_buffer(block, len(block)))
        return ctypes.addressof(self._blocks[-1])

    def run(
        self, hidden: Tensor, cosines: Tensor, sines: Tensor, caches: Sequence[tuple[Tensor, Tensor]], past: int
    ) -> None:
        """Add what the layers add to `hidden` (width,) float32, and write this token's keys and values into `caches`.

        cosines, sines: (head_size,) of the token's position, in the model's dtype. caches: of each layer, keys and values
        (1, kv_heads, room, head_size) with more room than `past` tokens, contiguous but for the heads' stride.
        Raises MemoryError where memory is short.
        """
        sizes, numbers = self._sizes, self._numbers[:]  # other threads have caches of their own
        for index, (keys, values) in enumerate(caches):
            first = index * _LAYER
            numbers[first + _KEYS], numbers[first + _VALUES] = keys.data_ptr(), values.data_ptr()
            numbers[first + _STRIDE] = keys.stride(1)
        places = cosines.data_ptr(), sines.data_ptr()
        step = _STEP.pack(len(self.layers), *sizes[:5], DTYPES[self.dtype], *sizes[5:], *places)
        if self._function(step, numbers.buffer_info()[0], past, hidden.data_ptr()):
            raise MemoryError(f"a token after {past} others")


def attend(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor | None:
    """softmax(query keys^T * scale) values for one new token in each of many sequences, with sums in float32.

    query and result: (sequences, heads, 1, head_size), of the dtype of keys and values (sequences, kv_heads, tokens,
    head_size), whose heads are equally far apart and 32, 64, ... or 256 wide. None for others, or without the kernel.
    Raises MemoryError where memory is short.
    """
    (sequences, heads, new, size), (kv_heads, tokens), apart = query.shape, keys.shape[1:3], keys.stride(1)
    same = keys.shape == values.shape == (sequences, kv_heads, tokens, size)
    even = keys.stride() == values.stride() == (kv_heads * apart, apart, size, 1)
    taken = query.is_cpu and query.dtype == keys.dtype == values.dtype and query.dtype in DTYPES and library()
    if not (same and even and taken) or new != 1 or size % 32 or size > _MOST_HEAD_SIZE or heads % kv_heads:
        return None
    query, out = query.contiguous(), torch.empty_like(query, memory_format=torch.contiguous_format)
    sizes = (sequences * heads, sequences * kv_heads, size, DTYPES[query.dtype], 0.0, scale)
    layer = array("q", (*[0] * _KEYS, keys.data_ptr(), values.data_ptr(), apart))
    step = _STEP.pack(1, 0, 0, *sizes, 0, 0)
    if library().edkm_attend(step, layer.buffer_info()[0], tokens, query.data_ptr(), out.data_ptr()):
        raise MemoryError(f"attention to {tokens} tokens of {sequences} sequences")
    return out


def supports(layers: Sequence[LayerWeights], sizes: Sizes, dtype: torch.dtype) -> bool:
    """Whether the kernel computes with these weights: their place, dtypes, and sizes that fill vectors."""
    halves = (sizes.width, sizes.inner, sizes.head_size // 2)
    if dtype not in DTYPES or library() is None or any(n <= 0 or n % _LANES for n in halves):
        return False
    if sizes.head_size % 2 or sizes.head_size > _MOST_HEAD_SIZE or sizes.heads % sizes.kv_heads:
        return False
    return all(_takes(layer, sizes, dtype) for layer in layers)


def _takes(layer: LayerWeights, sizes: Sizes, dtype: torch.dtype) -> bool:
    query, key = sizes.heads * sizes.head_size, sizes.kv_heads * sizes.head_size
    shared = ((layer.qkv, (query, key, key), sizes.width), (layer.gate_up, (sizes.inner,) * 2, sizes.width))
    single = (((layer.o,), (sizes.width,), query), ((layer.down,), (sizes.width,), sizes.inner))
    for matrices, rows, columns in (*shared, *single):
        if tuple(m.indices.shape[0] for m in matrices) != rows or not all(map(lut_linear_c.supports, matrices)):
            return False
        for packed in matrices:
            check(columns, packed)
    norms = ((layer.input_norm, sizes.width), (layer.post_norm, sizes.width))
    heads = ((norm, sizes.head_size) for norm in (layer.q_norm, layer.k_norm) if norm is not None)
    return all(
        norm.dtype == dtype and norm.device.type == "cpu" and norm.is_contiguous() and tuple(norm.shape) == (size,)
        for norm, size in (*norms, *heads)
    )
