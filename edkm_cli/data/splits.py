"""What of a source is trained on and what is held out to be measured.

A set of the hub with a split for it is measured on that. Of a source that is read as a whole (local files of up to
WHOLE_BYTES, `builtin`) the last tenth is held out; of anything larger the first megabyte, which is found without
reading the rest.

Sets of the hub, and local copies of them, are read by `datasets`: streamed, or as its memory-mapped tables.
"""

import os
import re
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, chain, takewhile
from pathlib import Path
from typing import Any
from unittest.mock import patch

from edkm_cli.config import TextSettings
from edkm_cli.data.reading import Part, batched, characters, line_ranges, next_line, read_files, refusing
from edkm_cli.data.sources import ALPACA, BUILTIN, PROSE, WIKITEXT2, Source, is_compressed, suffix_of
from edkm_cli.errors import UserError, named

WHOLE_BYTES = 12_000_000  # WikiText-2 is tokenized as a whole, as its figures ask; that takes 0.8 GB
HELD_OUT_FRACTION = 0.1
HELD_OUT_CHARACTERS = 1_000_000
TRAIN, TEST, ALL = "train", "test", "all"
# What a set's own text for measuring is called, the best first.
_HELD_OUT_SPLITS = ("test", "validation", "valid", "dev")
_PATIENCE_SECONDS = 5.0


def held_out_split(source: Source) -> str | None:
    """The split of a set that is for measuring; None where it has none, or where the source names a split itself.

    Raises UserError where the set cannot be had.
    """
    if source.split is not None:
        return None
    import datasets

    try:
        with _without_retries(source):
            names = datasets.get_dataset_split_names(source.repository, source.config)
    except Exception as error:
        raise _explained(source, error) from error
    return next((name for name in _HELD_OUT_SPLITS if name in names), None)


def hub_rows(source: Source, split: str, *, streaming: bool) -> Iterator[dict[str, Any]]:
    """The records of a split. Raises UserError that says what there is instead, or why it is out of reach."""
    import datasets

    try:
        with _without_retries(source):
            loaded = datasets.load_dataset(source.repository, source.config, split=split, streaming=streaming)
        yield from loaded
    except Exception as error:
        raise _explained(source, error) from error


@contextmanager
def _without_retries(source: Source) -> Iterator[None]:
    """Where the hub does not answer, `datasets` looks into its own cache at once, not after half a minute of retries."""
    if os.path.isdir(source.repository) or _answers():
        yield
        return
    with patch("datasets.config.HF_HUB_OFFLINE", True), patch("huggingface_hub.constants.HF_HUB_OFFLINE", True):
        yield


def _answers() -> bool:
    """Whether the hub answers at all."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=_PATIENCE_SECONDS)
    except Exception:  # whatever a proxy, a name server or offline mode raises
        return False
    return True


def _explained(source: Source, error: Exception) -> UserError:
    """The one line for what `datasets` raised."""
    text = " ".join(str(error).split())
    where = "from the Hugging Face hub" if not os.path.isdir(source.repository) else f"from {source.repository}"
    choices = re.search(r"\[('.*?')\]", text)
    there = choices[1].replace("'", "") if choices else ""
    if "OfflineModeIsEnabled" in text:
        rule = f"{source} could not be loaded: the Hugging Face hub does not answer"
        remedy = "check the network and HF_HUB_OFFLINE, or give a local file or 'builtin'"
        return UserError(f"{rule}, and the cache of `datasets` has no copy of it; {remedy}")
    if "Config" in text and there:
        rule = f"{source} needs one of its configurations, which are {there}, but {source.config or 'none'} is given"
        return UserError(f"{rule}; write it as {re.split('[:@]', source.name)[0]}:{there.split(',')[0]}")
    if "split" in text.lower() and there:
        if "[" in (source.split or ""):
            return UserError(f"{source} is a part of a split: it must be of {there}, not streamed; add --no-streaming")
        rule = f"{source} has the splits {there}, but not {source.split or 'train'}"
        return UserError(f"{rule}; write one as {source.name.partition('@')[0]}@{there.split(',')[0]}")
    if "gated" in text.lower():
        return UserError(f"{source} is a gated data set; ask for access on its page, then `hf auth login`")
    if type(error).__name__ == "DatasetNotFoundError":
        return UserError(f"{source} is not on the hub, or is private; check the name, or `hf auth login`")
    rule = f"{source} could not be loaded {where} ({named(error)})"
    return UserError(f"{rule}; check the network, or give a local file or 'builtin'")


def is_whole(source: Source) -> bool:
    """Whether a source is read into memory as a whole."""
    if source.kind != "files":
        return source.kind == "builtin"
    return not any(map(is_compressed, source.files)) and size_of(source) <= WHOLE_BYTES


def size_of(source: Source) -> int:
    """Bytes of a source's files. Raises UserError where one cannot be read."""
    total = 0
    for path in source.files:
        with refusing(source.option, path):
            total += path.stat().st_size
    return total


def read_split(source: Source, split: str, options: TextSettings = TextSettings()) -> Iterator[Part]:  # noqa: B008 - frozen
    """The parts of `train`, `test` (what is held out) or `all` of a source, in order.

    Raises UserError where it is missing, damaged, empty, or too small to be divided.
    """
    if source.needs_model:
        raise UserError(f"{source} is text that the model writes, of which nothing is held out; give --eval-data")
    if source.kind == "hub":
        return _hub_parts(source, split, options)
    if source.kind == "builtin":
        text = Part(source.name, records=builtin_texts(source.name), joint="\n\n", begins=True)
        return _divided(iter([text]), split, source)
    parts = read_files(source, options.data_column)
    if not is_whole(source) and split == ALL:
        return parts
    first = source.files[0]
    if not is_compressed(first) and suffix_of(first) == ".jsonl" and first.stat().st_size > WHOLE_BYTES:
        return _lines_split(source, split, options)
    return _divided(parts, split, source)


def streams(source: Source, options: TextSettings) -> bool:
    """Whether a set of the hub is read as it arrives, no further than needed: a small one only where that is asked for."""
    small = source.name.partition("@")[0] in (WIKITEXT2, ALPACA)
    return source.kind == "hub" and (not small if options.streaming is None else options.streaming)


def _hub_parts(source: Source, split: str, options: TextSettings) -> Iterator[Part]:
    """The parts of a hub set: of a split of its own for what is measured, or divided where it has none."""
    measured = held_out_split(source) if split != ALL else None
    part = (measured if split == TEST else None) or source.split or "train"
    rows = hub_rows(source, part, streaming=streams(source, options))
    if source.name == WIKITEXT2:
        texts = [row["text"] for row in rows]
        return iter([Part(source.name, 0, texts, joint="\n\n", begins=True, option=source.option)])
    parts = batched(rows, source.name, option=source.option)
    return parts if measured is not None or split == ALL else _divided(parts, split, source)


def builtin_texts(name: str = BUILTIN) -> list[str]:
    """English text that is on every machine: the topics of Python's own documentation, or paragraphs of everyday prose
    (stories, letters, recipes, reports; written for this project) that come with the package."""
    if name == PROSE:
        return Path(__file__).with_name("prose.txt").read_text(encoding="utf-8").strip().split("\n\n")
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def _divided(parts: Iterator[Part], split: str, source: Source) -> Iterator[Part]:
    """Of what is read once, from front to back: the last tenth where it proves short, else the first megabyte."""
    whole, size = is_whole(source), 0
    read: list[Part] = []
    for part in parts:
        read.append(part.loaded())
        size += characters(read[-1].records)
        if size > WHOLE_BYTES and not whole:
            yield from _head_split(chain(read, parts), split)
            return
    short = _texts_whole(read)
    units = [record for part in short for record in part.records]
    if all(isinstance(unit, str) and not unit.strip() for unit in units):
        raise UserError(f"{source.option} must hold text, but {source.name} is empty; give a source with text")
    sizes = [characters(unit) for unit in units]
    cut = len(units)
    if split != ALL:  # the last tenth, by characters; at least one unit stays on each side where there are two
        cut = max(bisect_right(list(accumulate(sizes)), (1 - HELD_OUT_FRACTION) * sum(sizes)), len(units) > 1)
    if split != ALL and not 0 < cut < len(units):
        rule = f"{source} must have at least two documents or lines with text, but has {sum(map(bool, sizes))}"
        raise UserError(f"{rule}; give a source with more, or name its column with --data-column")
    low, high = (cut, len(units)) if split == TEST else (0, cut)
    held_out = sum(sizes[cut:]) if split == TRAIN else 0
    for part in short:
        kept = part.cut(max(low, 0), max(high, 0))
        low, high = low - len(part.records), high - len(part.records)
        if kept.records:
            if kept.ends:  # one of several texts is a document like those of records
                kept = replace(kept, records=["".join(kept.records)], joint=None)
            yield replace(kept, held_out=held_out)
            held_out = 0


def _texts_whole(parts: list[Part]) -> list[Part]:
    """Parts of which each text is one again."""
    joined: list[Part] = []
    for part in parts:
        if part.continues:
            joined[-1] = replace(joined[-1], records=joined[-1].records + part.records, ends=part.ends)
        else:
            joined.append(part)
    return joined


def _lines_split(source: Source, split: str, options: TextSettings) -> Iterator[Part]:
    """Of a large JSON Lines file: its first megabyte of lines, and where they end."""
    path = source.files[0]
    with refusing(source.option, path), open(path, "rb") as file:
        file.seek(min(HELD_OUT_CHARACTERS, path.stat().st_size // 10))
        next_line(file)
        cut = file.tell()
    until = takewhile(lambda part: part.start < cut, line_ranges(path, option=source.option))
    first = (replace(part, stop=min(part.stop, cut)) for part in until)
    if split == TEST:
        yield from first
        return
    held_out = sum(characters(part.load()) for part in first)
    others = replace(source, files=source.files[1:])
    for part in chain(line_ranges(path, cut, option=source.option), read_files(others, options.data_column)):
        yield replace(part, held_out=held_out)
        held_out = 0


def _head_split(parts: Iterator[Part], split: str) -> Iterator[Part]:
    """The first megabyte of records, or all that follow them."""
    left, held_out = HELD_OUT_CHARACTERS, 0
    for part in parts:
        rest = part
        if left > 0:
            rest, cut = part.loaded(), 0
            while cut < len(rest.records) and left > 0:
                left -= characters(rest.records[cut])
                cut += 1
            head, rest = rest.cut(0, cut), rest.cut(cut, len(rest.records))
            held_out += characters(head.records)
            if split == TEST:
                yield head
                continue
        elif split == TEST:
            return
        if rest.path is not None or rest.records:
            yield replace(rest, held_out=held_out)
            held_out = 0
