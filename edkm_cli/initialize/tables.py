"""Lookup tables fitted to what a layer computes: least squares, with each weight's choice of an entry held.

K-means fits entries to weights. What counts is the layer's output: for a row w whose weights chose the entries S c (S of
one-hot rows, (in, k)) and inputs X, the error is tr((w - S c) H (w - S c)^T) with H = X X^T, least at
c = (S^T H S)^-1 S^T H w. The first product is a sum of H by codes, half of `in^2` additions a row. Alternated with a new
choice of entries, this is LNQ (GuidedQuant, arXiv 2505.07004, section 4); here the new choice is the error-compensated one.
"""

import torch
from torch import Tensor

from edkm_cli import kernels
from edkm_cli.clustering import Grid
from edkm_cli.granularity import FREE, Granularity

_COLUMNS = 512  # whose codes are 64-bit numbers at a time
PART_BYTES = 2**26  # of products of one part of the rows
_RIDGE = 1e-6  # entries that no weight chose stay where they are


def fits_tables(granularity: Granularity, shape: tuple[int, int], palette: str = FREE) -> bool:
    """Whether tables of a weight (out, in) are fitted: they span its columns, or are a palette's. Tables of tiles side by
    side depend on one another, which free ones have too many entries for."""
    return palette != FREE or granularity.tile(*shape)[1] == shape[1]


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


def fitted_grid(
    wanted: Tensor, weighted: Tensor, indices: Tensor, hessian: Tensor, parameters: Tensor, grid: Grid
) -> Tensor:
    """As `fitted_tables`, the parameters (groups, numbers) of a palette's tables, of tiles of one row: those of a row depend
    on one another and are solved for together. A row whose error grows when they are rounded keeps those it had.

    Args:
        wanted: (out, in), what is to be approximated.
    """
    (out, columns), numbers = indices.shape, grid.numbers
    tiles = len(parameters) // out
    width, unknowns = columns // tiles, tiles * numbers
    before = parameters.view(out, tiles, numbers)
    fitted, basis = torch.empty_like(before), grid.basis().to(hessian)
    by_tile = hessian.view(tiles, width, columns)
    for rows in torch.arange(out).split(max(1, PART_BYTES // (4 * unknowns * columns))):
        chosen = basis[:, indices[rows].long()].view(numbers, len(rows), tiles, width)
        # Of each row: (numbers, tiles, in), the products of H with what one unknown multiplies, then summed for the other.
        left = torch.einsum("nrtw,twc->rntc", chosen, by_tile).unflatten(3, (tiles, width))
        products = torch.einsum("rntuw,mruw->rntmu", left, chosen).reshape(len(rows), unknowns, unknowns).double()
        target = torch.einsum("nrtw,rtw->rnt", chosen, weighted[rows].view(-1, tiles, width).to(hessian))
        now = before[rows].transpose(1, 2).reshape(len(rows), -1, 1).double()
        ridge = _RIDGE * products.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] + 1e-30
        products.diagonal(dim1=1, dim2=2).add_(ridge[:, :, 0])
        solved = torch.linalg.solve(products, target.reshape(len(rows), -1, 1).double() + ridge * now)
        fitted[rows] = solved.view(-1, numbers, tiles).transpose(1, 2).to(fitted)

    def errors(candidate: Tensor) -> Tensor:
        tables = grid.tables(candidate.reshape(parameters.shape))
        off = kernels.lookup(indices, tables, (1, width), torch.float32) - wanted.float()
        return ((off @ hessian.float()) * off).sum(1)

    better = errors(fitted) < errors(before)
    return torch.where(better[:, None, None], fitted, before).reshape(parameters.shape)
