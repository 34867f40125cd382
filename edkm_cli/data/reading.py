"""Local files -> records and texts, a bounded part at a time: lines by their place in the file, so that several processes
can read one file, everything else in batches."""

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, BinaryIO

from edkm_cli.data.sources import TEXTS, Source, is_compressed, is_wikitext, suffix_of
from edkm_cli.errors import UserError

PART_BYTES = 1_000_000  # about 250,000 tokens, for which a tokenizer takes 75 MB
_LONGEST_ITEM = 100_000_000
_LONG_LINE_PARTS = 16  # of PART_BYTES: a line that is longer is cut
_BOM = b"\xef\xbb\xbf"
# What a file must be, and what helps where it is not, by its suffix.
_KINDS = {
    ".jsonl": ("valid jsonl, a record a line", "mend the file"),
    ".json": ("valid json", "it must be a list of records, or a record a line"),
    ".parquet": ("a parquet file", "write it again"),
    ".arrow": ("an Arrow file", "write it again"),
}
_LIST, _COMMA, _END = re.compile(r"\s*\[\s*"), re.compile(r"\s*,\s*"), re.compile(r"\s*(\[\s*)?\]\s*")


@dataclass(frozen=True)
class Part:
    """Consecutive records of a source, or a stretch of one running text.

    `where` they are, and the number of the `first` there. `records` are read already, or are the lines that begin in
    bytes `start` to `stop` of the file `path`. Where `joint` is not None they are lines or rows of a text, which it joins:
    the text `continues` that of the part before; a document `begins` or `ends` with them. `held_out`: characters before or
    after them that are left out to be measured. `option` names the source in errors.
    """

    where: str
    first: int = 0
    records: list[Any] = field(default_factory=list)
    path: Path | None = None
    start: int = 0
    stop: int = 0
    joint: str | None = None
    continues: bool = False
    begins: bool = False
    ends: bool = False
    held_out: int = 0
    option: str = "--data"

    @property
    def size(self) -> int:
        """About how many bytes of text it holds."""
        return self.stop - self.start if self.path is not None else characters(self.records)

    def load(self) -> list[Any]:
        """The records; of a running text its one piece. Raises UserError for a line that is not JSON."""
        if self.joint is None:
            return self.loaded().records
        return [(self.joint if self.continues else "") + self.joint.join(self.records)]

    def loaded(self) -> "Part":
        """The same, read. Raises UserError for a line that is not JSON."""
        if self.path is None:
            return self
        with refusing(self.option, self.path), open(self.path, "rb") as file:
            file.seek(self.start)
            data = file.read(self.stop - self.start)
        records, offset = [], self.start
        for line in data.split(b"\n"):  # only a newline ends a line: U+2028 and U+0085 stay inside
            if line.strip():
                records.append(_parsed(line, self.option, self.path, f"byte {offset}"))
            offset += len(line) + 1
        return replace(self, records=records, path=None)

    def cut(self, low: int, high: int) -> "Part":
        """Only the records `low` to `high`."""
        kept, continues = self.records[low:high], self.continues and low == 0
        return replace(self, records=kept, first=self.first + low, continues=continues)

    def place(self, number: int) -> str:
        """The name of a record in errors."""
        return f"{self.where}, record {self.first + number + 1}"


def read_files(source: Source, column: str | None = None) -> Iterator[Part]:
    """All parts of a source's files, in order. Raises UserError for a file that cannot be read."""
    for index, path in enumerate(source.files):
        with refusing(source.option, path):
            if suffix_of(path) in TEXTS:
                # Of several texts each is a document, with an end; WikiText is one text in however many files.
                alone = len(source.files) == 1 or is_wikitext(path)
                yield from _text_parts(path, alone=alone, begins=index == 0 or not alone, option=source.option)
            elif suffix_of(path) in (".parquet", ".arrow"):
                yield from batched(_rows(path, column), str(path), option=source.option)
            elif not _holds_lines(path):
                yield from batched(_items(path), str(path), option=source.option)
            elif is_compressed(path):
                yield from batched(_lines(path, source.option), str(path), option=source.option)
            else:
                yield from line_ranges(path, option=source.option)


@contextmanager
def refusing(option: str, path: Path, place: str = "") -> Iterator[None]:
    """Whatever makes a file, or a `place` in it, unreadable becomes a UserError of one line."""
    try:
        yield
    except (EOFError, OSError, ValueError, RecursionError, zlib.error) as error:
        where, reason = f"{path}{place and f', {place}'}", " ".join(str(error).split())
        kind, remedy = _KINDS.get(suffix_of(path), ("text", "mend the file"))
        if isinstance(error, UnicodeDecodeError):
            text = f"{option} must be UTF-8 text, but {where} is not ({error.reason}); convert it first"
        elif isinstance(error, OSError) and error.errno and error.strerror:
            text = f"{option} file cannot be read: {error.filename or path} ({error.strerror})"
        elif isinstance(error, (ValueError, RecursionError)):
            text = f"{option} must be {kind}, but {where} is not ({reason}); {remedy}"
        else:
            text = f"{option} file is damaged or incomplete: {path} ({error}); fetch it again"
        raise UserError(text) from error


def _parsed(line: bytes, option: str, path: Path, place: str) -> Any:
    """One record of JSON Lines. Raises UserError that says where it is."""
    with refusing(option, path, place):
        return json.loads(line.removeprefix(_BOM).decode("utf-8"))


def _opened(path: Path) -> BinaryIO:
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.suffix.lower() == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
    return open(path, "rb")


def _holds_lines(path: Path) -> bool:
    """Whether a file has a record a line: JSON Lines, and those .json files that do not begin with a list."""
    if suffix_of(path) != ".json":
        return suffix_of(path) == ".jsonl"
    with _opened(path) as file:
        return not file.read(1 << 16).removeprefix(_BOM).lstrip().startswith(b"[")


def _lines(path: Path, option: str) -> Iterator[Any]:
    """The records of JSON Lines that are read from their beginning."""
    with _opened(path) as file:
        for number, line in enumerate(iter(lambda: next_line(file), b"")):
            if line.strip():
                yield _parsed(line, option, path, f"line {number + 1}")


def next_line(file: BinaryIO) -> bytes:
    """The next line. Raises ValueError for one that memory should not hold: kilobytes can unpack to one without end."""
    line = file.readline(_LONGEST_ITEM + 1)
    if len(line) > _LONGEST_ITEM:
        raise ValueError(f"lines of at most {_LONGEST_ITEM} bytes are read, it has a longer one: is it damaged?")
    return line


def line_ranges(path: Path, start: int = 0, *, option: str = "--data") -> Iterator[Part]:
    """Byte ranges of whole lines, of about PART_BYTES each."""
    size = path.stat().st_size
    with refusing(option, path), open(path, "rb") as file:
        while start < size:
            file.seek(min(start + PART_BYTES, size))
            next_line(file)
            stop = file.tell()
            where = f"{path} from byte {start} on" if start else str(path)
            yield Part(where, path=path, start=start, stop=stop, option=option)
            start = stop


def _text_parts(path: Path, *, alone: bool, begins: bool, option: str) -> Iterator[Part]:
    """A text in pieces; as lines, or as rows where it is WikiText."""
    joint = "\n\n" if is_wikitext(path) else ""
    with _opened(path) as file:
        pieces = _pieces(io.TextIOWrapper(file, encoding="utf-8-sig", newline="\n"))
        for number, (piece, following) in enumerate(pairwise(chain(pieces, [""]))):
            records = wikitext_rows(piece) if is_wikitext(path) else piece.splitlines(keepends=True)
            part = Part(str(path), records=records, joint=joint, continues=number > 0, option=option)
            yield replace(part, begins=begins and number == 0, ends=not following and not alone)


def _pieces(text: io.TextIOWrapper) -> Iterator[str]:
    """A text in pieces of about PART_BYTES that end with a line; where lines are very long, with a word."""
    pending, size = [], 0
    for line in iter(lambda: text.readline(PART_BYTES), ""):
        pending.append(line)
        size += len(line.encode())
        long = size >= _LONG_LINE_PARTS * PART_BYTES and not line.endswith("\n")
        if long or (size >= PART_BYTES and line.endswith("\n")):
            piece = "".join(pending)
            end = (piece.rfind(" ", len(piece) // 2) + 1 or len(piece)) if long else len(piece)
            yield piece[:end]
            pending, size = [piece[end:]], len(piece[end:].encode())
    if any(pending):
        yield "".join(pending)


def wikitext_rows(text: str) -> list[str]:
    """The rows of the Hugging Face data set from a raw file: a non-blank line keeps its newline, a blank one is ''.

    >>> wikitext_rows("A title\\n\\nA paragraph.\\n")
    ['A title\\n', '', 'A paragraph.\\n']
    """
    return [row if row.strip() else "" for row in io.StringIO(text, newline="\n")]


def batched(records: Iterable[Any], where: str, *, option: str = "--data") -> Iterator[Part]:
    """Parts of about PART_BYTES of text or 4,096 records each."""
    first, size = 0, 0
    batch: list[Any] = []
    for record in records:
        batch.append(record)
        size += characters(record)
        if size >= PART_BYTES or len(batch) == 4096:
            yield Part(where, first, batch, option=option)
            first, batch, size = first + len(batch), [], 0
    if batch:
        yield Part(where, first, batch, option=option)


def characters(record: Any) -> int:
    """About how much text a record holds: the characters of all its strings."""
    left, count = [record], 0
    while left:
        value = left.pop()
        if isinstance(value, str):
            count += len(value)
        elif isinstance(value, dict):
            left += value.values()
        elif isinstance(value, (list, tuple)):
            left += value
    return count


def _rows(path: Path, column: str | None) -> Iterator[Any]:
    """Rows of a parquet or Arrow file as dicts, by batches. Raises ValueError where it is none."""
    import pyarrow
    import pyarrow.parquet

    try:
        if suffix_of(path) == ".parquet":
            with pyarrow.parquet.ParquetFile(path) as table:
                names = table.schema_arrow.names
                columns = [name for name in (column, "tools", "system") if name in names] if column in names else None
                for batch in table.iter_batches(batch_size=512, columns=columns):
                    yield from batch.to_pylist()
            return
        with pyarrow.OSFile(str(path)) as file:
            try:
                batches = iter(pyarrow.ipc.open_stream(file))
            except pyarrow.ArrowInvalid:
                opened = pyarrow.ipc.open_file(str(path))
                batches = (opened.get_batch(index) for index in range(opened.num_record_batches))
            for batch in batches:
                batch.validate(full=True)  # Arrow trusts a file's offsets, whatever they say
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError, OverflowError, MemoryError) as error:
        raise ValueError(str(error)) from error


def _items(path: Path) -> Iterator[Any]:
    """The items of a JSON list, one by one, so that a large file is never in memory as a whole. Raises ValueError."""
    decoder = json.JSONDecoder()
    text, at, count = "", 0, 0  # what is read, and how far it is used up
    with _opened(path) as file:
        reader = io.TextIOWrapper(file, encoding="utf-8-sig")
        while True:
            try:
                sign = (_COMMA if count else _LIST).match(text, at)
                if sign is None:
                    raise ValueError(f"after item {count} there is no comma" if count else "it is no list")
                item, end = decoder.raw_decode(text, sign.end())
            except ValueError as error:
                # As much again: an item may be long.
                more = reader.read(max(len(text) - at, 1 << 18)) if len(text) - at <= _LONGEST_ITEM else ""
                if more:
                    text, at = text[at:] + more, 0
                    continue
                last = _END.match(text, at)
                if last and bool(last[1]) == (count == 0) and last.end() == len(text):
                    return
                raise ValueError("something follows the list" if last else f"item {count + 1}: {error}") from error
            at, count = end, count + 1
            yield item
