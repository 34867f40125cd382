"""Triton kernels for CUDA: a group of weights is clustered by one program, all iterations in one kernel.

A program goes through its group in chunks: forward once for each iteration and once for the soft weights; backward runs
forward again, then back, and writes the weight's gradient. Attention is never a matrix in memory: of a chunk it is in
registers, (k, chunk), all k of a weight in one thread, so that only the sums over a whole group need other threads.
`supports` says what goes the PyTorch path.

Read with docs/clustering.md beside it; names are those of closed_form.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from edkm_cli.kernels.closed_form import EMPTY_MASS, Passes, Spread
from edkm_cli.kernels.layout_c import DTYPES
from edkm_cli.packing import Tile, to_groups

_MAX_K, _MAX_GROUP = 32, 16384
_CHUNK_ENTRIES = 4096  # k times the weights at a time: 32 numbers a thread in each tensor of a chunk
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


def supports(weight: Tensor, tile: Tile, k: int) -> bool:
    """Whether the kernels take this weight: groups of at most 16,384 weights, k a power of two up to 32."""
    return tile[0] * tile[1] <= _MAX_GROUP and k <= _MAX_K and k & (k - 1) == 0 and weight.dtype in DTYPES


@triton.jit
def _chunk(weight, importance, first, columns, tile_rows, tile_columns, WEIGHTED: tl.constexpr, CHUNK: tl.constexpr):
    """(weights, how much each counts, offsets, which are inside) of this program's group from number `first` on."""
    across, at = columns // tile_columns, first + tl.arange(0, CHUNK)
    row = tl.program_id(0) // across * tile_rows + at // tile_columns
    column = tl.program_id(0) % across * tile_columns + at % tile_columns
    offset, inside = row.to(tl.int64) * columns + column, at < tile_rows * tile_columns
    w = tl.load(weight + offset, mask=inside, other=0.0).to(tl.float32)
    m = tl.where(inside, 1.0, 0.0)
    if WEIGHTED == 1:
        m = tl.load(importance + column, mask=inside, other=0.0).to(tl.float32)
    if WEIGHTED == 2:
        m = tl.load(importance + offset, mask=inside, other=0.0).to(tl.float32)
    return w, m, offset, inside


@triton.jit
def _attention(w, c, inverse_tau):
    """(distances, attention), both (k, chunk), of weights and centroids."""
    d = w[None, :] - c[:, None]
    square = d * d
    e = tl.exp2((tl.min(square, 0)[None, :] - square) * (inverse_tau * _LOG2_E))
    return d, e * (1.0 / tl.sum(e, 0))[None, :]


@triton.jit
def _moments(
    weight, importance, c, inverse_tau, columns, tile_rows, tile_columns,
    WEIGHTED: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """(M, D), (K,) each."""
    shift, mass = tl.zeros((K, CHUNK), tl.float32), tl.zeros((K, CHUNK), tl.float32)
    for first in range(0, tile_rows * tile_columns, CHUNK):
        w, m, _, _ = _chunk(weight, importance, first, columns, tile_rows, tile_columns, WEIGHTED, CHUNK)
        d, a = _attention(w, c, inverse_tau)
        a *= m[None, :]
        shift += a * d
        mass += a
    return tl.sum(shift, 1), tl.sum(mass, 1)


@triton.jit
def _forward_kernel(
    weight, importance, centroids, tau, moved, out, columns, tile_rows, tile_columns, iterations, empty_mass,
    ITERATE: tl.constexpr, WEIGHTED: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Programs are groups. ITERATE: write centroids after `iterations` updates to `moved`; else soft weights to `out`."""
    of_group = tl.program_id(0).to(tl.int64) * K + tl.arange(0, K)
    c = tl.load(centroids + of_group)
    inverse_tau = 1.0 / tl.load(tau + tl.program_id(0))
    if ITERATE:
        for _ in range(iterations):
            shift, mass = _moments(
                weight, importance, c, inverse_tau, columns, tile_rows, tile_columns, WEIGHTED, K, CHUNK
            )
            c += shift / (mass + empty_mass)
        tl.store(moved + of_group, c)
    else:
        for first in range(0, tile_rows * tile_columns, CHUNK):
            w, _, offset, inside = _chunk(weight, importance, first, columns, tile_rows, tile_columns, 0, CHUNK)
            _, a = _attention(w, c, inverse_tau)
            tl.store(out + offset, tl.sum(a * c[:, None], 0).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    weight, importance, centroids, tau, mean_slope, grad, grad_moved, path, sums, grad_weight, grad_centroids,
    columns, tile_rows, tile_columns, iterations, empty_mass,
    WEIGHTED: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Programs are groups. `path` (groups, iterations + 1, 2, K) is scratch: centroids and masses of each iteration; so are
    `sums`, of the weight's shape: its gradient so far.

    mean_slope (groups, 2): the group's mean, and 2 (d tau / d variance) / n. Gradients of tau are carried times tau^2.
    """
    group, n = tl.program_id(0).to(tl.int64), tile_rows * tile_columns
    of_group = group * K + tl.arange(0, K)
    c = tl.load(centroids + of_group)
    inverse_tau = 1.0 / tl.load(tau + group)
    notes = path + group * (iterations + 1) * 2 * K + tl.arange(0, K)
    for t in range(iterations):
        shift, mass = _moments(weight, importance, c, inverse_tau, columns, tile_rows, tile_columns, WEIGHTED, K, CHUNK)
        tl.store(notes + t * 2 * K, c)
        tl.store(notes + t * 2 * K + K, mass)
        c += shift / (mass + empty_mass)
    tl.debug_barrier()  # one thread has stored an entry that all threads load below
    # the output: p_j = g A_j (c_j - mean)
    of_c, of_tau = tl.zeros((K, CHUNK), tl.float32), tl.zeros((CHUNK,), tl.float32)
    for first in range(0, n, CHUNK):
        w, _, offset, inside = _chunk(weight, importance, first, columns, tile_rows, tile_columns, 0, CHUNK)
        d, a = _attention(w, c, inverse_tau)
        direct = a * tl.load(grad + offset, mask=inside, other=0.0).to(tl.float32)[None, :]
        part = direct * (c[:, None] - tl.sum(a * c[:, None], 0)[None, :]) * d
        of_c += direct + part * (2.0 * inverse_tau)
        of_tau += tl.sum(part * d, 0)
        tl.store(sums + offset, tl.sum(part, 0) * (-2.0 * inverse_tau), mask=inside)
    gamma = tl.load(grad_moved + of_group) + tl.sum(of_c, 1)
    # the iterations, last first: u_j = pull_j (w - c'_j), p_j = m A_j (u_j - sum A u)
    for back in range(iterations):
        t = iterations - 1 - back
        moved = c
        c = tl.load(notes + t * 2 * K)
        pull = gamma / (tl.load(notes + t * 2 * K + K) + empty_mass)
        of_c = tl.zeros((K, CHUNK), tl.float32)
        tl.debug_barrier()  # what a chunk's threads stored, others may load
        for first in range(0, n, CHUNK):
            w, m, offset, inside = _chunk(weight, importance, first, columns, tile_rows, tile_columns, WEIGHTED, CHUNK)
            d, a = _attention(w, c, inverse_tau)
            u = pull[:, None] * (w[None, :] - moved[:, None])
            off = u - tl.sum(a * u, 0)[None, :]
            a *= m[None, :]
            part = a * off * d
            of_c += part
            of_tau += tl.sum(part * d, 0)
            dw = tl.sum(a * pull[:, None], 0) - tl.sum(part, 0) * (2.0 * inverse_tau)
            tl.store(sums + offset, tl.load(sums + offset, mask=inside, other=0.0) + dw, mask=inside)
        gamma = pull * empty_mass + tl.sum(of_c, 1) * (2.0 * inverse_tau)
    tl.debug_barrier()
    at_mean, slope = tl.load(mean_slope + group * 2), tl.load(mean_slope + group * 2 + 1)
    # A slope of zero means that tau is held at its floor, where its gradient may overflow
    grad_tau = tl.sum(of_tau, 0) * inverse_tau * inverse_tau
    by_variance = tl.where(slope == 0.0, 0.0, grad_tau * slope)
    for first in range(0, n, CHUNK):
        w, _, offset, inside = _chunk(weight, importance, first, columns, tile_rows, tile_columns, 0, CHUNK)
        dw = tl.load(sums + offset, mask=inside, other=0.0) + by_variance * (w - at_mean)
        tl.store(grad_weight + offset, dw.to(grad_weight.dtype.element_ty), mask=inside)
    tl.store(grad_centroids + of_group, gamma)


class TritonPasses(Passes):
    """A weight of small groups: all iterations in one kernel, all of backward in another.

    `importance` is (in,), which the rows share, or (out, in).
    """

    def __init__(self, weight: Tensor, tile: Tile, importance: Tensor | None = None) -> None:
        self._weight, self._tile = weight.contiguous(), tile
        self._importance = self._weight if importance is None else importance.contiguous()
        self._weighted = 0 if importance is None else importance.dim()
        self.group_size = tile[0] * tile[1]
        self._groups = weight.numel() // self.group_size

    def _shape(self, k: int) -> dict[str, int]:
        chunk = max(32, min(triton.next_power_of_2(self.group_size), _CHUNK_ENTRIES // k))
        return {"WEIGHTED": self._weighted, "K": k, "CHUNK": chunk, "num_warps": max(1, min(4, chunk // 32))}

    def spread(self) -> tuple[Tensor, Tensor]:
        variance, mean = torch.var_mean(to_groups(self._weight, self._tile).float(), dim=1, correction=0)
        return mean.double(), variance.double()

    def _forward(self, centroids: Tensor, tau: Tensor, iterations: int, out: Tensor | None) -> Tensor:
        moved, target = torch.empty_like(centroids), self._weight if out is None else out
        _forward_kernel[(self._groups,)](
            self._weight, self._importance, centroids.contiguous(), tau.float(), moved, target, self._weight.shape[1],
            *self._tile, iterations, EMPTY_MASS, ITERATE=out is None, **self._shape(centroids.shape[1]),
        )  # fmt: skip
        return moved

    def iterate(self, centroids: Tensor, tau: Tensor, iterations: int) -> Tensor:
        return self._forward(centroids, tau, iterations, None)

    def soft(self, centroids: Tensor, tau: Tensor, dtype: torch.dtype) -> Tensor:
        out = torch.empty(self._weight.shape, dtype=dtype, device=self._weight.device)
        self._forward(centroids, tau, 0, out)
        return out

    def backward(
        self, start: Tensor, spread: Spread, iterations: int, grad: Tensor | None, grad_moved: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        k, upstream = start.shape[1], torch.zeros_like(self._weight) if grad is None else grad.contiguous()
        gamma = torch.zeros_like(start) if grad_moved is None else grad_moved.to(start.dtype).contiguous()
        path = torch.empty(self._groups, iterations + 1, 2, k, dtype=torch.float32, device=start.device)
        grad_weight, grad_start = torch.empty_like(self._weight), torch.empty_like(start)
        sums = grad_weight if grad_weight.dtype == torch.float32 else torch.empty_like(grad_weight, dtype=torch.float32)
        mean_slope = torch.stack((spread.mean, spread.slope * (2.0 / self.group_size)), 1).float().contiguous()
        _backward_kernel[(self._groups,)](
            self._weight, self._importance, start.contiguous(), spread.tau.float(), mean_slope, upstream, gamma, path, sums,
            grad_weight, grad_start, self._weight.shape[1], *self._tile, iterations, EMPTY_MASS, **self._shape(k),
        )  # fmt: skip
        return grad_weight, grad_start
