"""Triton kernels for CUDA: a group of weights stays in registers while all iterations run over it.

One program clusters one group that is a run of contiguous weights (row geometries): it loads the group once, iterates,
and writes the soft weights, or, in backward, runs forward again, then back, and writes the weight's gradient. Attention
is never a matrix: a loop over centroids k computes d, then exp, twice (once for the normaliser, once for the sums),
which for k = 8 costs less than a trip to memory would. Centroids are k-vectors in registers too; entry j is read by
a masked sum. Larger groups, larger k and blocks go the PyTorch path (`supports` says which).

Read with docs/clustering.md beside it; names are those of closed_form.py.
"""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from edkm_cli.kernels.closed_form import EMPTY_MASS, Passes, Spread
from edkm_cli.kernels.layout_c import DTYPES
from edkm_cli.kernels.tiles import Tile

_MAX_K = 16
_MAX_GROUP = 16384


def supports(weight: Tensor, tile: Tile, k: int) -> bool:
    """Whether the kernels take this weight: contiguous groups of at most 16,384 weights, k a power of two up to 16."""
    whole_rows = tile[1] == weight.shape[1]
    fits = tile[0] * tile[1] <= _MAX_GROUP and k <= _MAX_K and k & (k - 1) == 0
    runs = weight.is_cuda or os.environ.get("TRITON_INTERPRET", "0") == "1"  # in Python on CPU tensors, as in tests
    return whole_rows and fits and weight.dtype in DTYPES and runs


@triton.jit
def _entry(vector, j, K: tl.constexpr):
    """vector[j] of a (K,) vector in registers."""
    return tl.sum(tl.where(tl.arange(0, K) == j, vector, 0.0), 0)


@triton.jit
def _normaliser(w, c, inverse_tau, K: tl.constexpr):
    """(least squared distance, 1 / sum of exponentials) of each weight."""
    least = (w - _entry(c, 0, K)) * (w - _entry(c, 0, K))
    for j in tl.static_range(1, K):
        d = w - _entry(c, j, K)
        least = tl.minimum(least, d * d)
    total = tl.zeros_like(w)
    for j in tl.static_range(K):
        d = w - _entry(c, j, K)
        total += tl.exp((least - d * d) * inverse_tau)
    return least, 1.0 / total


@triton.jit
def _soft(w, c, least, share, inverse_tau, K: tl.constexpr):
    """The attention-weighted sum of the centroids at each weight."""
    mean = tl.zeros_like(w)
    for j in tl.static_range(K):
        entry = _entry(c, j, K)
        d = w - entry
        mean += tl.exp((least - d * d) * inverse_tau) * share * entry
    return mean


@triton.jit
def _importance(importance, group, at, stride, period, inside, WEIGHTED: tl.constexpr):
    """How much each weight counts: a group's importance starts `stride` after the one before, and repeats itself."""
    if WEIGHTED:
        return tl.load(importance + group * stride + at % period, mask=inside, other=0.0).to(tl.float32)
    else:
        return tl.where(inside, 1.0, 0.0)


@triton.jit
def _moments(w, m, inside, c, inverse_tau, K: tl.constexpr):
    """(M, D), (K,) each; weights count by m."""
    least, share = _normaliser(w, c, inverse_tau, K)
    lanes = tl.arange(0, K)
    shift = tl.zeros_like(c)
    mass = tl.zeros_like(c)
    for j in tl.static_range(K):
        d = w - _entry(c, j, K)
        a = tl.where(inside, tl.exp((least - d * d) * inverse_tau) * share, 0.0) * m
        shift = tl.where(lanes == j, tl.sum(a * d, 0), shift)
        mass = tl.where(lanes == j, tl.sum(a, 0), mass)
    return shift, mass


@triton.jit
def _forward_kernel(
    weight, importance, centroids, tau, moved, out, n, stride, period, iterations, empty_mass,
    ITERATE: tl.constexpr, WEIGHTED: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Programs are groups. ITERATE: write centroids after `iterations` updates to `moved`; else soft weights to `out`."""
    group = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, N)
    inside = at < n
    lanes = tl.arange(0, K)
    w = tl.load(weight + group * n + at, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(centroids + group * K + lanes)
    inverse_tau = 1.0 / tl.load(tau + group)
    if ITERATE:
        m = _importance(importance, group, at, stride, period, inside, WEIGHTED)
        for _ in range(iterations):
            shift, mass = _moments(w, m, inside, c, inverse_tau, K)
            c += shift / (mass + empty_mass)
        tl.store(moved + group * K + lanes, c)
    else:
        least, share = _normaliser(w, c, inverse_tau, K)
        mean = _soft(w, c, least, share, inverse_tau, K)
        tl.store(out + group * n + at, mean.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    weight, importance, centroids, tau, mean_slope, grad, grad_moved, path, grad_weight, grad_centroids, n, stride, period,
    iterations, empty_mass, WEIGHTED: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Programs are groups. `path` (groups, iterations + 1, 2, K) is scratch: centroids and masses of each iteration.

    mean_slope (groups, 2): the group's mean, and 2 (d tau / d variance) / n. Gradients of tau are carried times tau^2.
    """
    group = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, N)
    inside = at < n
    lanes = tl.arange(0, K)
    w = tl.load(weight + group * n + at, mask=inside, other=0.0).to(tl.float32)
    m = _importance(importance, group, at, stride, period, inside, WEIGHTED)
    g = tl.load(grad + group * n + at, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(centroids + group * K + lanes)
    gamma = tl.load(grad_moved + group * K + lanes)
    inverse_tau = 1.0 / tl.load(tau + group)
    notes = path + group * (iterations + 1) * 2 * K + lanes
    for t in range(iterations):
        shift, mass = _moments(w, m, inside, c, inverse_tau, K)
        tl.store(notes + t * 2 * K, c)
        tl.store(notes + t * 2 * K + K, mass)
        c += shift / (mass + empty_mass)
    tl.debug_barrier()  # one thread has stored an entry that all threads load below
    # the output: p_j = g A_j (c_j - mean)
    least, share = _normaliser(w, c, inverse_tau, K)
    soft = _soft(w, c, least, share, inverse_tau, K)
    from_logits = tl.zeros_like(w)
    tau_sum = tl.zeros_like(w)
    for j in tl.static_range(K):
        entry = _entry(c, j, K)
        d = w - entry
        direct = tl.where(inside, g * tl.exp((least - d * d) * inverse_tau) * share, 0.0)
        part = direct * (entry - soft) * d
        from_logits += part
        tau_sum += part * d
        gamma += tl.where(lanes == j, tl.sum(direct + part * (2.0 * inverse_tau), 0), 0.0)
    dw = from_logits * (-2.0 * inverse_tau)
    # the iterations, last first: u_j = pull_j (w - c'_j), p_j = m A_j (u_j - sum A u)
    for back in range(iterations):
        t = iterations - 1 - back
        moved = c
        c = tl.load(notes + t * 2 * K)
        pull = gamma / (tl.load(notes + t * 2 * K + K) + empty_mass)
        gamma = pull * empty_mass
        least, share = _normaliser(w, c, inverse_tau, K)
        mean = tl.zeros_like(w)
        for j in tl.static_range(K):
            d = w - _entry(c, j, K)
            mean += tl.exp((least - d * d) * inverse_tau) * share * _entry(pull, j, K) * (w - _entry(moved, j, K))
        from_logits = tl.zeros_like(w)
        for j in tl.static_range(K):
            d = w - _entry(c, j, K)
            a = tl.where(inside, tl.exp((least - d * d) * inverse_tau) * share, 0.0) * m
            part = a * (_entry(pull, j, K) * (w - _entry(moved, j, K)) - mean) * d
            dw += a * _entry(pull, j, K)
            from_logits += part
            tau_sum += part * d
            gamma += tl.where(lanes == j, tl.sum(part, 0) * (2.0 * inverse_tau), 0.0)
        dw -= from_logits * (2.0 * inverse_tau)
    grad_tau = tl.sum(tau_sum, 0) * inverse_tau * inverse_tau
    at_mean = tl.load(mean_slope + group * 2)
    slope = tl.load(mean_slope + group * 2 + 1)
    # A slope of zero means that tau is held at its floor, where grad_tau may overflow
    dw += tl.where(slope == 0.0, 0.0, grad_tau * slope) * (w - at_mean)
    tl.store(grad_weight + group * n + at, dw.to(grad_weight.dtype.element_ty), mask=inside)
    tl.store(grad_centroids + group * K + lanes, gamma)


class TritonPasses(Passes):
    """A weight whose groups fit in registers: all iterations in one kernel, all of backward in another.

    `importance` is (in,), which the rows share, or (out, in).
    """

    def __init__(self, weight: Tensor, tile: Tile, importance: Tensor | None = None) -> None:
        self._weight = weight.contiguous()
        self._importance = self._weight if importance is None else importance.contiguous()
        self._weighted = importance is not None
        self.group_size = tile[0] * tile[1]
        self._groups = weight.numel() // self.group_size
        columns_only = importance is not None and importance.dim() == 1
        self._repeats = (0, weight.shape[1]) if columns_only else (self.group_size, self.group_size)
        block = triton.next_power_of_2(self.group_size)
        self._shape = {"N": block, "num_warps": 16 if block >= 8192 else 8 if block >= 2048 else 4}

    def spread(self) -> tuple[Tensor, Tensor]:
        grouped = self._weight.view(self._groups, self.group_size).float()
        variance, mean = torch.var_mean(grouped, dim=1, correction=0)
        return mean.double(), variance.double()

    def _forward(self, centroids: Tensor, tau: Tensor, iterations: int, out: Tensor | None) -> Tensor:
        moved, k = torch.empty_like(centroids), centroids.shape[1]
        target = self._weight if out is None else out
        _forward_kernel[(self._groups,)](
            self._weight, self._importance, centroids.contiguous(), tau.float(), moved, target, self.group_size,
            *self._repeats, iterations, EMPTY_MASS, ITERATE=out is None, WEIGHTED=self._weighted, K=k, **self._shape,
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
        mean_slope = torch.stack((spread.mean, spread.slope * (2.0 / self.group_size)), 1).float().contiguous()
        _backward_kernel[(self._groups,)](
            self._weight, self._importance, start.contiguous(), spread.tau.float(), mean_slope, upstream, gamma, path,
            grad_weight, grad_start, self.group_size, *self._repeats, iterations, EMPTY_MASS, WEIGHTED=self._weighted, K=k,
            **self._shape,
        )  # fmt: skip
        return grad_weight, grad_start
