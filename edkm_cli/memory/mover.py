"""Moving bytes off a device and back: pinned buffers, side streams, prefetch.

One `Mover` serves all devices, each by a *lane*: on CUDA it copies on side streams and orders the copies with events,
elsewhere (CPU tensors in the forced mode) at once. All else (the order of prefetching, the accounting) is the same code,
and runs on a machine without a GPU. Pinned buffers are torch's: its allocator keeps those that are freed, and gives one out
again when the copies that touch it have ended.

The lane of a GPU has not been measured on a GPU yet: `python scripts/bench_offload.py block --json FILE` will do it.
"""

import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, Protocol

import torch


@dataclass
class Statistics:
    """Counts since the start. Bytes are bytes, times are seconds of wall clock.

    A tensor that autograd saves is *offered*. It is then *kept* where it is (a parameter, an input the caller holds,
    a tensor already on the target device, a tensor of a few bytes), found to be a *duplicate* of one already moved,
    or *moved*; `moved_bytes` counts what codecs left to move. `duplicates_at_hop[d]` were found by the graph search at
    distance d, `duplicates_by_identity` only by comparing storages.
    """

    offered_tensors: int = 0
    offered_bytes: int = 0
    kept_tensors: int = 0
    kept_bytes: int = 0
    kept_small_bytes: int = 0
    moved_tensors: int = 0
    moved_bytes: int = 0
    restored_bytes: int = 0
    stored_bytes: int = 0
    peak_stored_bytes: int = 0
    duplicates_at_hop: dict[int, int] = field(default_factory=dict)
    duplicates_by_identity: int = 0
    duplicate_bytes: int = 0
    search_seconds: float = 0.0
    pack_seconds: float = 0.0
    unpack_seconds: float = 0.0

    @property
    def duplicates(self) -> int:
        """Saved tensors that needed no copy of their own."""
        return self.duplicates_by_identity + sum(self.duplicates_at_hop.values())

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"duplicates": self.duplicates}

    def stored(self, change_bytes: int) -> None:
        """Count bytes that begin (positive) or cease (negative) to be held on the target device."""
        self.stored_bytes += change_bytes
        self.peak_stored_bytes = max(self.peak_stored_bytes, self.stored_bytes)


class Stored(Protocol):
    """A flat tensor kept somewhere, in some form. Dropping the last reference frees it."""

    def load(self) -> torch.Tensor:
        """The 1-D tensor again: same values, dtype, length and device."""


Store = Callable[[torch.Tensor], Stored]


class Codec(Protocol):
    """Makes a flat tensor smaller before it is stored."""

    def pack(self, flat: torch.Tensor, store: Store) -> Stored | None:
        """Store `flat` (1-D, any dtype) in a smaller form through `store`, or None if this codec is not for it."""


class Lane:
    """Copies between a device and host buffers: on CUDA on two side streams (one each way), so that they overlap with
    compute and with each other; elsewhere at once, in the calling thread. Events end copies; None where none is needed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._in = (torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2))

    def outward(self, source: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Copy `source` (uint8, on the device) to a new tensor on the host; on CUDA start to, once the work queued so far
        has written it."""
        buffer = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=self._out is not None)
        if self._out is None:
            return buffer.copy_(source), None
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            buffer.copy_(source, non_blocking=True)
        source.record_stream(self._out)  # its memory is not reused before the copy has read it
        return buffer, self._out.record_event()

    def inward(self, buffer: torch.Tensor, after: Any) -> tuple[torch.Tensor, Any]:
        """Copy `buffer` to a new tensor on the device; on CUDA start to, after the copy that filled it."""
        if self._in is None:
            return torch.empty_like(buffer, device=self._device).copy_(buffer), None
        self._in.wait_event(after)
        with torch.cuda.stream(self._in):
            out = torch.empty(buffer.shape, dtype=buffer.dtype, device=self._device)
            out.copy_(buffer, non_blocking=True)
        return out, self._in.record_event()

    def wait(self, tensor: torch.Tensor, event: Any) -> None:
        """Make the current stream wait for an inward copy, and keep the memory until that stream is done with it."""
        if event is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(event)
            tensor.record_stream(current)


class Moved:
    """A flat tensor held in host memory."""

    def __init__(self, mover: "Mover", lane: Lane, source: torch.Tensor, number: int) -> None:
        self._mover, self._lane, self._dtype, self._number = mover, lane, source.dtype, number
        self._buffer, self._event = lane.outward(source.contiguous().view(torch.uint8))
        self._bytes = self._buffer.numel()
        self._ready: tuple[torch.Tensor, Any] | None = None
        self.loaded = False
        mover.statistics.moved_bytes += self._bytes
        mover.statistics.stored(self._bytes)
        weakref.finalize(self, mover.statistics.stored, -self._bytes).atexit = False

    def prefetch(self) -> None:
        """Start the copy back, if it has not been started."""
        if self._ready is None:
            self._ready = self._lane.inward(self._buffer, self._event)
            self._event = self._ready[1]
            self._mover.statistics.restored_bytes += self._bytes

    def load(self) -> torch.Tensor:
        """The tensor on its device, ready for the current stream; starts the copies that are probably next."""
        self.prefetch()
        assert self._ready is not None
        (tensor, event), self._ready, self.loaded = self._ready, None, True
        self._mover.prefetch_before(self._number)
        self._lane.wait(tensor, event)
        return tensor.view(self._dtype)


class Mover:
    """Moves flat tensors to host memory. The end of every chain of codecs: `mover.store` is a `Store`.

    Backward visits saved tensors in roughly the reverse order, so whenever one is loaded, the copies of the `prefetch`
    tensors that were moved just before it are started.
    """

    def __init__(self, statistics: Statistics, *, prefetch: int) -> None:
        self.statistics, self._prefetch = statistics, prefetch
        self._lane_of = cache(Lane)  # one for each device
        self._by_number: weakref.WeakValueDictionary[int, Moved] = weakref.WeakValueDictionary()
        self._count = 0

    def store(self, flat: torch.Tensor) -> Moved:
        """Copy a 1-D tensor to host memory; on CUDA without waiting for the copy."""
        moved = Moved(self, self._lane_of(flat.device), flat, self._count)
        self._by_number[self._count] = moved
        self._count += 1
        return moved

    def prefetch_before(self, number: int) -> None:
        """Start copying back the tensors that were moved just before this one, unless someone has had them already."""
        for earlier in range(number - 1, number - 1 - self._prefetch, -1):
            if (moved := self._by_number.get(earlier)) is not None and not moved.loaded:
                moved.prefetch()
