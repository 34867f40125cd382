"""K-means after training: SqueezeLLM's dense part (arXiv 2306.07629, section 4.1).

Each weight becomes the nearest of 2**bits values that its row shares. The values are chosen by k-means, in which each
weight counts by its entry of the diagonal of the Fisher matrix: how much an error in it raises the loss. This is also
the start of `edkm compress --start kmeans`. The paper's sparse part (the largest and the most sensitive weights kept in
16 bits) is left out.

`importance="activation"` takes the mean squared input of a weight's column instead of the Fisher diagonal; `none` weighs
all alike.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from edkm_cli.progress import Track, no_progress
from edkm_cli.research.baselines import dkm
from edkm_cli.research.baselines.outcome import Outcome


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
    """Cluster a model's decoder linears in place: what `dkm` starts from. `group_size` and `seed` are not used.

    Args:
        granularity: which weights share a LUT: `tensor`, `row:G` or `block:RxC`.
        lut_dtype: of the stored LUT entries.
        importance: `gradient`, `activation` or `none`; the first two are measured on `batches`.

    Raises UserError for bits, a geometry, a LUT dtype or an importance that is unknown or does not fit.
    """
    options: dict[str, Any] = {"granularity": granularity, "lut_dtype": lut_dtype, "importance": importance}
    outcome = dkm.quantize(model, batches, bits=bits, steps=0, track=track, **options)
    return replace(
        outcome, note={"activation": "weighted by squared inputs", "none": "not weighted"}.get(importance, "")
    )
