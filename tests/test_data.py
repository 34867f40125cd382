"""From a `--data` name to tokens: held-out parts, records of every kind, and bad files in one clear line."""

import json
from dataclasses import replace

import pytest
import torch

from edkm_cli.data import Blocks, load_documents, open_training_data, parse_source, parse_sources, tokenize
from edkm_cli.data.reading import wikitext_rows
from edkm_cli.data.training import training_tokens
from edkm_cli.errors import UserError
from helpers import byte_tokenizer


def text_of(path, split="all"):
    return "\n\n".join(load_documents(parse_source(str(path)), split))


def test_rows_are_those_of_the_hub_data_set():
    raw = " \n = Title = \n \n Text with \u2028 a line separator . \n"
    assert wikitext_rows(raw) == ["", " = Title = \n", "", " Text with \u2028 a line separator . \n"]


@pytest.mark.parametrize("name", ["w.raw", "w.tokens.txt", "wiki.test.tokens"])
def test_a_wikitext_file_is_its_rows_joined_by_two_newlines(tmp_path, name):
    path = tmp_path / name
    path.write_text("a\n\nb\n", encoding="utf-8")
    assert text_of(path) == "a\n\n\n\n\nb\n"


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    return x\n",
        "no newline at the end",
        "\n\n\nblank lines\n\n\nand more\n\n",
        "odd \u2028 and \x85 ends \x0b.\r\n",
    ],
)
def test_a_text_file_is_text_as_the_file_holds_it(tmp_path, text):
    path = tmp_path / "t.txt"
    path.write_bytes(text.encode())
    assert text_of(path) == text
    tokenizer = byte_tokenizer()
    lines = len(text.splitlines())
    if lines > 1:
        parts = (
            training_tokens(parse_sources([str(path)]), tokenizer),
            tokenize(load_documents(parse_source(str(path)), "test"), tokenizer),
        )
        assert tokenizer.decode(torch.cat(parts)) == text


def test_a_byte_order_mark_is_not_text(tmp_path):
    (tmp_path / "t.txt").write_bytes(b"\xef\xbb\xbfHello\n")
    (tmp_path / "l.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "Hello"}\n')
    (tmp_path / "j.json").write_bytes(b'\xef\xbb\xbf[{"text": "Hello"}]')
    assert text_of(tmp_path / "t.txt") == "Hello\n"
    assert text_of(tmp_path / "l.jsonl") == text_of(tmp_path / "j.json") == "Hello"


def test_only_a_newline_ends_a_record(tmp_path):
    path = tmp_path / "r.jsonl"
    texts = ["one \u2028 line", "two \x85 lines", "three \u2029 \x0c lines"]
    path.write_text("\r\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts), encoding="utf-8")
    assert load_documents(parse_source(str(path)), "all") == texts


def test_a_json_file_may_hold_lines(tmp_path):
    path = tmp_path / "r.json"
    path.write_text('{"text": "one"}\n{"text": "two"}\n')
    assert load_documents(parse_source(str(path)), "all") == ["one", "two"]


def test_a_null_answer_is_no_answer(tmp_path):
    path = tmp_path / "r.json"
    records = [{"instruction": "Say", "output": answer} for answer in ("Yes.", None, "No.", "", "So.")]
    path.write_text(json.dumps(records))
    assert "None" not in text_of(path)
    data = open_training_data(parse_sources([str(path)]), byte_tokenizer())
    assert data.stores[0].counts.empty == 2
    assert "None" not in byte_tokenizer().decode(data.all_tokens())


def test_train_and_test_part_a_text_and_nothing_is_in_both(text_file):
    whole, train, test = (text_of(text_file, split) for split in ("all", "train", "test"))
    assert train + test == whole == text_file.read_text()
    assert 0.09 < len(test) / len(whole) < 0.12


def test_builtin_text_is_everywhere_and_split():
    train, test = (load_documents(parse_source("builtin"), split) for split in ("train", "test"))
    assert sum(map(len, train)) > 300_000
    whole = sum(map(len, train + test))  # Python's documentation, whose topics are of any length
    assert sum(map(len, test[1:])) <= whole / 10 < sum(map(len, test))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, "does not exist"),
        ("empty.txt", b"  \n", "is empty"),
        ("empty.jsonl", b"", "is empty"),
        ("latin.txt", b"caf\xe9", "must be UTF-8"),
        ("latin.jsonl", b'{"text": "caf\xe9"}', "must be UTF-8"),
        ("latin.json", b'["caf\xe9"]', "must be UTF-8"),
        ("text.csv", b"a,b", "must end in"),
        ("bad.json", b"{", "must be valid json"),
        ("cut.json", b'[{"text": "a"}, {"te', "must be valid json"),
        ("two.json", b'["a"] ["b"]', "follows the list"),
        ("comma.json", b'["a" "b"]', "no comma"),
        ("one.json", b'{"text":\n"a"}', "must be a list of records"),
        ("empty.json", b"[]", "is empty"),
        ("odd.jsonl", b'{"a": 1}', "a record must be"),
        ("number.jsonl", b'{"text": 1}', "'text' of a record must be a text"),
        ("list.jsonl", b"[1]", "a record must be a string or an object"),
        ("bad.jsonl", b'{"text": "a"}\n{"text": \n', "must be valid jsonl"),
        ("deep.jsonl", b"[" * 100_000, "must be valid jsonl"),
        ("bad.parquet", b"nonsense", "must be a parquet file"),
        ("bad.arrow", b"nonsense", "must be an Arrow file"),
        ("bad.jsonl.gz", b"nonsense", "damaged or incomplete"),
        ("bad.jsonl.zst", b"nonsense", "damaged or incomplete"),
    ],
)
def test_bad_files_get_one_clear_line(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        load_documents(parse_source(str(path)), "all", tokenizer=byte_tokenizer())
    assert "\n" not in str(caught.value)
    assert "\x00" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty.txt", b""),
        ("empty.jsonl", b""),
        ("latin.txt", b"caf\xe9"),
        ("bad.jsonl", b"{"),
        ("bad.json", b"{"),
        ("bad.parquet", b"x"),
        ("bad.txt.gz", b"x"),
    ],
)
def test_a_bad_file_is_told_of_under_the_option_that_names_it(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=r"^--eval-data "):
        load_documents(parse_source(str(tmp_path / name), "--eval-data"))


def test_a_text_that_is_measured_takes_no_weight(text_file):
    with pytest.raises(UserError, match=r"--eval-data .*text.txt is measured, which takes no weight; leave out =0.5"):
        load_documents(parse_source(f"{text_file}=0.5", "--eval-data"))


def test_calibration_has_the_shares_of_the_sources(tmp_path):
    """Of 100 sequences a source of weight 0.9 has 90, wherever it is named and whatever its size."""
    (tmp_path / "a.txt").write_text("aaaa\n" * 200)
    (tmp_path / "b.txt").write_text("bbbb\n" * 4000)
    tokenizer = byte_tokenizer()
    for first, second in ((0.9, 0.1), (0.1, 0.9)):
        sources = parse_sources([f"{tmp_path / 'a.txt'}={first}", f"{tmp_path / 'b.txt'}={second}"])
        batches = open_training_data(sources, tokenizer).calibration_batches(20, limit=2000, seed=0)
        texts = [tokenizer.decode(batch[0]) for batch in batches]
        assert [tuple(batch.shape) for batch in batches] == [(1, 20)] * 100
        assert sum("a" in text for text in texts) == round(100 * first)
        (one,) = open_training_data(sources, tokenizer).calibration_batches(20, limit=20, seed=0)
        assert ("a" in tokenizer.decode(one[0])) == (first > second)
    whole = open_training_data([replace(source, weight=None) for source in sources], tokenizer)
    together = Blocks(whole.all_tokens(), 20, seed=0)
    batches = whole.calibration_batches(20, limit=2000, seed=0)
    assert all(torch.equal(batch, together.batch(index, 1)) for index, batch in enumerate(batches))
    assert len(batches) == 100


def test_a_comparison_reads_data_without_weights(tmp_path, text_file):
    with pytest.raises(UserError, match="takes no weights"):
        training_tokens(parse_sources([f"{text_file}=0.5"]), byte_tokenizer())


def test_one_document_cannot_be_divided(tmp_path):
    path = tmp_path / "one.jsonl"
    path.write_text('{"text": "alone"}\n')
    with pytest.raises(UserError, match="at least two documents"):
        training_tokens(parse_sources([str(path)]), byte_tokenizer())


def test_records_end_with_end_of_sequence(tmp_path):
    path = tmp_path / "r.json"
    path.write_text(json.dumps([{"text": "aa"}, {"text": "bb"}, {"text": "c"}]))
    tokenizer = byte_tokenizer()
    assert tokenizer.decode(training_tokens(parse_sources([str(path)]), tokenizer)) == "aa<eos>bb<eos>"
    assert tokenize(load_documents(parse_source(str(path)), "all"), tokenizer).numel() == len("aa\n\nbb\n\nc")
