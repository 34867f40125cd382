"""Training sequences and batches of them: batch number i is a function of (seed, i) alone, so a resumed run sees the very
batches it would have seen, whatever was read before.

A sequence is cut from the running text, or packed of whole documents by best-fit decreasing (Johnson 1973; for language
models arXiv 2404.10830): each document, the longest first, goes into the fullest sequence that still has room for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from edkm_cli.data.sources import DROP, SPLIT
from edkm_cli.data.store import TokenStore, store_of
from edkm_cli.errors import UserError

NO_LABEL = -1
_WINDOW = 1 << 16  # documents that are packed together: bounded work, and neighbours stay near


@dataclass(frozen=True)
class Batch:
    """Training sequences: `ids` (batch, sequence) int64; `labels`, the token to be learnt at each position, NO_LABEL
    where none is (None: the next token at every position but the last); `positions`, which restart with every document
    of a packed sequence (None: they do not)."""

    ids: Tensor
    labels: Tensor | None = None
    positions: Tensor | None = None

    def to(self, device: str | torch.device) -> "Batch":
        labels, positions = (None if some is None else some.to(device) for some in (self.labels, self.positions))
        return Batch(self.ids.to(device), labels, positions)

    @property
    def learnt(self) -> int:
        """Tokens to be learnt; 0 where none is."""
        return self.ids.shape[0] * (self.ids.shape[1] - 1) if self.labels is None else int((self.labels >= 0).sum())


class Blocks:
    """Sequences of `sequence_length` tokens in a seeded order; each pass over the data has its own."""

    def __init__(
        self,
        tokens: Tensor | TokenStore | Sequence[TokenStore],
        sequence_length: int,
        *,
        seed: int,
        weights: Sequence[float] | None = None,
        cycle: int = 1000,
        packing: bool = False,
        long_records: str = SPLIT,
    ):
        """
        Args:
            tokens: ids (tokens,), or the stores of one or more sources.
            weights: the sources' shares of the sequences; None: each source once a pass.
            cycle: sequences in which sources with weights have their shares exactly.
            packing: whole documents in a sequence, by best fit; else the text is cut every `sequence_length` tokens.
            long_records: `split` or `drop` documents of more tokens than a sequence.

        Raises UserError where there is not one sequence.
        """
        if isinstance(tokens, Tensor):
            tokens = store_of(tokens[None].numpy())
        stores = [tokens] if isinstance(tokens, TokenStore) else list(tokens)
        self._length, self._packing, self._cycle = sequence_length, packing, cycle
        self._sources = [
            Sequences(together, sequence_length, packing=packing, long_records=long_records)
            for together in ([stores] if weights is None else [[store] for store in stores])
        ]
        self._shares = _shares(weights, cycle) if weights is not None else None
        # Kept are the order of the cycle, and of each source that of the pass.
        self._shuffled = lru_cache(len(self._sources) + 1)(partial(_shuffled, seed * 1_000_003))

    def __len__(self) -> int:
        """Sequences in one pass over all sources."""
        return sum(map(len, self._sources))

    def counts(self) -> dict[str, int]:
        """`sequences` in one pass, tokens in none of them (`dropped`), documents in several (`split`), and places that hold
        no token (`padded`)."""
        layouts, tokens = [source.layout for source in self._sources], len(self) * self._length
        return {
            "sequences": len(self),
            "dropped": sum(layout.dropped for layout in layouts),
            "split": sum(layout.split for layout in layouts),
            "padded": tokens - sum(int(layout.lengths.sum()) for layout in layouts),
        }

    def batch(self, index: int, batch_size: int) -> Tensor:
        """The ids of batch `index`, (batch_size, sequence_length)."""
        return self.examples(index, batch_size).ids

    def examples(self, index: int, batch_size: int) -> Batch:
        """Batch `index`: `batch_size` sequences, and what of them is to be learnt."""
        rows = [self._row(position) for position in range(index * batch_size, (index + 1) * batch_size)]
        ids, learnt, positions = (torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True))
        labels = None
        if self._packing or any(source.has_masks for source in self._sources):
            labels = torch.full_like(ids, NO_LABEL)
            labels[:, :-1] = torch.where(learnt[:, 1:], ids[:, 1:], NO_LABEL)
        return Batch(ids, labels, positions if self._packing else None)

    def _row(self, position: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`Sequences.row` at a place of the seeded order."""
        source, number = self._source(position)
        sequences = self._sources[source]
        epoch, offset = divmod(number, len(sequences))
        return sequences.row(int(self._shuffled(len(sequences), epoch + 7_919 * source)[offset]))

    def _source(self, position: int) -> tuple[int, int]:
        """(source, how many of its sequences come before) at a place: in each cycle every source has its exact share."""
        if self._shares is None:
            return 0, position
        cycle, offset = divmod(position, self._cycle)
        order = np.repeat(np.arange(len(self._shares)), self._shares)[self._shuffled(self._cycle, cycle).numpy()]
        source = int(order[offset])
        return source, cycle * int(self._shares[source]) + int((order[:offset] == source).sum())


def _shuffled(seed: int, count: int, number: int) -> Tensor:
    """The order of so many things that has this number."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed + number))


def _shares(weights: Sequence[float], cycle: int) -> np.ndarray:
    """Sequences of each source in a cycle, by largest remainders; at least one each, where a cycle has so many."""
    exact = np.array(weights, np.float64) / sum(weights) * cycle
    shares = np.maximum(np.floor(exact).astype(np.int64), int(cycle >= len(weights)))
    shares[np.argsort(shares - exact, kind="stable")[: max(0, cycle - shares.sum())]] += 1
    while shares.sum() > cycle:
        shares[np.argmax(shares)] -= 1
    return shares


@dataclass(frozen=True)
class Layout:
    """Sequences as slices of the running text: sequence i is slices `first[i]` to `first[i + 1]`, slice j the tokens
    `starts[j]` to `starts[j] + lengths[j]`. `dropped` counts tokens in no sequence, `split` documents in several."""

    starts: np.ndarray
    lengths: np.ndarray
    first: np.ndarray
    dropped: int
    split: int

    def __len__(self) -> int:
        return len(self.first) - 1

    def slices(self, index: int) -> list[tuple[int, int]]:
        """(start, length) of each slice of a sequence."""
        part = slice(int(self.first[index]), int(self.first[index + 1]))
        return list(zip(self.starts[part].tolist(), self.lengths[part].tolist(), strict=True))


def plain_layout(ends: np.ndarray, sequence_length: int, long_records: str = SPLIT) -> Layout:
    """The text cut every `sequence_length` tokens, wherever documents end; the rest at the very end is dropped.

    Where long records are dropped, those of more tokens than a sequence are left out first.
    """
    starts, lengths, total, split = _documents(ends, sequence_length, long_records)
    if lengths.sum() == total and lengths.size:  # one stretch
        starts, lengths = np.zeros(1, np.int64), np.array([total])
    used = int(lengths.sum()) // sequence_length * sequence_length
    # Cut the kept stretches at every sequence border.
    at = np.concatenate([[0], np.cumsum(lengths)])
    borders = np.unique(np.concatenate([at[at < used], np.arange(0, used + 1, sequence_length)]))
    stretch = np.searchsorted(at, borders[:-1], side="right") - 1
    first = np.searchsorted(borders[:-1], np.arange(0, used + 1, sequence_length))
    return Layout(starts[stretch] + borders[:-1] - at[stretch], np.diff(borders), first, total - used, split)


def packed_layout(ends: np.ndarray, sequence_length: int, long_records: str = SPLIT) -> Layout:
    """Whole documents packed by best fit. Longer ones than a sequence are cut into sequences, their rest is packed with
    the others; or they are dropped."""
    starts, lengths, total, split = _documents(ends, sequence_length, long_records)
    starts, lengths = _cut(starts, lengths, sequence_length)
    order, counts = [], []
    for low in range(0, len(lengths), _WINDOW):
        for members in best_fit(lengths[low : low + _WINDOW], sequence_length):
            order += [low + member for member in members]
            counts.append(len(members))
    picks = np.array(order, np.int64)
    return Layout(starts[picks], lengths[picks], np.cumsum([0, *counts]), total - int(lengths.sum()), split)


def best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Bins of at most `capacity`, each the indices of its members: the longest first, each into the fullest bin that has
    room. Ties go by index, so the result is a function of the lengths.

    A bit of `free` says that some bin has so much room, so the best fit is its lowest bit from the length on.
    """
    bins: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    free = 0
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        if fits := free >> length:
            room = length + (fits & -fits).bit_length() - 1
            chosen = with_room[room].pop()
            if not with_room[room]:
                free &= ~(1 << room)
            bins[chosen].append(index)
        else:
            room, chosen = capacity, len(bins)
            bins.append([index])
        if left := room - length:
            with_room[left].append(chosen)
            free |= 1 << left
    return bins


def _documents(ends: np.ndarray, longest: int, long_records: str) -> tuple[np.ndarray, np.ndarray, int, int]:
    """(starts, lengths) of the documents that have tokens, without those of more than `longest` where they are dropped;
    the tokens of all; and how many documents are to be split."""
    lengths = np.diff(np.asarray(ends, np.int64), prepend=0)
    starts, total = np.asarray(ends, np.int64) - lengths, int(lengths.sum())
    kept = (lengths > 0) & ((lengths <= longest) | (long_records != DROP))
    return starts[kept], lengths[kept], total, int((lengths[kept] > longest).sum())


def _cut(starts: np.ndarray, lengths: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Every document in pieces of at most `size`."""
    pieces = -(-lengths // size)
    owner = np.repeat(np.arange(len(lengths)), pieces)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    return starts[owner] + number * size, np.minimum(size, lengths[owner] - number * size)


class Sequences:
    """Stores read as one text, one after the other, and the training sequences that it is cut into.

    `layout` says which tokens are in which; `has_masks`: some tokens are seen and not learnt. The arguments are those of
    `Blocks`. Raises UserError where there is not one sequence.
    """

    def __init__(self, stores: list[TokenStore], length: int, *, packing: bool, long_records: str):
        self._stores, self._length, self._packing = stores, length, packing
        self._starts = np.cumsum([0, *map(len, stores)])
        self.has_masks = any(store.counts.masked for store in stores)
        ends = np.concatenate([store.ends + start for store, start in zip(stores, self._starts, strict=False)])
        self.layout = (packed_layout if packing else plain_layout)(ends, length, long_records)
        if not len(self.layout):
            lengths = np.diff(ends, prepend=0)
            long = int(lengths[lengths > length].sum()) if long_records == DROP else 0
            dropped = f", of which {long} are in longer documents, which --long-records drop leaves out" if long else ""
            rule = f"training data must have at least {length} tokens (one sequence), got {self._starts[-1]}{dropped}"
            raise UserError(f"{rule}; give more --data or a {'larger' if long else 'smaller'} --sequence-length")

    def __len__(self) -> int:
        return len(self.layout)

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(ids int64, which of them are learnt, positions that restart with each slice) of a sequence."""
        ids = np.zeros(self._length, np.int64)  # nothing attends to what fills a packed sequence up, or learns it
        learnt = np.zeros(self._length, bool)
        positions = np.zeros(self._length, np.int64)
        at = 0
        for start, length in self.layout.slices(index):
            for store, first in zip(self._stores, self._starts.tolist(), strict=False):
                low, high = max(start - first, 0), min(start + length - first, len(store))
                if low < high:
                    here = slice(at + first + low - start, at + first + high - start)
                    ids[here], learnt[here] = store.ids(low, high), store.trained(low, high)
            positions[at : at + length] = np.arange(length)
            if self._packing:
                learnt[at] = False  # a document's first token has nothing that it follows from
            at += length
        positions[at:] = np.arange(self._length - at)
        return ids, learnt, positions
