"""Passes over weights in plain PyTorch: the reference of every faster kernel, and what runs where there is neither a
compiler nor Triton.

Those of `closed_form` go chunk by chunk, so that an attention map stays in cache. float64 weights are computed in float64,
all others in float32; sums over a chunk are added up in float64.

The distance from an entry is |w - c| in float32 (float64 for float64 weights), a tie goes to the lower index. One
subtraction is correctly rounded everywhere, so every implementation finds the same index for every weight, bit for bit.

K-means is Lloyd's iteration on sorted values from several starts: a local optimum, where `kmeans.c` finds the global one.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from edkm_cli.kernels.closed_form import Passes, centroid_dtype
from edkm_cli.packing import Tile, from_groups, to_groups

_BLOCK = 64  # columns whose changes `descend` passes on to the others in one product
ONE_HOT_NUMBERS = 2**23  # in a one-hot matrix, at most, of which four are held in float32
_STEPS = 100
_CHUNK = {"cpu": 1 << 22, "cuda": 1 << 24}  # values sorted at a time; about 80 bytes are in use for each
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
    return torch.softmax((square.amin(-1, keepdim=True) - square) / tau[:, None, None], -1), offset


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


def nearest(weight: Tensor, centroids: Tensor, tile: Tile) -> Tensor:
    """Index of the nearest entry, (out, in) uint8."""
    values, compute = to_groups(weight, tile), centroid_dtype(weight)
    indices = torch.empty(values.shape, dtype=torch.uint8, device=weight.device)
    for chunk in chunks(values, centroids.shape[1]):
        offset = values[chunk].to(compute)[:, :, None] - centroids[chunk[0]].to(compute)[:, None, :]
        indices[chunk] = offset.abs_().argmin(-1).to(torch.uint8)
    return from_groups(indices, weight.shape, tile)


def lookup(indices: Tensor, centroids: Tensor, tile: Tile, dtype: torch.dtype) -> Tensor:
    """centroids[group, index] for indices (out, in) uint8, in `dtype`."""
    positions, entries = to_groups(indices, tile), centroids.to(dtype)
    dense = torch.empty(positions.shape, dtype=dtype, device=indices.device)
    for chunk in chunks(positions, 8):
        dense[chunk] = entries[chunk[0]].gather(1, positions[chunk].long())
    return from_groups(dense, indices.shape, tile)


def snap(weight: Tensor, centroids: Tensor, tile: Tile, dtype: torch.dtype) -> tuple[Tensor, bool]:
    """(the nearest entry of each weight in `dtype`, whether all weights are finite)."""
    finite = bool(weight.sum(dtype=centroid_dtype(weight)).isfinite())
    return lookup(nearest(weight, centroids, tile), centroids, tile, dtype), finite


def sum_by_entry(weight: Tensor, centroids: Tensor, grad: Tensor, tile: Tile) -> Tensor:
    """The sum of `grad` over the weights nearest to each entry, (groups, k) float64."""
    indices, grads = to_groups(nearest(weight, centroids, tile), tile), to_groups(grad, tile)
    sums = torch.zeros(centroids.shape, dtype=torch.float64, device=weight.device)
    for chunk in chunks(grads, centroids.shape[1]):
        sums[chunk[0]] = sums[chunk[0]].scatter_add(1, indices[chunk].long(), grads[chunk].double())
    return sums


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


def changes(indices: Tensor, errors: Tensor, luts: Tensor, hessian: Tensor, start: int, end: int) -> Tensor:
    """What `descend` adds to the entries of the columns from `start` to `end`, (out, end - start); `indices` is changed."""
    width, diagonal = indices.shape[1] // luts.shape[1], hessian.diagonal()
    part = errors[:, start:end].clone()
    found = torch.zeros_like(part)
    for j in range(start, end):
        entries = luts[:, j // width]
        now = entries.gather(1, indices[:, j : j + 1].long())
        chosen = (entries - (now - part[:, j - start, None] / diagonal[j])).abs().argmin(1, keepdim=True)
        found[:, j - start] = (entries.gather(1, chosen) - now)[:, 0]
        part.addr_(found[:, j - start], hessian[j, start:end])
        indices[:, j] = chosen[:, 0].to(indices.dtype)
    return found


def descend(
    indices: Tensor, errors: Tensor, luts: Tensor, hessian: Tensor, sweeps: int, change: Callable[..., Tensor] = changes
) -> None:
    """Coordinate descent on tr((Q - W) H (Q - W)^T) over the choice of entries Q, in place, all rows side by side.

    With the others held, a weight q_j is best at q_j - r_j / H_jj, r = (q - w) H, and takes the entry nearest to that. Ends
    after a sweep over the columns that changes nothing.

    Args:
        indices: (out, in) uint8, the chosen entries.
        errors: (Q - W) H of the choice, (out, in), floating point; used up.
        luts: (out, tiles, k) in the same dtype: the entries of a row in each of `tiles` equal parts of the columns.
        hessian: (in, in) in the same dtype, symmetric, its diagonal positive.
        change: `changes`, or a faster one.
    """
    columns = indices.shape[1]
    for _ in range(sweeps):
        before = indices.clone()
        for start in range(0, columns, _BLOCK):
            end = min(start + _BLOCK, columns)
            errors.addmm_(change(indices, errors, luts, hessian, start, end), hessian[start:end])
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
        chosen = (codes.t()[..., None] == torch.arange(k, device=codes.device)).to(hessian.dtype)  # (in, rows, k)
        weighted = (hessian @ chosen.flatten(1)).view_as(chosen).permute(1, 0, 2)  # (rows, in, k)
        sums.append((chosen.permute(1, 2, 0) @ weighted).double())
    return torch.cat(sums)


def _starts(values: Tensor, mass: Tensor, k: int) -> list[Tensor]:
    """Starting centroids (groups, k) at quantiles of mass, of count, of the value range, and of mass * distance^2."""
    size, spots = values.shape[1], (torch.arange(k, dtype=torch.float64, device=values.device) + 0.5) / k
    starts = [values[:, (spots * size).long()], values[:, :1] + (values[:, -1:] - values[:, :1]) * spots]
    spread = (values - values.mean(1, keepdim=True)).square()
    for density in (mass, mass * spread, (mass * (spread + spread.mean(1, keepdim=True))).sqrt()):
        below = density.cumsum(1)
        starts.append(values.gather(1, torch.searchsorted(below, spots * below[:, -1:]).clamp_max(size - 1)))
    return starts


def _lloyd(values: Tensor, sums: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """(centroids, the part of the squares they explain) after convergence; sums (2, groups, n + 1) are prefix sums."""
    edges = None
    for _ in range(_STEPS):
        inner = torch.searchsorted(values, (centroids[:, 1:] + centroids[:, :-1]) / 2, right=True)
        if edges is not None and torch.equal(inner, edges):
            break
        edges = inner
        ends = torch.nn.functional.pad(inner, (1, 0)), torch.nn.functional.pad(inner, (0, 1), value=values.shape[1])
        mass, moment = (s.gather(1, ends[1]) - s.gather(1, ends[0]) for s in sums)
        centroids = torch.where(mass > 0, moment / mass.clamp_min(1e-300), centroids).sort(1).values
    return centroids, (2 * moment * centroids - mass * centroids.square()).sum(1)


def kmeans(values: Tensor, importance: Tensor | None, ks: Sequence[int]) -> list[Tensor]:
    """`passes_c.kmeans`, to a local optimum."""
    parts: list[list[Tensor]] = [[] for _ in ks]
    at_once = max(1, _CHUNK.get(values.device.type, 1 << 22) // values.shape[1])
    for first in range(0, values.shape[0], at_once):
        chunk, order = values[first : first + at_once].double().sort(1)
        mass = torch.ones_like(chunk)
        if importance is not None:
            mass = importance[first : first + at_once].double().gather(1, order)
            mass = torch.where(mass.sum(1, keepdim=True) > 0, mass, 1.0)
        mass = mass / mass.sum(1, keepdim=True)
        sums = torch.nn.functional.pad(torch.stack((mass, mass * chunk)).cumsum(2), (1, 0))
        for k, found in zip(ks, parts, strict=True):
            runs = [_lloyd(chunk, sums, start.sort(1).values) for start in _starts(chunk, mass, k)]
            best = torch.stack([explained for _, explained in runs]).argmax(0)
            found.append(torch.stack([c for c, _ in runs])[best, torch.arange(len(chunk), device=chunk.device)])
    return [torch.cat(found).float() for found in parts]
