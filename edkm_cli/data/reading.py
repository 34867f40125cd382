"""Local files -> raw records, a bounded part at a time: lines by their place in the file, so that several processes can
read one file, everything else in batches."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from edkm_cli.data.sources import Source, is_compressed, is_text, is_wikitext, suffix_of
from edkm_cli.errors import UserError

PART_BYTES = 1_000_000  # about 250,000 tokens, for which a tokenizer takes 75 MB
_LONGEST_ITEM = 100_000_000
_LONG_LINE_PARTS = 16  # of PART_BYTES: a line that is longer is cut
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Part:
    """Some consecutive records of a source: read (`records`), or the lines that begin in bytes `start` to `stop` of a
    file. `first` is the number of its first record. `stream`: the records are pieces of one text, not documents; whether
    the text `begins` and `ends` with them. `held_out`: characters before or after it that are left out to be measured."""

    where: str
    first: int = 0
    records: list[Any] = field(default_factory=list)
    path: Path | None = None
    start: int = 0
    stop: int = 0
    stream: bool = False
    begins: bool = False
    ends: bool = False
    held_out: int = 0

    @property
    def size(self) -> int:
        """About how many bytes of text it holds."""
        return self.stop - self.start if self.path is not None else characters(self.records)

    def load(self) -> list[Any]:
        """The records. Raises UserError for a line that is not JSON."""
        if self.path is None:
            return self.records
        with _open(self.path) as file:
            file.seek(self.start)
            data = file.read(self.stop - self.start)
        return [
            parse_line(line, f"{self.path}, byte {self.start + offset}")
            for offset, line in _lines(data)
            if line.strip()
        ]


def _lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(offset, line) of each line; only a newline ends one, so U+2028 and U+0085 stay inside."""
    offset = 0
    for line in data.split(b"\n"):
        yield offset, line
        offset += len(line) + 1


def parse_line(line: bytes, where: str) -> Any:
    """One record of JSON Lines. Raises UserError that says where it is."""
    try:
        return json.loads(line.removeprefix(_BOM).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"--data must be UTF-8 text, but {where} is not ({error.reason}); convert it first") from error
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"--data must be valid jsonl, a record a line, but {where} is not ({error}); mend the file"
        ) from error


def read_files(source: Source, column: str | None = None) -> Iterator[Part]:
    """All parts of a source's files, in order. Raises UserError for a file that cannot be read."""
    first = 0
    for path in source.files:
        for part in _read_file(path, first, column, alone=len(source.files) == 1):
            first += len(part.records)
            yield part


def _read_file(path: Path, first: int, column: str | None, *, alone: bool) -> Iterator[Part]:
    """`alone`: the only file of its source. Of several, each text is a document, with an end."""
    suffix = suffix_of(path)
    if is_text(path):
        ends = not alone and not is_wikitext(path)
        number, pieces = 0, text_pieces(path)
        text = next(pieces, None)
        while text is not None:
            following = next(pieces, None)
            begins = number == 0 and (ends or first == 0)
            yield Part(str(path), first + number, [text], stream=True, begins=begins, ends=ends and following is None)
            number, text = number + 1, following
    elif suffix in (".parquet", ".arrow"):
        yield from batched(_columnar(path, column), str(path), first)
    elif suffix == ".json" and not _is_lines(path):
        yield from batched(_json_items(path), str(path), first)
    elif is_compressed(path):
        with _open(path) as file:
            records = (
                parse_line(line, f"{path}, line {number + 1}")
                for number, line in enumerate(_whole_lines(path, file))
                if line.strip()
            )
            yield from batched(_reading(path, records), str(path), first)
    else:
        yield from line_ranges(path)


def _whole_lines(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """The lines of a compressed file. Raises UserError for one that memory should not hold: a few kilobytes can unpack to
    a line without end."""
    while line := _line(path, file):
        yield line


def _line(path: Path, file: BinaryIO) -> bytes:
    line = file.readline(_LONGEST_ITEM + 1)
    if len(line) > _LONGEST_ITEM:
        raise UserError(
            f"--data must have lines of at most {_LONGEST_ITEM} bytes, but {path} has a longer one; is it damaged?"
        )
    return line


def line_ranges(path: Path, start: int = 0) -> Iterator[Part]:
    """Byte ranges of whole lines, of about PART_BYTES each."""
    size = path.stat().st_size
    with _open(path) as file:
        while start < size:
            file.seek(min(start + PART_BYTES, size))
            _line(path, file)
            stop = file.tell()
            yield Part(str(path), path=path, start=start, stop=stop)
            start = stop


def end_of_lines(path: Path, size: int) -> int:
    """Where the line ends in which byte `size` of a file is."""
    with _open(path) as file:
        file.seek(size)
        file.readline()
        return file.tell()


def read_text(path: Path) -> str:
    """A text as the file holds it, but for a byte order mark. Raises UserError where it is not UTF-8."""
    with _open(path) as file:
        data = b"".join(_reading(path, iter(lambda: file.read(1 << 20), b"")))
    try:
        return data.removeprefix(_BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"--data must be UTF-8 text, but {path} is not (byte {error.start}); convert it first"
        ) from error


def text_pieces(path: Path) -> Iterator[str]:
    """A long text in pieces of about PART_BYTES that end with a line (where lines are very long, with a word); WikiText's
    as its rows joined. Put together they are the whole text."""
    pending, size, number, joint = [], 0, 0, ""
    with _open(path) as file:
        for line in _reading(path, iter(lambda: file.readline(PART_BYTES), b"")):
            if number == 0:
                line = line.removeprefix(_BOM)
            pending.append(line)
            size, number = size + len(line), number + 1
            if size >= _LONG_LINE_PARTS * PART_BYTES and not line.endswith(b"\n"):  # a text without lines
                data = b"".join(pending)
                cut = data.rfind(b" ", len(data) // 2) + 1 or _whole_characters(data)
                yield joint + _decoded([data[:cut]], path)
                pending, size, joint = [data[cut:]], len(data) - cut, ""
            if size >= PART_BYTES and line.endswith(b"\n"):
                yield joint + _decoded(pending, path)
                pending, size, joint = [], 0, "\n\n" if is_wikitext(path) else ""
    if pending:
        yield joint + _decoded(pending, path)


def _whole_characters(data: bytes) -> int:
    """How many bytes there are before the last character, which may be cut."""
    end = len(data) - 1
    while end > 0 and data[end] & 0xC0 == 0x80:
        end -= 1
    return max(end, 1)


def _decoded(lines: list[bytes], path: Path) -> str:
    try:
        text = b"".join(lines).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"--data must be UTF-8 text, but {path} is not ({error.reason}); convert it first") from error
    return "\n\n".join(wikitext_rows(text)) if is_wikitext(path) else text


def wikitext_rows(text: str) -> list[str]:
    """The rows of the Hugging Face data set from a raw file: a non-blank line keeps its newline, a blank one is ''.

    >>> wikitext_rows("A title\\n\\nA paragraph.\\n")
    ['A title\\n', '', 'A paragraph.\\n']
    """
    rows = text.split("\n")
    last = rows.pop()
    rows = [row + "\n" if row.strip() else "" for row in rows]
    return [*rows, last if last.strip() else ""] if last else rows


def _open(path: Path) -> BinaryIO:
    try:
        if path.suffix.lower() == ".gz":
            return gzip.open(path, "rb")  # type: ignore[return-value]
        if path.suffix.lower() == ".zst":
            return _open_zst(path)
        return open(path, "rb")
    except OSError as error:
        raise UserError(f"--data file cannot be read: {path} ({error.strerror or error})") from error


def _open_zst(path: Path) -> BinaryIO:
    try:
        import pyarrow
    except ImportError as error:
        raise UserError(f"reading {path} needs pyarrow, which is not installed; pip install datasets") from error
    import io

    raw = pyarrow.input_stream(str(path), compression="zstd")
    return io.BufferedReader(raw)


def _reading(path: Path, items: Iterator[Any]) -> Iterator[Any]:
    """The items; a file that is damaged or truncated is a UserError."""
    try:
        yield from items
    except (EOFError, OSError, zlib.error) as error:
        raise UserError(f"--data file is damaged or incomplete: {path} ({error}); fetch it again") from error


def batched(records: Iterator[Any], where: str, first: int) -> Iterator[Part]:
    """Parts of about PART_BYTES of text or 4,096 records each."""
    batch: list[Any] = []
    size = 0
    for record in records:
        batch.append(record)
        size += characters(record)
        if size >= PART_BYTES or len(batch) == 4096:
            yield Part(where, first, batch)
            first, batch, size = first + len(batch), [], 0
    if batch:
        yield Part(where, first, batch)


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


def _columnar(path: Path, column: str | None) -> Iterator[Any]:
    """Rows of a parquet or Arrow file as dicts, by batches."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"reading {path.suffix} needs pyarrow, which is not installed; pip install datasets") from error
    kind = suffix_of(path)[1:]
    try:
        if kind == "parquet":
            with pyarrow.parquet.ParquetFile(path) as table:
                known = table.schema_arrow.names
                columns = [column] if column in known else None
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
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        text = " ".join(str(error).split())
        raise UserError(f"--data must be a {kind} file, but {path} cannot be read ({text})") from error


def _is_lines(path: Path) -> bool:
    """Whether a .json file holds JSON Lines, as many do: it does not begin with a list, and its first line is whole."""
    with _open(path) as file:
        for line in _reading(path, iter(lambda: file.readline(PART_BYTES), b"")):
            begin = line.removeprefix(_BOM).lstrip()
            if begin:
                if not begin.startswith(b"{"):
                    return False
                if not begin.endswith(b"\n"):
                    begin += next(_reading(path, iter(lambda: file.readline(_LONGEST_ITEM), b"")), b"")
                try:
                    json.loads(begin)
                except (ValueError, RecursionError):
                    return False
                return True
    return False


def _json_items(path: Path) -> Iterator[Any]:
    """The items of a JSON list, one by one, so that a large file is never in memory as a whole."""
    decoder, blank = json.JSONDecoder(), re.compile(r"\s*")
    with _open(path) as file:
        reader = _characters(path, file)
        text, at, count = "", 0, 0

        def more() -> bool:
            nonlocal text, at
            pieces = [text[at:]]
            while (piece := next(reader, None)) is not None:
                pieces.append(piece)
                if sum(map(len, pieces[1:])) >= len(pieces[0]):  # twice as much, for an item that is long
                    break
            text, at = "".join(pieces), 0
            return len(pieces) > 1

        def sign() -> str:
            """The next character that is not blank; '' at the end."""
            nonlocal at
            while (at := blank.match(text, at).end()) == len(text):  # type: ignore[union-attr]
                if not more():
                    return ""
            return text[at]

        if sign() != "[":
            raise _not_a_list(path)
        at += 1
        while sign() != "]":
            if count:
                if sign() != ",":
                    raise _not_json(path, f"after item {count} there is no comma")
                at += 1
                sign()
            while True:
                try:
                    item, at = decoder.raw_decode(text, at)
                    break
                except (ValueError, RecursionError) as error:
                    if isinstance(error, RecursionError) or len(text) - at > _LONGEST_ITEM or not more():
                        raise _not_json(path, f"item {count + 1}: {error}") from error
            count += 1
            yield item
        at += 1
        if sign():
            raise _not_json(path, "something follows the list")


def _not_a_list(path: Path) -> UserError:
    if path.stat().st_size < _LONGEST_ITEM and not is_compressed(path):
        try:
            json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            return _not_json(path, str(error))
    return UserError(f"--data must be a list of records that is not empty, but {path} is not one")


def _not_json(path: Path, why: str) -> UserError:
    return UserError(f"--data must be valid json, but {path} is not ({why}); mend the file")


def _characters(path: Path, file: BinaryIO) -> Iterator[str]:
    """The text of a file, by pieces."""
    import codecs

    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    try:
        for data in _reading(path, iter(lambda: file.read(1 << 18), b"")):
            yield decoder.decode(data)
        yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise UserError(
            f"--data must be UTF-8 text, but {path} is not (byte {error.start}); convert it first"
        ) from error
