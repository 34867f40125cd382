"""What formats with limits of their own share."""

from __future__ import annotations

from typing import Any

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
