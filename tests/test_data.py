"""Text -> tokens: the WikiText rows of the perplexity protocol, records, held-out splits, and bad files."""

import json

import pytest
import torch

from edkm_cli.config import UserError
from edkm_cli.data import Blocks, load_documents, tokenize, training_tokens, wikitext_rows
from helpers import byte_tokenizer


def test_rows_are_those_of_the_hub_data_set():
    raw = " \n = Title = \n \n Text with \u2028 a line separator . \n"
    assert wikitext_rows(raw) == ["", " = Title = \n", "", " Text with \u2028 a line separator . \n"]


def test_a_raw_file_is_joined_by_two_newlines(tmp_path):
    path = tmp_path / "w.raw"
    path.write_text("a\n\nb\n", encoding="utf-8")
    assert load_documents(str(path), "all").text() == "a\n\n\n\n\nb\n"


def test_records_may_be_texts_or_alpaca(tmp_path):
    path = tmp_path / "r.json"
    path.write_text(json.dumps([{"text": "one"}, {"instruction": "Add", "input": "1 2", "output": "3"}, "two"]))
    documents = load_documents(str(path), "all").documents
    assert documents[0] == "one"
    assert documents[2] == "two"
    assert documents[1].endswith("### Instruction:\nAdd\n\n### Input:\n1 2\n\n### Response:\n3")
    lines = tmp_path / "r.jsonl"
    lines.write_text('{"text": "one"}\n\n{"text": "two"}\n')
    assert load_documents(str(lines), "all").documents == ["one", "two"]


def test_parquet_files_are_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "r.parquet"
    parquet.write_table(pyarrow.table({"text": ["one", "two"]}), path)
    assert load_documents(str(path), "all").documents == ["one", "two"]


def test_train_and_test_part_a_text_and_nothing_is_in_both(text_file):
    whole = load_documents(str(text_file), "all").documents
    train, test = load_documents(str(text_file), "train").documents, load_documents(str(text_file), "test").documents
    assert train + test == whole
    held_out = sum(map(len, test)) / sum(map(len, whole))
    assert 0.09 < held_out < 0.12


def test_builtin_text_is_everywhere_and_split():
    train, test = load_documents("builtin", "train").text(), load_documents("builtin", "test").text()
    assert len(train) > 300_000
    assert 0.05 < len(test) / len(train) < 0.25


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, "does not exist"),
        ("empty.txt", b"  \n", "is empty"),
        ("latin.txt", b"caf\xe9", "must be UTF-8"),
        ("text.csv", b"a,b", "must end in"),
        ("bad.json", b"{", "must be valid json"),
        ("empty.json", b"[]", "not empty"),
        ("odd.jsonl", b'{"a": 1}', "a record must be"),
        ("bad.parquet", b"nonsense", "must be a parquet file"),
    ],
)
def test_bad_files_get_one_clear_line(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        load_documents(str(path), "train")
    assert "\n" not in str(caught.value)


def test_an_unknown_data_set_is_refused():
    with pytest.raises(UserError, match="wikitext2, alpaca, builtin or a file"):
        load_documents("c4", "train")


def test_blocks_cover_each_pass_once_in_an_order_of_the_seed(text_file):
    tokens = torch.arange(100)
    blocks = Blocks(tokens, 7, seed=3)
    first = torch.cat([blocks.batch(i, 2) for i in range(7)])
    assert sorted(first[:, 0].tolist()) == [7 * i for i in range(14)]
    again = Blocks(tokens, 7, seed=3)
    assert torch.equal(again.batch(5, 2), blocks.batch(5, 2))
    assert not torch.equal(Blocks(tokens, 7, seed=4).batch(0, 14), blocks.batch(0, 14))
    second = blocks.batch(1, 14)
    assert sorted(second[:, 0].tolist()) == [7 * i for i in range(14)]
    assert not torch.equal(second, blocks.batch(0, 14))


def test_too_little_text_for_a_sequence_is_refused():
    with pytest.raises(UserError, match="at least 64 tokens"):
        Blocks(torch.arange(63), 64, seed=0)


def test_training_tokens_part_records_by_end_of_sequence(tmp_path):
    path = tmp_path / "r.json"
    path.write_text(json.dumps([{"text": "aa"}, {"text": "bb"}, {"text": "c"}]))
    tokenizer = byte_tokenizer()
    tokens = training_tokens([str(path)], tokenizer)
    assert tokenizer.decode(tokens) == "aa<eos>bb"
    assert tokenize(load_documents(str(path), "all"), tokenizer).numel() == len("aa\n\nbb\n\nc")
