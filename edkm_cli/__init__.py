"""edkm: compress LLaMA-family models to 3-bit palettized weights while fine-tuning them.

Importing this package imports no torch; its public names load what they need when they are first used.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__ = ["UserError", "__version__", "load"]
_HOMES = {"UserError": "edkm_cli.errors", "load": "edkm_cli.hf"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'edkm_cli' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
