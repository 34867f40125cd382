"""The passes of `closed_form` for a 16-bit weight with one LUT: a table of distinct values instead of an attention map.

A 16-bit weight's bit pattern is its own index into a table of 65,536 entries. All weights with one pattern have one row
of attention, so the iterations run over the distinct values (2,000 to 10,000 in practice), each counted as often as it
occurs, in float64. Per weight there remain a histogram and a gather forward; a histogram of the gradient and a blend
g_i * slope(v_i) + offset(v_i) backward. The paper's uniquification keeps an index per weight; here the weight is it.

K-means of millions of weights goes by their `distinct` values, too, also where a model that was trained in 16 bits is loaded
in float32: weights that are equal belong to one cluster, so a group is its values, each with the sum of its importances.
"""

from collections.abc import Iterator, Sequence
from types import ModuleType

import torch
from torch import Tensor

from edkm_cli.kernels.closed_form import Passes
from edkm_cli.kernels.passes_torch import attention, soft

PATTERNS = 1 << 16
_CHUNK = {"cpu": 1 << 20, "cuda": 1 << 26}  # weights at a time: indices are four times as wide
_ONE_THREAD_ENTRIES = 1 << 15


Parts = Sequence[tuple[Tensor, Tensor]]


def _cut(weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(some of the weights, their bit patterns), a chunk at a time."""
    bits, size = weight.reshape(-1).view(torch.int16), _CHUNK.get(weight.device.type, 1 << 20)
    for first in range(0, bits.numel(), size):
        chunk = slice(first, first + size)
        yield chunk, bits[chunk].to(torch.int32) & (PATTERNS - 1)


def count_patterns(weight: Tensor) -> Tensor:
    """How often each bit pattern occurs in a 16-bit weight, (65536,) int64."""
    counts = torch.zeros(PATTERNS, dtype=torch.int64, device=weight.device)
    for _, patterns in _cut(weight):
        counts += torch.bincount(patterns, minlength=PATTERNS)
    return counts


def sum_by_pattern(weight: Tensor, grad: Tensor) -> Tensor:
    """The sum of `grad` over the weights with each pattern, (65536,) float64."""
    sums = torch.zeros(PATTERNS, dtype=torch.float64, device=weight.device)
    flat = grad.reshape(-1)
    for chunk, patterns in _cut(weight):
        sums += torch.bincount(patterns, weights=flat[chunk].double(), minlength=PATTERNS)
    return sums


def gather(weight: Tensor, table: Tensor) -> Tensor:
    """table[pattern] of a table (65536,), in the weight's shape and the table's dtype."""
    out = torch.empty(weight.numel(), dtype=table.dtype, device=weight.device)
    for chunk, patterns in _cut(weight):
        out[chunk] = table[patterns]
    return out.view(weight.shape)


def blend(weight: Tensor, parts: Parts, offset: Tensor) -> Tensor:
    """offset[pattern] + sum over (factor, table) in `parts` of factor * table[pattern], in the weight's shape and
    dtype. Tables are (65536,) float32; a factor is of the weight's shape, and there are at most two parts."""
    out = torch.empty(weight.numel(), dtype=weight.dtype, device=weight.device)
    flat = [(factor.reshape(-1), table) for factor, table in parts]
    for chunk, patterns in _cut(weight):
        out[chunk] = offset[patterns] + sum(factor[chunk].float() * table[patterns] for factor, table in flat)
    return out.view(weight.shape)


class TablePasses(Passes):
    """The passes over a bfloat16 or float16 weight (out, in) whose group is the whole matrix.

    With an importance, (in,) or (out, in), a distinct value counts in the moments by the sum over its weights. `kernels` is
    this module or one with the same functions.
    """

    def __init__(self, weight: Tensor, kernels: ModuleType, importance: Tensor | None = None) -> None:
        self._weight, self._kernels, self.group_size = weight, kernels, weight.numel()
        counts = kernels.count_patterns(weight)
        self._patterns = counts.nonzero()[:, 0]  # (u,)
        self._values = self._patterns.to(torch.int16).view(weight.dtype).double()[None]  # (1, u)
        self._counts = counts[self._patterns].double()  # (u,)
        self._importance = None if importance is None else importance.expand(weight.shape)
        self._masses = self._counts  # (u,)
        if self._importance is not None:
            self._masses = kernels.sum_by_pattern(weight, self._importance)[self._patterns]
        self._grad: Tensor | None = None
        self._slope = torch.zeros_like(self._counts)
        self._offset = torch.zeros_like(self._counts)  # for an importance of 1

    def _table(self, entries: Tensor, dtype: torch.dtype) -> Tensor:
        table = torch.zeros(PATTERNS, dtype=dtype, device=entries.device)
        table[self._patterns] = entries.to(dtype)
        return table

    def spread(self) -> tuple[Tensor, Tensor]:
        mean = (self._values * self._counts).sum(1) / self.group_size
        return mean, ((self._values - mean[:, None]).square() * self._counts).sum(1) / self.group_size

    def _cut(self, k: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(part of the table, its values (1, u'), their masses (u',)) small enough for PyTorch to stay on one thread.

        Waking its threads for microseconds of work costs more than the work, and on a busy machine far more.
        """
        entries = max(1, _ONE_THREAD_ENTRIES // k) if self._values.device.type == "cpu" else PATTERNS
        for first in range(0, self._counts.numel(), entries):
            part = slice(first, first + entries)
            yield part, self._values[:, part], self._masses[part]

    def moments(self, centroids: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
        shift, mass = torch.zeros_like(centroids, dtype=torch.float64), torch.zeros_like(centroids, dtype=torch.float64)
        for _, values, masses in self._cut(centroids.shape[1]):
            weights, offset = attention(values, centroids.double(), tau)
            weights = weights * masses[:, None]
            shift += (weights * offset).sum(1)
            mass += weights.sum(1)
        return shift, mass

    def soft(self, centroids: Tensor, tau: Tensor, dtype: torch.dtype) -> Tensor:
        clustered, c = torch.empty_like(self._counts), centroids.double()
        for part, values, _ in self._cut(c.shape[1]):
            clustered[part] = soft(attention(values, c, tau)[0], c)[0]
        return self._kernels.gather(self._weight, self._table(clustered, dtype))

    def soft_backward(self, centroids: Tensor, tau: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        self._grad = grad
        sums = self._kernels.sum_by_pattern(self._weight, grad)[self._patterns]  # (u,)
        c = centroids.double()
        grad_centroids, grad_tau = torch.zeros_like(c), torch.zeros_like(tau)
        for part, values, _ in self._cut(c.shape[1]):
            upstream = sums[part, None]
            weights, offset = attention(values, c, tau)
            share = weights * (c[:, None, :] - soft(weights, c)[:, :, None])  # (1, u', k), for a gradient of 1
            through = share * offset
            self._slope[part] += through.sum(-1)[0] * (-2.0 / tau)
            grad_centroids += (weights * upstream).sum(1) + (through * upstream).sum(1) * (2.0 / tau)
            grad_tau += (through * offset * upstream).sum((1, 2))
        return grad_centroids, grad_tau / tau / tau

    def moments_backward(self, centroids: Tensor, moved: Tensor, pull: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
        c = centroids.double()
        grad_centroids, grad_tau = torch.zeros_like(c), torch.zeros_like(tau)
        for part, values, masses in self._cut(c.shape[1]):
            weights, offset = attention(values, c, tau)
            upstream = pull[:, None, :] * (values[:, :, None] - moved.double()[:, None, :])
            through = weights * (upstream - (weights * upstream).sum(-1, keepdim=True)) * offset
            self._offset[part] += ((weights * pull[:, None, :]).sum(-1) - through.sum(-1) * (2.0 / tau))[0]
            through = through * masses[:, None]
            grad_centroids += through.sum(1) * (2.0 / tau)
            grad_tau += (through * offset).sum((1, 2))
        return grad_centroids, grad_tau / tau / tau

    def weight_gradient(self, mean: Tensor, pull: Tensor) -> Tensor:
        offset, parts = ((self._values - mean[:, None]) * pull[:, None])[0], []
        if self._grad is not None:
            parts.append((self._grad, self._table(self._slope, torch.float32)))
        if self._importance is None:
            offset = self._offset + offset
        else:
            parts.append((self._importance, self._table(self._offset, torch.float32)))
        return self._kernels.blend(self._weight, parts, self._table(offset, torch.float32))


def narrowed(values: Tensor) -> Tensor | None:
    """Float32 values as bfloat16 or float16 where that changes none of them, else None."""
    narrow = (values.to(dtype) for dtype in (torch.bfloat16, torch.float16))
    return next((some for some in narrow if torch.equal(some.float(), values)), None)


def distinct(values: Tensor, importance: Tensor | None, kernels: ModuleType) -> tuple[Tensor, Tensor]:
    """(distinct values (1, u) float32, their importances (1, u) float32) of 16-bit values (1, n), all finite.

    Without importance, or where it is zero everywhere, each value counts as often as it occurs.
    """
    values = values.contiguous()
    counts = kernels.count_patterns(values)
    masses = counts.double() if importance is None else kernels.sum_by_pattern(values, importance)
    if not bool(masses.any()):
        masses = counts.double()
    patterns = torch.arange(PATTERNS, device=values.device).to(torch.int16)[counts > 0]
    return patterns.view(values.dtype).float()[None], masses[counts > 0].float()[None]
