"""`gguf`: one file for llama.cpp and what is built on it (Ollama, LM Studio), in blocks of 32 weights.

    Q4_0    fp16 scale d, 16 bytes: weight j = d * (low nibble of byte j - 8), weight j + 16 the high nibble
    IQ4_NL  the same, with a table of 16 levels in place of the numbers -8 to 7
    Q8_0    fp16 scale d, 32 signed bytes: the embeddings
    F16     matrices whose rows are no multiple of 32; F32: vectors

Bytes are packed here from our indices and scales, and `read` decodes the file with the `gguf` package, which does as
llama.cpp does. Rows of Q and K are in llama.cpp's order (`edkm_cli.export.formats.gguf_model`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from edkm_cli.errors import UserError
from edkm_cli.export.formats.gguf_model import Naming, add_metadata, naming_of, naming_of_file
from edkm_cli.export.formats.options import Options, rounded
from edkm_cli.export.formats.rows import require_fit
from edkm_cli.export.source import Compressed, DenseTensor
from edkm_cli.progress import Track, no_progress

_BLOCK = 32
_TYPES = {"integers": "Q4_0", "iq4_nl": "IQ4_NL"}
FILE = "model.gguf"


class _Stored(NamedTuple):
    """A tensor of the file: its name and type there, shape, and what makes its bytes (rows, bytes of a row)."""

    name: str
    type: str
    shape: tuple[int, ...]
    make: Callable[[], Tensor]


def check(source: Compressed, options: Options) -> None:
    """Tables of Q4_0 or IQ4_NL, and embeddings whose scales fp16 holds, in a family that llama.cpp's names are known for."""
    palette = source.spec.palette
    require_fit(f"gguf:{palette if palette == 'iq4_nl' else 'q4_0'}", source)
    naming_of(source.config)
    for tensor in source.tensors.values():
        if tensor.module and not tensor.linear and tensor.shape[1] % _BLOCK:
            raise UserError(
                f"gguf holds embeddings in blocks of {_BLOCK}, but {tensor.module} has rows of {tensor.shape[1]}; use "
                "--embedding-bits 16"
            )


def facts(source: Compressed, options: Options) -> dict[str, Any]:
    """What export.json says."""
    return {"type": _TYPES[source.spec.palette], "notes": [f"llama-cli -m DIRECTORY/{FILE} -p TEXT"]}


def _stored(source: Compressed) -> Iterator[_Stored]:
    naming = naming_of(source.config)
    for tensor in source.tensors.values():
        name, order = naming.name(tensor.name), naming.order(tensor.name, tensor.shape[0])
        if tensor.linear:
            yield _Stored(name, _TYPES[source.spec.palette], tensor.shape, partial(_nibbles, source, tensor, order))
        elif tensor.module:
            yield _Stored(name, "Q8_0", tensor.shape, partial(_bytes, source, tensor))
        else:
            kind = "F32" if len(tensor.shape) == 1 else "F16"
            yield _Stored(name, kind, tensor.shape, partial(_plain, source, tensor, naming, kind))
    if (factors := naming.frequencies) is not None:
        yield _Stored("rope_freqs.weight", "F32", tuple(factors.shape), factors.clone)


def _nibbles(source: Compressed, tensor: DenseTensor, order: Tensor | None) -> Tensor:
    """Blocks of a linear, (out, in / 32 * 18) uint8."""
    codes, (scales, _) = source.indices(tensor.module), source.numbers(tensor.module)
    if order is not None:
        codes, scales = codes[order], scales[order]
    halves = codes.unflatten(1, (-1, 2, _BLOCK // 2))
    return _blocks(scales, halves[:, :, 0] | (halves[:, :, 1] << 4))


def _bytes(source: Compressed, tensor: DenseTensor) -> Tensor:
    """Blocks of an embedding, (rows, columns / 32 * 34) uint8; scales of wider groups, or of whole rows, are repeated."""
    blocks = source.levels(tensor.module).to(torch.int8).view(torch.uint8).unflatten(1, (-1, _BLOCK))
    scales = source.stored(f"{tensor.module}.scale")
    return _blocks(scales.repeat_interleave(blocks.shape[1] // scales.shape[1], 1), blocks)


def _blocks(scales: Tensor, content: Tensor) -> Tensor:
    """(rows, bytes) uint8 of scales (rows, blocks), two bytes before the bytes of each block (rows, blocks, bytes)."""
    return torch.cat([scales.half()[:, :, None].view(torch.uint8), content], 2).flatten(1)


def _plain(source: Compressed, tensor: DenseTensor, naming: Naming, kind: str) -> Tensor:
    values, order = source.dense(tensor.name), naming.order(tensor.name, tensor.shape[0])
    shifted = (values if order is None else values[order]) + naming.shift(tensor.name)
    return rounded(shifted, torch.float32 if kind == "F32" else torch.float16, tensor.name)


def _row_bytes(stored: _Stored) -> tuple[int, ...]:
    """Shape of the bytes of a tensor, as the file's writer wants it."""
    per_block = {"Q4_0": 18, "IQ4_NL": 18, "Q8_0": 34}.get(stored.type)
    return stored.shape if per_block is None else (stored.shape[0], stored.shape[1] // _BLOCK * per_block)


def _size(stored: _Stored) -> int:
    return int(np.prod(_row_bytes(stored))) * {"F32": 4, "F16": 2}.get(stored.type, 1)


def needed_bytes(source: Compressed, options: Options) -> int:
    """Disk that the export takes, about."""
    return sum(_size(stored) for stored in _stored(source))


def write(source: Compressed, folder: Path, options: Options, track: Track = no_progress) -> None:
    """Write the file, one tensor after another."""
    from gguf import GGMLQuantizationType, GGUFWriter

    stored = list(_stored(source))
    writer = GGUFWriter(folder / FILE, naming_of(source.config).architecture)
    add_metadata(writer, source, options, _TYPES[source.spec.palette])
    for tensor in stored:
        numpy = {"F32": np.float32, "F16": np.float16}.get(tensor.type, np.uint8)
        kind = GGMLQuantizationType[tensor.type]
        writer.add_tensor_info(tensor.name, _row_bytes(tensor), np.dtype(numpy), _size(tensor), raw_dtype=kind)
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
        yield name, (values if order is None else values[order.argsort()]) - naming.shift(name)


def stated(source: Compressed, name: str, options: Options) -> tuple[Tensor, Tensor]:
    """Packed matrices and vectors are exact, but for norms that are stored plus one; other matrices are F16."""
    exact, tensor = source.dense(name), source.tensors[name]
    shift = naming_of(source.config).shift(name)
    if len(tensor.shape) > 1 and not tensor.module:
        return exact.half().float(), exact
    return (exact + shift) - shift, exact
