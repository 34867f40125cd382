"""Documents -> token ids, with which of them are learnt; a part of a source at a time, alike in every process."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from edkm_cli.config import UserError
from edkm_cli.data.reading import PART_BYTES, Part
from edkm_cli.data.records import Document, render

COMPLETIONS, ALL = "completions", "all"
_LONG_LINE = 64  # characters from which a line is looked for in other texts
_SAMPLED = np.uint64(16)  # of the lines, one in so many is kept for comparison


@dataclass(frozen=True)
class Encoding:
    """How records become tokens: all that decides a token, but the text and the tokenizer."""

    column: str | None = None
    train_on: str = COMPLETIONS


@dataclass
class Counts:
    """What became of a source: documents and tokens read, tokens learnt, tokens that are seen and not learnt, and
    records without text or without an answer, which are left out."""

    documents: int = 0
    tokens: int = 0
    trained: int = 0
    masked: int = 0
    empty: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


@dataclass(frozen=True)
class Encoded:
    """Tokens of some documents: `ids` (tokens,), `lengths` of the documents, `trained` (tokens,) bool or None where all
    are learnt, and `marks`, sorted 64-bit digests of documents and long lines."""

    ids: np.ndarray
    lengths: np.ndarray
    trained: np.ndarray | None
    marks: np.ndarray
    counts: Counts


class Encoder:
    """Renders and tokenizes parts. Copied into worker processes; it holds no open files."""

    def __init__(self, tokenizer: Any, encoding: Encoding):
        self.tokenizer, self.encoding = tokenizer, encoding
        empty = list(tokenizer("")["input_ids"])
        self._begin = empty[:1] if empty and empty[0] == tokenizer.bos_token_id else []
        self._end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        self.dtype = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32

    def encode(self, part: Part) -> Encoded:
        """Raises UserError for a record that cannot be used."""
        records = part.load()
        if part.stream:
            return self._stream(records, self._begin if part.first == 0 else [])
        documents: list[Document] = []
        empty = 0
        for number, record in enumerate(records):
            where = f"{part.where}, record {part.first + number + 1}"
            found = self._rendered(record, where)
            empty += not found
            documents += found
        return self._assemble(documents, empty)

    def _rendered(self, record: Any, where: str) -> list[Document]:
        whole = self.encoding.train_on == ALL
        found = render(record, where, tokenizer=self.tokenizer, column=self.encoding.column, whole=whole)
        if not whole:
            found = [document for document in found if document.answers is None or document.answers]
        return [document for document in found if document.text.strip()]

    def _stream(self, texts: list[str], begin: list[int]) -> Encoded:
        """Pieces of one running text: what a tokenizer makes of each, nothing put between them."""
        ids = [np.asarray(row, self.dtype) for row in self._ids(texts)]
        if ids and begin:
            ids[0] = np.concatenate([np.asarray(begin, self.dtype), ids[0]])
        lengths = np.array([row.size for row in ids], np.int64)
        total = int(lengths.sum())
        joined = np.concatenate(ids) if ids else np.empty(0, self.dtype)
        return Encoded(joined, lengths, None, marks(texts), Counts(len(texts), total, total))

    def _ids(self, texts: list[str], **options: Any) -> Any:
        if not texts:
            return []
        found = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False, **options)
        return found if options else found["input_ids"]

    def _assemble(self, documents: list[Document], empty: int) -> Encoded:
        rows: list[np.ndarray] = []
        learnt: list[np.ndarray] = []
        for document, ids, trained in zip(documents, *self._tokens(documents), strict=True):
            if not document.templated:
                ends = document.answers is None or bool(document.answers)
                end = self._end if self._end and ids[-1:] != self._end else []
                trained = [bool(document.answers is None)] * len(self._begin) + trained + [ends] * len(end)
                ids = self._begin + ids + end
            rows.append(np.asarray(ids, self.dtype))
            learnt.append(np.asarray(trained, bool))
        lengths = np.array([row.size for row in rows], np.int64)
        total = int(lengths.sum())
        joined = np.concatenate(rows) if rows else np.empty(0, self.dtype)
        mask = np.concatenate(learnt) if learnt else np.empty(0, bool)
        count = int(mask.sum())
        return Encoded(
            joined,
            lengths,
            None if count == total else mask,
            marks([document.text for document in documents]),
            Counts(len(rows), total, count, total - count, empty),
        )

    def _tokens(self, documents: list[Document]) -> tuple[list[list[int]], list[list[bool]]]:
        """Ids without what begins and ends a document, and which of them are learnt, for each document."""
        ids: list[list[int]] = [[] for _ in documents]
        trained: list[list[bool]] = [[] for _ in documents]
        plain = [index for index, document in enumerate(documents) if document.answers is None]
        pieces = [(index, piece) for index in plain for piece in split_long(documents[index].text)]
        for (index, _), row in zip(pieces, self._ids([piece for _, piece in pieces]), strict=True):
            ids[index] += row
        for index in plain:
            trained[index] = [True] * len(ids[index])
        answered = [index for index, document in enumerate(documents) if document.answers is not None]
        for index, (row, mask) in zip(answered, self._answers([documents[i] for i in answered]), strict=True):
            ids[index], trained[index] = row, mask
        return ids, trained

    def _answers(self, documents: list[Document]) -> list[tuple[list[int], list[bool]]]:
        """A token is learnt where all of it is in an answer: one that begins in the prompt is the prompt's."""
        texts = [document.text for document in documents]
        if not self.tokenizer.is_fast:
            return [self._answers_by_length(document) for document in documents]
        if not texts:
            return []
        found = self._ids(texts, return_offsets_mapping=True)
        result = []
        for ids, offsets, document in zip(found["input_ids"], found["offset_mapping"], documents, strict=True):
            start, end = np.array(offsets, np.int64).reshape(-1, 2).T
            reached = np.concatenate([[0], np.maximum.accumulate(end)[:-1]]) if len(ids) else end
            # Blanks that a tokenizer leaves out of a token's offsets are a part of it all the same.
            first = np.where(end > start, np.minimum(reached, start), reached)
            last = np.maximum(end, first + 1)
            mask = np.zeros(len(ids), bool)
            for low, high in document.answers or ():
                mask |= (first >= low) & (last <= high)
            result.append((ids, mask.tolist()))
        return result

    def _answers_by_length(self, document: Document) -> tuple[list[int], list[bool]]:
        """Where a tokenizer gives no offsets: by how many tokens the text has up to an answer's ends."""
        ids = self._ids([document.text])[0]
        mask = [False] * len(ids)
        for low, high in document.answers or ():
            first, last = (len(self._ids([document.text[:at]])[0]) for at in (low, high))
            mask[first:last] = [True] * (min(last, len(ids)) - first)
        return ids, mask


def split_long(text: str) -> list[str]:
    """A text of more than PART_BYTES characters in pieces of at most that many, cut after a line or a word where there
    is one: tokenizing takes 300 bytes of memory a token."""
    pieces = []
    while len(text) > PART_BYTES:
        cut = text.rfind("\n", PART_BYTES // 2, PART_BYTES) + 1 or text.rfind(" ", PART_BYTES // 2, PART_BYTES)
        cut = cut if cut > 0 else PART_BYTES
        pieces.append(text[:cut])
        text = text[cut:]
    return [*pieces, text]


def marks(texts: list[str]) -> np.ndarray:
    """Digests by which the same text is found elsewhere: of every document, and of one in 16 of its long lines (chosen
    by the digest, so the same line is chosen everywhere). Sorted, uint64."""
    whole = [digest64(text.strip()) for text in texts]
    lines = [
        digest64(line.strip())
        for text in texts
        if "\n" in text.strip()
        for line in text.split("\n")
        if len(line) >= _LONG_LINE
    ]
    sampled = np.array(lines, np.uint64)
    return np.unique(np.concatenate([np.array(whole, np.uint64), sampled[sampled % _SAMPLED == 0]]))


def digest64(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "little")


def check_train_on(train_on: str) -> None:
    """Raises UserError for a value that is none."""
    if train_on not in (COMPLETIONS, ALL):
        raise UserError(f"--train-on must be {COMPLETIONS} or {ALL}, got {train_on!r}")
