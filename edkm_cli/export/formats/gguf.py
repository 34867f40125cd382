"""`gguf`: one file for llama.cpp and what is built on it (Ollama, LM Studio), in blocks of weights.

    Q4_0        fp16 scale d, 16 bytes: weight j = d * (low nibble of byte j - 8), weight j + 16 the high nibble
    IQ4_NL      the same, with a table of 16 levels in place of the numbers -8 to 7
    MXFP4       a power of two in one byte, and the same, with the numbers of FP4
    Q8_0        fp16 scale d, 32 signed bytes: the embeddings, too
    Q2_K to Q6_K  super-blocks of 256 weights: `_super_block`
    F16         matrices whose rows are no multiple of a block; F32: vectors

Bytes are packed here from our indices and scales, and `read` decodes the file with the `gguf` package, which does as
llama.cpp does. Rows of Q and K are in llama.cpp's order (`edkm_cli.export.formats.gguf_model`).
"""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from edkm_cli.errors import UserError
from edkm_cli.export.formats.folder import Entry, rounded, target_of
from edkm_cli.export.formats.gguf_model import Naming, add_metadata, naming_of, naming_of_file
from edkm_cli.export.formats.options import Options
from edkm_cli.export.source import Compressed, DenseTensor, Described
from edkm_cli.granularity import AFFINE, MULTIPLES, SUPER_BLOCK
from edkm_cli.progress import Track, no_progress

_BLOCK = 32
FILE = "model.gguf"


def check(source: Described, options: Options | None) -> None:
    """Embeddings whose scales are those of whole blocks."""
    for tensor in source.tensors.values():
        if tensor.module and not tensor.linear and (group := source.spec.embedding_group or tensor.shape[1]) % _BLOCK:
            rule = f"gguf holds embeddings in blocks of {_BLOCK}, but {group} columns of {tensor.module} share a scale"
            raise UserError(f"{rule}; use --embedding-group {_BLOCK}, or --embedding-bits 16 without it")


def _type(source: Compressed) -> str:
    """llama.cpp's name of the type of linears."""
    return target_of("gguf", source).removeprefix("gguf:").upper()


def facts(source: Compressed, options: Options) -> dict[str, Any]:
    return {"type": _type(source), "notes": [f"llama-cli -m DIRECTORY/{FILE} -p TEXT"]}


def _stored(source: Compressed) -> Iterator[Entry]:
    """What is written; an entry makes the bytes, (rows, bytes of a row)."""
    naming = naming_of(source.config)
    for tensor in source.tensors.values():
        name, order = naming.name(tensor.name), naming.order(tensor.name, tensor.shape[0])
        if tensor.linear:
            yield Entry(name, _type(source), tensor.shape, partial(_linear, source, tensor, order))
        elif tensor.module:
            yield Entry(name, "Q8_0", tensor.shape, partial(_embedding, source, tensor))
        else:
            kind = "F32" if len(tensor.shape) == 1 else "F16"
            yield Entry(name, kind, tensor.shape, partial(_plain, source, tensor, naming, kind))
    if (factors := naming.frequencies) is not None:
        yield Entry("rope_freqs.weight", "F32", tuple(factors.shape), factors.clone)


def _linear(source: Compressed, tensor: DenseTensor, order: Tensor | slice) -> Tensor:
    """Blocks of a linear, (out, bytes of a row) uint8."""
    codes, path, kind = source.indices(tensor.module)[order], tensor.module, _type(source)
    if source.spec.lut_dtype == "int8":
        leaves = ("scales", "offsets") if source.spec.palette == AFFINE else ("scales",)
        tiles = SUPER_BLOCK // MULTIPLES[source.spec.palette, source.spec.bits][0]
        numbers = [source.stored(f"{path}.{leaf}")[order].to(torch.int16).unflatten(1, (-1, tiles)) for leaf in leaves]
        units = source.stored(f"{path}.lut_scale")[order]
        return _super_blocks(kind, codes.unflatten(1, (-1, SUPER_BLOCK)), numbers, units)
    scales = source.stored(f"{path}.scales")[order]
    if kind == "Q8_0":
        return _blocks(scales, (codes ^ 128).unflatten(1, (-1, _BLOCK)))  # a code is the level plus 128
    halves = codes.unflatten(1, (-1, 2, _BLOCK // 2))
    return _blocks(scales, halves[:, :, 0] | (halves[:, :, 1] << 4))


def _embedding(source: Compressed, tensor: DenseTensor) -> Tensor:
    """Blocks of an embedding, (rows, columns / 32 * 34) uint8; scales of wider groups, or of whole rows, are repeated."""
    blocks = source.levels(tensor.module).to(torch.int8).view(torch.uint8).unflatten(1, (-1, _BLOCK))
    scales = source.stored(f"{tensor.module}.scale")
    return _blocks(scales.repeat_interleave(blocks.shape[1] // scales.shape[1], 1).half(), blocks)


def _blocks(scales: Tensor, content: Tensor) -> Tensor:
    """(rows, bytes) uint8 of scales (rows, blocks), their bytes before those of each block (rows, blocks, bytes)."""
    return torch.cat([scales[:, :, None].view(torch.uint8), content], 2).flatten(1)


def _super_blocks(kind: str, codes: Tensor, numbers: list[Tensor], units: Tensor) -> Tensor:
    """(rows, bytes) uint8 of llama.cpp's k-quants (ggml-common.h): d and, of affine types, the negative of dmin.

    Args:
        codes: (rows, blocks, 256) uint8.
        numbers: scales and, of affine types, offsets: multiples of their unit, (rows, blocks, tiles) int16.
        units: (rows, blocks, 1 or 2) float16.
    """
    scales = numbers[0]
    halves = codes.unflatten(2, (2, 4, 32))  # two half blocks of four times 32 weights
    d = torch.cat([units[:, :, :1], -units[:, :, 1:]], 2).view(torch.uint8)
    if kind == "Q6_K":
        nibbles = (codes & 15).unflatten(2, (2, 2, 64))
        parts = [_bits(nibbles, 4), _bits(halves >> 4, 2), scales.to(torch.int8).view(torch.uint8), d]
    elif kind == "Q3_K":
        parts = [_bits((codes >> 2).unflatten(2, (8, 32)), 1), _bits(halves & 3, 2), _six_bits(scales + 32), d]
    elif kind == "Q2_K":
        parts = [(scales | numbers[1] << 4).to(torch.uint8), _bits(halves, 2), d]
    else:
        nibbles = _bits((codes & 15).unflatten(2, (4, 2, 32)), 4)
        fifth = [_bits((codes >> 4).unflatten(2, (8, 32)), 1)] if kind == "Q5_K" else []
        parts = [d, _six_bits_of_two(scales, numbers[1]), *fifth, nibbles]
    return torch.cat(parts, 2).flatten(1)


def _bits(parts: Tensor, bits: int) -> Tensor:
    """(rows, blocks, bytes) uint8: bytes of (..., parts, bytes), the first part in the lowest bits."""
    shifts = torch.arange(parts.shape[-2], dtype=torch.uint8)[:, None] * bits
    return (parts << shifts).sum(-2, dtype=torch.uint8).flatten(2)


def _six_bits(numbers: Tensor) -> Tensor:
    """Q3_K's 12 bytes of 16 numbers below 64: low nibbles of eight and eight, then high bits, every fourth in one."""
    low, high = (numbers & 15).unflatten(2, (2, 8)), (numbers >> 4).unflatten(2, (4, 4))
    return torch.cat([_bits(low.to(torch.uint8), 4), _bits(high.to(torch.uint8), 2)], 2)


def _six_bits_of_two(scales: Tensor, offsets: Tensor) -> Tensor:
    """Q4_K's and Q5_K's 12 bytes of twice 8 numbers below 64: four of each beside the high bits of others, then nibbles."""
    (first, second), (low, high) = scales.split(4, 2), offsets.split(4, 2)
    packed = [first | (second >> 4) << 6, low | (high >> 4) << 6, (second & 15) | (high & 15) << 4]
    return torch.cat(packed, 2).to(torch.uint8)


def _plain(source: Compressed, tensor: DenseTensor, naming: Naming, kind: str) -> Tensor:
    shifted = source.dense(tensor.name)[naming.order(tensor.name, tensor.shape[0])] + naming.shift(tensor.name)
    return rounded(shifted, torch.float32 if kind == "F32" else torch.float16, tensor.name)


def _byte_shape(stored: Entry) -> tuple[int, ...]:
    """Shape of the bytes of a tensor, as the file's writer wants it."""
    from gguf import GGMLQuantizationType
    from gguf.quants import quant_shape_to_byte_shape

    return quant_shape_to_byte_shape(stored.shape, GGMLQuantizationType[stored.dtype])


def needed_bytes(source: Compressed, options: Options) -> int:
    """Disk that the export takes, about."""
    return sum(math.prod(_byte_shape(stored)) for stored in _stored(source))


def write(source: Compressed, folder: Path, options: Options, track: Track = no_progress) -> None:
    """Write the file, one tensor after another."""
    from gguf import GGMLQuantizationType, GGUFWriter

    stored = list(_stored(source))
    writer = GGUFWriter(folder / FILE, naming_of(source.config).architecture)
    add_metadata(writer, source, options, _type(source))
    for tensor in stored:
        shape, kind = _byte_shape(tensor), GGMLQuantizationType[tensor.dtype]
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), math.prod(shape), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in track(stored, "writing gguf", len(stored)):
        writer.write_tensor_data(tensor.make().contiguous().numpy())
    writer.close()


def read(folder: Path, options: Options) -> Iterator[tuple[str, Tensor]]:
    """(name, float32 tensor) of the dense model, decoded by the `gguf` package."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(folder / FILE)
    naming = naming_of_file(reader.fields)
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            continue
        name = naming.name_back(tensor.name)
        values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))
        values = values.view(*reversed(tensor.shape.tolist()))
        order = naming.order(name, values.shape[0])
        yield name, values[order.argsort() if isinstance(order, Tensor) else order] - naming.shift(name)


def stated(source: Compressed, name: str, options: Options) -> tuple[Tensor, Tensor]:
    """Packed matrices and vectors are exact, but for norms that are stored plus one; other matrices are F16."""
    exact, tensor = source.dense(name), source.tensors[name]
    shift = naming_of(source.config).shift(name)
    if len(tensor.shape) > 1 and not tensor.module:
        return exact.half().float(), exact
    return (exact + shift) - shift, exact
