"""`compressed-tensors`: the `pack-quantized` directory that vLLM (`w4a16` and the like) and transformers open.

A linear P of shape (out, in) with b bits stores

    P.weight_packed  int32 (out, in * b / 32): a row's codes as one little-endian bit stream, which is what a row of our
                     packed indices is (docs/format.md); a code is the level plus 2^(b-1)
    P.weight_scale   (out, in / group) in the tables' number format: group 32, 64 or 128
    P.weight_shape   int64 (2): out, in

and everything else, embeddings among it, is a plain tensor in that number format. `read` follows the library's text, which
from 0.18 on packs codes across words.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edkm_cli.export.formats.folder import EXPORT_AGAIN, Entry, codes_of_words, require_fit
from edkm_cli.export.formats.options import Options
from edkm_cli.export.source import Compressed, DenseTensor
from edkm_cli.format import read_json
from edkm_cli.model_files import TensorFiles


def check(source: Compressed, options: Options) -> None:
    """2, 3 or 4 bits; scales times whole numbers, in tiles of 1 x 32, 64 or 128."""
    require_fit(f"w{min(max(source.spec.bits, 2), 4)}a16", source)


def facts(source: Compressed, options: Options) -> dict[str, Any]:
    return {"dtype": source.spec.lut_dtype, "notes": ["vllm serve DIRECTORY"]}


def entries(source: Compressed, tensor: DenseTensor, options: Options) -> Iterator[Entry]:
    bits, dtype, path = source.spec.bits, getattr(torch, source.spec.lut_dtype), tensor.module
    if not tensor.linear:
        return
    rows, columns = tensor.shape
    group = source.spec.granularity.tile(rows, columns)[1]
    yield Entry(f"{path}.weight_packed", torch.int32, (rows, columns * bits // 32), lambda: source.words(path))
    yield Entry(f"{path}.weight_scale", dtype, (rows, columns // group), lambda: source.numbers(path)[0])
    yield Entry(f"{path}.weight_shape", torch.int64, (2,), lambda: torch.tensor([rows, columns]))


def settings(source: Compressed, folder: Path, options: Options) -> dict[str, Any]:
    group = {"strategy": "group", "group_size": source.spec.granularity.columns}
    weights = {"num_bits": source.spec.bits, "type": "int", "symmetric": True, **group}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": sorted({"lm_head", *source.spec.skipped}),
    }
    return {"dtype": source.spec.lut_dtype, "quantization_config": quantization}


def read(folder: Path, options: Options) -> Iterator[tuple[str, Tensor]]:
    """(name, float32 tensor) of the dense model, by the library's rules."""
    config = read_json(folder / "config.json", remedy=EXPORT_AGAIN)["quantization_config"]
    weights = config["config_groups"]["group_0"]["weights"]
    files = TensorFiles(folder, remedy=EXPORT_AGAIN)
    for name in files.tensors:
        path, _, leaf = name.rpartition(".")
        if leaf == "weight_packed":
            _, columns = files.get(f"{path}.weight_shape").tolist()
            levels = codes_of_words(files.get(name), weights["num_bits"], columns) - 2 ** (weights["num_bits"] - 1)
            scales = files.get(f"{path}.weight_scale").float()[:, :, None]
            yield f"{path}.weight", (levels.float().unflatten(1, (-1, weights["group_size"])) * scales).flatten(1)
        elif leaf not in ("weight_scale", "weight_shape"):
            yield name, files.get(name).float()
