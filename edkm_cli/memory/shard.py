"""Sharding over learners (eDKM, arXiv 2309.00964, section 2.2).

In fully synchronous data-parallel training every learner holds the same weights, and therefore the same attention maps
and index lists. Each of L learners keeps 1/L of the bytes; in backward they all-gather the whole.
"""

from typing import Any

import torch
import torch.distributed as dist

from edkm_cli.errors import UserError
from edkm_cli.memory.mover import Store, Stored

_CHUNK_BYTES = 1 << 24


class Shard:
    """A codec: every learner of a process group keeps one slice of the bytes. Bit-exact; nothing happens alone.

    Everything offered to it must be the same on all learners, and offered (and in backward, asked back) in the same
    order by all of them: packing compares checksums and unpacking gathers, so both are collective. Activations differ
    between learners; therefore put `Shard` on a `MarshalSavedTensors` that encloses only what is computed from
    replicated weights, such as clustering. A learner that drops out makes the others wait for the group's timeout.

    `group` is the process group, of gloo or nccl; None is the default one. Without torch.distributed initialised there is
    one learner. Checksums (order, length and content) are compared before slicing, which costs one pass and one small
    collective for each tensor; UserError is raised in forward, on every learner, if the learners' tensors differ.
    """

    def __init__(self, group: Any = None) -> None:
        self._group, self._sequence = group, 0

    def pack(self, flat: torch.Tensor, store: Store) -> Stored | None:
        """Store this learner's slice, ceil(bytes / L) of them or what is left; None in a group of one."""
        if (world := _world_size(self._group)) == 1:
            return None
        data = flat.view(torch.uint8)
        self._compare(data)
        self._sequence += 1
        share = -(-data.numel() // world)
        rank = dist.get_rank(self._group)
        mine = data[rank * share : (rank + 1) * share]
        return _Sharded(store(mine) if mine.numel() else None, flat, share, self._group)

    def _compare(self, data: torch.Tensor) -> None:
        report = torch.tensor([self._sequence, data.numel(), _checksum(data)], dtype=torch.int64)
        report = report.to(_collective_device(data.device, self._group))
        everyone = [torch.empty_like(report) for _ in range(_world_size(self._group))]
        dist.all_gather(everyone, report, group=self._group)
        reports = [report.tolist() for report in everyone]
        if different := [learner for learner, report in enumerate(reports) if report != reports[0]]:
            rule = f"Shard needs the same tensors on all {len(reports)} learners"
            which = f"saved tensor {self._sequence} of learner {', '.join(map(str, different))}"
            remedy = "load the same weights everywhere, and keep activations out of the sharded block"
            raise UserError(f"{rule}, but {which} differs from learner 0's (its {data.numel()} bytes here); {remedy}")


class _Sharded:
    """A stored slice of a tensor; loading it is collective."""

    def __init__(self, slice_: Stored | None, flat: torch.Tensor, share: int, group: Any) -> None:
        self._slice, self._share, self._group = slice_, share, group
        self._bytes, self._dtype, self._device = flat.numel() * flat.itemsize, flat.dtype, flat.device

    def load(self) -> torch.Tensor:
        device = _collective_device(self._device, self._group)
        mine = torch.zeros(self._share, dtype=torch.uint8, device=device)
        if self._slice is not None:
            piece = self._slice.load()
            mine[: piece.numel()] = piece.to(device)
        world = _world_size(self._group)
        whole = torch.empty(world * self._share, dtype=torch.uint8, device=device)
        dist.all_gather(list(whole.chunk(world)), mine, group=self._group)
        return whole[: self._bytes].to(self._device).view(self._dtype)


def _world_size(group: Any) -> int:
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def _collective_device(device: torch.device, group: Any) -> torch.device:
    """Where a collective on a tensor of this device runs: gloo works in host memory, nccl on the device."""
    return device if "nccl" in dist.get_backend(group) else torch.device("cpu")


def _checksum(data: torch.Tensor) -> int:
    """A 64-bit sum of a uint8 tensor, sensitive to the position of every byte. Equal bytes give equal sums."""
    total = 0
    for chunk in data.split(_CHUNK_BYTES):
        words = torch.nn.functional.pad(chunk, (0, -chunk.numel() % 8)).view(torch.int64)
        mixed = (words * torch.arange(1, 2 * words.numel(), 2, device=data.device)).sum() + (words >> 17).sum()
        total = (total * 0x9E3779B97F4A7C15 + int(mixed.item())) & 0xFFFFFFFFFFFFFFFF
    return total - (1 << 64) if total >= 1 << 63 else total
