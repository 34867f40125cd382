"""Texts that are measured: a source as one text, tokenized once, as the perplexity protocol asks."""

import filecmp
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from edkm_cli.allocator import return_free_blocks
from edkm_cli.config import TextSettings
from edkm_cli.data.encode import split_long
from edkm_cli.data.reading import refusing
from edkm_cli.data.records import render
from edkm_cli.data.sources import PROSE, Source
from edkm_cli.data.splits import ALL, TEST, WHOLE_BYTES, read_split
from edkm_cli.errors import UserError


def load_documents(
    source: Source,
    split: str | None = None,
    *,
    tokenizer: Any = None,
    options: TextSettings = TextSettings(),  # noqa: B008 - frozen
    characters: int | None = None,
) -> list[str]:
    """The documents (files, pages, records) of a source's `train`, `test` (held out) or `all`; None: what is measured.

    Args:
        tokenizer: its chat template renders conversations; needed for those only.
        characters: read no more of a source that is larger than memory should hold.

    Raises UserError where the source is missing, empty, not UTF-8 or of no known kind, or is measured and has a weight.
    """
    if split is None:
        if source.weight is not None:
            raise UserError(f"{source} is measured, which takes no weight; leave out ={source.weight:g}")
        split = measured_split(source)
    texts: list[str] = []
    for part in read_split(source, split, options):
        for number, record in enumerate(part.load()):
            column = options.data_column if isinstance(record, Mapping) and options.data_column in record else None
            documents = render(record, part.place(number), tokenizer=tokenizer, column=column, whole=True)
            if part.continues and texts:
                texts[-1] += documents[0].text
            else:
                texts += [document.text for document in documents]
        if characters is not None and sum(map(len, texts)) > max(characters, WHOLE_BYTES):
            break
    if not any(text.strip() for text in texts):
        raise UserError(f"{source.option} must hold text, but {source.name} has none; give a source with text")
    return texts


def measured_split(source: Source) -> str:
    """What of an `--eval-data` is measured: local files, `builtin-prose` and splits that it names as a whole, else what a
    data set has for measuring, or what is held out of it."""
    whole = source.kind == "files" or source.split is not None or source.name == PROSE
    return ALL if whole else TEST


def require_held_out(trained: Sequence[Source], measured: Source) -> None:
    """Raises UserError where a text to be measured is one that is trained on: the same file, a copy of it under another
    name, or the same split."""
    for source in trained:
        both = set()
        for mine, other in product(measured.files, source.files):
            with refusing(measured.option, mine):
                same = mine.resolve() == other.resolve()
                if same or (mine.stat().st_size > 0 and filecmp.cmp(mine, other, shallow=False)):
                    both.add(mine.resolve())
        same_split = source.kind == measured.kind == "hub" and measured.split is not None
        same_split = same_split and (source.repository, source.config) == (measured.repository, measured.config)
        same_prose = source.name == measured.name == PROSE
        if both or same_prose or (same_split and measured.split == (source.split or "train")):
            what = str(min(both)) if both else measured.name
            raise UserError(
                f"{measured.option} must not be trained on, but {what} is in {source}, too; leave it out "
                "(a part of the first --data is held out for it), or name another text"
            )


def tokenize(documents: list[str], tokenizer: Any) -> Tensor:
    """Token ids of the whole text, (tokens,) int64, a blank line between documents: tokenized once, as the perplexity
    protocol asks; a text of more than WHOLE_BYTES characters in pieces."""
    text = "\n\n".join(documents)
    pieces = [text] if len(text) <= WHOLE_BYTES else split_long(text)
    rows = [tokenizer(piece, verbose=False, add_special_tokens=piece is pieces[0])["input_ids"] for piece in pieces]
    ids = torch.cat([torch.tensor(row, dtype=torch.int64) for row in rows])
    return_free_blocks()
    return ids
