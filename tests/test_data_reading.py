"""Files of every kind give the same records, whole and in parts; bounded parts cover a file exactly."""

import gzip
import json

import pytest

from edkm_cli.data import load_documents, parse_source, reading, splits
from edkm_cli.data.encode import Encoder
from edkm_cli.data.reading import Part, line_ranges, read_files
from edkm_cli.data.splits import read_split
from edkm_cli.errors import UserError
from helpers import byte_tokenizer

RECORDS = [{"text": f"Document {i}, with \u2028 and ü. " + "word " * (i % 7)} for i in range(50)]


def write(path):
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS).encode()
    kind = path.name.partition(".")[2]
    if kind == "jsonl":
        path.write_bytes(lines)
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(lines))
    elif kind == "jsonl.zst":
        import pyarrow

        with pyarrow.output_stream(str(path), compression="zstd") as file:
            file.write(lines)
    elif kind == "json":
        path.write_text(json.dumps(RECORDS, indent=1))
    elif kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), path, row_group_size=7)
    else:
        import pyarrow

        table = pyarrow.Table.from_pylist(RECORDS)
        opened = pyarrow.ipc.new_stream if "stream" in path.name else pyarrow.ipc.new_file
        with opened(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=7)


KINDS = ["r.jsonl", "r.jsonl.gz", "r.jsonl.zst", "r.json", "r.parquet", "file.arrow", "stream.arrow"]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("part_bytes", [1, 333, 1_000_000])
def test_every_kind_of_file_gives_the_same_records(tmp_path, monkeypatch, name, part_bytes):
    if not name.startswith(("r.json", "r.jsonl.gz")) or name.endswith("zst"):
        pytest.importorskip("pyarrow")
    write(tmp_path / name)
    monkeypatch.setattr(reading, "PART_BYTES", part_bytes)
    parts = list(read_files(parse_source(str(tmp_path / name))))
    assert [record for part in parts for record in part.load()] == RECORDS
    if part_bytes == 1:
        assert len(parts) == len(RECORDS)


def test_a_directory_and_a_glob_are_read_in_the_order_of_names(tmp_path):
    for name in ("b.jsonl", "a.json"):
        write(tmp_path / name)
    (tmp_path / "c.txt").write_text("text\n")
    documents = [record["text"] for record in RECORDS]
    assert load_documents(parse_source(str(tmp_path)), "all") == [*documents, *documents, "text\n"]
    assert load_documents(parse_source(str(tmp_path / "*.json*")), "all") == [*documents, *documents]


def test_a_column_of_a_table_comes_with_the_tools_of_its_records(tmp_path):
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    rows = [
        {"chat": [{"role": "user", "content": "1 + 1?"}], "tools": [{"name": "add"}], "system": "Add.", "id": 7}
    ] * 3
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "r.parquet")
    parts = read_files(parse_source(str(tmp_path / "r.parquet")), column="chat")
    assert [record for part in parts for record in part.load()] == [
        {k: row[k] for k in ("chat", "tools", "system")} for row in rows
    ]


def test_ranges_of_lines_cover_a_file_once_whatever_the_lines(tmp_path, monkeypatch):
    path = tmp_path / "r.jsonl"
    path.write_text('\n\n"a"\n' + json.dumps("b" * 500) + "\n\n\n" + '"c"')
    for size in (1, 2, 3, 100, 10_000):
        monkeypatch.setattr(reading, "PART_BYTES", size)
        parts = list(line_ranges(path))
        assert [record for part in parts for record in part.load()] == ["a", "b" * 500, "c"]
        assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]


def test_a_long_list_is_read_item_by_item(tmp_path, monkeypatch):
    items = [{"text": "x" * size} for size in (0, 10, 700_000, 1, 300_000)]
    path = tmp_path / "r.json"
    path.write_text("  " + json.dumps(items))
    assert [item for part in read_files(parse_source(str(path))) for item in part.load()] == items


def test_a_json_file_of_lines_may_begin_with_a_long_one(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    records = [{"text": "x" * 500}, {"text": "b"}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    monkeypatch.setattr(reading, "PART_BYTES", 100)
    assert [record for part in read_files(parse_source(str(path))) for record in part.load()] == records


@pytest.mark.parametrize(("name", "split"), [("t.txt", "all"), ("t.txt", "train"), ("t.txt", "test"), ("t.raw", "all")])
def test_a_compressed_text_is_the_text_whatever_its_pieces(tmp_path, monkeypatch, name, split):
    text = "".join(f"Line {i} of a text.\n\n" for i in range(60)) + "An end"
    (tmp_path / name).write_text(text)
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
    monkeypatch.setattr(reading, "PART_BYTES", 300)
    whole, pieces = (
        "\n\n".join(load_documents(parse_source(str(tmp_path / file)), split)) for file in (name, f"{name}.gz")
    )
    assert pieces == whole


@pytest.mark.parametrize("text", ["A line of words.\n", "Eine Zeile über Straßen.\n", "x\n\n"])
@pytest.mark.parametrize("suffix", ["txt", "txt.gz"])
def test_of_a_large_text_the_first_characters_are_held_out_whatever_its_letters(tmp_path, monkeypatch, text, suffix):
    path = tmp_path / f"large.{suffix}"
    lines = text * (6000 // len(text))
    path.write_bytes(gzip.compress(lines.encode()) if suffix.endswith("gz") else lines.encode())
    monkeypatch.setattr(splits, "WHOLE_BYTES", 3000)
    monkeypatch.setattr(splits, "HELD_OUT_CHARACTERS", 1000)
    monkeypatch.setattr(reading, "PART_BYTES", 1000)
    whole, train, test = (
        "\n\n".join(load_documents(parse_source(str(path)), split)) for split in ("all", "train", "test")
    )
    assert test + train == whole
    assert len(test) - len(text) < 1000 <= len(test)


def test_of_a_large_jsonl_no_record_is_both_trained_on_and_measured(tmp_path, monkeypatch):
    path = tmp_path / "large.jsonl"
    path.write_text("".join(json.dumps({"text": f"Record {number}."}) + "\n" for number in range(300)))
    monkeypatch.setattr(splits, "WHOLE_BYTES", 3000)
    monkeypatch.setattr(splits, "HELD_OUT_CHARACTERS", 1000)
    monkeypatch.setattr(reading, "PART_BYTES", 3000)
    whole, train, test = (list(read_split(parse_source(str(path)), split)) for split in ("all", "train", "test"))
    every, learnt, measured = ([record for part in parts for record in part.load()] for parts in (whole, train, test))
    assert measured + learnt == every
    assert 0 < len(measured) < 60
    assert sum(part.held_out for part in train) == reading.characters(measured)


@pytest.mark.parametrize("lines", [2, 90])
def test_what_is_held_out_of_small_texts_is_counted_once(tmp_path, monkeypatch, lines):
    monkeypatch.setattr(reading, "PART_BYTES", 100)
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("A line of a text.\n" * lines)
    train, test = (list(read_split(parse_source(str(tmp_path)), split)) for split in ("train", "test"))
    assert sum(part.held_out for part in train) == sum(reading.characters(part.records) for part in test) > 0


def test_what_is_held_out_of_a_large_text_is_counted_once(tmp_path, monkeypatch):
    path = tmp_path / "large.txt"
    path.write_text("A line of words.\n" * 400)
    monkeypatch.setattr(splits, "WHOLE_BYTES", 3000)
    monkeypatch.setattr(splits, "HELD_OUT_CHARACTERS", 1000)
    monkeypatch.setattr(reading, "PART_BYTES", 1000)
    train, test = (list(read_split(parse_source(str(path)), split)) for split in ("train", "test"))
    assert sum(part.held_out for part in train) == sum(reading.characters(part.load()) for part in test) > 0


def test_of_two_lines_the_second_is_held_out_however_short(tmp_path):
    path = tmp_path / "t.txt"
    path.write_text("x" * 1000 + "\ny\n")
    train, test = (load_documents(parse_source(str(path)), split) for split in ("train", "test"))
    assert (train, test) == (["x" * 1000 + "\n"], ["y\n"])


def test_of_several_texts_each_is_a_document_also_where_they_are_large(tmp_path, monkeypatch):
    tokenizer = byte_tokenizer()
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"{name}\n" * 300)
    monkeypatch.setattr(reading, "PART_BYTES", 100)
    parts = read_files(parse_source(str(tmp_path)))
    ids = [Encoder(tokenizer).encode(part).ids for part in parts]
    assert len(ids) > 12
    text = tokenizer.decode([token for row in ids for token in row.tolist()])
    assert text == "".join(f"{name}\n" * 300 + "<eos>" for name in "abc")


def test_a_line_that_memory_should_not_hold_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({"text": "x" * 1000}))
    monkeypatch.setattr(reading, "_LONGEST_ITEM", 300)
    monkeypatch.setattr(reading, "PART_BYTES", 10)
    with pytest.raises(UserError, match="lines of at most 300 bytes"):
        list(read_files(parse_source(str(path))))


def test_the_place_of_a_bad_line_is_told(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(UserError, match=r"r\.jsonl, byte 14 is not"):
        Part("", path=path, stop=100).load()


def test_a_truncated_archive_is_refused(tmp_path):
    path = tmp_path / "r.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "one"}\n' * 10_000)[:-20])
    with pytest.raises(UserError, match="damaged or incomplete"):
        load_documents(parse_source(str(path)), "all")
