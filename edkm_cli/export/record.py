"""What export records of each tensor, so that it can be recognised later: tensors.json."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from edkm_cli.format import write_json

RECORD = "tensors.json"
_CHUNK = 2**22


def tensor_record(tensor: Tensor) -> dict[str, Any]:
    """dtype, shape and sha256 of a tensor; of floating ones their mean magnitude and the largest, of integers the sum."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    record: dict[str, Any] = {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "sha256": hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest(),
    }
    if flat.numel() == 0:
        return record
    if not flat.is_floating_point():
        return {**record, "sum": int(flat.sum(dtype=torch.int64))}
    total = largest = 0.0
    for part in flat.split(_CHUNK):  # of a vocabulary's rows a copy would be as large as the model
        magnitude = part.float().abs()
        total += float(magnitude.sum(dtype=torch.float64))
        largest = max(largest, float(magnitude.amax()))
    return {**record, "mean_magnitude": total / flat.numel(), "largest": largest}


def record_tensors(directory: Path) -> None:
    """Write tensors.json about all safetensors files of a directory, reading them back from the disk."""
    records = {}
    for file in sorted(directory.glob("model*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                records[name] = tensor_record(opened.get_tensor(name))
    write_json(directory / RECORD, records)
