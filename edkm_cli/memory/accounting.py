"""What marshaling did: bytes, duplicates and seconds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Statistics:
    """Counts since the start or the last `reset_statistics()`. Bytes are bytes, times are seconds of wall clock.

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
