"""`edkm inspect`: what a compressed checkpoint holds, from its files' headers; and with `--verify`, whether every byte of it
is what export wrote, and whether it says the truth about itself.

`integrity.check_checkpoint` looks at headers and checksums. To verify, the tensors are read, too: each must have the sha256
and the statistics that export recorded in tensors.json, tables must be finite and ascending, padding zero, and the sizes
in report.json those of the files. What is not recorded cannot be verified, and that is said, too.
"""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from edkm_cli.errors import UserError
from edkm_cli.evaluate.size import footprint
from edkm_cli.export.checkpoint import RECORD, tensor_record
from edkm_cli.export.source import Compressed
from edkm_cli.files import CHECKSUMS, read_json
from edkm_cli.integrity import AGAIN
from edkm_cli.model_files import weight_files_bytes
from edkm_cli.nn.swap import is_tied
from edkm_cli.packing import as_numbers, unpack
from edkm_cli.runtime.palettized import PalettizedLinear


def describe(source: Compressed) -> dict[str, Any]:
    """What a checkpoint holds: what `edkm inspect --json` writes."""
    model, spec, layers = source.model, source.spec, []
    size = footprint(model)
    for name, module in source.packed.items():
        buffers = {key: buffer.numel() * buffer.element_size() for key, buffer in module.named_buffers(recurse=False)}
        linear, shape = isinstance(module, PalettizedLinear), [module.rows, module.columns]
        bits = module.bits if linear or not spec.embedding_rows else spec.embedding_widths
        layer = {"name": name, "kind": type(module).__name__, "bytes": buffers, "shape": shape, "bits": bits}
        layer["luts"] = spec.granularity_of(name).groups(*shape) if linear else 0
        layer |= {"granularity": spec.module_granularity[name]} if name in spec.module_granularity else {}
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


def verify(source: Compressed) -> dict[str, Any]:
    """Read a whole checkpoint and compare it with what export recorded; returns the counts of what was compared.

    Raises UserError naming the first thing that differs, or the record that is missing.
    """
    directory = source.directory
    for name in (CHECKSUMS, RECORD):
        if not (directory / name).is_file():
            raise UserError(f"{directory} holds no {name}, so it cannot be verified; {AGAIN}")
    recorded = read_json(directory / RECORD, remedy=AGAIN)
    stored = source.files.tensors
    for name in stored:
        tensor = source.stored(name)
        if recorded.get(name) != json.loads(json.dumps(tensor_record(tensor))):
            raise UserError(f"{directory}: {name[:100]} is not the tensor that export recorded in {RECORD}; {AGAIN}")
        _check_values(directory, name, tensor, source.packed.get(name.rpartition(".")[0]))
    if len(stored) != len(recorded):
        raise UserError(f"{directory / RECORD} lists {len(recorded)} tensors, files hold {len(stored)}; {AGAIN}")
    return {"tensors": len(recorded), "report": _check_report(source)}


def _check_values(directory: Path, name: str, tensor: Tensor, module: Any) -> None:
    """What holds for tensors of any checkpoint, whoever recorded them, beside being finite."""
    leaf = name.rpartition(".")[2]
    if leaf == "lut" and isinstance(module, PalettizedLinear) and not bool((as_numbers(tensor).diff(dim=1) >= 0).all()):
        raise UserError(f"{directory}: the entries of {name} must ascend, but do not; {AGAIN}")
    if leaf.startswith("indices") and module is not None:
        linear = isinstance(module, PalettizedLinear)
        bits = module.bits if linear else next(part.bits for part in module.row_parts if part.leaf == leaf)
        if (used := module.columns * bits % 8) and bool((tensor[:, -1] >> used).any()):
            raise UserError(f"{directory}: the last bits of the rows of {name} must be zero, but are not; {AGAIN}")
        if not linear and not module.signs_scales and not bool(unpack(tensor, bits, module.columns).all()):
            raise UserError(f"{directory}: {name} holds index 0, which an embedding does not use; {AGAIN}")


def _check_report(source: Compressed) -> bool:
    """Compare the sizes in report.json with the files'; False where there is no report."""
    if not (path := source.directory / "report.json").is_file():
        return False
    report, facts = read_json(path, remedy=AGAIN), describe(source)
    for key in ("weights_bytes", "decoder_bits_per_weight", "model_bits_per_weight"):
        said, actual = report.get(key), facts[key]
        if not isinstance(said, (int, float)) or not abs(said - actual) <= 1e-6 * actual:
            raise UserError(f"{path} says {key} {str(said)[:40]}, but it is {actual}; {AGAIN}")
    return True
