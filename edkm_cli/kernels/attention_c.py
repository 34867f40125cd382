"""The passes of `closed_form` over a float32 or 16-bit weight on the CPU, by `attention.c`."""

import torch
from torch import Tensor

from edkm_cli.kernels.closed_form import Passes
from edkm_cli.kernels.layout_c import Tiled, matrix, readable, writable
from edkm_cli.kernels.tiles import Tile


class CPasses(Passes):
    """`closed_form.Passes`."""

    def __init__(self, weight: Tensor, tile: Tile, importance: Tensor | None = None) -> None:
        self._tiled, self._dtype, self.group_size = Tiled(weight, tile), weight.dtype, tile[0] * tile[1]
        self._importance = None if importance is None else readable(importance)
        self._grad_weight: Tensor | None = None

    def spread(self) -> tuple[Tensor, Tensor]:
        tiled = self._tiled
        counts, means, squares = tiled.partial(), tiled.partial(), tiled.partial()
        tiled.run("spread", 1, matrix(tiled.weight), counts, means, squares)
        mean = (counts * means).sum(1, keepdim=True) / self.group_size
        square = squares + counts * (means - mean).square()
        return mean.reshape(-1), tiled.join(square) / self.group_size

    def moments(self, centroids: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
        tiled, k = self._tiled, centroids.shape[1]
        shift, mass = tiled.partial(k), tiled.partial(k)
        of_weights = matrix(tiled.weight), matrix(self._importance)
        tiled.run("moments", k, *of_weights, centroids.contiguous(), tau, shift, mass)
        return tiled.join(shift), tiled.join(mass)

    def soft(self, centroids: Tensor, tau: Tensor, dtype: torch.dtype) -> Tensor:
        tiled = self._tiled
        out = torch.empty(tiled.weight.shape, dtype=writable(dtype))
        tiled.run("soft", centroids.shape[1], matrix(tiled.weight), centroids.contiguous(), tau, matrix(out))
        return out.to(dtype)

    def _gradient(self, zero: bool) -> Tensor:
        if self._grad_weight is None:
            self._grad_weight = (torch.zeros if zero else torch.empty)(self._tiled.weight.shape, dtype=torch.float32)
        return self._grad_weight

    def soft_backward(self, centroids: Tensor, tau: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        tiled, k, upstream = self._tiled, centroids.shape[1], readable(grad)
        assert self._grad_weight is None, "the output's gradient comes first: its kernel overwrites"
        grad_centroids, grad_tau, weight_grad = tiled.partial(k), tiled.partial(), self._gradient(zero=False)
        at = matrix(tiled.weight), matrix(None), centroids.contiguous(), tau, matrix(upstream)
        tiled.run("backward", k, *at, None, None, matrix(weight_grad), grad_centroids, grad_tau)
        return tiled.join(grad_centroids), tiled.join(grad_tau) / tau / tau

    def moments_backward(self, centroids: Tensor, moved: Tensor, pull: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
        tiled, k, pull = self._tiled, centroids.shape[1], pull.float()
        grad_centroids, grad_tau, weight_grad = tiled.partial(k), tiled.partial(), self._gradient(zero=True)
        of_weights, into = (matrix(tiled.weight), matrix(self._importance)), matrix(weight_grad)
        at = centroids.contiguous(), tau, into, moved.contiguous()
        tiled.run("backward", k, *of_weights, *at, pull, into, grad_centroids, grad_tau)
        return tiled.join(grad_centroids), tiled.join(grad_tau) / tau / tau

    def weight_gradient(self, mean: Tensor, pull: Tensor) -> Tensor:
        tiled, weight_grad = self._tiled, self._gradient(zero=True)
        out = weight_grad if writable(self._dtype) == torch.float32 else torch.empty_like(tiled.weight)
        tiled.run("weight_gradient", 1, matrix(tiled.weight), matrix(weight_grad), mean, pull, matrix(out))
        self._grad_weight = None
        return out.to(self._dtype)
