"""The passes of `closed_form` in plain PyTorch, chunk by chunk so that an attention map stays in cache.

This is the reference of every faster kernel and what runs where there is neither a compiler nor Triton. float64 weights
are computed in float64, all others in float32; sums over a chunk are added up in float64.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from edkm_cli.kernels.closed_form import Passes, centroid_dtype
from edkm_cli.kernels.tiles import Tile, from_groups, to_groups

_CHUNK_ENTRIES = {"cpu": 1 << 17, "cuda": 1 << 26}  # entries of an attention map worked on at a time

Chunk = tuple[slice, slice]


def chunks(grouped: Tensor, k: int) -> Iterator[Chunk]:
    """Cut a (groups, size) tensor so that a chunk times k fits the cache: whole groups, or one in parts."""
    groups, size = grouped.shape
    entries = _CHUNK_ENTRIES.get(grouped.device.type, 1 << 22)
    groups_at_once = max(1, entries // (size * k))
    size_at_once = size if size * k <= entries else max(1, entries // k)
    for group in range(0, groups, groups_at_once):
        for first in range(0, size, size_at_once):
            yield slice(group, group + groups_at_once), slice(first, first + size_at_once)


def attention(values: Tensor, centroids: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
    """(A, d), both (groups, n, k), of values (groups, n), centroids (groups, k) and tau (groups,)."""
    offset = values[:, :, None] - centroids[:, None, :]
    square = offset.square()
    logits = (square.amin(-1, keepdim=True) - square) / tau[:, None, None]
    return torch.softmax(logits, -1), offset


def soft(weights: Tensor, centroids: Tensor) -> Tensor:
    """w~_i = sum_j A_ij c_j, (groups, n)."""
    return torch.matmul(weights, centroids[:, :, None])[:, :, 0]


class TorchPasses(Passes):
    """The passes over a weight (out, in) of any floating dtype on any device; `importance` is (in,) or (out, in)."""

    def __init__(self, weight: Tensor, tile: Tile, importance: Tensor | None = None) -> None:
        self._weight, self._tile = weight, tile
        self._values, self.group_size = to_groups(weight, tile), tile[0] * tile[1]
        self._importance = None if importance is None else to_groups(importance.expand(weight.shape), tile)
        self._compute = centroid_dtype(weight)
        self._piled: Tensor | None = None

    def _cut(self, k: int) -> Iterator[tuple[Chunk, Tensor]]:
        for chunk in chunks(self._values, k):
            yield chunk, self._values[chunk].to(self._compute)

    def _sums(self, *shape: int) -> Tensor:
        return torch.zeros(self._values.shape[0], *shape, dtype=torch.float64, device=self._values.device)

    def _pile(self, chunk: Chunk, part: Tensor) -> None:
        if self._piled is None:
            self._piled = torch.zeros(self._values.shape, dtype=self._compute, device=self._values.device)
        self._piled[chunk] += part

    def spread(self) -> tuple[Tensor, Tensor]:
        mean, variance = self._sums(), self._sums()
        for chunk, values in self._cut(1):
            mean[chunk[0]] += values.sum(1, dtype=torch.float64)
        mean /= self.group_size
        for chunk, values in self._cut(1):
            variance[chunk[0]] += (values - mean[chunk[0], None]).square().sum(1)
        return mean, variance / self.group_size

    def moments(self, centroids: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
        k = centroids.shape[1]
        shift, mass = self._sums(k), self._sums(k)
        for chunk, values in self._cut(k):
            weights, offset = attention(values, *self._at(chunk, centroids, tau))
            weights = self._weighed(chunk, weights)
            shift[chunk[0]] += (weights * offset).sum(1, dtype=torch.float64)
            mass[chunk[0]] += weights.sum(1, dtype=torch.float64)
        return shift, mass

    def _weighed(self, chunk: Chunk, weights: Tensor) -> Tensor:
        """Attention (groups, n, k) times importance."""
        return weights if self._importance is None else weights * self._importance[chunk].to(self._compute)[:, :, None]

    def _at(self, chunk: Chunk, *of_groups: Tensor) -> list[Tensor]:
        return [tensor[chunk[0]].to(self._compute) for tensor in of_groups]

    def soft(self, centroids: Tensor, tau: Tensor, dtype: torch.dtype) -> Tensor:
        clustered = torch.empty(self._values.shape, dtype=dtype, device=self._values.device)
        for chunk, values in self._cut(centroids.shape[1]):
            at = self._at(chunk, centroids, tau)
            clustered[chunk] = soft(attention(values, *at)[0], at[0]).to(dtype)
        return from_groups(clustered, self._weight.shape, self._tile)

    def soft_backward(self, centroids: Tensor, tau: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        grad_groups, k = to_groups(grad, self._tile), centroids.shape[1]
        grad_centroids, grad_tau = self._sums(k), self._sums()
        for chunk, values in self._cut(k):
            c, tau_here = self._at(chunk, centroids, tau)
            weights, offset = attention(values, c, tau_here)
            upstream = grad_groups[chunk].to(self._compute)[:, :, None]
            share = upstream * weights * (c[:, None, :] - soft(weights, c)[:, :, None])
            self._pile(chunk, (share * offset).sum(-1) * (-2.0 / tau_here[:, None]))
            direct, through = (upstream * weights).sum(1, dtype=torch.float64), (share * offset).sum(1)
            grad_centroids[chunk[0]] += direct + through.double() * (2.0 / tau[chunk[0], None])
            grad_tau[chunk[0]] += (share * offset.square()).sum((1, 2), dtype=torch.float64)
        return grad_centroids, grad_tau / tau / tau

    def moments_backward(self, centroids: Tensor, moved: Tensor, pull: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
        k = centroids.shape[1]
        grad_centroids, grad_tau = self._sums(k), self._sums()
        for chunk, values in self._cut(k):
            moved_here, pull_here, tau_here = self._at(chunk, moved, pull, tau)
            weights, offset = attention(values, *self._at(chunk, centroids, tau))
            upstream = pull_here[:, None, :] * (values[:, :, None] - moved_here[:, None, :])
            mean = (weights * upstream).sum(-1, keepdim=True)
            weights = self._weighed(chunk, weights)
            share = weights * (upstream - mean)
            direct = (weights * pull_here[:, None, :]).sum(-1)
            self._pile(chunk, direct - (share * offset).sum(-1) * (2.0 / tau_here[:, None]))
            grad_centroids[chunk[0]] += (share * offset).sum(1, dtype=torch.float64) * (2.0 / tau[chunk[0], None])
            grad_tau[chunk[0]] += (share * offset.square()).sum((1, 2), dtype=torch.float64)
        return grad_centroids, grad_tau / tau / tau

    def weight_gradient(self, mean: Tensor, pull: Tensor) -> Tensor:
        for chunk, values in self._cut(1):
            mean_here, pull_here = self._at(chunk, mean, pull)
            self._pile(chunk, (values - mean_here[:, None]) * pull_here[:, None])
        assert self._piled is not None
        gradient, self._piled = self._piled, None
        return from_groups(gradient, self._weight.shape, self._tile).to(self._weight.dtype)
