"""`compressed-tensors`: the directory that vLLM and transformers open: `pack-quantized` (`w4a16` and the like), and FP4.

A linear P of shape (out, in) with b bits stores

    P.weight_packed  int32 (out, in * b / 32): a row's codes as one little-endian bit stream, which is what a row of our
                     packed indices is (docs/format.md); a code is the level plus 2^(b-1)
    P.weight_scale   (out, in / group) in the tables' number format: group 32, 64 or 128
    P.weight_shape   int64 (2): out, in

or, of FP4 (`mxfp4-pack-quantized`, `nvfp4-pack-quantized`),

    P.weight_packed  uint8 (out, in / 2): two codes, the even column in the low half
    P.weight_scale   uint8 (out, in / 32): powers of two, of which 127 is one; or E4M3 (out, in / 16)
    P.weight_global_scale  float32 (1), beside E4M3: what scales are divided by; one for all matrices here, so that an
                     engine can join those that it computes together

and everything else, embeddings among it, is a plain tensor, in the number format of scales that have 16 bits. `read`
follows the library's text, which from 0.18 on packs codes across words.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edkm_cli.export.formats.folder import Entry, codes_in, fp4_codes, fp4_scales, fp4_weight, opened, scaled, target_of
from edkm_cli.export.formats.options import Options
from edkm_cli.export.source import Compressed, DenseTensor

# How the library calls scales of FP4: their dtype and what shares one.
_FP4 = {"mxfp4": (torch.uint8, "group"), "nvfp4": (torch.float8_e4m3fn, "tensor_group")}
_WHOLE = "pack-quantized"


def facts(source: Compressed, options: Options) -> dict[str, Any]:
    plain = options.dtype_name("bfloat16") if _kind(source) in _FP4 else source.spec.lut_dtype
    return {"dtype": plain, "notes": ["vllm serve DIRECTORY"]}


def _kind(source: Compressed) -> str:
    return target_of("compressed-tensors", source)


def entries(source: Compressed, tensor: DenseTensor, options: Options) -> Iterator[Entry]:
    if not tensor.linear:
        return
    bits, dtype, path, (rows, columns) = source.spec.bits, source.spec.torch_lut_dtype, tensor.module, tensor.shape
    scales = (rows, columns // source.spec.granularity.tile(rows, columns)[1])
    if (kind := _kind(source)) in _FP4:
        dtype, _ = _FP4[kind]
        yield Entry(f"{path}.weight_packed", torch.uint8, (rows, columns // 2), lambda: fp4_codes(source, path))
        yield Entry(f"{path}.weight_scale", dtype, scales, lambda: fp4_scales(source, path).view(dtype))
        if kind == "nvfp4":
            divisor = torch.tensor([1 / source.scale(path)])
            yield Entry(f"{path}.weight_global_scale", torch.float32, (1,), lambda: divisor)
        return
    yield Entry(f"{path}.weight_packed", torch.int32, (rows, columns * bits // 32), lambda: source.words(path))
    yield Entry(f"{path}.weight_scale", dtype, scales, lambda: source.numbers(path)[0])
    yield Entry(f"{path}.weight_shape", torch.int64, (2,), lambda: torch.tensor([rows, columns]))


def settings(source: Compressed, folder: Path, options: Options) -> dict[str, Any]:
    kind, spec = _kind(source), source.spec
    weights: dict[str, Any] = {"num_bits": spec.bits, "symmetric": True, "group_size": spec.granularity.columns}
    if kind in _FP4:
        dtype, strategy = _FP4[kind]
        weights |= {"type": "float", "strategy": strategy, "scale_dtype": str(dtype), "zp_dtype": str(dtype)}
    else:
        weights |= {"type": "int", "strategy": "group"}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-{_WHOLE}" if kind in _FP4 else _WHOLE,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": sorted({"lm_head", *spec.skipped}),
    }
    return {"dtype": facts(source, options)["dtype"], "quantization_config": quantization}


def read(folder: Path, options: Options) -> Iterator[tuple[str, Tensor]]:
    """(name, float32 tensor) of the dense model, by the library's rules."""
    config, files = opened(folder)
    quantization = config["quantization_config"]
    bits = quantization["config_groups"]["group_0"]["weights"]["num_bits"]
    for name in files.tensors:
        path, _, leaf = name.rpartition(".")
        if leaf == "weight_packed":
            packed, scales = files.get(name), files.get(f"{path}.weight_scale")
            if quantization["format"] == _WHOLE:
                _, columns = files.get(f"{path}.weight_shape").tolist()
                weight = scaled(codes_in(packed, bits, columns) - 2 ** (bits - 1), scales.float())
            elif scales.dtype == torch.uint8:
                weight = fp4_weight(packed.view(torch.int32), scales.view(torch.float8_e8m0fnu).float())
            else:
                weight = fp4_weight(packed.view(torch.int32), scales.float() / files.get(f"{path}.weight_global_scale"))
            yield f"{path}.weight", weight
        elif not leaf.startswith("weight_"):
            yield name, files.get(name).float()
