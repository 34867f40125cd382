"""Batches of training sequences: batch number i is a function of (seed, i) alone, so a resumed run sees the very batches
it would have seen, whatever was read before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from edkm_cli.data.encode import Counts
from edkm_cli.data.layout import Chain, Layout, packed_layout, plain_layout
from edkm_cli.data.sources import DROP, SPLIT
from edkm_cli.data.store import TokenStore
from edkm_cli.errors import UserError

NO_LABEL = -1


@dataclass(frozen=True)
class Batch:
    """Training sequences: `ids` (batch, sequence) int64; `labels`, the token to be learnt at each position, NO_LABEL
    where none is (None: the next token at every position but the last); `positions`, which restart with every document
    of a packed sequence (None: they do not)."""

    ids: Tensor
    labels: Tensor | None = None
    positions: Tensor | None = None

    def to(self, device: str | torch.device) -> Batch:
        move = [None if tensor is None else tensor.to(device) for tensor in (self.ids, self.labels, self.positions)]
        assert move[0] is not None
        return Batch(move[0], move[1], move[2])

    @property
    def learnt(self) -> int:
        """Tokens to be learnt; 0 where none is."""
        if self.labels is None:
            return self.ids.shape[0] * (self.ids.shape[1] - 1)
        return int((self.labels >= 0).sum())


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
        padding: int = 0,
    ):
        """
        Args:
            tokens: ids (tokens,), or the stores of one or more sources.
            weights: the sources' shares of the sequences; None: each source once a pass.
            cycle: sequences in which sources with weights have their shares exactly.
            packing: whole documents in a sequence, by best fit; else the text is cut every `sequence_length` tokens.
            long_records: `split` or `drop` documents of more tokens than a sequence.
            padding: the id that fills a packed sequence up; nothing attends to it or learns it.

        Raises UserError where there is not one sequence.
        """
        stores = _stores(tokens)
        self._texts = [Chain([store]) for store in stores] if weights is not None else [Chain(stores)]
        self._length, self._seed, self._packing, self._padding = sequence_length, seed, packing, padding
        cut = packed_layout if packing else plain_layout
        self._layouts: list[Layout] = [cut(text.ends(), sequence_length, long_records) for text in self._texts]
        for text, layout in zip(self._texts, self._layouts, strict=True):
            if not len(layout):
                raise _too_little(text, sequence_length, long_records)
        self._cycle = cycle
        self._shares = _shares(weights, cycle) if weights is not None else None
        self._orders: dict[int, tuple[int, Tensor]] = {}

    def __len__(self) -> int:
        """Sequences in one pass over all sources."""
        return sum(map(len, self._layouts))

    @property
    def dropped(self) -> int:
        """Tokens that are in no sequence."""
        return sum(layout.dropped for layout in self._layouts)

    @property
    def split(self) -> int:
        """Documents that have more tokens than a sequence, and are in several."""
        return sum(layout.split for layout in self._layouts)

    @property
    def padded(self) -> int:
        """Places in all sequences that hold no token."""
        return sum(len(layout) * self._length - int(layout.lengths.sum()) for layout in self._layouts)

    def batch(self, index: int, batch_size: int) -> Tensor:
        """The ids of batch `index`, (batch_size, sequence_length)."""
        return self.examples(index, batch_size).ids

    def examples(self, index: int, batch_size: int) -> Batch:
        """Batch `index`: `batch_size` sequences, and what of them is to be learnt."""
        rows = [self._row(position) for position in range(index * batch_size, (index + 1) * batch_size)]
        ids = torch.from_numpy(np.stack([row[0] for row in rows]))
        labelled = self._packing or any(text.has_masks for text in self._texts)
        labels = torch.from_numpy(np.stack([row[1] for row in rows])) if labelled else None
        return Batch(ids, labels, torch.from_numpy(np.stack([row[2] for row in rows])) if self._packing else None)

    def _row(self, position: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(ids, labels, positions) of the sequence at a place of the seeded order."""
        source, number = self._source(position)
        epoch, offset = divmod(number, len(self._layouts[source]))
        text, layout = self._texts[source], self._layouts[source]
        ids = np.full(self._length, self._padding, np.int64)
        labels = np.full(self._length, NO_LABEL, np.int64)
        positions = np.zeros(self._length, np.int64)
        at = 0
        learnt = np.zeros(self._length, bool)
        for start, length in layout.slices(int(self._order(source, epoch)[offset])):
            end = at + length
            ids[at:end] = text.ids(start, start + length)
            learnt[at:end] = text.trained(start, start + length)
            positions[at:end] = np.arange(length)
            if self._packing:
                learnt[at] = False  # a document's first token has nothing to be told from
            at = end
        positions[at:] = np.arange(self._length - at)
        labels[:-1] = np.where(learnt[1:], ids[1:], NO_LABEL)
        return ids, labels, positions

    def _source(self, position: int) -> tuple[int, int]:
        """(source, how many of its sequences come before) at a place: in each cycle every source has its exact share, in
        an order of the seed."""
        if self._shares is None:
            return 0, position
        cycle, offset = divmod(position, self._cycle)
        order = self._shuffled(np.repeat(np.arange(len(self._shares)), self._shares), cycle)
        source = int(order[offset])
        return source, cycle * int(self._shares[source]) + int((order[:offset] == source).sum())

    def _shuffled(self, items: np.ndarray, cycle: int) -> np.ndarray:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + cycle)
        return items[torch.randperm(len(items), generator=generator).numpy()]

    def _order(self, source: int, epoch: int) -> Tensor:
        """The order of a source's sequences in a pass; the last one asked for is kept."""
        kept = self._orders.get(source)
        if kept is None or kept[0] != epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch + 7_919 * source)
            kept = (epoch, torch.randperm(len(self._layouts[source]), generator=generator))
            self._orders[source] = kept
        return kept[1]


def _too_little(text: Chain, sequence_length: int, long_records: str) -> UserError:
    lengths = np.diff(text.ends(), prepend=0)
    long = int(lengths[lengths > sequence_length].sum()) if long_records == DROP else 0
    dropped = f", of which {long} are in longer documents, which --long-records drop leaves out" if long else ""
    return UserError(
        f"training data must have at least {sequence_length} tokens (one sequence), got {len(text)}{dropped}; "
        f"give more --data or a {'larger' if long else 'smaller'} --sequence-length"
    )


def _stores(tokens: Tensor | TokenStore | Sequence[TokenStore]) -> list[TokenStore]:
    if isinstance(tokens, Tensor):
        count = tokens.numel()
        ends = np.array([count], np.int64)
        tokens = TokenStore(tokens.numpy(), None, ends, np.empty(0, np.uint64), Counts(1, count, count))
    return [tokens] if isinstance(tokens, TokenStore) else list(tokens)


def _shares(weights: Sequence[float], cycle: int) -> np.ndarray:
    """Sequences of each source in a cycle, by largest remainders; at least one each, where a cycle has so many."""
    exact = np.array(weights, np.float64) / sum(weights) * cycle
    shares = np.maximum(np.floor(exact).astype(np.int64), int(cycle >= len(weights)))
    by_rest = np.argsort(-(exact - np.floor(exact)), kind="stable")
    for step in range(int(cycle - shares.sum())):
        shares[by_rest[step % len(shares)]] += 1
    while shares.sum() > cycle:
        shares[np.argmax(shares)] -= 1
    return shares
