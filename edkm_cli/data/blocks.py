"""Batches of training sequences: batch number i is a function of (seed, i) alone, so a resumed run sees the very batches
it would have seen, whatever was read before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from edkm_cli.data.encode import Counts
from edkm_cli.data.layout import Sequences
from edkm_cli.data.sources import SPLIT
from edkm_cli.data.store import TokenStore

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
        self._seed, self._packing, self._cycle = seed, packing, cycle
        self._sources = [
            Sequences(together, sequence_length, packing=packing, long_records=long_records, padding=padding)
            for together in ([stores] if weights is None else [[store] for store in stores])
        ]
        self._shares = _shares(weights, cycle) if weights is not None else None
        self._orders: dict[int, tuple[int, Tensor]] = {}

    def __len__(self) -> int:
        """Sequences in one pass over all sources."""
        return sum(map(len, self._sources))

    @property
    def dropped(self) -> int:
        """Tokens that are in no sequence."""
        return sum(source.layout.dropped for source in self._sources)

    @property
    def split(self) -> int:
        """Documents that have more tokens than a sequence, and are in several."""
        return sum(source.layout.split for source in self._sources)

    @property
    def padded(self) -> int:
        """Places in all sequences that hold no token."""
        return sum(source.padded for source in self._sources)

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
        epoch, offset = divmod(number, len(self._sources[source]))
        return self._sources[source].row(int(self._order(source, epoch)[offset]))

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
            kept = (epoch, torch.randperm(len(self._sources[source]), generator=generator))
            self._orders[source] = kept
        return kept[1]


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
