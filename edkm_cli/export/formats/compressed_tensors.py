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
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edkm_cli.export.formats.folder import EXPORT_AGAIN, Entry, entry_bytes, write_config, write_entries
from edkm_cli.export.formats.options import Options
from edkm_cli.export.formats.rows import codes_of_words, require_fit
from edkm_cli.export.source import Compressed
from edkm_cli.format import read_json
from edkm_cli.model_files import TensorFiles
from edkm_cli.progress import Track, no_progress


def check(source: Compressed, options: Options) -> None:
    """2, 3 or 4 bits; scales times whole numbers, in tiles of 1 x 32, 64 or 128."""
    require_fit(f"w{min(max(source.spec.bits, 2), 4)}a16", source)


def facts(source: Compressed, options: Options) -> dict[str, Any]:
    """What export.json says."""
    return {"dtype": source.spec.lut_dtype, "notes": ["vllm serve DIRECTORY"]}


def _entries(source: Compressed, options: Options) -> Iterator[Entry]:
    """What is stored of each tensor of the dense model."""
    bits, dtype = source.spec.bits, getattr(torch, source.spec.lut_dtype)
    for tensor in source.tensors.values():
        if not tensor.linear:
            yield Entry(tensor.name, dtype, tensor.shape, partial(source.dense, tensor.name))
            continue
        (rows, columns), path = tensor.shape, tensor.module
        group = source.spec.granularity.tile(rows, columns)[1]
        words = partial(_words, source, path)
        yield Entry(f"{path}.weight_packed", torch.int32, (rows, columns * bits // 32), words)
        yield Entry(f"{path}.weight_scale", dtype, (rows, columns // group), partial(_scales, source, path))
        yield Entry(f"{path}.weight_shape", torch.int64, (2,), partial(torch.tensor, [rows, columns]))


def _words(source: Compressed, path: str) -> Tensor:
    return source.stored(f"{path}.indices").view(torch.int32)


def _scales(source: Compressed, path: str) -> Tensor:
    return source.numbers(path)[0]


def needed_bytes(source: Compressed, options: Options) -> int:
    """Disk that the export takes, about."""
    return entry_bytes(_entries(source, options))


def write(source: Compressed, folder: Path, options: Options, track: Track = no_progress) -> None:
    """Write the model, one tensor after another."""
    write_entries(folder, _entries(source, options), "writing compressed-tensors", track)
    weights = {
        "num_bits": source.spec.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": source.spec.granularity.columns,
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": sorted({"lm_head", *source.spec.skipped}),
    }
    write_config(source.directory, folder, {"dtype": source.spec.lut_dtype, "quantization_config": quantization})


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


def stated(source: Compressed, name: str, options: Options) -> tuple[Tensor, Tensor]:
    """Linears are exact; the rest has the number format of the tables."""
    exact = source.dense(name)
    return exact if source.tensors[name].linear else exact.to(getattr(torch, source.spec.lut_dtype)).float(), exact
