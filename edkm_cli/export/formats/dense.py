"""`dense`: a plain Hugging Face model in float16, bfloat16 or float32, which every other converter reads.

Each weight is its table entry, rounded once to the dtype. `auto` is the dtype of the tables, which rounds no entry of free
ones (bfloat16 for float8 tables, whose scale is a power of two). Rounded then are entries of palettes and embeddings, whose
numbers are products, and what is stored uncompressed in another dtype: norms, biases.

Some families (mixtures of experts) have other tensors in memory than in the files of the hub. transformers undoes its
own conversion here, decoder layer by decoder layer, and reads the export back.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edkm_cli.export.formats.folder import in_memory, is_converted, opened, rounded, write_config, write_tensors
from edkm_cli.export.formats.options import Options
from edkm_cli.export.source import Compressed
from edkm_cli.model_files import from_pretrained
from edkm_cli.progress import Track, no_progress, quiet_bars
from edkm_cli.runtime.experts import joined

_LAYER = re.compile(r"^(.*?\.\d+)\.")
_AUTO = {"float16": "float16", "float32": "float32", "int8": "float32"}  # others: bfloat16, exact for free tables


def facts(source: Compressed, options: Options) -> dict[str, Any]:
    return {"dtype": options.dtype_name(_AUTO.get(source.spec.lut_dtype, "bfloat16"))}


def write(source: Compressed, folder: Path, options: Options, track: Track = no_progress) -> None:
    """Write the model, one decoder layer after another."""
    from transformers.core_model_loading import revert_weight_conversion

    dtype, empty = getattr(torch, facts(source, options)["dtype"]), source.dense_skeleton()
    kinds, converts = {name: source.dense_dtype(name, dtype) for name in source.tensors}, is_converted(empty)

    def parts(make: Any) -> Iterator[dict[str, Tensor]]:
        for _, names in groupby(source.tensors, key=lambda name: (found := _LAYER.match(name)) and found[1]):
            part = joined(source.model, {name: make(name) for name in names})
            part = part if not converts else revert_weight_conversion(empty, part)
            yield {name: tensor.contiguous() for name, tensor in part.items()}

    meta = list(parts(lambda name: torch.empty(source.tensors[name].shape, dtype=kinds[name], device="meta")))
    announced = {name: (tensor.dtype, tuple(tensor.shape)) for part in meta for name, tensor in part.items()}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        real = parts(lambda name: rounded(source.dense(name), kinds[name], name))
        for part in track(real, "writing dense weights", len(meta)):
            yield from part.items()

    write_tensors(folder, announced, tensors())
    write_config(source.directory, folder, facts(source, options))


def read(folder: Path, options: Options) -> Iterable[tuple[str, Tensor]]:
    """(name, float32 tensor) of the dense model: as the files hold them, or where transformers converts a family's
    tensors while it loads, as it loads them."""
    _, files = opened(folder)
    tensors = ((name, files.get(name).float()) for name in files.tensors)
    return in_memory(folder, tensors, lambda empty: load(folder, options), trust_remote_code=options.trust_remote_code)


def load(folder: Path, options: Options) -> Any:
    """The model as transformers loads it."""
    trust = options.trust_remote_code
    with quiet_bars():
        return from_pretrained(folder, dtype=torch.float32, local_files_only=True, trust_remote_code=trust).eval()
