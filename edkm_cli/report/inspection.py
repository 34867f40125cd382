"""`edkm inspect`: what a compressed checkpoint holds, from its files' headers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from edkm_cli.evaluate.size import footprint
from edkm_cli.export.source import Compressed
from edkm_cli.models import weight_files_bytes
from edkm_cli.nn.swap import is_tied
from edkm_cli.runtime.palettized import PALETTIZED, PalettizedLinear
from edkm_cli.summaries import megabytes, table


def inspect_checkpoint(directory: str | Path, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """Verify a compressed directory and describe it. Raises UserError if it is none or damaged."""
    source = Compressed(directory, trust_remote_code=trust_remote_code)
    return describe(source)


def describe(source: Compressed) -> dict[str, Any]:
    """What a checkpoint holds: what `edkm inspect --json` writes."""
    model, spec, layers = source.model, source.spec, []
    size = footprint(model)
    for name, module in model.named_modules():
        if not isinstance(module, PALETTIZED):
            continue
        buffers = {key: buffer.numel() * buffer.element_size() for key, buffer in module.named_buffers(recurse=False)}
        layer: dict[str, Any] = {"name": name, "kind": type(module).__name__, "bytes": buffers}
        if isinstance(module, PalettizedLinear):
            shape = (module.out_features, module.in_features)
            layer |= {
                "shape": list(shape),
                "bits": spec.bits_of(name),
                "luts": spec.granularity_of(name).groups(*shape),
            }
            layer |= {"granularity": spec.module_granularity[name]} if name in spec.module_granularity else {}
        else:
            layer |= {"shape": [module.rows, module.columns], "bits": module.bits, "luts": 0}
        layers.append(layer)
    return {
        "directory": str(source.directory),
        "quantization_config": {key: value for key, value in spec.to_mapping().items() if key != "quant_method"},
        "architecture": type(model).__name__,
        "tied_embeddings": is_tied(model),
        "weights_bytes": weight_files_bytes(source.directory),
        "decoder_bits_per_weight": size.decoder_bits_per_weight,
        "model_bits_per_weight": size.model_bits_per_weight,
        "layers": layers,
    }


def format_inspection(result: dict[str, Any]) -> str:
    """The description as text: totals, then a line for each layer."""
    spec = result["quantization_config"]
    rows = [
        [layer["name"], "x".join(map(str, layer["shape"])), str(layer["bits"]), str(layer["luts"] or "-"),
         f"{sum(layer['bytes'].values()):,}"]
        for layer in result["layers"]
    ]  # fmt: skip
    of_embeddings = [layer["bits"] for layer in result["layers"] if not layer["luts"]]
    embeddings = f"{of_embeddings[0]} bits" if of_embeddings else "dense"
    embeddings += f" in groups of {spec['embedding_group']}" if spec.get("embedding_group") else ""
    widths = sorted({spec["bits"], *spec.get("module_bits", {}).values()})
    bits = f"{widths[0]} to {widths[-1]} bits" if len(widths) > 1 else f"{spec['bits']} bits"
    tables = f"scales of {spec['palette']} tables" if "palette" in spec else "LUTs"
    tied = "tied" if result["tied_embeddings"] else "not tied"
    others = [layer["granularity"] for layer in result["layers"] if "granularity" in layer]
    tiles = ", ".join([spec["granularity"], *(f"{text} in {count}" for text, count in Counter(others).items())])
    return "\n".join(
        [
            f"{result['directory']}: {result['architecture']}, {bits}, {tiles}, "
            f"{spec['lut_dtype']} {tables}, embeddings {embeddings} ({tied}), format {spec['format_version']}",
            f"{megabytes(result['weights_bytes'])}, decoder {result['decoder_bits_per_weight']:.3f} bits per weight, "
            f"whole model {result['model_bits_per_weight']:.3f}",
            "",
            table(rows, header=["module", "shape", "bits", "LUTs", "bytes"]),
        ]
    )
