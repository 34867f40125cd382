"""Sums of a matrix by the codes of its rows and columns, in plain PyTorch: reference of the fast kernel."""

from __future__ import annotations

import torch
from torch import Tensor

ONE_HOT_NUMBERS = 2**25  # in a one-hot matrix, at most: 128 MiB


def sum_by_code(indices: Tensor, hessian: Tensor, k: int) -> Tensor:
    """S^T H S for each row of codes, S its one-hot rows (in, k): (rows, k, k) float64.

    Args:
        indices: (rows, in) uint8 below k.
        hessian: (in, in) symmetric, in float32 or float64, which decides the precision of the products.
    """
    sums = []
    for codes in indices.split(max(1, ONE_HOT_NUMBERS // (len(hessian) * k))):
        chosen = torch.nn.functional.one_hot(codes.t().long(), k).to(hessian.dtype)  # (in, rows, k)
        weighted = (hessian @ chosen.flatten(1)).view_as(chosen).permute(1, 0, 2)  # (rows, in, k)
        sums.append((chosen.permute(1, 2, 0) @ weighted).double())
    return torch.cat(sums)
