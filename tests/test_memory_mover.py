"""Moving tensors: loading one fetches its neighbours ahead."""

import weakref

import torch

from edkm_cli.memory.mover import Mover, Statistics


def test_loading_prefetches_what_was_moved_just_before():
    mover = Mover(Statistics(), prefetch=2)
    moved = [mover.store(torch.full((4,), float(i))) for i in range(5)]
    assert torch.equal(moved[4].load(), torch.full((4,), 4.0))
    assert mover.statistics.restored_bytes == 3 * 16
    assert [m._ready is not None for m in moved] == [False, False, True, True, False]
    assert torch.equal(moved[3].load(), torch.full((4,), 3.0))
    assert mover.statistics.restored_bytes == 4 * 16
    reference = weakref.ref(moved[0])
    del moved
    assert reference() is None
    assert mover.statistics.stored_bytes == 0
