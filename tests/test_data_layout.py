"""Sequences: plain cutting keeps the text in order, packing keeps documents whole and wastes little."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edkm_cli.data.layout import best_fit, packed_layout, plain_layout
from edkm_cli.data.sources import DROP, SPLIT

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
