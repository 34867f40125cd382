"""`mlx`: a directory that mlx-lm opens, on a Mac or an iPhone: its affine groups, `scale * code + bias`.

A packed matrix P of shape (out, in) stores

    P.weight            uint32 (out, in * bits / 32): a row's codes as one little-endian bit stream, which is what a row of
                        our packed indices is (docs/format.md)
    P.scales, P.biases  (out, in / group) in the tables' number format: group 32, 64 or 128

and everything else stays a plain tensor in that number format. Embeddings are symmetric here: their bias is that many
scales below zero, which is exact. `quantization` in config.json has `group_size` and `bits`, and those of each module that
differs. `read` follows `mx.dequantize` in float32: which word and bits a code is in, not how bytes were viewed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edkm_cli.errors import UserError
from edkm_cli.export.formats.folder import EXPORT_AGAIN, Entry, entry_bytes, write_config, write_entries
from edkm_cli.export.formats.options import Options
from edkm_cli.export.formats.rows import codes_of_words, require_fit
from edkm_cli.export.source import Compressed, DenseTensor
from edkm_cli.format import read_json
from edkm_cli.model_files import TensorFiles
from edkm_cli.progress import Track, no_progress

_GROUPS, _BITS = (32, 64, 128), (2, 3, 4, 5, 6, 8)


def check(source: Compressed, options: Options) -> None:
    """Affine tables of tiles of 1 x 32, 64 or 128; embeddings in groups of as many columns."""
    spec = source.spec
    require_fit(f"mlx:{spec.bits}" if spec.bits in _BITS else "mlx:4", source)
    for tensor in source.tensors.values():
        bits, group = _layout(source, tensor) if tensor.module else (4, 32)
        if bits not in _BITS or group not in _GROUPS:
            raise UserError(
                f"mlx holds 2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128, but {tensor.module} has {bits} bits in "
                f"groups of {group}; use --embedding-bits 8 --embedding-group 64 and --bits 3 to 5"
            )


def _layout(source: Compressed, tensor: DenseTensor) -> tuple[int, int]:
    """(bits, columns of a group) of a packed matrix."""
    if tensor.linear:
        return source.spec.bits_of(tensor.module), source.spec.granularity.tile(*tensor.shape)[1]
    return source.spec.embedding_bits, source.spec.embedding_group or tensor.shape[1]


def facts(source: Compressed, options: Options) -> dict[str, Any]:
    """What export.json says."""
    return {"dtype": source.spec.lut_dtype, "notes": ["mlx_lm.generate --model DIRECTORY --prompt TEXT"]}


def _entries(source: Compressed, options: Options) -> Iterator[Entry]:
    """What is stored of each tensor of the dense model."""
    dtype = getattr(torch, source.spec.lut_dtype)
    for tensor in source.tensors.values():
        if not tensor.module:
            yield Entry(tensor.name, dtype, tensor.shape, partial(source.dense, tensor.name))
            continue
        (rows, columns), (bits, group), path = tensor.shape, _layout(source, tensor), tensor.module
        yield Entry(f"{path}.weight", torch.uint32, (rows, columns * bits // 32), partial(_words, source, path))
        for which, leaf in enumerate(("scales", "biases")):
            make = partial(_numbers, source, tensor, which)
            yield Entry(f"{path}.{leaf}", dtype, (rows, columns // group), make)


def _words(source: Compressed, path: str) -> Tensor:
    return source.stored(f"{path}.indices").view(torch.uint32)


def _numbers(source: Compressed, tensor: DenseTensor, which: int) -> Tensor:
    """Scales (`which` 0) or biases of a packed matrix, (rows, groups)."""
    if tensor.linear:
        numbers = source.numbers(tensor.module)[which]
        assert numbers is not None
        return numbers
    scale = source.stored(f"{tensor.module}.scale")
    return scale * -(2.0 ** (source.spec.embedding_bits - 1)) if which else scale


def needed_bytes(source: Compressed, options: Options) -> int:
    """Disk that the export takes, about."""
    return entry_bytes(_entries(source, options))


def write(source: Compressed, folder: Path, options: Options, track: Track = no_progress) -> None:
    """Write the model, one tensor after another."""
    write_entries(folder, _entries(source, options), "writing mlx", track)
    packed = {tensor.module: _layout(source, tensor) for tensor in source.tensors.values() if tensor.module}
    usual = _layout(source, source.linears[0])[1], source.spec.bits
    quantization: dict[str, Any] = {"group_size": usual[0], "bits": usual[1], "mode": "affine"}
    for path, (bits, group) in packed.items():
        if (group, bits) != usual:
            quantization[path] = {"group_size": group, "bits": bits}
    write_config(source.directory, folder, {"dtype": source.spec.lut_dtype, "quantization": quantization})


def read(folder: Path, options: Options) -> Iterator[tuple[str, Tensor]]:
    """(name, float32 tensor) of the dense model, by MLX's rules."""
    quantization = read_json(folder / "config.json", remedy=EXPORT_AGAIN)["quantization"]
    files = TensorFiles(folder, remedy=EXPORT_AGAIN)
    for name, tensor in ((name, files.get(name)) for name in files.tensors):
        path, _, leaf = name.rpartition(".")
        if leaf == "weight" and f"{path}.scales" in files:
            layout = {**quantization, **quantization.get(path, {})}
            scales, biases = (files.get(f"{path}.{leaf}").float() for leaf in ("scales", "biases"))
            yield name, _dequantized(tensor, scales, biases, layout["bits"], layout["group_size"])
        elif leaf not in ("scales", "biases"):
            yield name, tensor.float()


def _dequantized(words: Tensor, scales: Tensor, biases: Tensor, bits: int, group: int) -> Tensor:
    codes = codes_of_words(words.view(torch.int32), bits, words.shape[1] * 32 // bits)
    codes = codes.float().unflatten(1, (-1, group))
    return (scales[:, :, None] * codes + biases[:, :, None]).flatten(1)


def stated(source: Compressed, name: str, options: Options) -> tuple[Tensor, Tensor]:
    """Packed matrices are exact; the rest has the number format of the tables."""
    exact = source.dense(name)
    packed = bool(source.tensors[name].module)
    return exact if packed else exact.to(getattr(torch, source.spec.lut_dtype)).float(), exact
