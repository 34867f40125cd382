"""K-means after training: SqueezeLLM's dense part (arXiv 2306.07629, section 4.1).

Each weight becomes the nearest of 2**bits values that its row shares. The values are chosen by k-means, in which each
weight counts by its entry of the diagonal of the Fisher matrix: how much an error in it raises the loss. This is also
the start of `edkm compress --start kmeans`. The paper's sparse part (the largest and the most sensitive weights kept in
16 bits) is left out.

`importance="activation"` takes the mean squared input of a weight's column instead of the Fisher diagonal; `none` weighs
all alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from edkm_cli.clustering import kmeans_start, parse_lut_dtype, snap
from edkm_cli.distributed import World
from edkm_cli.granularity import Granularity
from edkm_cli.initialize.importance import collect_importance
from edkm_cli.packing import packed_width
from edkm_cli.progress import Track, no_progress
from edkm_cli.research.baselines.outcome import Outcome, check_bits, decoder_linears


def quantize(
    model: Any,
    batches: list[Tensor],
    *,
    bits: int,
    group_size: int = 0,
    seed: int = 0,
    track: Track = no_progress,
    granularity: str = "row:1",
    lut_dtype: str = "float16",
    importance: str = "gradient",
) -> Outcome:
    """Cluster a model's decoder linears in place; `group_size` and `seed` are not used.

    Args:
        granularity: which weights share a LUT: `tensor`, `row:G` or `block:RxC`.
        lut_dtype: of the stored LUT entries.
        importance: `gradient`, `activation` or `none`; the first two are measured on `batches`.

    Raises UserError for bits, a geometry, a LUT dtype or an importance that is unknown or does not fit.
    """
    check_bits(bits)
    layers = decoder_linears(model)
    count = count_luts(layers, bits=bits, granularity=granularity, lut_dtype=lut_dtype)
    device = next(model.parameters()).device
    used = batches if importance != "none" else []
    importances = collect_importance(
        model, list(layers), used, kind=importance, world=World(device=str(device)), track=track
    )
    for name, layer in track(layers.items(), "k-means", len(layers)):
        weight, mass = layer.weight.detach(), importances.pop(name, None)
        centroids = kmeans_start(weight, 2**bits, granularity=granularity, importance=mass, name=name)
        weight.copy_(snap(weight, centroids, granularity=granularity, lut_dtype=lut_dtype, name=name))
    note = {"gradient": "", "activation": "weighted by squared inputs", "none": "not weighted"}[importance]
    return Outcome(*count, calibration_tokens=sum(batch.numel() for batch in used), note=note)


def count_luts(layers: Mapping[str, nn.Linear], *, bits: int, granularity: str, lut_dtype: str) -> tuple[float, int]:
    """(bits per weight, stored bytes) of layers whose weights are indices into LUTs. Raises UserError for a bad geometry."""
    geometry, dtype = Granularity.parse(granularity), parse_lut_dtype(lut_dtype)
    assert dtype is not None
    total_bits = weights = stored_bytes = 0
    for name, layer in layers.items():
        rows, columns = layer.weight.shape
        entries = geometry.groups(rows, columns, layer=name) * 2**bits
        total_bits += rows * columns * bits + entries * 8 * dtype.itemsize
        stored_bytes += rows * packed_width(columns, bits) + entries * dtype.itemsize
        weights += rows * columns
    return total_bits / weights, stored_bytes
