"""Lookup tables fitted to what a layer computes: least squares, with each weight's choice of an entry held.

K-means fits entries to weights. What counts is the layer's output: for a row w whose weights chose the entries S c (S of
one-hot rows, (in, k)) and inputs X, the error is tr((w - S c) H (w - S c)^T) with H = X X^T, least at
c = (S^T H S)^-1 S^T H w. The first product is a sum of H by codes, half of `in^2` additions a row. Alternated with a new
choice of entries, this is LNQ (GuidedQuant, arXiv 2505.07004, section 4); here the new choice is the error-compensated one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edkm_cli import kernels
from edkm_cli.granularity import Granularity

_COLUMNS = 512  # whose codes are 64-bit numbers at a time
_RIDGE = 1e-6  # entries that no weight chose stay where they are


def fits_tables(granularity: Granularity, shape: tuple[int, int]) -> bool:
    """Whether tables of a weight (out, in) are fitted: they span its columns. Tables of tiles side by side would depend on
    one another."""
    return granularity.tile(*shape)[1] == shape[1]


def fitted_tables(
    weighted: Tensor, indices: Tensor, hessian: Tensor, tables: Tensor, granularity: Granularity
) -> Tensor:
    """The tables (groups, k) with the least output error, in `tables`' dtype.

    Args:
        weighted: (out, in), what is to be approximated times `hessian`.
        indices: (out, in) integers below k: the entry of each weight.
        hessian: (in, in) X X^T, in float32 or float64, which decides the precision of the sums.
        tables: (groups, k), what the solution is drawn to where the text says nothing.
        granularity: of the tables, which span all columns: see `fits_tables`.
    """
    groups, k = tables.shape
    products = kernels.sum_by_code(indices, hessian, k).unflatten(0, (groups, -1)).sum(1)
    wanted = torch.zeros_like(products[:, 0])
    for column, codes in zip(weighted.split(_COLUMNS, 1), indices.split(_COLUMNS, 1), strict=True):
        wanted.scatter_add_(1, codes.reshape(groups, -1).long(), column.reshape(groups, -1).double())
    ridge = _RIDGE * products.diagonal(dim1=1, dim2=2).mean(1, keepdim=True) + 1e-30
    products.diagonal(dim1=1, dim2=2).add_(ridge)
    return torch.linalg.solve(products, wanted + ridge * tables.double()).to(tables.dtype)
