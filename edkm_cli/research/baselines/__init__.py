"""The methods that edkm is compared with: one published method in each file, all behind one function.

    def quantize(model, batches, *, bits, group_size, seed=0, track=no_progress, <the method's own options>) -> Outcome

`model` is a dense causal LM in float32, changed in place: every linear of the decoder stack gets the weight that the
method's stored form decodes to. `batches` is calibration text, token ids (1, length) int64 each; methods that need none
ignore it. `group_size` is the number of weights along a row that share a scale; 0 means the whole row. The clustering
methods `kmeans` and `dkm` take `granularity` instead. The result holds the size of the stored form.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from edkm_cli.errors import UserError

METHODS = {
    name: f"edkm_cli.research.baselines.{name}"
    for name in ("rtn", "gptq", "awq", "smoothquant", "kmeans", "dkm", "llm_qat", "autoround")
}


def load(name: str) -> ModuleType:
    """The module of a method, imported now. Raises UserError for a name that is not in `METHODS`."""
    if name not in METHODS:
        raise UserError(f"a method must be one of {', '.join(METHODS)}, got {name!r}")
    return import_module(METHODS[name])
