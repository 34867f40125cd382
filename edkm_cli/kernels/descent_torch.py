"""Choices of entries improved one column after the other, in plain PyTorch: reference of the fast kernel."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 64  # columns whose changes reach the others in one product


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
