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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edkm_cli.errors import UserError
from edkm_cli.export.formats.folder import EXPORT_AGAIN, Entry, codes_of_words, require_fit
from edkm_cli.export.formats.options import Options
from edkm_cli.export.source import Compressed, DenseTensor
from edkm_cli.format import read_json
from edkm_cli.model_files import TensorFiles

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
    group = source.spec.embedding_group or tensor.shape[1]
    return source.bits_of(tensor.module), source.spec.granularity.tile(*tensor.shape)[1] if tensor.linear else group


def facts(source: Compressed, options: Options) -> dict[str, Any]:
    return {"dtype": source.spec.lut_dtype, "notes": ["mlx_lm.generate --model DIRECTORY --prompt TEXT"]}


def entries(source: Compressed, tensor: DenseTensor, options: Options) -> Iterator[Entry]:
    dtype, path = getattr(torch, source.spec.lut_dtype), tensor.module
    if not path:
        return
    (rows, columns), (bits, group) = tensor.shape, _layout(source, tensor)
    words, numbers = (rows, columns * bits // 32), (rows, columns // group)
    yield Entry(f"{path}.weight", torch.uint32, words, lambda: source.words(path).view(torch.uint32))
    yield Entry(f"{path}.scales", dtype, numbers, lambda: _numbers(source, tensor, 0))
    yield Entry(f"{path}.biases", dtype, numbers, lambda: _numbers(source, tensor, 1))


def settings(source: Compressed, folder: Path, options: Options) -> dict[str, Any]:
    """Changes of config.json: the usual groups and bits, and those of each module that differs."""
    packed = {tensor.module: _layout(source, tensor) for tensor in source.tensors.values() if tensor.module}
    usual = source.spec.bits, _layout(source, source.linears[0])[1]
    others = {
        path: {"group_size": group, "bits": bits} for path, (bits, group) in packed.items() if (bits, group) != usual
    }
    quantization = {"group_size": usual[1], "bits": usual[0], "mode": "affine", **others}
    return {"dtype": source.spec.lut_dtype, "quantization": quantization}


def _numbers(source: Compressed, tensor: DenseTensor, which: int) -> Tensor:
    """Scales (`which` 0) or biases of a packed matrix, (rows, groups)."""
    if tensor.linear:
        numbers = source.numbers(tensor.module)[which]
        assert numbers is not None
        return numbers
    scale = source.stored(f"{tensor.module}.scale")
    return scale * -(2.0 ** (source.bits_of(tensor.module) - 1)) if which else scale


def read(folder: Path, options: Options) -> Iterator[tuple[str, Tensor]]:
    """(name, float32 tensor) of the dense model, by MLX's rules."""
    quantization = read_json(folder / "config.json", remedy=EXPORT_AGAIN)["quantization"]
    files = TensorFiles(folder, remedy=EXPORT_AGAIN)
    for name, tensor in ((name, files.get(name)) for name in files.tensors):
        path, _, leaf = name.rpartition(".")
        if leaf == "weight" and f"{path}.scales" in files:
            layout = {**quantization, **quantization.get(path, {})}
            scales, biases = (files.get(f"{path}.{leaf}").float()[:, :, None] for leaf in ("scales", "biases"))
            codes = codes_of_words(tensor.view(torch.int32), layout["bits"], tensor.shape[1] * 32 // layout["bits"])
            yield name, (scales * codes.float().unflatten(1, (-1, layout["group_size"])) + biases).flatten(1)
        elif leaf not in ("scales", "biases"):
            yield name, tensor.float()
