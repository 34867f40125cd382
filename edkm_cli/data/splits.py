"""What of a source is trained on and what is held out to be measured.

A set of the hub with a split for it is measured on that. Of a source that is read as a whole (local files of up to
WHOLE_BYTES, `builtin`) the last tenth is held out; of anything larger the first megabyte, which is found without
reading the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

from edkm_cli.data import hub
from edkm_cli.data.reading import (
    Part,
    batched,
    characters,
    end_of_lines,
    line_ranges,
    read_files,
    read_text,
    wikitext_rows,
)
from edkm_cli.data.sources import (
    ALPACA,
    BUILTIN,
    PROSE,
    WIKITEXT2,
    Source,
    is_compressed,
    is_text,
    is_wikitext,
    suffix_of,
)
from edkm_cli.errors import UserError

WHOLE_BYTES = 12_000_000  # WikiText-2 is tokenized as a whole, as its figures ask; that takes 0.8 GB
HELD_OUT_FRACTION = 0.1
HELD_OUT_CHARACTERS = 1_000_000
TRAIN, TEST, ALL = "train", "test", "all"


@dataclass(frozen=True)
class Reading:
    """How sources are read: the field with the text, and whether hub sets are streamed (None: all but the small named
    ones)."""

    column: str | None = None
    streaming: bool | None = None


def is_whole(source: Source) -> bool:
    """Whether a source is read into memory as a whole."""
    if source.kind == "files":
        return (
            not any(map(is_compressed, source.files))
            and sum(_size(path, source.option) for path in source.files) <= WHOLE_BYTES
        )
    return source.kind == "builtin"


def _size(path: Path, option: str) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise UserError(f"{option} file cannot be read: {path} ({error.strerror or error})") from error


def read_split(source: Source, split: str, reading: Reading = Reading()) -> Iterator[Part]:
    """The parts of `train`, `test` (what is held out) or `all` of a source, in order.

    Raises UserError where it is missing, damaged, empty, or too small to be divided.
    """
    if source.needs_model:
        raise UserError(f"{source} is text that the model writes, of which nothing is held out; give --eval-data")
    if source.kind == "hub":
        return _hub_split(source, split, reading)
    if is_whole(source):
        return iter(_whole_split(source, split))
    if split == ALL:
        return read_files(source, reading.column)
    lines = [path for path in source.files[:1] if suffix_of(path) == ".jsonl" and not is_compressed(path)]
    if lines:
        return _lines_split(source, split, reading)
    return _stream_split(read_files(source, reading.column), split, source)


def _hub_split(source: Source, split: str, reading: Reading) -> Iterator[Part]:
    streaming = reading.streaming
    if streaming is None:
        streaming = source.name.partition("@")[0] not in (WIKITEXT2, ALPACA)
    own = hub.held_out_split(source) if split != ALL or source.name == WIKITEXT2 else None
    chosen = (own if split != TRAIN else None) or source.split or "train"
    rows = hub.rows(source, chosen, streaming=streaming)
    if source.is_wikitext:
        text = "\n\n".join(row["text"] for row in rows)
        return iter([Part(source.name, 0, [text], stream=True, begins=True)])
    parts = batched(rows, source.name, 0)
    return parts if own or split == ALL else _stream_split(parts, split, source)


def _whole_split(source: Source, split: str) -> list[Part]:
    """Of lines (texts) and records, by characters; at least one stays on each side where there are two."""
    units: list[tuple[int, Any]] = []  # (its file, a line of text or a record)
    for index, path in enumerate(source.files):
        if is_wikitext(path):
            units += [(index, row) for row in wikitext_rows(read_text(path))]
        elif is_text(path):
            units += [(index, line) for line in read_text(path).splitlines(keepends=True)]
        else:
            units += [(index, record) for part in read_files(replace(source, files=(path,))) for record in part.load()]
    if source.kind == "builtin":
        units = [(0, text) for text in builtin_texts(source.name)]
    if all(isinstance(unit, str) and not unit.strip() for _, unit in units):
        raise UserError(f"{source.option} must hold text, but {source.name} is empty; give a file with text")
    held_out = 0
    if split != ALL:
        sizes = [characters(unit) for _, unit in units]
        cut = held_out_start(sizes)
        kept = units[:cut] if split == TRAIN else units[cut:]
        if not kept or len(kept) == len(units):
            raise UserError(f"{source} must have at least two documents or lines, got {len(units)}")
        units, held_out = kept, sum(sizes[cut:]) if split == TRAIN else 0
    first, *rest = _regrouped(source, units)
    return [replace(first, held_out=held_out), *rest]


def _regrouped(source: Source, units: list[tuple[int, Any]]) -> list[Part]:
    """Parts in the order of the files: a text is whole again, records come one after the other."""
    if source.kind == "builtin":
        return [Part(source.name, 0, ["\n\n".join(text for _, text in units)], stream=True, begins=True)]
    parts: list[Part] = []
    first = 0
    for index in dict.fromkeys(index for index, _ in units):
        path = source.files[index]
        mine = [unit for at, unit in units if at == index]
        if is_text(path):
            text = ("\n\n" if is_wikitext(path) else "").join(mine)
            stream = len(source.files) == 1 or is_wikitext(path)
            parts.append(Part(str(path), first, [text], stream=stream, begins=stream and first == 0))
        else:
            parts.append(Part(str(path), first, mine))
        first += len(mine)
    return parts


def builtin_texts(name: str = BUILTIN) -> list[str]:
    """English text that is on every machine: the topics of Python's own documentation, or paragraphs of everyday prose
    (stories, letters, recipes, reports; written for this project) that come with the package."""
    if name == PROSE:
        return read_text(Path(__file__).with_name("prose.txt")).strip().split("\n\n")
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def held_out_start(sizes: list[int]) -> int:
    """The first unit of the last tenth, by characters; at least one stays on each side where there are two."""
    left = (1 - HELD_OUT_FRACTION) * sum(sizes)
    for index, size in enumerate(sizes):
        left -= size
        if left < 0:
            return max(index, 1) if len(sizes) > 1 else index
    return len(sizes)


def _lines_split(source: Source, split: str, reading: Reading) -> Iterator[Part]:
    """Of a large JSON Lines file: its first megabyte of lines, and where they end."""
    path = source.files[0]
    cut = end_of_lines(path, min(HELD_OUT_CHARACTERS, _size(path, source.option) // 10))
    until = takewhile(lambda part: part.start < cut, line_ranges(path))
    first = (replace(part, stop=min(part.stop, cut)) for part in until)
    if split == TEST:
        yield from first
    else:
        held_out = sum(characters(part.load()) for part in first)
        for part in line_ranges(path, start=cut):
            yield replace(part, held_out=held_out)
            held_out = 0
        yield from read_files(replace(source, files=source.files[1:]), reading.column)


def _stream_split(parts: Iterator[Part], split: str, source: Source) -> Iterator[Part]:
    """Of what is read once, from front to back: the last tenth where it proves short, else the first megabyte."""
    short: list[Part] = []
    size = 0
    if (first := next(parts, None)) is None:
        raise UserError(f"{source.option} must hold text, but {source.name} is empty; give a source with text")
    for part in chain([first], parts):
        short.append(replace(part, records=part.load(), path=None))
        size += characters(short[-1].records)
        if size > WHOLE_BYTES:
            yield from _head_split(chain(short, parts), split)
            return
    if short[0].stream and len({part.where for part in short}) == 1:  # pieces of one text, which is divided by lines
        text = "".join(text for part in short for text in part.records)
        if not text.strip():
            raise UserError(f"{source.option} must hold text, but {source.name} is empty; give a source with text")
        short = [replace(short[0], records=text.splitlines(keepends=True))]
    sizes = [characters(record) for part in short for record in part.records]
    cut = held_out_start(sizes)
    if not 0 < cut < len(sizes):
        raise UserError(f"{source} must have at least two documents or lines, got {len(sizes)}")
    held_out = sum(sizes[cut:]) if split == TRAIN else 0
    for part in short:
        at = min(max(cut - part.first + short[0].first, 0), len(part.records))
        kept = part.records[:at] if split == TRAIN else part.records[at:]
        if kept:
            kept = ["".join(kept)] if part.stream else kept
            yield replace(part, records=kept, first=part.first + (0 if split == TRAIN else at), held_out=held_out)
            held_out = 0


def _head_split(parts: Iterator[Part], split: str) -> Iterator[Part]:
    """The first megabyte of records, or all that follow them."""
    left, held_out = HELD_OUT_CHARACTERS, 0
    for part in parts:
        if left <= 0:
            if split == TEST:
                return
            yield replace(part, held_out=held_out)
            held_out = 0
            continue
        records, cut = part.load(), 0
        while cut < len(records) and left > 0:
            left -= characters(records[cut])
            cut += 1
        held_out += characters(records[:cut]) if split == TRAIN else 0
        kept = records[:cut] if split == TEST else records[cut:]
        if kept:
            first = part.first if split == TEST else part.first + cut
            yield replace(part, records=kept, first=first, path=None, held_out=held_out)
            held_out = 0
