"""Moving bytes off a device and back: pinned buffers from a reused pool, side streams, prefetch.

One `Mover` serves all devices, each by a *lane*: on CUDA it copies on side streams and orders the copies with events,
elsewhere (CPU tensors in the forced mode) at once. All else (the pool, the order of prefetching, the accounting) is the
same code, and runs on a machine without a GPU.

The lane of a GPU has not been measured on a GPU yet: `python scripts/bench_offload.py block --json FILE` will do it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from edkm_cli.memory.accounting import Statistics


class Stored(Protocol):
    """A flat tensor kept somewhere, in some form. Dropping the last reference frees it."""

    def load(self) -> torch.Tensor:
        """The 1-D tensor again: same values, dtype, length and device."""


Store = Callable[[torch.Tensor], Stored]


class Codec(Protocol):
    """Makes a flat tensor smaller before it is stored."""

    def pack(self, flat: torch.Tensor, store: Store) -> Stored | None:
        """Store `flat` (1-D, any dtype) in a smaller form through `store`, or None if this codec is not for it."""


class PinnedPool:
    """Byte buffers of exact sizes, reused: a training step asks for the same sizes every time.

    A returned buffer may still be read by a copy under way; the event that ends that copy comes back with it and is
    waited for before the buffer is given out again.
    """

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        self._free: dict[int, list[tuple[torch.Tensor, Any]]] = {}
        self.allocated_bytes = 0

    def take(self, length_bytes: int) -> torch.Tensor:
        """A uint8 buffer of this many bytes, on the host, contents undefined."""
        free = self._free.get(length_bytes)
        if free:
            buffer, event = free.pop(0)
            if event is not None:
                event.synchronize()
            return buffer
        self.allocated_bytes += length_bytes
        return torch.empty(length_bytes, dtype=torch.uint8, pin_memory=self._pin)

    def give_back(self, buffer: torch.Tensor, event: Any) -> None:
        """Return a buffer; `event` (or None) ends the last copy that touches it."""
        self._free.setdefault(buffer.numel(), []).append((buffer, event))

    def clear(self) -> None:
        """Forget the free buffers, giving their memory back."""
        for length_bytes, free in self._free.items():
            self.allocated_bytes -= length_bytes * len(free)
        self._free.clear()


class Lane:
    """Copies between a device and host buffers: on CUDA on two side streams (one each way), so that they overlap with
    compute and with each other; elsewhere at once, in the calling thread. Events end copies; None where none is needed."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._streams = device, device.type == "cuda"
        self._out, self._in = (torch.cuda.Stream(device) if self._streams else None for _ in range(2))
        self.pool = PinnedPool(pin=self._streams)

    def outward(self, buffer: torch.Tensor, source: torch.Tensor) -> Any:
        """Copy `source` (uint8, on the device) into `buffer` (uint8, on the host); on CUDA start to, once the work queued
        so far has written it."""
        if self._out is None:
            buffer.copy_(source)
            return None
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            buffer.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._out)
        source.record_stream(self._out)  # its memory is not reused before the copy has read it
        return event

    def inward(self, buffer: torch.Tensor, after: Any) -> tuple[torch.Tensor, Any]:
        """Copy `buffer` to a new tensor on the device; on CUDA start to, after the copy that filled it."""
        if self._in is None:
            return torch.empty_like(buffer, device=self._device).copy_(buffer), None
        self._in.wait_event(after)
        with torch.cuda.stream(self._in):
            out = torch.empty(buffer.shape, dtype=buffer.dtype, device=self._device)
            out.copy_(buffer, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._in)
        return out, event

    def wait(self, tensor: torch.Tensor, event: Any) -> None:
        """Make the current stream wait for an inward copy, and keep the memory until that stream is done with it."""
        if event is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(event)
            tensor.record_stream(current)


class Moved:
    """A flat tensor held in host memory. Its buffer goes back to the pool when the last reference goes."""

    def __init__(self, mover: Mover, lane: Lane, source: torch.Tensor, number: int) -> None:
        self._mover, self._lane, self._dtype, self._number = mover, lane, source.dtype, number
        data = source.contiguous().view(torch.uint8)
        self._bytes = data.numel()
        self._buffer = lane.pool.take(self._bytes)
        self._event = lane.outward(self._buffer, data)
        self._ready: tuple[torch.Tensor, Any] | None = None
        self.loaded = False
        mover.statistics.moved_bytes += self._bytes
        mover.statistics.stored(self._bytes)

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

    def __del__(self) -> None:
        if not hasattr(self, "_event"):  # the constructor failed
            return
        self._mover.statistics.stored(-self._bytes)
        self._lane.pool.give_back(self._buffer, self._event)


class Mover:
    """Moves flat tensors to host memory. The end of every chain of codecs: `mover.store` is a `Store`.

    Backward visits saved tensors in roughly the reverse order, so whenever one is loaded, the copies of the `prefetch`
    tensors that were moved just before it are started.
    """

    def __init__(self, statistics: Statistics, *, prefetch: int) -> None:
        self.statistics = statistics
        self._prefetch = prefetch
        self._lanes: dict[torch.device, Lane] = {}
        self._by_number: weakref.WeakValueDictionary[int, Moved] = weakref.WeakValueDictionary()
        self._count = 0

    def store(self, flat: torch.Tensor) -> Moved:
        """Copy a 1-D tensor to host memory; on CUDA without waiting for the copy."""
        if flat.device not in self._lanes:
            self._lanes[flat.device] = Lane(flat.device)
        moved = Moved(self, self._lanes[flat.device], flat, self._count)
        self._by_number[self._count] = moved
        self._count += 1
        return moved

    def prefetch_before(self, number: int) -> None:
        """Start copying back the tensors that were moved just before this one, unless someone has had them already."""
        for earlier in range(number - 1, number - 1 - self._prefetch, -1):
            moved = self._by_number.get(earlier)
            if moved is not None and not moved.loaded:
                moved.prefetch()

    def release_pools(self) -> None:
        """Give the memory of buffers that nobody uses back to the system."""
        for lane in self._lanes.values():
            lane.pool.clear()
