"""Rows that are other engines' models as they are: a file of llama.cpp, or a directory of mlx-lm (`convert -q`, its DWQ).

Both are decoded to the numbers that they hold, and measured as every other row is.
"""

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

from edkm_cli import models
from edkm_cli.errors import UserError, brief
from edkm_cli.export.formats import mlx
from edkm_cli.export.formats.folder import opened, read_model
from edkm_cli.export.formats.options import Options
from edkm_cli.format import TORCH_DTYPES
from edkm_cli.research.compare.config import GGUF, Entry

_GGUF_DECODER = re.compile(r"blk\.\d+\..*weight")


def facts_of(entry: Entry) -> tuple[Path, dict[str, Any]]:
    """The file or directory of an entry, and the facts of its row that headers give: `bits`, `granularity` (the commonest
    tensor type, or the group), `decoder_bits_per_weight`, `weights_bytes` and a `note`.

    Raises UserError for options, and for what is no such file.
    """
    options, gguf = dict(entry.options), entry.method == GGUF
    if set(options) != {"file"}:
        raise UserError(f"{entry.method} must be written {entry.method}:FILE, without options, got {entry.label!r}")
    path = Path(options["file"]).expanduser().absolute()
    rule = f"{entry.method}:FILE must name a {'.gguf file' if gguf else 'directory of mlx-lm'}, but {path}"
    if not (path.suffix == ".gguf" and path.is_file() if gguf else (path / "config.json").is_file()):
        raise UserError(f"{rule} is none; check the path")
    try:
        return path, (_gguf_facts if gguf else _mlx_facts)(path)
    except (OSError, ValueError, KeyError, IndexError, TypeError, ZeroDivisionError) as error:
        raise UserError(f"{rule} cannot be read as one ({brief(error)})") from error


def _gguf_facts(path: Path) -> dict[str, Any]:
    """A type's blocks hold their scales, so bits per weight are the bytes of the decoder's matrices by their weights."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    matrices = [one for one in reader.tensors if len(one.shape) > 1 and _GGUF_DECODER.fullmatch(one.name)]
    weights: Counter[str] = Counter()
    for one in matrices:
        weights[one.tensor_type.name] += int(one.n_elements)
    bits_per_weight = 8 * sum(int(one.n_bytes) for one in matrices) / sum(weights.values())
    common = weights.most_common(1)[0][0]
    bits = re.search(r"Q(\d)", common)
    mixed = ", ".join(f"{count / sum(weights.values()):.0%} {kind}" for kind, count in weights.most_common())
    ends = ("token_embd.weight", "output.weight")
    others = sorted({one.tensor_type.name for one in reader.tensors if one.name in ends})
    note = f"decoder {mixed}; embeddings {', '.join(others)}; decoded to bfloat16"
    matrix = reader.fields.get("quantize.imatrix.dataset")
    return {
        "bits": int(bits[1]) if bits else round(bits_per_weight),
        "granularity": common,
        "decoder_bits_per_weight": bits_per_weight,
        "weights_bytes": sum(int(one.n_bytes) for one in reader.tensors),
        "note": note + (f"; importance matrix from {matrix.contents()}" if matrix is not None else ""),
    }


def _mlx_facts(path: Path) -> dict[str, Any]:
    """`quantization` of config.json, and the bytes of a matrix with its scales and biases by its weights."""
    config, files = opened(path)
    usual = config["quantization"]
    sizes = {name: TORCH_DTYPES[one.dtype].itemsize * math.prod(one.shape) for name, one in files.tensors.items()}
    packed = [name.removesuffix(".scales") for name in sizes if name.endswith(".scales")]
    bits = {module: usual.get(module, usual)["bits"] for module in packed}
    layers = [module for module in bits if ".layers." in module]
    stored = sum(sizes.get(f"{module}.{leaf}", 0) for module in layers for leaf in ("weight", "scales", "biases"))
    others = ", ".join(f"at {bits[module]} bits" for module in bits.keys() - layers) or "as they came"
    return {
        "bits": usual["bits"],
        "granularity": f"group:{usual['group_size']}",
        "decoder_bits_per_weight": stored / sum(sizes[f"{module}.weight"] / bits[module] for module in layers),
        "weights_bytes": sum(sizes.values()),
        "note": f"embeddings {others}; decoded to float32",
    }


def opened_model(settings: dict[str, Any]) -> Any:
    """The model of a row, decoded. Raises UserError for one that is not of the compared model's sizes."""
    path = Path(settings["file"])
    source = models.resolve(str(path))
    configs = [models.load_config(models.resolve(settings["model"])), models.load_config(source, may_be_quantized=True)]
    for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
        wanted, given = (getattr(config.get_text_config(), name, None) for config in configs)
        if wanted != given:
            raise UserError(f"{path} must be a file of {settings['model']}, but its {name} is {given}, not {wanted}")
    if settings["method"] == GGUF:
        return models.load_dense(source, dtype="float32", device=settings["device"], progress=False)
    return read_model(path, mlx.read(path, Options())).to(settings["device"])
