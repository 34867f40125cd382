"""`any-precision`: the layers of Any-Precision LLM (SNU-ARC/any-precision-llm at a3257d0), with one precision.

A linear P of shape (out, in) stores, at b bits,

    P.qweight  int32 (b, out, in / 32): bit planes, the most significant first. A plane's row is in words, one for each
               thread of a warp: of each 1024 columns (fewer at the end of a row) thread t has columns 8 (t + T j) + i,
               with T threads, j from 0 to 3 and i from 0 to 7, in bit 8 (3 - j) + 7 - i of its word
    P.lut{b}   float16 (out, 2**b): a table for each row
    P.bias     float32 (out), or that of --dtype, if there is one

`write` follows the project's packing (`any_precision/quantization/pack.py`): bits of eight columns to a byte, the first in
the highest bit, then bytes permuted to the threads of warps. `read` follows its CUDA kernel (`modules/kernels/dequant.cuh`):
where each thread stores what it decodes.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edkm_cli.export.formats.folder import Entry, opened, read_packed, row_tables
from edkm_cli.export.formats.options import Options
from edkm_cli.export.source import Compressed, DenseTensor
from edkm_cli.targets import repeated_layers

_WARP, _WORD = 32, 32


def entries(source: Compressed, tensor: DenseTensor, options: Options) -> Iterator[Entry]:
    if not tensor.linear:
        return
    (bits, path), shape = (source.spec.bits, tensor.module), tensor.shape
    planes = (bits, shape[0], shape[1] // _WORD)
    yield Entry(f"{path}.qweight", torch.int32, planes, lambda: _planes(source.indices(path), bits))
    yield Entry(f"{path}.lut{bits}", torch.float16, (shape[0], 2**bits), lambda: row_tables(source, tensor))


def settings(source: Compressed, folder: Path, options: Options) -> dict[str, Any]:
    """Changes of config.json: bits, where decoder layers are, and which of their linears have tables."""
    bits, (model, layers, names) = source.spec.bits, repeated_layers([tensor.module for tensor in source.linears])
    architecture = {"model_name": model, "layers_name": layers, "module_names": names}
    precision = {"seed_precision": bits, "parent_precision": bits, "group_count": 1, "arch_config": architecture}
    return {"dtype": "float16", "anyprec": precision}


def _planes(indices: Tensor, bits: int) -> Tensor:
    """(bits, out, in / 32) int32 from (out, in) uint8 indices."""
    out, columns = indices.shape
    weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8)
    # Of each 128 bytes (or of what is left) thread t gets t, T + t, 2T + t and 3T + t, the first as the highest of its word.
    order = torch.cat([some.view(4, -1).flip(0).t().flatten() for some in torch.arange(columns // 8).split(4 * _WARP)])
    planes = torch.empty(bits, out, columns // _WORD, dtype=torch.int32)
    for plane in range(bits):
        octets = (((indices >> (bits - 1 - plane)) & 1).view(out, -1, 8) * weights).sum(-1, dtype=torch.uint8)
        planes[plane] = octets[:, order].contiguous().view(torch.int32)
    return planes


def read(folder: Path, options: Options) -> Iterator[tuple[str, Tensor]]:
    """(name, float32 tensor) of the dense model, as the kernel decodes it."""
    bits = int(opened(folder)[0]["anyprec"]["parent_precision"])
    return read_packed(folder, "qweight", f"lut{bits}", lambda words, lut: lut.float().gather(1, _decoded(words)))


def _decoded(words: Tensor) -> Tensor:
    """(out, in) int64 indices from (bits, out, in / 32) int32: thread by thread, as the kernel stores them."""
    bits, out, count = words.shape
    indices = torch.zeros(out, count * _WORD, dtype=torch.int64)
    for first in range(0, count, _WARP):  # one step of the kernel's loop over a row
        threads = min(_WARP, count - first)
        word = words[:, :, first : first + threads].long() & 0xFFFFFFFF
        thread = torch.arange(threads)
        for bit in range(_WORD):
            group, inside = 3 - bit // 8, 7 - bit % 8
            column = first * _WORD + 8 * threads * group + 8 * thread + inside
            for plane in range(bits):
                indices[:, column] |= ((word[plane] >> bit) & 1) << (bits - 1 - plane)
    return indices


def stated(source: Compressed, name: str, options: Options) -> tuple[Tensor, Tensor]:
    """Tables are float16, which holds float16 and scaled float8 entries; the rest has the dtype of the options."""
    exact = source.dense(name)
    dtype = torch.float16 if source.tensors[name].linear else getattr(torch, options.dtype_name())
    return exact.to(dtype).float(), exact
