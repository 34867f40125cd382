"""Documents -> token ids, with which of them are learnt; a part of a source at a time, alike in every process."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from edkm_cli.config import TextSettings
from edkm_cli.data.marks import marks
from edkm_cli.data.reading import PART_BYTES, Part
from edkm_cli.data.records import Document, render
from edkm_cli.data.sources import EVERYTHING

# Words, blanks, accents, parts of a character: on it the tokenizer's own library must do as transformers does.
_PROBE = "A word,\n  1 234 \u00fc\u0301 \U0001f642\tend. "


@dataclass
class Counts:
    """What became of a source: documents and tokens read, tokens learnt, tokens that are seen and not learnt, and
    records without text or without an answer, which are left out; and characters held out to be measured."""

    documents: int = 0
    tokens: int = 0
    trained: int = 0
    masked: int = 0
    empty: int = 0
    held_out: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


@dataclass(frozen=True)
class Encoded:
    """Tokens of some documents: `ids` (tokens,), `lengths` of the documents, `trained` (tokens,) bool, which of them are
    learnt, and `marks`, sorted 64-bit digests of documents and long lines."""

    ids: np.ndarray
    lengths: np.ndarray
    trained: np.ndarray
    marks: np.ndarray
    counts: Counts


class Encoder:
    """Renders and tokenizes parts. Copied into worker processes; it holds no open files.

    Of a source that is large a share of the marks is kept: `sampled`.
    """

    def __init__(self, tokenizer: Any, options: TextSettings = TextSettings(), *, sampled: bool = False):  # noqa: B008
        self.tokenizer, self.sampled = tokenizer, sampled
        self.column, self.whole = options.data_column, options.train_on == EVERYTHING
        empty = list(tokenizer("")["input_ids"])
        self._begin = empty[:1] if empty and empty[0] == tokenizer.bos_token_id else []
        self._end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        self.dtype = np.uint16 if max(tokenizer.get_vocab().values(), default=0) < 1 << 16 else np.uint32
        probe, self._direct = [_PROBE + (tokenizer.eos_token or "")], False
        wanted, self._direct = self._ids(probe), getattr(tokenizer, "is_fast", False)
        self._direct = self._direct and self._ids(probe) == wanted

    def encode(self, part: Part) -> Encoded:
        """Raises UserError for a record that cannot be used."""
        if part.joint is None:
            return self._documents(part)
        texts = part.load()  # a piece of a running text: nothing is put between it and the next
        ids = [*(self._begin if part.begins else []), *self._ids(texts)[0], *(self._end if part.ends else [])]
        return self._encoded(part, texts, [np.asarray(ids, self.dtype)], [np.ones(len(ids), bool)])

    def _encoded(
        self, part: Part, texts: list[str], ids: list[np.ndarray], trained: list[np.ndarray], empty: int = 0
    ) -> Encoded:
        """Put together: the ids of each text of a part, and which of them are learnt."""
        lengths = np.array([row.size for row in ids], np.int64)
        joined = np.concatenate([np.empty(0, self.dtype), *ids])
        mask = np.concatenate([np.empty(0, bool), *trained])
        total, count = mask.size, int(mask.sum())
        counts = Counts(len(ids), total, count, total - count, empty, part.held_out)
        return Encoded(joined, lengths, mask, marks(texts, sampled=self.sampled), counts)

    def _documents(self, part: Part) -> Encoded:
        """Each with what begins and ends one, unless a chat template has put it in."""
        documents: list[Document] = []
        empty = 0
        for number, record in enumerate(part.load()):
            made = render(record, part.place(number), tokenizer=self.tokenizer, column=self.column, whole=self.whole)
            with_text = [one for one in made if one.text.strip() and (one.answers is None or one.answers)]
            empty += not with_text
            documents += with_text
        begin, end = np.asarray(self._begin, self.dtype), np.asarray(self._end, self.dtype)
        ids, trained = self._tokens(documents)
        for index, document in enumerate(documents):
            if not document.templated:
                first = begin[: 0 if ids[index][:1].tolist() == self._begin else None]
                last = end[: 0 if ids[index][-1:].tolist() == self._end else None]
                learns_begin = np.full(first.size, document.answers is None)
                trained[index] = np.concatenate([learns_begin, trained[index], np.ones(last.size, bool)])
                ids[index] = np.concatenate([first, ids[index], last])
        return self._encoded(part, [document.text for document in documents], ids, trained, empty)

    def _ids(self, texts: list[str]) -> list[list[int]]:
        """Tokens of each text, without what begins and ends one."""
        backend = self.tokenizer.backend_tokenizer if self._direct else None
        # What transformers wraps: a fifth of the time goes into its wrapping. An earlier call may have asked it to truncate.
        if backend is not None and backend.truncation is None and backend.padding is None:
            return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
        if not texts:
            return []
        return self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]

    def _tokens(self, documents: list[Document]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Ids without what begins and ends a document, and which of them are learnt, for each document."""
        ids = [np.empty(0, self.dtype) for _ in documents]
        plain = [index for index, document in enumerate(documents) if document.answers is None]
        pieces = [(index, piece) for index in plain for piece in split_long(documents[index].text)]
        for (index, _), row in zip(pieces, self._ids([piece for _, piece in pieces]), strict=True):
            ids[index] = np.concatenate([ids[index], np.asarray(row, self.dtype)])
        trained = [np.ones(row.size, bool) for row in ids]
        answered = [index for index, document in enumerate(documents) if document.answers is not None]
        for index, (row, mask) in zip(answered, self._answers([documents[i] for i in answered]), strict=True):
            ids[index], trained[index] = np.asarray(row, self.dtype), mask
        return ids, trained

    def _answers(self, documents: list[Document]) -> list[tuple[list[int], np.ndarray]]:
        """A token is learnt where all of it is in an answer: one that begins in the prompt is the prompt's."""
        if not documents:
            return []
        if not self.tokenizer.is_fast:
            return [self._answers_by_length(document) for document in documents]
        options = {"return_offsets_mapping": True, "return_attention_mask": False, "verbose": False}
        rows = self.tokenizer([document.text for document in documents], add_special_tokens=False, **options)
        result = []
        for ids, offsets, document in zip(rows["input_ids"], rows["offset_mapping"], documents, strict=True):
            start, end = np.array(offsets, np.int64).reshape(-1, 2).T
            reached = np.concatenate([[0], np.maximum.accumulate(end)[:-1]]) if len(ids) else end
            # Blanks that a tokenizer leaves out of a token's offsets are a part of it all the same.
            first = np.where(end > start, np.minimum(reached, start), reached)
            last = np.maximum(end, first + 1)
            mask = np.zeros(len(ids), bool)
            for low, high in document.answers or ():
                mask |= (first >= low) & (last <= high)
            result.append((ids, mask))
        return result

    def _answers_by_length(self, document: Document) -> tuple[list[int], np.ndarray]:
        """Where a tokenizer gives no offsets: by how many tokens the text has up to an answer's ends."""
        ids = self._ids([document.text])[0]
        mask = np.zeros(len(ids), bool)
        for low, high in document.answers or ():
            first, last = (len(self._ids([document.text[:at]])[0]) for at in (low, high))
            mask[first:last] = True
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
