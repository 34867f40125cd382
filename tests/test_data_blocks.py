"""Batches: a function of the seed and the step, with exact shares of the sources and labels within documents only.

Sequences: plain cutting keeps the text in order, packing keeps documents whole and wastes little.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edkm_cli.data import Blocks
from edkm_cli.data.blocks import _shares, best_fit, packed_layout, plain_layout
from edkm_cli.data.encode import Counts, Encoded
from edkm_cli.data.sources import DROP, SPLIT
from edkm_cli.data.store import in_memory
from edkm_cli.errors import UserError


def store(lengths, first=0, trained=None):
    """Documents of running numbers."""
    total = sum(lengths)
    ids = np.arange(first, first + total, dtype=np.uint16)
    mask = np.ones(total, bool) if trained is None else np.array(trained, bool)
    counts = Counts(len(lengths), total, int(mask.sum()), int((~mask).sum()))
    return in_memory([Encoded(ids, np.array(lengths), mask, np.empty(0, np.uint64), counts)], np.uint16)


def test_blocks_cover_each_pass_once_in_an_order_of_the_seed():
    tokens = torch.arange(100)
    blocks = Blocks(tokens, 7, seed=3)
    first = torch.cat([blocks.batch(i, 2) for i in range(7)])
    assert sorted(first[:, 0].tolist()) == [7 * i for i in range(14)]
    again = Blocks(tokens, 7, seed=3)
    assert torch.equal(again.batch(5, 2), blocks.batch(5, 2))
    assert not torch.equal(Blocks(tokens, 7, seed=4).batch(0, 14), blocks.batch(0, 14))
    second = blocks.batch(1, 14)
    assert sorted(second[:, 0].tolist()) == [7 * i for i in range(14)]
    assert not torch.equal(second, blocks.batch(0, 14))


def test_too_little_text_for_a_sequence_is_refused():
    with pytest.raises(UserError, match="at least 64 tokens"):
        Blocks(torch.arange(63), 64, seed=0)
    with pytest.raises(
        UserError, match=r"got 73, of which 70 are in longer documents, which .* drop leaves out; .* larger"
    ):
        Blocks(store([70, 3]), 64, seed=0, long_records="drop")


def test_sources_without_weights_are_read_one_after_the_other():
    one = Blocks([store([5]), store([9], 5)], 7, seed=0)
    assert torch.equal(one.batch(0, 2), Blocks(torch.arange(14), 7, seed=0).batch(0, 2))


def test_every_source_has_its_exact_share_at_any_place():
    small, large = store([40]), store([4000], 100)
    blocks = Blocks([small, large], 10, seed=1, weights=[0.7, 0.3])
    rows = blocks.batch(0, 1000)
    from_small = rows[:, 0] < 40
    assert int(from_small.sum()) == 700
    starts, counts = rows[from_small, 0].unique(return_counts=True)
    assert starts.tolist() == [0, 10, 20, 30]
    assert set(counts.tolist()) == {175}
    assert rows[~from_small, 0].unique().numel() == 300
    assert torch.equal(blocks.batch(1234, 3), Blocks([small, large], 10, seed=1, weights=[7, 3]).batch(1234, 3))
    assert 50 < int((blocks.batch(0, 100)[:, 0] < 40).sum()) < 90


def test_masked_tokens_have_no_label():
    blocks = Blocks(store([4, 4], trained=[0, 0, 1, 1, 1, 0, 1, 0]), 8, seed=0)
    batch = blocks.examples(0, 1)
    assert batch.ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert batch.labels.tolist() == [[-1, 2, 3, 4, -1, 6, -1, -1]]
    assert batch.positions is None
    assert batch.learnt == 4
    assert Blocks(store([4, 4]), 8, seed=0).examples(0, 1).labels is None


def test_packed_sequences_restart_and_predict_within_documents_only():
    blocks = Blocks(store([3, 6, 2, 4]), 8, seed=0, packing=True)
    rows = {tuple(row.ids[0].tolist()): row for row in (blocks.examples(i, 1) for i in range(len(blocks)))}
    assert set(rows) == {(3, 4, 5, 6, 7, 8, 9, 10), (11, 12, 13, 14, 0, 1, 2, 0)}
    first, second = rows[(3, 4, 5, 6, 7, 8, 9, 10)], rows[(11, 12, 13, 14, 0, 1, 2, 0)]
    assert first.positions.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1]]
    assert first.labels.tolist() == [[4, 5, 6, 7, 8, -1, 10, -1]]
    assert second.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0]]
    assert second.labels.tolist() == [[12, 13, 14, -1, 1, 2, -1, -1]]
    assert blocks.counts() == {"sequences": len(blocks), "dropped": 0, "split": 0, "padded": 1}


LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=60)


def tokens_of(layout, index):
    return [token for start, length in layout.slices(index) for token in range(start, start + length)]


@given(LENGTHS, st.integers(2, 20), st.sampled_from([SPLIT, DROP]))
def test_plain_cutting_keeps_the_order_and_counts_what_it_drops(lengths, size, long_records):
    layout = plain_layout(np.cumsum(lengths), size, long_records)
    starts = np.cumsum(lengths) - lengths
    kept = [
        t for s, n in zip(starts, lengths, strict=True) if n <= size or long_records == SPLIT for t in range(s, s + n)
    ]
    rows = [tokens_of(layout, index) for index in range(len(layout))]
    assert all(len(row) == size for row in rows)
    assert [token for row in rows for token in row] == kept[: len(kept) // size * size]
    assert layout.dropped == sum(lengths) - len(rows) * size
    assert layout.split == (sum(n > size for n in lengths) if long_records == SPLIT and len(layout) else 0)


@given(LENGTHS, st.integers(2, 20), st.sampled_from([SPLIT, DROP]))
def test_packing_holds_every_token_once_and_no_document_crosses_a_border(lengths, size, long_records):
    layout = packed_layout(np.cumsum(lengths), size, long_records)
    starts = (np.cumsum(lengths) - lengths).tolist()
    wanted = {
        t for s, n in zip(starts, lengths, strict=True) if n <= size or long_records == SPLIT for t in range(s, s + n)
    }
    rows = [tokens_of(layout, index) for index in range(len(layout))]
    assert sorted(token for row in rows for token in row) == sorted(wanted)
    assert all(0 < len(row) <= size for row in rows)
    assert layout.dropped == sum(lengths) - len(wanted)
    whole = {(s, n) for s, n in zip(starts, lengths, strict=True) if 0 < n <= size}
    assert whole <= {piece for index in range(len(layout)) for piece in layout.slices(index)}


@given(st.lists(st.integers(1, 30), max_size=80))
def test_best_fit_is_that_of_a_plain_search(lengths):
    capacity, bins = 30, []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [b for b in bins if sum(lengths[i] for i in b) + lengths[index] <= capacity]
        if fitting:
            max(fitting, key=lambda b: sum(lengths[i] for i in b)).append(index)
        else:
            bins.append([index])
    found = best_fit(np.array(lengths, np.int64), capacity)
    assert len(found) == len(bins)
    fill = sorted(sum(lengths[i] for i in members) for members in found)
    assert fill == sorted(sum(lengths[i] for i in members) for members in bins)


def test_packing_fills_sequences():
    lengths = np.random.default_rng(0).integers(1, 600, 5000)
    layout = packed_layout(np.cumsum(lengths), 1024)
    assert lengths.sum() / (len(layout) * 1024) > 0.98


@pytest.mark.parametrize("cut", [plain_layout, packed_layout])
def test_nothing_makes_no_sequence(cut):
    assert len(cut(np.empty(0, np.int64), 8)) == 0


@pytest.mark.parametrize(
    ("weights", "cycle", "shares"),
    [
        ((0.05, 0.475, 0.475), 16, [1, 8, 7]),  # what was raised to one gets nothing for its remainder
        ((0.4996, 0.4996, 0.0008), 1000, [500, 499, 1]),
        ((0.7, 0.2, 0.1), 10, [7, 2, 1]),
        ((1, 1, 1), 1000, [334, 333, 333]),
        ((1, 1e-9, 1e-9), 5, [3, 1, 1]),
    ],
)
def test_shares_are_those_of_the_weights(weights, cycle, shares):
    assert _shares(weights, cycle).tolist() == shares
