"""The closed-form correction: what a decoder layer's matrices can do about errors that were made before them, to inputs
(GPTAQ, arXiv 2504.02692) and in the residual stream: docs/clustering.md, "The start".

Each token counts by its own norm: the first token of a text has activations a hundred times as large as all others, and an
unweighted regression would spend the matrices on the errors of that one. A token that gets such activations in the
compressed model alone would count for more than all others: each counts by the larger of its two inputs (docs/log.md).

Which matrices add to a residual stream is not known by name but found on one text: the stream before, plus the output,
is what another module gets or what the layer returns, bit by bit.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from edkm_cli.allocator import return_free_blocks
from edkm_cli.initialize.layers import HiddenStates
from edkm_cli.nn.clustered import ClusteredLinear
from edkm_cli.nn.hooks import entering, hooked
from edkm_cli.precision import TOKENS_A_SUM, sum_of_products

# Shares of the two errors that are made up for: measured on SmolLM2-135M with 24,576 tokens, docs/log.md.
_INPUTS, _RESIDUAL = 0.9, 0.6


class Corrections:
    """For one decoder layer and its clustered linears: a record of its uncompressed pass, and the weights that follow."""

    def __init__(self, block: nn.Module, layers: Sequence[ClusteredLinear]):
        self._block, self._layers = block, list(layers)
        self._adds_to: dict[ClusteredLinear, nn.Module] = {}
        self._exact: dict[nn.Module, HiddenStates] = {}  # what modules got in the uncompressed model
        self._norms: WeakKeyDictionary[HiddenStates, list[Tensor]] = WeakKeyDictionary()  # of it, (1, sequence, 1) each
        self._now: dict[nn.Module, Tensor] = {}  # what they get in the compressed one
        self._by_output: Tensor | None = None  # (batch, sequence, 1)
        self._weights: Tensor | None = None  # the same, for the matrix at hand
        self._shared: tuple[Tensor | None, Any] = (None, None)  # inputs X, and what was computed of them

    def find_residuals(self, run: Callable[[Tensor], Tensor], hidden: Tensor) -> None:
        """Find the matrices that add to a residual stream. `run` is the uncompressed layer, `hidden` (1, sequence,
        hidden) what enters it. On the meta device, where there is nothing to compare, the first that could adds to what
        enters, all others to the last stream."""
        streams: list[tuple[nn.Module, Tensor]] = [(self._block, hidden)]
        outputs: dict[ClusteredLinear, Tensor] = {}

        def enters(module: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], Tensor) and args[0].shape == hidden.shape:
                streams.append((module, args[0]))

        def leaves(module: Any, args: tuple[Any, ...], output: Tensor) -> None:
            if output.shape == hidden.shape:
                outputs[module] = output

        others = [m for m in self._block.modules() if m is not self._block and m not in self._layers]
        with hooked(others, enters), hooked(self._layers, leaves, after=True):
            end = run(hidden)
        if hidden.is_meta:
            self._adds_to = {layer: streams[-1 if at else 0][0] for at, layer in enumerate(outputs)}
            return
        ends = [stream for _, stream in streams] + [end]
        for layer, output in outputs.items():
            for module, stream in streams:
                total = stream + output
                if any(torch.equal(total, other) for other in ends):
                    self._adds_to[layer] = module
                    break

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep what the modules get in passes of the uncompressed layer, one text each; once for all that get the same."""
        last: Tensor | None = None
        kept = HiddenStates()

        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal last, kept
            if (given := entering(args, kwargs)) is last:
                self._exact.setdefault(module, kept)
            elif given.dim() == 3:  # experts get a choice of the tokens, see `target`
                last, kept = given, self._exact.setdefault(module, HiddenStates())
                kept.push(given)
                self._norms.setdefault(kept, []).append(given.float().norm(dim=-1, keepdim=True))

        with hooked([*self._layers, *set(self._adds_to.values())], keep, with_kwargs=True):
            yield

    def weigh(self, outputs: HiddenStates) -> None:
        """Let tokens count by what the uncompressed layer gave for them, (1, sequence, hidden) each: those of more than the
        median norm by their relative error, so that none counts for more than the others."""
        norms = torch.cat([outputs[text].float().norm(dim=-1, keepdim=True) for text in range(len(outputs))])
        self._weights = self._by_output = (norms.median() / norms.clamp_min(1e-30)).clamp_max_(1.0)

    def hessian(self, layer: ClusteredLinear, inputs: Tensor) -> Tensor:
        """X X^T, (in, in), of a matrix's inputs (..., in) as `_weighted` gives them from now on."""
        exact, self._weights = self._exact.get(layer), self._by_output
        if self._weights is not None and exact is not None and inputs.shape[:-1] == self._weights.shape[:-1]:
            pairs = zip(self._norms[exact], inputs.split(1), strict=True)
            shares = [was / now.float().norm(dim=-1, keepdim=True).clamp_min_(1e-30) for was, now in pairs]
            self._weights = self._weights * torch.cat(shares).clamp_max_(1.0)
        return _sum(inputs, lambda some: (self._weighted(inputs[some], some),) * 2)

    def _weighted(self, inputs: Tensor, some: slice = slice(None)) -> Tensor:
        """Inputs of a layer, of `some` texts, as (tokens, in) float32, times the square roots of the tokens' weights."""
        if self._weights is not None and inputs.shape[:-1] == self._weights[some].shape[:-1]:
            inputs = inputs.float() * self._weights[some]
        return inputs.reshape(-1, inputs.shape[-1]).float()

    @contextmanager
    def following(self) -> Iterator[None]:
        """In the pass of the compressed layer, all texts at once, keep what the correction of a matrix needs; what was
        recorded is forgotten at the end."""

        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._now[module] = entering(args, kwargs)

        with hooked(set(self._adds_to.values()), keep, with_kwargs=True):
            yield
        self._exact.clear()
        self._now.clear()
        self._shared = (None, None)

    def target(
        self, layer: ClusteredLinear, inputs: Tensor, times_inverse: Callable[[Tensor], Tensor], damping: float
    ) -> Tensor:
        """The weight (out, in) that is to be rounded, in the dtype of the layer's.

        Args:
            inputs: X, (batch, sequence, in), of the compressed model.
            times_inverse: multiplies a matrix (n, in) by the damped inverse of the weighted X X^T.
            damping: the share of its mean diagonal that was added.

        A layer that sees a choice of the tokens, as experts do, keeps its weight: nothing says that they are the same.
        """
        if (exact := self._exact.get(layer)) is None or inputs.dim() != 3 or len(exact) != len(inputs):
            return layer.weight
        weight, stream = layer.weight.float(), self._adds_to.get(layer)
        if inputs.shape[:-1].numel() < layer.in_features:
            change = self._by_tokens(weight, inputs, exact, stream, damping)
        elif stream is None:  # what is solved once serves all matrices with these inputs
            of_inputs = partial(self._missing, inputs, exact)
            change = weight @ self._once(inputs, lambda: times_inverse(_INPUTS * _sum(inputs, of_inputs)))
        else:

            def outputs(some: slice) -> tuple[Tensor, Tensor]:
                missing, x = self._missing(inputs, exact, some)
                wanted = sum_of_products(missing.t(), weight.t()).mul_(_INPUTS)  # (tokens, out)
                return wanted.add_(self._error(stream, some), alpha=_RESIDUAL), x

            change = times_inverse(_sum(inputs, outputs))
        self.forget(layer)
        return (weight + change).to(layer.weight.dtype)

    def forget(self, layer: ClusteredLinear) -> None:
        """Drop what only this corrected layer needed; free blocks go back where no other matrix has its inputs, before the
        pass over all texts goes on, which needs the most memory."""
        stream, exact = self._adds_to.pop(layer, None), self._exact.get(layer)
        for module in (layer, stream):
            if module is not None and module not in self._adds_to.values():
                self._exact.pop(module, None)
                self._now.pop(module, None)
        if exact not in self._exact.values():
            return_free_blocks()

    def _by_tokens(
        self, weight: Tensor, inputs: Tensor, exact: HiddenStates, stream: nn.Module | None, damping: float
    ) -> Tensor:
        """The change of a weight where tokens are fewer than columns: X^T (X X^T + damping)^-1 = (X^T X + damping)^-1 X^T, a
        matrix of tokens by tokens (Woodbury)."""

        def solved() -> tuple[Tensor, Tensor]:
            x = self._weighted(inputs)  # (tokens, in)
            products = x @ x.t()
            products.diagonal().add_(damping * products.diagonal().sum() / x.shape[1] + 1e-30)
            return self._weighted(exact.some()) - x, torch.cholesky_solve(x, torch.linalg.cholesky(products))

        missing, solution = self._once(inputs, solved)
        wanted = (weight @ missing.t()).mul_(_INPUTS)  # (out, tokens)
        if stream is not None:
            wanted.add_(self._error(stream).t(), alpha=_RESIDUAL)
        return wanted @ solution

    def _error(self, stream: nn.Module, some: slice = slice(None)) -> Tensor:
        """Of the residual stream that a module gets, of `some` texts, weighted, (tokens, hidden)."""
        return self._weighted(self._exact[stream].some(some) - self._now[stream][some], some)

    def _missing(self, inputs: Tensor, exact: HiddenStates, some: slice) -> tuple[Tensor, Tensor]:
        """X' - X and X, of `some` texts, (tokens, in)."""
        x = self._weighted(inputs[some], some)
        return self._weighted(exact.some(some), some) - x, x

    def _once(self, inputs: Tensor, compute: Callable[[], Any]) -> Any:
        """What `compute` gives, for all matrices that get the same X: they got the same X', too."""
        if self._shared[0] is not inputs:
            self._shared = (inputs, compute())
        return self._shared[1]


def _sum(inputs: Tensor, factors: Callable[[slice], tuple[Tensor, Tensor]]) -> Tensor:
    """`sum_of_products` over the texts of inputs (texts, ..., in), whose factors exist some thousand tokens at a time."""
    at_once = max(1, TOKENS_A_SUM // max(1, inputs.shape[1:-1].numel()))
    total = sum_of_products(*factors(slice(at_once)))
    for first in range(at_once, len(inputs), at_once):
        total += sum_of_products(*factors(slice(first, first + at_once)))
    return total
