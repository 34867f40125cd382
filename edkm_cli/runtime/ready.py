"""What makes a packed product cheap to call: addresses prepared once."""

from __future__ import annotations

from operator import is_

from torch import Tensor

from edkm_cli.runtime import dispatch
from edkm_cli.runtime.lut_linear_c import Products
from edkm_cli.runtime.packed import Packed, check


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
