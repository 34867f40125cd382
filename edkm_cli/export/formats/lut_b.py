"""`lut-b` (experimental): tables for the LUT-B units of NVIDIA's Rubin, as a draft of compressed-tensors stores them.

The draft is pull request 801 of vllm-project/compressed-tensors at 383dfe2 (July 2026), not merged. A linear P of shape
(out, in) stores, for each tile of 8 x 64 weights,

    P.weight_packed    uint8 (out / 8, in / 64, 192): the 512 indices of a tile row by row, three bits each, the first in the
                       lowest bits
    P.weight_codebook  float8_e4m3fn (out / 8, in / 64, 8): its table, ascending
    P.bias             a plain tensor, if there is one

and everything else stays plain. A tile's rows are 24 bytes each of our packed rows, so that indices are moved by bytes.
An expert's matrices are linears of the names that the family's files have, gates and what they gate apart, as llm-compressor
writes them. The one scale of `--target lut-b`, and where it goes: docs/export.md, "lut-b".
"""

import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edkm_cli.errors import UserError
from edkm_cli.export.formats.folder import Entry, in_memory, read_packed
from edkm_cli.export.formats.options import Options
from edkm_cli.export.source import Compressed, DenseTensor, Described
from edkm_cli.initialize.sharded import Place

DRAFT = "compressed-tensors pull request 801 at 383dfe2, 2026-07-29"
_ROWS, _COLUMNS, _ENTRIES, _BITS = 8, 64, 8, 3
_TILE_BYTES = _ROWS * _COLUMNS * _BITS // 8
_DECODER_LINEAR = re.compile(r"\.layers\.\d+\.(.*_proj(\.\d+)?(\.weight)?|mlp\.gate\.weight)$")  # routers, too
_RESIDUAL_BIAS = re.compile(r"\.layers\.\d+\..*\.(o_proj|down_proj)\.bias$")
_INNER_NORM = re.compile(r"\.layers\.\d+\.(input_layernorm|post_attention_layernorm)\.weight$")


def check(source: Described, options: Options | None) -> None:
    """Matrices that files hold apart, of whole tiles."""
    for tensor in source.tensors.values():
        names, expert, *_ = source.places.get(tensor.name, Place(()))
        if not names or expert is not None or (tensor.linear and tensor.shape[0] % (_ROWS * len(names))):
            rule = "lut-b holds experts whose matrices are apart in files of their family, and of whole tiles"
            found = f"{tensor.name} of {source.config.model_type} is not"
            raise UserError(f"{rule}, but {found}; compress with --experts dense, or export --to dense")


def facts(source: Compressed, options: Options) -> dict[str, Any]:
    return {
        "dtype": options.dtype_name(),
        "draft": DRAFT,
        "scale_moved": _scale(source),
        "notes": [f"experimental: the format is a draft ({DRAFT}) and may change; no released runtime reads it"],
    }


def entries(source: Compressed, tensor: DenseTensor, options: Options) -> Iterator[Entry]:
    """What is stored of a tensor of the dense model, in as many parts as the files of its family have of it."""
    path, names = tensor.module, source.places[tensor.name].names
    wholes = [Entry("", getattr(torch, options.dtype_name()), tensor.shape, lambda: _scaled(source, tensor.name))]
    if tensor.linear:
        tiles = (tensor.shape[0] // _ROWS, tensor.shape[1] // _COLUMNS)
        packed, codebook, table = (*tiles, _TILE_BYTES), (*tiles, _ENTRIES), torch.float8_e4m3fn
        wholes = [
            Entry("_packed", torch.uint8, packed, lambda: tiled_bytes(source.stored(f"{path}.indices"))),
            Entry("_codebook", table, codebook, lambda: source.stored(f"{path}.lut").view(codebook)),
        ]
    for whole in wholes:
        rows = (whole.shape[0] // len(names), *whole.shape[1:])
        for part, name in enumerate(names):
            yield Entry(name + whole.name, whole.dtype, rows, partial(_rows, whole, part, len(names)))


def _rows(whole: Entry, part: int, parts: int) -> Tensor:
    return whole.make().chunk(parts)[part]


def settings(source: Compressed, folder: Path, options: Options) -> dict[str, Any]:
    scale = _scale(source)
    places = [source.places[f"{name}.weight"] for name in source.spec.skipped if f"{name}.weight" in source.places]
    dense = {part.removesuffix(".weight") for place in places for part in place.names}
    block = {"strategy": "block", "block_structure": [_ROWS, _COLUMNS]}
    weights = {"type": "codebook", "num_bits": _BITS, **block, "symmetric": True, "dynamic": False}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "lut-b",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "format": "lut-b"}},
        "ignore": sorted({"lm_head", *dense}),
    }
    moved = {} if scale == 1.0 else {"rms_norm_eps": source.config.rms_norm_eps / scale**2}
    return {"dtype": options.dtype_name(), "quantization_config": quantization, **moved}


def tiled_bytes(packed: Tensor) -> Tensor:
    """(..., out, in * 3 / 8) uint8, packed row by row -> (..., out / 8, in / 64, 192) uint8, packed tile by tile."""
    tiles = packed.unflatten(-1, (-1, _COLUMNS * _BITS // 8)).unflatten(-3, (-1, _ROWS))  # (..., 8, in / 64, 24)
    return tiles.transpose(-3, -2).flatten(-2)


def read(folder: Path, options: Options) -> Iterable[tuple[str, Tensor]]:
    """(name, float32 tensor) of the dense model, index by index."""
    tensors = read_packed(folder, "weight_packed", "weight_codebook", decoded)

    def load(empty: Any) -> Any:
        return type(empty).from_pretrained(None, config=empty.config, state_dict=dict(tensors), dtype=torch.float32)

    return in_memory(folder, tensors, load, trust_remote_code=options.trust_remote_code)


def decoded(packed: Tensor, codebook: Tensor) -> Tensor:
    """The weight (..., out, in) float32 of tiles (..., out / 8, in / 64, 192) uint8 and tables (..., 8) of E4M3.

    Element e of a tile is weight (e // 64, e % 64) of it, with the index in bits 3 e to 3 e + 2 of its bytes.
    """
    element = torch.arange(_ROWS * _COLUMNS)
    index = torch.zeros(*packed.shape[:-1], element.numel(), dtype=torch.int64)
    for bit in range(_BITS):
        place = _BITS * element + bit
        index |= ((packed[..., place // 8].long() >> (place % 8)) & 1) << bit
    values = codebook.float().gather(-1, index).unflatten(-1, (_ROWS, _COLUMNS))  # (..., out / 8, in / 64, 8, 64)
    return values.transpose(-3, -2).flatten(-2).flatten(-3, -2)


def stated(source: Compressed, name: str, options: Options) -> tuple[Tensor, Tensor]:
    """The source's tensor times its power of two; tables are exact, the rest has the dtype of the options."""
    exact = _scaled(source, name)
    if source.tensors[name].linear:
        return exact, exact
    return exact.to(getattr(torch, options.dtype_name())).float(), exact


def _scale(source: Compressed) -> float:
    return source.scale(source.linears[0].module)


def _scaled(source: Compressed, name: str) -> Tensor:
    """A tensor, multiplied so that the model computes the same with all tables divided by the scale."""
    scale, factor = _scale(source), 1.0
    divided = source.tensors[name].linear or name.endswith("embed_tokens.weight")
    before_tied_head = name == "model.norm.weight" and getattr(source.config, "tie_word_embeddings", False)
    if divided or _DECODER_LINEAR.search(name) or _RESIDUAL_BIAS.search(name):
        factor = 1.0 / scale
    elif before_tied_head or _INNER_NORM.search(name):
        factor = scale
    return source.dense(name) * factor
