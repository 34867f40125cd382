"""What `edkm export` is given beside the format, and the number format of what has no lookup tables."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from edkm_cli.errors import UserError

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Options:
    """Settings of an export.

    Attributes:
        dtype: of tensors that the format stores as plain numbers: `auto`, `float16`, `bfloat16` or `float32`.
        sequence_length: `coreml`: tokens of a call, `N`, or a range, `1-N`.
        cache: `coreml`: keep keys and values of earlier tokens in the model's state.
        base_gguf: `gguf`: a file whose metadata are taken over.
        context: tokens of the windows that perplexity will be measured on; None: it will not.
        trust_remote_code: run the Python files of a checkpoint whose model is none of transformers' own.
    """

    dtype: str = "auto"
    sequence_length: str = "1-1024"
    cache: bool = False
    base_gguf: Path | None = None
    context: int | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", *DTYPES):
            raise UserError(f"--dtype must be one of auto, {', '.join(DTYPES)}, got {self.dtype!r}")

    def dtype_name(self, auto: str = "float32") -> str:
        """The dtype's name, where `auto` stands for the one given."""
        return auto if self.dtype == "auto" else self.dtype

    def torch_dtype(self, auto: str = "float32") -> torch.dtype:
        """The dtype, where `auto` stands for the one given."""
        return DTYPES[self.dtype_name(auto)]


def rounded(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """A tensor in `dtype`. Raises UserError where a number is too large for it."""
    result = tensor.to(dtype)
    if tensor.dtype != dtype and not bool(result.isfinite().all()):
        largest = float(tensor.abs().max())
        raise UserError(
            f"{name} holds {largest:g}, more than {torch.finfo(dtype).max:g}, the largest number of "
            f"{str(dtype).removeprefix('torch.')}; give --dtype bfloat16 or float32"
        )
    return result
