"""What makes a packed product cheap to call: addresses prepared once, and one call for linears that share their input."""

from __future__ import annotations

from operator import is_
from typing import Any

from torch import Tensor

from edkm_cli.runtime import dispatch
from edkm_cli.runtime.lut_linear_c import Products
from edkm_cli.runtime.packed import Packed, check

_SHARED_TOKENS = 16  # with more, a call for each matrix costs nothing beside the products


class Ready:
    """A module's matrices as the kernel reads them, made again when a tensor has moved."""

    def __init__(self) -> None:
        self._matrices: tuple[Packed, ...] = ()
        self._addresses: tuple[int, ...] = ()
        self._products: Products | None = None

    def __deepcopy__(self, memo: dict) -> Ready:
        return Ready()

    def __reduce__(self) -> tuple:
        return Ready, ()

    def product(self, x: Tensor, matrices: tuple[Packed, ...], columns: int) -> list[Tensor] | None:
        """x times each matrix, or None where the kernel is not the way.

        `matrices` should hold the same objects at each call as long as they stay what they are.
        """
        kept = self._matrices
        if len(kept) == len(matrices) and all(map(is_, kept, matrices)):
            products = self._products
            found = None if products is None else products(x)
            if found is not None or _addresses(matrices) == self._addresses:
                return found
        for packed in matrices:
            check(columns, packed)
        self._matrices, self._addresses = matrices, _addresses(matrices)
        self._products = dispatch.products(matrices, columns)
        return None if self._products is None else self._products(x)


def _addresses(matrices: tuple[Packed, ...]) -> tuple[int, ...]:
    return tuple(t.data_ptr() for m in matrices for t in m[:3] if t is not None)


class SharedInput:
    """Linears that are called one after the other with one input (q, k, v; gate, up): the first call computes them all.

    The others' results wait until they are asked for with the same tensor, unchanged; anything else is computed anew.
    """

    def __init__(self, members: tuple[Any, ...]):
        self.members, self._ready = members, Ready()
        self._state: tuple[Tensor, int, dict[int, Tensor]] | None = None  # one attribute, so that threads cannot mix

    def forget(self) -> None:
        """Hold none of the members' tensors any more; the next call asks for them again."""
        self._ready, self._state = Ready(), None

    def product(self, member: Any, x: Tensor) -> Tensor | None:
        """What `member` gives for x, or None where nothing can be shared."""
        state = self._state
        if state is not None and state[0] is x and id(member) in state[2] and state[1] == x._version:
            found = state[2].pop(id(member))
            if not state[2]:
                self._state = None
            return found
        if x.numel() > _SHARED_TOKENS * member.in_features or x.is_inference():
            return None
        outs = self._ready.product(x, tuple([m.packed() for m in self.members]), member.in_features)
        if outs is None:
            return None
        results = {id(m): out for m, out in zip(self.members, outs, strict=True)}
        found = results.pop(id(member))
        self._state = (x, x._version, results)
        return found
