"""What edkm is compared with: one published method a file, all behind one function.

    def quantize(model, batches, *, bits, group_size, seed=0, track=no_progress, <the method's own options>) -> Outcome

`model` is a dense causal LM in float32, changed in place: every linear of the decoder stack gets the weight that the
method's stored form decodes to. `batches` is calibration text, token ids (1, length) int64 each; methods that need none
take it and leave it alone. `group_size` counts the weights along a row that share a scale, 0 is one group a row; the
clustering methods `kmeans` and `dkm` have `granularity` in its place. The result says what the stored form weighs.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from edkm_cli.errors import UserError

METHODS = {
    name: f"edkm_cli.baselines.{name}" for name in ("rtn", "gptq", "awq", "smoothquant", "kmeans", "dkm", "llm_qat")
}


def load(name: str) -> ModuleType:
    """The module of a method, imported now. Raises UserError for a name that is not in `METHODS`."""
    if name not in METHODS:
        raise UserError(f"a method must be one of {', '.join(METHODS)}, got {name!r}")
    return import_module(METHODS[name])
