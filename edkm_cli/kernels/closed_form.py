"""Differentiable k-means in closed form: which passes over the weights forward and backward need, and how they join.

One-dimensional attention is a function of one scalar, so nothing of size (weights, k) has to outlive a pass. What a
pass does is left to a subclass of `Passes` (plain PyTorch, C, a table of distinct values); what passes add up to
is here, once. Symbols as in docs/clustering.md: A attention, d_ij = w_i - c_j, gamma_j = dL/dc'_j,

    M_j = sum_i m_i A_ij d_ij     D_j = sum_i m_i A_ij     c'_j = c_j + M_j / (D_j + EMPTY_MASS)

with m_i the importance of a weight (1 where none is given; a constant, it gets no gradient). This is the weighted mean
(N_j + eps c_j) / (D_j + eps) written as a step from c_j: it loses no digits when
centroids have nearly converged, and a cluster that attracts nothing stays where it is.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# A virtual mass at each centroid's old place. Far below the attention of one weight that matters (float32 resolves 1e-7
# of a mean), far above float32's smallest number, so that empty clusters behave identically in every precision.
EMPTY_MASS = 1e-12
# The least absolute temperature: 1/tau and its products with squared distances up to 1e8 stay finite in float32.
# Reached by groups without spread only, and there it means hard assignment.
TAU_FLOOR = 1e-30


class Spread(NamedTuple):
    """A group's mean, absolute temperature tau, and d tau / d variance (0 where the floor holds). (groups,) float64."""

    mean: Tensor
    tau: Tensor
    slope: Tensor


def centroid_dtype(weight: Tensor) -> torch.dtype:
    """float64 for float64 weights, float32 for all others."""
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


def relative_temperature(mean: Tensor, variance: Tensor, temperature: float) -> Spread:
    """tau = temperature * variance, kept above TAU_FLOOR."""
    tau = temperature * variance
    return Spread(mean, tau.clamp_min(TAU_FLOOR), torch.where(tau < TAU_FLOOR, torch.zeros_like(tau), temperature))


def step(centroids: Tensor, shift: Tensor, mass: Tensor) -> Tensor:
    """One centroid update from M and D, in the centroids' dtype."""
    return (centroids.double() + shift / (mass + EMPTY_MASS)).to(centroids.dtype)


class Passes:
    """The passes over one weight. All sums are (groups, k) or (groups,) float64; weight gradients pile up inside.

    A subclass has those from `spread` to `weight_gradient`, or `spread`, `soft` and its own `iterate` and `backward`.
    """

    group_size: int  # number of weights that share one LUT

    def spread(self) -> tuple[Tensor, Tensor]:
        """Mean and population variance of each group."""
        raise NotImplementedError

    def moments(self, centroids: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
        """M and D."""
        raise NotImplementedError

    def soft(self, centroids: Tensor, tau: Tensor, dtype: torch.dtype) -> Tensor:
        """The clustered weight sum_j A_ij c_j, (out, in)."""
        raise NotImplementedError

    def soft_backward(self, centroids: Tensor, tau: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """(dL/dc_j, dL/dtau) of `soft` for its gradient `grad`; piles up dL/dw."""
        raise NotImplementedError

    def moments_backward(self, centroids: Tensor, moved: Tensor, pull: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
        """(dL/dc_j, dL/dtau) of one iteration centroids -> moved, pull_j = gamma_j / (D_j + eps); piles up dL/dw."""
        raise NotImplementedError

    def weight_gradient(self, mean: Tensor, pull: Tensor) -> Tensor:
        """What has piled up, plus pull_g * (w_i - mean_g), in the weight's shape and dtype."""
        raise NotImplementedError

    def iterate(self, centroids: Tensor, tau: Tensor, iterations: int) -> Tensor:
        """The centroids after `iterations` updates."""
        for _ in range(iterations):
            centroids = step(centroids, *self.moments(centroids, tau))
        return centroids

    def backward(
        self, start: Tensor, spread: Spread, iterations: int, grad: Tensor | None, grad_centroids: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(dL/dweight, dL/dstart) from the gradients of the clustered weight and of the final centroids.

        The intermediate centroids are computed again: k numbers a group are cheap to keep for the length of this call and
        too many to keep between forward and backward.
        """
        path, masses = [start], []
        for _ in range(iterations):
            shift, mass = self.moments(path[-1], spread.tau)
            path.append(step(path[-1], shift, mass))
            masses.append(mass)
        gamma = torch.zeros_like(start, dtype=torch.float64) if grad_centroids is None else grad_centroids.double()
        grad_tau = torch.zeros_like(spread.tau)
        if grad is not None:
            from_output, tau_part = self.soft_backward(path[-1], spread.tau, grad)
            gamma, grad_tau = gamma + from_output, grad_tau + tau_part
        for before, after, mass in zip(reversed(path[:-1]), reversed(path[1:]), reversed(masses), strict=True):
            pull = gamma / (mass + EMPTY_MASS)
            from_attention, tau_part = self.moments_backward(before, after, pull, spread.tau)
            gamma, grad_tau = pull * EMPTY_MASS + from_attention, grad_tau + tau_part
        weight_gradient = self.weight_gradient(spread.mean, grad_tau * spread.slope * (2.0 / self.group_size))
        return weight_gradient, gamma.to(start.dtype)
