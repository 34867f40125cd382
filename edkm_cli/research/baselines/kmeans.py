"""K-means after training: SqueezeLLM's dense part (arXiv 2306.07629, section 4.1).

Each weight becomes the nearest of 2**bits values that its row shares. The values are chosen by k-means, in which each
weight counts by its entry of the diagonal of the Fisher matrix: how much an error in it raises the loss. This is also
the start of `edkm compress --start kmeans`. The paper's sparse part (the largest and the most sensitive weights kept in
16 bits) is left out.

`importance="activation"` takes the mean squared input of a weight's column for the Fisher diagonal; `none` weighs all alike.
"""

from dataclasses import replace

from edkm_cli.research.baselines import dkm
from edkm_cli.research.baselines.outcome import Outcome, Task


def quantize(
    task: Task, *, granularity: str = "row:1", lut_dtype: str = "float16", importance: str = "gradient"
) -> Outcome:
    """Cluster a model's decoder linears in place: what `dkm`, which explains these options, starts from.

    Raises UserError for bits, a geometry, a LUT dtype or an importance that is unknown or does not fit.
    """
    outcome = dkm.quantize(task, steps=0, granularity=granularity, lut_dtype=lut_dtype, importance=importance)
    return replace(outcome, note={"activation": "by squared inputs", "none": "not weighted"}.get(importance, ""))
