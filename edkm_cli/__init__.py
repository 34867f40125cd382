"""edkm: compress LLaMA-family models to 3-bit palettized weights while fine-tuning them.

Importing this package imports no torch; its public names load what they need when they are first used.
"""

from typing import Any

__version__ = "0.1.0"
__all__ = ["UserError", "__version__", "load"]


def __getattr__(name: str) -> Any:
    if name == "load":
        from edkm_cli.hf import load

        return load
    if name == "UserError":
        from edkm_cli.errors import UserError

        return UserError
    raise AttributeError(f"module 'edkm_cli' has no attribute {name!r}")
