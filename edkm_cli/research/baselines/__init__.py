"""The methods that edkm is compared with: one published method in each file, all behind one function.

    def quantize(task, *, <the method's own options>) -> Outcome

The model of the task is changed in place: every linear of the decoder stack gets the weight that the method's stored form
decodes to. Methods that need no calibration text ignore it; the clustering methods `kmeans` and `dkm` take `granularity`
in place of `group_size`. The result holds the size of the stored form.
"""

from importlib import import_module
from types import ModuleType

from edkm_cli.errors import UserError

METHODS = ("rtn", "gptq", "awq", "smoothquant", "kmeans", "dkm", "llm_qat", "autoround")

SHARED = {"bits": int, "group_size": int, "seed": int}  # the settings of a task


def load(name: str) -> ModuleType:
    """The module of a method, imported now. Raises UserError for a name that is not in `METHODS`."""
    if name not in METHODS:
        raise UserError(f"a method must be one of {', '.join(METHODS)}, got {name!r}")
    return import_module(f"{__name__}.{name}")
