"""Digests by which the same text is found in what is trained on and in what is measured, however the two are divided into
files, documents and lines.

A passage begins at any line and has as many lines as make 64 characters. Kept of a training text are its documents, its
passages, and its short lines; looked for are the documents and passages of a measured one, a passage also as a document of
its own, a document of one short line also as a line.
"""

import hashlib
import zlib
from collections import Counter
from collections.abc import Iterator

import numpy as np

_PASSAGE, _PASSAGE_LINES = 64, 16  # characters of a passage, and the most lines
_SHORTEST = 16  # characters of a line that is looked for by itself
_SAMPLED = 16  # of a large source, one passage in so many is kept


def marks(texts: list[str], *, sampled: bool = False) -> np.ndarray:
    """What is kept of texts that are trained on: sorted, uint64.

    `sampled`: of one in 16 passages and lines only, chosen by what they say, so the same one is chosen everywhere.
    """
    digests = [_digest(text.strip()) for text in texts]
    for text in texts:
        for line, passage in _passages(text):
            if passage and _is_kept(passage, sampled):
                digests.append(_digest(passage))
            if _SHORTEST <= len(line) < _PASSAGE and _is_kept(line, sampled):
                digests.append(_digest(line, "line"))
    return np.unique(np.array(digests, np.uint64))


def looked_for(texts: list[str], *, sampled: bool = False) -> np.ndarray:
    """What is looked for of texts that are measured, (documents and passages, 2) uint64: each is found where either of its
    two digests is among the marks. What several of the texts have is left out: the records of a kind may begin alike.

    `sampled`: the marks are.
    """
    documents = {}
    counts: Counter[tuple[int, int]] = Counter()
    for text in texts:
        document, lines = text.strip(), list(_passages(text))
        short = not lines and _SHORTEST <= len(document) < _PASSAGE
        documents[_digest(document)] = _digest(document, "line" if short else "")
        of_text = set()
        for line, passage in lines:
            alone = _digest(line) if len(line) >= _SHORTEST else None
            if passage and _is_kept(passage, sampled):
                digest = _digest(passage)
                of_text.add((digest, alone or digest))
            elif not passage and alone:
                of_text.add((alone, alone))
        counts.update(of_text)
    pairs = [*documents.items(), *(pair for pair, count in counts.items() if count == 1)]
    return np.array(sorted(pairs), np.uint64).reshape(-1, 2)


def _passages(text: str) -> Iterator[tuple[str, str]]:
    """(line, the passage that begins with it, or '') of each line that is not blank, without the blanks around it. None
    of a text of one line, which is its document."""
    lines = [line for line in map(str.strip, text.split("\n")) if line]
    for index, line in enumerate(lines if len(lines) > 1 else ()):
        passage, stop = line, index + 1
        while len(passage) < _PASSAGE and stop < min(len(lines), index + _PASSAGE_LINES):
            passage, stop = f"{passage}\n{lines[stop]}", stop + 1
        yield line, passage if len(passage) >= _PASSAGE else ""


def _is_kept(text: str, sampled: bool) -> bool:
    return not (sampled and zlib.crc32(text.encode("utf-8", "replace")) % _SAMPLED)


def _digest(text: str, kind: str = "") -> int:
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8, person=kind.encode())
    return int.from_bytes(digest.digest(), "little")
