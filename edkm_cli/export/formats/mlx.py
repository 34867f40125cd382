"""`mlx`: a directory that mlx-lm opens, on a Mac or an iPhone: its affine groups, `scale * code + bias`, or FP4.

A packed matrix P of shape (out, in) stores

    P.weight            uint32 (out, in * bits / 32): a row's codes as one little-endian bit stream, which is what a row of
                        our packed indices is (docs/format.md)
    P.scales, P.biases  (out, in / group) in the tables' number format: group 32, 64 or 128
    P.scales            of FP4 uint8 (out, in / group), and no biases: powers of two in groups of 32 (`mxfp4`), or E4M3 in
                        groups of 16 (`nvfp4`)

and everything else stays a plain tensor in the number format of the embeddings' scales. Embeddings are affine and
symmetric here: their bias is that many scales below zero, which is exact. `quantization` in config.json has `group_size`,
`bits` and `mode`, and those of each module that differs. `read` follows `mx.dequantize` in float32: which word and bits a
code is in, not how bytes were viewed.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edkm_cli.errors import UserError
from edkm_cli.export.formats.folder import Entry, codes_in, fp4_codes, fp4_scales, fp4_weight, opened, scaled
from edkm_cli.export.formats.options import Options
from edkm_cli.export.source import Compressed, DenseTensor, Described
from edkm_cli.targets import full_positions

_GROUPS, _BITS = (32, 64, 128), (2, 3, 4, 5, 6, 8)
_MODES = {"float8_e8m0fnu": "mxfp4", "float8_e4m3fn": "nvfp4"}  # by the number format of scales
_SCALES = {mode: getattr(torch, name) for name, mode in _MODES.items()}


def check(source: Described, options: Options | None) -> None:
    """Affine groups of 32, 64 or 128 columns, of embeddings, too."""
    for tensor in source.tensors.values():
        layout = _layout(source, tensor) if tensor.module else {"mode": ""}
        if layout["mode"] == "affine" and (layout["bits"] not in _BITS or layout["group_size"] not in _GROUPS):
            found = f"{tensor.module} has {layout['bits']} bits in groups of {layout['group_size']}"
            rule = f"mlx holds 2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128, but {found}"
            raise UserError(f"{rule}; use --embedding-bits 8 --embedding-group 64 and --bits 3 to 5")


def _layout(source: Described, tensor: DenseTensor) -> dict[str, Any]:
    """What config.json says of a packed matrix."""
    group, mode = source.spec.embedding_group or tensor.shape[1], "affine"
    if tensor.linear:
        group = source.spec.granularity.tile(*tensor.shape)[1]
        mode = _MODES.get(source.spec.lut_dtype, mode)
    return {"group_size": group, "bits": source.bits_of(tensor.module), "mode": mode}


def facts(source: Compressed, options: Options) -> dict[str, Any]:
    dtype = str(source.spec.embedding_scale_dtype).removeprefix("torch.")
    return {"dtype": dtype, "notes": ["mlx_lm.generate --model DIRECTORY --prompt TEXT"]}


def entries(source: Compressed, tensor: DenseTensor, options: Options) -> Iterator[Entry]:
    dtype, path = source.spec.embedding_scale_dtype, tensor.module
    if not path:
        return
    (rows, columns), layout = tensor.shape, _layout(source, tensor)
    words, numbers = (rows, columns * layout["bits"] // 32), (rows, columns // layout["group_size"])
    if layout["mode"] != "affine":
        yield Entry(f"{path}.weight", torch.uint32, words, lambda: fp4_codes(source, path).view(torch.uint32))
        yield Entry(f"{path}.scales", torch.uint8, numbers, lambda: fp4_scales(source, path).view(torch.uint8))
        return
    yield Entry(f"{path}.weight", torch.uint32, words, lambda: source.words(path).view(torch.uint32))
    yield Entry(f"{path}.scales", dtype, numbers, lambda: _numbers(source, tensor, 0))
    yield Entry(f"{path}.biases", dtype, numbers, lambda: _numbers(source, tensor, 1))


def settings(source: Compressed, folder: Path, options: Options) -> dict[str, Any]:
    """Changes of config.json: the usual groups, bits and mode, and those of each module that differs."""
    packed = {tensor.module: _layout(source, tensor) for tensor in source.tensors.values() if tensor.module}
    usual = {**_layout(source, source.linears[0]), "bits": source.spec.bits}
    others = {path: layout for path, layout in packed.items() if layout != usual}
    positions = full_positions(source.config, by_layer=True)
    known = {} if positions is None else {"max_position_embeddings": positions}
    return {"dtype": facts(source, options)["dtype"], "quantization": {**usual, **others}, **known}


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
    config, files = opened(folder)
    for name, tensor in ((name, files.get(name)) for name in files.tensors):
        path, _, leaf = name.rpartition(".")
        if leaf == "weight" and f"{path}.scales" in files:
            layout = config["quantization"].get(path, config["quantization"])
            words, scales = tensor.view(torch.int32), files.get(f"{path}.scales")
            if (mode := layout.get("mode", "affine")) == "affine":
                codes = codes_in(words, layout["bits"], words.shape[1] * 32 // layout["bits"])
                yield name, scaled(codes, scales.float(), files.get(f"{path}.biases").float())
            else:
                yield name, fp4_weight(words, scales.view(_SCALES[mode]).float())
        elif leaf not in ("scales", "biases"):
            yield name, tensor.float()
