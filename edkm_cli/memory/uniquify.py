"""Weight uniquification (eDKM, arXiv 2309.00964, section 2.2).

A 16-bit weight has at most 65,536 distinct values, and every row of an attention map that belongs to one value is the
same. A map of n rows becomes a table of u distinct rows and n indices of 16 bits:

    map (n, m)  ->  table (u, m), index (n,) of 16 bits        u <= 65,536, in practice 2,000 to 10,000

The index depends on the weight alone, so all maps of one weight share one index list: the difference map, the attention
map and the clustered weight of a layer together cost one list and three tables.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from edkm_cli.errors import UserError
from edkm_cli.memory.mover import Store, Stored

_CHUNK_ROWS = 1 << 20
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Uniquify:
    """A codec: maps whose rows are functions of a 16-bit key become a table and a shared index list. Bit-exact.

    A map is a flat tensor whose length is a multiple of a key's, read as `(key.numel(), m)` in the key's order. That its
    rows really depend on the key alone is verified bit by bit; a tensor for which it is not true (an activation that
    has the right length by chance) is left as it is.

    `keys` are 16-bit tensors (bfloat16, float16 or int16, any shape), usually the weights being clustered. They are
    referenced, not copied, and read when something is packed: they must then hold the values the maps came from. `packed`
    and `refused` count tensors that were uniquified, and those of fitting length that were not exact; `index_bytes` and
    `table_bytes` what was made so far. Raises UserError for a key of another dtype.
    """

    def __init__(self, keys: Iterable[torch.Tensor]) -> None:
        self._keys = [_Key(key) for key in keys]
        self.packed = self.refused = self.index_bytes = self.table_bytes = 0

    def pack(self, flat: torch.Tensor, store: Store) -> Stored | None:
        """Store table and index through `store`, or None if no key fits."""
        for key in self._keys:
            if (rows := key.rows_of(flat)) is None:
                continue
            codes = key.index()
            table = rows.index_select(0, codes.first)
            if not _reproduces(rows, table, codes.index):
                self.refused += 1
                continue
            if (index := codes.stored()) is None:
                index = store(codes.index)
                codes.stored = weakref.ref(index)
                self.index_bytes += codes.index.numel() * 2
            self.table_bytes += table.numel() * table.itemsize
            self.packed += 1
            return _Uniquified(store(table.view(flat.dtype).view(-1)), index, codes.first.numel())
        return None


class _Uniquified:
    """A stored map: its table and the index list that it shares with others."""

    def __init__(self, table: Stored, index: Stored, rows: int) -> None:
        self._table, self._index, self._rows = table, index, rows

    def load(self) -> torch.Tensor:
        table, index = self._table.load(), self._index.load()
        words = _rows_as_words(table, self._rows)
        out = torch.empty((index.numel(), words.shape[1]), dtype=words.dtype, device=words.device)
        for chunk, numbers in zip(out.split(_CHUNK_ROWS), index.split(_CHUNK_ROWS), strict=True):
            torch.index_select(words, 0, _unsigned(numbers), out=chunk)
        return out.view(table.dtype).view(-1)


@dataclass
class _Codes:
    """A key's values numbered: `first` (u,) a row of each distinct value, `index` (n,) int16 bits of its number."""

    version: int
    first: torch.Tensor
    index: torch.Tensor
    stored: Callable[[], Stored | None] = lambda: None  # a weak reference to the index once it is stored


class _Key:
    """A 16-bit tensor and, while something stored uses it, its numbering."""

    def __init__(self, key: torch.Tensor) -> None:
        if key.dtype not in (torch.bfloat16, torch.float16, torch.int16):
            raise UserError(f"a key must be of bfloat16, float16 or int16, got {key.dtype}; cast the weight first")
        self._key = key
        self._codes: _Codes | None = None

    def rows_of(self, flat: torch.Tensor) -> torch.Tensor | None:
        """`flat` as (n, words) integer words, or None if its length or device does not fit the key."""
        if (count := self._key.numel()) == 0 or flat.numel() % count or flat.device != self._key.device:
            return None
        return _rows_as_words(flat, count)

    def index(self) -> _Codes:
        """The numbering of the key's present values; computed again after the key was written to."""
        version = self._key._version
        if self._codes is None or self._codes.version != version or self._codes.stored() is None:
            self._codes = self._number(version)
        return self._codes

    def _number(self, version: int) -> _Codes:
        bits = self._key.detach().reshape(-1).view(torch.int16)
        first = torch.full((65536,), -1, dtype=torch.int64, device=bits.device)
        for start in range(0, bits.numel(), _CHUNK_ROWS):
            chunk = bits[start : start + _CHUNK_ROWS]
            first[_unsigned(chunk).long()] = torch.arange(start, start + chunk.numel(), device=bits.device)
        present = first >= 0
        number = (present.cumsum(0) - 1).to(torch.int32).to(torch.int16)  # 32,768 and above wrap: bits of a uint16
        index = torch.empty_like(bits)
        for chunk, keys in zip(index.split(_CHUNK_ROWS), bits.split(_CHUNK_ROWS), strict=True):
            chunk.copy_(number[_unsigned(keys)])
        return _Codes(version, first[present], index)


def _unsigned(bits: torch.Tensor) -> torch.Tensor:
    """int16 bits as the uint16 number they are, in int32."""
    return bits.to(torch.int32).bitwise_and_(0xFFFF)


def _rows_as_words(flat: torch.Tensor, rows: int) -> torch.Tensor:
    """(rows, words): integer words, so that comparison is of bits (NaN equals itself, -0.0 is not 0.0)."""
    return flat.view(_WORDS.get(flat.itemsize, torch.uint8)).view(rows, -1)


def _reproduces(rows: torch.Tensor, table: torch.Tensor, index: torch.Tensor) -> bool:
    """Whether `table[index]` is `rows`, bit by bit. Looks at a small piece first: most misfits show at once."""
    pieces = [slice(4096), *(slice(start, start + _CHUNK_ROWS) for start in range(4096, rows.shape[0], _CHUNK_ROWS))]
    return all(torch.equal(table.index_select(0, _unsigned(index[piece])), rows[piece]) for piece in pieces)
