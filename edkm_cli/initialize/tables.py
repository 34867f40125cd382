"""Lookup tables fitted to what a layer computes: least squares, with each weight's choice of an entry held.

K-means fits entries to weights. What counts is the layer's output: for a row w whose weights chose the entries S c (S of
one-hot rows, (in, k)) and inputs X, the error is tr((w - S c) H (w - S c)^T) with H = X X^T, least at
c = (S^T H S)^-1 S^T H w. Alternated with a new choice of entries, this is LNQ (GuidedQuant, arXiv 2505.07004, section 4);
here the new choice is the error-compensated one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edkm_cli.granularity import Granularity

# One product costs 2 k in^2 out operations: a second on two cores for 576 x 1536, half an hour on a GPU for all of LLaMA-7B.
MOST_COLUMNS = 2048
_RIDGE = 1e-6  # entries that no weight chose stay where they are
ONE_HOT_NUMBERS = 2**25  # in a one-hot matrix, at most: 128 MiB


def fits_tables(granularity: Granularity, shape: tuple[int, int]) -> bool:
    """Whether tables of a weight (out, in) are fitted: they span its columns, which are not too many for the product.
    Tables of tiles side by side would depend on one another."""
    return granularity.tile(*shape)[1] == shape[1] and shape[1] <= MOST_COLUMNS


def fitted_tables(weight: Tensor, indices: Tensor, hessian: Tensor, tables: Tensor, granularity: Granularity) -> Tensor:
    """The tables (groups, k) with the least output error, in `tables`' dtype.

    Args:
        weight: (out, in), what is to be approximated, floating point.
        indices: (out, in) integers below k: the entry of each weight.
        hessian: (in, in) X X^T, in float32 or float64, which decides the precision of the products.
        tables: (groups, k), what the solution is drawn to where the text says nothing.
        granularity: of the tables, which span all columns: see `fits_tables`.
    """
    (rows, columns), k = weight.shape, tables.shape[1]
    tile_rows = granularity.tile(rows, columns)[0]
    groups = torch.arange(rows, device=weight.device) // tile_rows
    products = hessian.new_zeros(len(tables), k, k, dtype=torch.float64)
    wanted = hessian.new_zeros(len(tables), k, dtype=torch.float64)
    step = max(1, ONE_HOT_NUMBERS // (columns * k))
    for start in range(0, rows, step):
        at = slice(start, min(start + step, rows))
        chosen = torch.nn.functional.one_hot(indices[at].t().long(), k).to(hessian.dtype)  # (in, rows, k)
        weighted = (hessian @ chosen.flatten(1)).view_as(chosen).permute(1, 0, 2)  # (rows, in, k)
        products.index_add_(0, groups[at], (chosen.permute(1, 2, 0) @ weighted).double())
        moments = (weight[at, None].to(hessian.dtype) @ weighted)[:, 0]  # (rows, k)
        wanted.index_add_(0, groups[at], moments.double())
    ridge = _RIDGE * products.diagonal(dim1=1, dim2=2).mean(1, keepdim=True) + 1e-30
    products.diagonal(dim1=1, dim2=2).add_(ridge)
    return torch.linalg.solve(products, wanted + ridge * tables.double()).to(tables.dtype)
