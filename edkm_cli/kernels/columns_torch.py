"""Columns of a weight rounded one after the other, choices of entries improved so, and a matrix summed by codes, in plain
PyTorch: reference of the fast kernels."""

import torch
from torch import Tensor

_BLOCK = 64  # columns whose changes `descend` passes on to the others in one product
ONE_HOT_NUMBERS = 2**25  # in a one-hot matrix, at most: 128 MiB


def round_columns(block: Tensor, luts: Tensor, tiles: Tensor, factor: Tensor, stored: torch.dtype) -> Tensor:
    """Errors of the columns of `block` (columns, rows), each rounded when those before it have passed theirs on; in place,
    `block` becomes what its columns were right before they were rounded.

    Args:
        luts: (tiles, k, rows) in the block's dtype, ascending along k: the entries of a row in each tile of columns.
        tiles: (columns,) int64, the tile of each column.
        factor: (columns, columns): column j passes on `factor[j, t]` of its error to column t > j.
        stored: what the block's values are stored as; a column is rounded to that before its entry is found.
    """
    entries = luts.transpose(1, 2).contiguous()  # (tiles, rows, k)
    borders = (entries[..., 1:] + entries[..., :-1]) / 2
    errors = torch.empty_like(block)
    for j, tile in enumerate(tiles.tolist()):
        if stored != block.dtype:
            block[j] = block[j].to(stored)  # or another entry might be the nearest
        nearest = torch.searchsorted(borders[tile], block[j][:, None])
        torch.sub(block[j], entries[tile].gather(1, nearest)[:, 0], out=errors[j])
        block[j + 1 :].addr_(factor[j, j + 1 :], errors[j], alpha=-1)
    return errors


def descend(indices: Tensor, errors: Tensor, luts: Tensor, hessian: Tensor, sweeps: int) -> None:
    """Coordinate descent on tr((Q - W) H (Q - W)^T) over the choice of entries Q, in place, all rows side by side.

    With the others held, a weight q_j is best at q_j - r_j / H_jj, r = (q - w) H, and takes the entry nearest to that. Ends
    after a sweep over the columns that changes nothing.

    Args:
        indices: (out, in) uint8, the chosen entries.
        errors: (Q - W) H of the choice, (out, in), floating point; used up.
        luts: (out, tiles, k) in the same dtype: the entries of a row in each of `tiles` equal parts of the columns.
        hessian: (in, in) in the same dtype, symmetric, its diagonal positive.
        sweeps: over all columns, at most.
    """
    columns = indices.shape[1]
    width = columns // luts.shape[1]
    diagonal = hessian.diagonal()
    for _ in range(sweeps):
        before = indices.clone()
        for start in range(0, columns, _BLOCK):
            end = min(start + _BLOCK, columns)
            part = errors[:, start:end].clone()
            changes = torch.zeros_like(part)
            for j in range(start, end):
                entries = luts[:, j // width]
                now = entries.gather(1, indices[:, j : j + 1].long())
                best = now - part[:, j - start, None] / diagonal[j]
                chosen = (entries - best).abs().argmin(1, keepdim=True)
                changes[:, j - start] = (entries.gather(1, chosen) - now)[:, 0]
                part.addr_(changes[:, j - start], hessian[j, start:end])
                indices[:, j] = chosen[:, 0].to(indices.dtype)
            errors.addmm_(changes, hessian[start:end])
        if torch.equal(before, indices):
            return


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
