"""What formats with limits of their own share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from edkm_cli.errors import UserError
from edkm_cli.export.source import Compressed, DenseTensor
from edkm_cli.targets import TARGETS, check_model, misfits


def require_fit(name: str, source: Compressed) -> None:
    """Raises UserError unless the format holds this checkpoint's bits, tables and shapes."""
    spec = source.spec
    tables: dict[str, Any] = {"granularity": spec.granularity, "lut_dtype": spec.lut_dtype, "palette": spec.palette}
    faults = misfits(name, bits=spec.bits, **tables)
    if spec.module_bits and not TARGETS[name].mixes:
        faults.append("the matrices differ in bits, and the format has one number for all; use --allocation uniform")
    if faults:
        raise UserError(f"--to {name}: {'; '.join(faults)} (edkm compress --target {name} sets all of them)")
    shapes = {tensor.module: tensor.shape for tensor in source.linears}
    check_model(name, source.config, shapes, lut_scale=source.scale(source.linears[0].module))


def row_tables(source: Compressed, tensor: DenseTensor) -> Tensor:
    """The table of each row of a linear, (out, 2**bits) float32; rows that share one repeat it."""
    table = source.table(tensor.module)
    return table.repeat_interleave(tensor.shape[0] // table.shape[0], 0)


def codes_of_words(words: Tensor, bits: int, columns: int) -> Tensor:
    """(rows, columns) int64 of rows of 32-bit words, int32: one little-endian stream of codes, some of which cross the
    border of two words."""
    unsigned = words.long() & 0xFFFFFFFF
    place = torch.arange(columns) * bits
    low, shift = place // 32, place % 32
    high = (low + 1).clamp_max(words.shape[1] - 1)
    return ((unsigned[:, low] >> shift) | (unsigned[:, high] << (32 - shift))) & (2**bits - 1)
