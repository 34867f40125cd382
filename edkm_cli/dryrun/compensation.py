"""What compensating a linear holds beside the model, which no tensor of a rehearsal stands for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from edkm_cli.granularity import FREE
from edkm_cli.initialize.tables import PART_BYTES, fits_tables
from edkm_cli.precision import TOKENS_A_SUM


def compensation_bytes(layer: Any, inputs: Tensor, bits: int, hidden: int, *, corrected: bool) -> int:
    """The most that `Compensation` holds at once, in bytes.

    Args:
        layer: a clustered linear, weight (out, in).
        inputs: what enters it, (..., in).
        bits: the most that its tables may get.
        hidden: size of the residual stream, to which the layer's output is added where it is as wide.
        corrected: whether the weight is corrected for the errors of the layers before, too.
    """
    square, size = layer.in_features**2, layer.out_features * layer.in_features
    groups, k, grid = len(layer.centroids), 2**bits, layer.clustering.grid
    tokens = inputs.numel() // layer.in_features
    some = min(tokens, TOKENS_A_SUM)
    narrow = layer.weight.dtype != torch.float32
    widened = 4 * size * narrow
    # All matrices in float32. The Hessian, its sorted copy, and two of its factorization.
    factoring = 4 * 4 * square + 6 * some * layer.in_features
    # The Hessian, its factor and that with a unit diagonal; the weight, its float32 copy, the rounded one, the tables.
    moving = 3 * 4 * square + (2 * 4 + layer.weight.element_size()) * size + 4 * layer.centroids.numel()
    # The Hessian, damped, too, and its factor; the weight, rounded and times H, its codes; sums of H by pairs of entries.
    fitting = 3 * 4 * square + (3 * 4 + 1) * size + 8 * (layer.out_features + groups) * k**2 + widened
    # The Hessian, damped, too, and its factor; the weight, its errors and what they raise, codes; three numbers an entry.
    improving = 3 * 4 * square + (4 * 4 + 1) * size + 3 * 4 * groups * 2**bits + widened
    needed = [factoring, moving, improving]
    if grid.palette != FREE:  # codes, products of a part of the rows, then three weights and their errors
        needed.append(4 * square + (4 * 4 + 1) * size + 3 * PART_BYTES * grid.numbers + 4 * groups * k)
    elif fits_tables(layer.clustering.granularity, (layer.out_features, layer.in_features)):
        needed.append(fitting)
    if corrected:
        # The inputs of both models and their difference, the stream's likewise, some tokens of them; the sum of their
        # products, and what is added to it.
        columns = layer.in_features + layer.out_features * (layer.out_features == hidden)
        # What is solved once for all matrices with these inputs. Among tokens: inputs of both models, the solution and two
        # copies on the way, two matrices of tokens by tokens; else four of columns by columns.
        among_tokens = 4 * 4 * inputs.numel() + 2 * 4 * tokens**2
        solving = among_tokens if tokens < layer.in_features else 4 * 4 * square
        shared = 8 * tokens * layer.in_features if tokens < layer.in_features else 4 * square  # by the next matrix, too
        needed = [most + shared for most in needed]
        needed.append(2 * 4 * square + 3 * 4 * size + max(solving, 3 * 4 * some * columns + 2 * 4 * square))
    return max(needed)
