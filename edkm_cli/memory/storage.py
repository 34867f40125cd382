"""Views and storages: which bytes of a storage a tensor reads.

A storage is known by the address of its `StorageImpl` *while a weak reference to it is held*: the weak reference keeps
that address from being given to another storage, so equal addresses mean the same storage. The address of the data is
never used, since an allocator hands it out again as soon as a tensor is freed.
"""

import math
from dataclasses import dataclass

import torch


def storage_address(tensor: torch.Tensor) -> int:
    """The address of the tensor's `StorageImpl`; an identity only while the storage or a weak reference to it lives."""
    return tensor.untyped_storage()._cdata


@dataclass(frozen=True, slots=True)
class View:
    """How a tensor lies in its storage, of which `low` and `high` bound its bytes."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    low: int
    high: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "View":
        """The view of a strided tensor of at least one element."""
        size, stride, low = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()) * tensor.itemsize
        span = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        return cls(tensor.dtype, size, stride, low, low + span * tensor.itemsize)

    @property
    def distinct_bytes(self) -> int:
        """Bytes of the elements in memory; an expanded dimension (stride 0) counts once."""
        elements = math.prod(length for length, step in zip(self.size, self.stride, strict=True) if step)
        return min(elements * self.dtype.itemsize, self.high - self.low)

    def rebuild(self, flat: torch.Tensor, *, low: int) -> torch.Tensor:
        """This view on `flat`, a 1-D tensor that holds the storage's bytes from `low` on."""
        start = self.low - low
        typed = flat.view(torch.uint8)[start : start + self.high - self.low].view(self.dtype)
        return typed.as_strided(self.size, self.stride, typed.storage_offset())


@dataclass(frozen=True, slots=True)
class Region:
    """The bytes of a storage that one move takes: a range, or, with `holes`, only the elements of that view."""

    low: int
    high: int
    holes: View | None = None

    @classmethod
    def to_move(cls, view: View, storage_bytes: int) -> "Region":
        """What to move for this view: its own range where it is dense; the whole storage where it reads at least half
        of it (its siblings will read the rest: one copy serves all); else only its elements, packed together."""
        if view.distinct_bytes == view.high - view.low:
            return cls(view.low & ~15, view.high)  # where numbers of any size may begin
        if 2 * view.distinct_bytes >= storage_bytes:
            usable = storage_bytes - (storage_bytes - view.low) % view.dtype.itemsize
            return cls(view.low % view.dtype.itemsize, usable)
        return cls(view.low, view.high, holes=view)

    def covers(self, view: View) -> bool:
        """Whether this view can be rebuilt from the region."""
        return self.low <= view.low and view.high <= self.high if self.holes is None else self.holes == view

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The region as a 1-D tensor of `tensor`'s dtype. A view of the storage, or a packed copy if it has holes."""
        if self.holes is None:
            return tensor.as_strided(((self.high - self.low) // tensor.itemsize,), (1,), self.low // tensor.itemsize)
        return self._without_expanded(tensor).contiguous().view(-1)

    def scatter(self, flat: torch.Tensor) -> torch.Tensor:
        """The inverse of `gather`: a 1-D tensor of the bytes `low` to `high`, those in holes undefined."""
        if self.holes is None:
            return flat
        out = torch.empty((self.high - self.low) // flat.itemsize, dtype=flat.dtype, device=flat.device)
        packed = self._without_expanded(self.holes.rebuild(out, low=self.low))
        packed.copy_(flat.view(packed.shape))
        return out

    @staticmethod
    def _without_expanded(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[tuple(slice(None if step else 1) for step in tensor.stride())]
