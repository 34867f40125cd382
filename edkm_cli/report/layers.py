"""Figures of the weights for the page: bytes by part, the error of each layer, histograms with table entries.

Two safetensors files are read side by side, one layer at a time, so memory holds a layer of each and no model. The
original is used only if it is on this machine; it is never downloaded.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edkm_cli import models
from edkm_cli.errors import UserError
from edkm_cli.export.ownership import listing
from edkm_cli.export.source import Compressed
from edkm_cli.initialize.sharded import StoredModel
from edkm_cli.model_files import files_digest
from edkm_cli.progress import Track, no_progress
from edkm_cli.report.inspection import describe
from edkm_cli.report.read import RunFiles

_BINS = 72
_SPREAD = 4.0  # histograms reach so many standard deviations to either side


@dataclass(frozen=True)
class Histogram:
    """Counts of a linear's original weights in equal bins from `low` to `high`, and its LUT's entries as (lower quartile,
    median, upper quartile) over the layer's LUTs; with one LUT the three are the same."""

    name: str
    low: float
    high: float
    counts: list[float]
    entries: list[tuple[float, float, float]]
    luts: int


@dataclass(frozen=True)
class Weights:
    """Bytes by part, compressed and in 16 bits; each linear's error, ||w - w~||^2 / ||w||^2, and histograms of some, or in
    `missing` why there are none."""

    stored_bytes: dict[str, int]
    original_bytes: dict[str, int]
    errors: dict[str, float] = field(default_factory=dict)
    histograms: list[Histogram] = field(default_factory=list)
    missing: str = ""


def measure_weights(run: RunFiles, *, trust_remote_code: bool = False, track: Track = no_progress) -> Weights:
    """Measure the checkpoint of a finished run against the model that it was made from.

    Raises UserError if the checkpoint is damaged; where only the original is missing, `missing` says so.
    """
    compressed = Compressed(run.directory, trust_remote_code=trust_remote_code)
    stored, dense = _parts(describe(compressed), run.report["original_weights_bytes"])
    linears = [tensor.module for tensor in compressed.linears]
    errors, histograms = {}, []
    try:
        directory, split = _original_directory(run), compressed.spec.split_experts
        reference = StoredModel(compressed.dense_skeleton(), directory, split=split)
        sample = set(_representative(linears))
        for name in track(linears, "comparing layers", len(linears)):
            given, restored = reference.get(f"{name}.weight"), compressed.dense(f"{name}.weight")
            if given.shape != restored.shape or given.dtype.itemsize < 2:
                was = f"{tuple(given.shape)} {given.dtype}"
                raise UserError(f"{name} is {tuple(restored.shape)}, but {was} before: another model, or quantized?")
            weight = given.float()
            errors[name] = relative_squared_error(weight, restored)
            if name in sample:
                histograms.append(_histogram(name, weight, compressed.table(name)))
    except UserError as error:
        return Weights(stored, dense, missing=str(error))
    return Weights(stored, dense, errors, histograms)


def relative_squared_error(weight: Tensor, restored: Tensor) -> float:
    """||w - w~||^2 / ||w||^2 of two matrices, rows summed in float32, their sums in float64."""
    difference = (weight - restored).square_().sum(1).double().sum()
    return float(difference / weight.square().sum(1).double().sum().clamp_min(1e-30))


def place(name: str) -> tuple[str, str]:
    """(kind, number of the decoder layer or "-") of a module path.

    >>> place("model.layers.3.mlp.up_proj")
    ('up_proj', '3')
    """
    layer = re.search(r"\.(\d+)\.", name)
    return re.sub(r"\.\d+$", "", name).rpartition(".")[2], layer[1] if layer else "-"


def _original_directory(run: RunFiles) -> Path:
    """Where the original's safetensors files are. Raises UserError where they are not on this machine, or others now."""
    name = run.report["model"]
    source = models.resolve(name, run.settings.get("revision"))
    if source.gguf_file and not source.architecture:
        raise UserError(f"{name} is a GGUF file, which cannot be read tensor by tensor")
    if source.is_local:
        directory = models.safetensors_directory(source)
    else:
        try:
            directory = models.safetensors_directory(source, fetch=False)
        except UserError as error:
            raise UserError(f"the original model {source.location} is not on this machine") from error
    if not any(directory.glob("*.safetensors")):
        raise UserError(f"{directory} holds no safetensors files")
    known = (listing(run.directory).get("identity") or {}).get("model_sha256")
    if known is not None and source.path is not None and files_digest(source.path) != known:
        raise UserError(f"{name} is not the model that was compressed: it has changed, or is another directory's")
    return directory


def _representative(names: list[str]) -> list[str]:
    """Of each kind the first, the middle and the last layer."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(place(name)[0], []).append(name)
    return [paths[index] for paths in kinds.values() for index in sorted({0, len(paths) // 2, len(paths) - 1})]


def _histogram(name: str, weight: Tensor, lut: Tensor) -> Histogram:
    centre, reach = float(weight.mean()), _SPREAD * float(weight.std()) or 1e-6
    counts = torch.histc(weight, bins=_BINS, min=centre - reach, max=centre + reach)
    rows = lut[torch.linspace(0, lut.shape[0] - 1, min(lut.shape[0], 4096)).long()]  # quantile takes so many
    low, middle, high = rows.quantile(torch.tensor([0.25, 0.5, 0.75]), dim=0)
    entries = list(zip(low.tolist(), middle.tolist(), high.tolist(), strict=True))
    return Histogram(name, centre - reach, centre + reach, counts.tolist(), entries, lut.shape[0])


def _parts(inspected: dict[str, Any], original_bytes: int) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes by part of the checkpoint, and of the original in 16 bits. What is left of the files is dense (and headers)."""
    stored = dict.fromkeys(("indices", "LUTs", "embeddings"), 0)
    dense = dict.fromkeys(("decoder linears", "embeddings"), 0)
    for layer in inspected["layers"]:
        rows, columns = layer["shape"]
        if layer["kind"] == "PalettizedLinear":
            stored["indices"] += layer["bytes"]["indices"]
            stored["LUTs"] += sum(layer["bytes"].values()) - layer["bytes"]["indices"]
            dense["decoder linears"] += 2 * rows * columns
        elif layer["bytes"]:  # a tied head stores nothing
            stored["embeddings"] += sum(layer["bytes"].values())
            dense["embeddings"] += 2 * rows * columns
    stored["dense rest"] = max(inspected["weights_bytes"] - sum(stored.values()), 0)
    dense["dense rest"] = max(original_bytes - sum(dense.values()), 0)
    return stored, dense
