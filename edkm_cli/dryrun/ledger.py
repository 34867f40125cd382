"""A ledger of tensor storages, kept while code runs: how many bytes each part holds, and the highest total.

A dispatch mode sees the result of every operation. A new storage is entered under the current part ("activations",
"optimizer", ...) and place. It is removed when its last tensor is freed by Python's reference counting, as in the run
itself. What an operation allocates and frees before it returns is not seen.

On the meta device storages have sizes and no memory. So a model of any size goes through a training step in seconds, and
the ledger then holds what the real step would. `call` gives the values that such a run cannot compute.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from edkm_cli.nn.hooks import changed

DEVICE, HOST, HEAP = "device", "host", "heap"
STANDS_FOR = "stands_for"  # attribute of a tensor: how many like it there are in a run, itself included
Call = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def stands_for(tensor: Tensor) -> int:
    """How many tensors of a run this one stands for."""
    return getattr(tensor, STANDS_FOR, 1)


@dataclass
class Account:
    """Bytes by part now, and at the moment of each phase when their total was highest.

    Freed blocks of fewer bytes than `kept_below` wait, as `HEAP`, for those that come next or for `return_free`; at least
    `holes` times what such blocks hold, `small`, do.
    """

    kept_below: int = 0
    holes: float = 0.0
    small: int = 0
    bytes: dict[str, int] = field(default_factory=dict)
    total: int = 0
    peaks: dict[str, dict[str, int]] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)  # the sums of `peaks`

    def add(self, part: str, size: int, phase: str) -> None:
        """So many bytes more (or fewer) under a part."""
        self.bytes[part] = self.bytes.get(part, 0) + size
        self.total += size
        if abs(size) < self.kept_below:
            waiting, self.small = self.bytes.get(HEAP, 0), self.small + size
            self.bytes[HEAP] = max(0, waiting - size, int(self.holes * self.small))
            self.total += self.bytes[HEAP] - waiting
        if self.total > self.totals.get(phase, -1):
            self.totals[phase], self.peaks[phase] = self.total, dict(self.bytes)

    def return_free(self) -> None:
        """As `return_free_blocks` in a run."""
        self.total -= self.bytes.pop(HEAP, 0)


@dataclass(frozen=True)
class Peak:
    """Bytes by part at the moment of the highest total, the phase it is in, the highest total of each phase, how much of
    that of loading is pages of files, and the freed blocks that wait at that moment (None: not counted)."""

    phase: str
    parts: dict[str, int]
    phases: dict[str, int]
    files: int = 0
    waiting: int | None = None

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass
class _Entry:
    size: int
    place: str
    part: str
    watch: Any


class Ledger(TorchDispatchMode):
    """Use as a context manager around the code; then read `accounts`.

    Args:
        call: runs an operation, `call(func, args, kwargs)`; by default as it is.
        part_of: the part of a new storage, from a tensor on it; by default the current `part`.
        granule: sizes are rounded up to this many bytes, as the device's allocator does.

    Attributes:
        part, place: where new storages are entered. `under` sets them for a while, hooks may set them for good.
        share: the fraction of a new storage that is counted, for one of several holders.
    """

    def __init__(self, *, call: Call | None = None, part_of: Callable[[Tensor], str] | None = None, granule: int = 1):
        super().__init__()
        self.accounts = {DEVICE: Account(), HOST: Account()}
        self.part, self.place, self.share, self.phase = "other", DEVICE, 1.0, "start"
        self._call = call or (lambda func, args, kwargs: func(*args, **kwargs))
        self._granule = granule
        self._part_of = part_of or (lambda tensor: self.part)
        self._counting = True
        self._entries: dict[int, _Entry] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = self._call(func, args, kwargs or {})
        results = result if isinstance(result, (tuple, list)) else (result,)
        for item in results if self._counting else ():
            if isinstance(item, Tensor):
                self._entry(item)
        return result

    def _entry(self, tensor: Tensor) -> _Entry:
        """That of the tensor's storage, which is made where there is none."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._entries:
            part, size = self._part_of(tensor), self._rounded(storage.nbytes(), self.share)
            self._entries[key] = _Entry(size, self.place, part, weakref.ref(storage, lambda _: self._strike(key)))
            self.accounts[self.place].add(part, size, self.phase)
        return self._entries[key]

    def _rounded(self, size: int, share: float) -> int:
        return math.ceil(size * share / self._granule) * self._granule

    def _strike(self, key: int) -> None:
        entry = self._entries.pop(key)
        self.accounts[entry.place].add(entry.part, -entry.size, self.phase)

    def begin(self, phase: str) -> None:
        """From now on peaks belong to this phase; what is held already counts in it."""
        self.phase = phase
        for account in self.accounts.values():
            account.return_free()
            account.add(self.part, 0, phase)

    def under(self, part: str, *, place: str | None = None) -> AbstractContextManager[None]:
        """New storages belong to this part (and place) inside."""
        return changed(self, part=part, place=place or self.place)

    def uncounted(self) -> AbstractContextManager[None]:
        """Storages made inside are not entered; `move` does that."""
        return changed(self, _counting=False)

    def move(self, tensors: Iterable[Tensor], part: str, *, place: str = DEVICE, share: float = 1.0) -> None:
        """Enter tensors under a part, wherever they were before, each storage once, as often as it `stands_for` others.
        One of several holders of a storage keeps a `share` of it."""
        for tensor in tensors:
            entry = self._entry(tensor)
            self.accounts[entry.place].add(entry.part, -entry.size, self.phase)
            size = self._rounded(tensor.untyped_storage().nbytes(), share * stands_for(tensor))
            entry.place, entry.part, entry.size = place, part, size
            self.accounts[place].add(part, entry.size, self.phase)

    def holds(self, tensor: Tensor, place: str) -> bool:
        """Whether the tensor's storage is entered at this place."""
        entry = self._entries.get(tensor.untyped_storage()._cdata)
        return entry is not None and entry.place == place

    @contextmanager
    def more(self, size_bytes: int, part: str, *, place: str = DEVICE) -> Iterator[None]:
        """So many bytes more under a part, inside: what no tensor stands for."""
        self.accounts[place].add(part, size_bytes, self.phase)
        try:
            yield
        finally:
            self.accounts[place].add(part, -size_bytes, self.phase)
