"""Data sets of the hub, through `datasets` and a copy of a set in the hub's layout."""

import json
import shutil
from dataclasses import replace

import pytest

from edkm_cli.config import TextSettings
from edkm_cli.data import load_documents, open_training_data, parse_source, parse_sources, splits, training
from edkm_cli.data.splits import _answers
from edkm_cli.errors import UserError
from helpers import byte_tokenizer

datasets = pytest.importorskip("datasets")

CARD = """---
configs:
- config_name: en
  data_files:
  - split: train
    path: data/train.jsonl
  - split: test
    path: data/test.jsonl
- config_name: de
  data_files:
  - split: train
    path: data/test.jsonl
---
"""


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """owner/name in the current directory, which `datasets` reads as it reads the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EDKM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    folder = tmp_path / "owner" / "name"
    (folder / "data").mkdir(parents=True)
    (folder / "README.md").write_text(CARD)
    for split, count in (("train", 200), ("test", 20)):
        lines = [json.dumps({"body": f"{split} {i}", "id": i}) for i in range(count)]
        (folder / "data" / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize("name", ["owner/name:en", "./owner/name:en"])
@pytest.mark.parametrize("streaming", [None, True, False])
def test_a_set_is_trained_on_its_training_split_and_measured_on_its_test_split(hub, name, streaming):
    options = TextSettings(data_column="body", streaming=streaming)
    data = open_training_data(parse_sources([name]), byte_tokenizer(), options=options)
    text = byte_tokenizer().decode(data.all_tokens())
    assert text == "".join(f"train {i}<eos>" for i in range(200))
    measured = load_documents(parse_source(name), "test", options=TextSettings(data_column="body", streaming=streaming))
    assert measured == [f"test {i}" for i in range(20)]
    assert (
        load_documents(
            parse_source(f"{name}@test"), "all", options=TextSettings(data_column="body", streaming=streaming)
        )
        == measured
    )


def test_a_part_of_a_split_of_a_local_set_is_no_pattern_of_files(hub):
    for name in ("./owner/name:en@train[:10%]", str(hub) + ":en@train[:10%]"):
        options = TextSettings(data_column="body", streaming=False)
        data = open_training_data(parse_sources([name]), byte_tokenizer(), options=options)
        assert byte_tokenizer().decode(data.all_tokens()).startswith("train 0<eos>train 1<eos>")


def test_of_a_set_without_a_split_for_it_the_last_tenth_is_held_out(hub):
    train, test = (
        load_documents(parse_source("owner/name:de"), split, options=TextSettings(data_column="body"))
        for split in ("train", "test")
    )
    assert train + test == [f"test {i}" for i in range(20)]
    assert len(test) == 2


def test_a_large_one_gives_its_first_text_to_be_measured(hub, monkeypatch):
    monkeypatch.setattr(splits, "WHOLE_BYTES", 50)
    monkeypatch.setattr(splits, "HELD_OUT_CHARACTERS", 30)
    train, test = (
        load_documents(parse_source("owner/name:de"), split, options=TextSettings(data_column="body"))
        for split in ("train", "test")
    )
    assert test + train == [f"test {i}" for i in range(20)]
    assert len(test) == 5


def test_a_stream_is_read_no_further_than_the_run_needs(hub, monkeypatch):
    monkeypatch.setattr("edkm_cli.data.reading.PART_BYTES", 100)
    data = open_training_data(
        parse_sources(["owner/name:en"]),
        byte_tokenizer(),
        options=TextSettings(data_column="body", data_workers=1),
        token_limit=300,
    )
    assert 300 <= data.tokens < 500


@pytest.mark.parametrize(
    ("name", "column", "message"),
    [
        ("owner/name", "body", r"configurations, which are en, de, but none is given.*owner/name:en"),
        ("owner/name:fr", "body", r"configurations, which are en, de, but fr is given"),
        ("owner/name:en@dev", "body", r"has the splits train, test, but not dev.*owner/name:en@train"),
        ("owner/name:en", "text", r"fields of the records, which are 'body', 'id', got 'text'|field of the records"),
        ("owner/name:en", None, r"has 'body', 'id'; name the field with --data-column"),
    ],
)
@pytest.mark.parametrize("streaming", [True, False])
def test_what_is_missing_gets_one_line_that_says_what_there_is(hub, name, column, message, streaming):
    with pytest.raises(UserError, match=message) as caught:
        open_training_data(
            parse_sources([name]), byte_tokenizer(), options=TextSettings(data_column=column, streaming=streaming)
        )
    assert "\n" not in str(caught.value)


def test_a_hub_out_of_reach_gets_one_line(monkeypatch):
    def unreachable(*_, **__):
        raise ConnectionError("Couldn't reach 'nobody/none' on the Hub\n(offline)")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    monkeypatch.setattr(datasets, "get_dataset_split_names", unreachable)
    with pytest.raises(UserError, match=r"could not be loaded from the Hugging Face hub .*check the network") as caught:
        open_training_data(parse_sources(["nobody/none"]), byte_tokenizer())
    assert "\n" not in str(caught.value)


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch):
    """Through the real clients, at a port where nobody is."""
    import huggingface_hub

    asked = []
    monkeypatch.setattr("edkm_cli.data.splits._answers", lambda: asked.append(1) and False)
    before = huggingface_hub.constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    with pytest.raises(UserError, match=r"does not answer, and the cache of `datasets` has no copy") as caught:
        open_training_data(parse_sources(["nobody/none"]), byte_tokenizer())
    assert "\n" not in str(caught.value)
    assert len(asked) == 1
    assert before == (huggingface_hub.constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE)


def test_whether_a_hub_answers_is_told_at_once(monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    assert not _answers()


@pytest.mark.parametrize("streaming", [None, True, False])
def test_a_small_set_is_read_whole_unless_it_is_streamed(hub, streaming, monkeypatch):
    (hub / "data" / "more.jsonl").write_text(
        "".join(json.dumps({"body": f"more {i}", "id": i}) + "\n" for i in range(9000))
    )
    (hub / "README.md").write_text(CARD.replace("data/train.jsonl", "data/more.jsonl"))
    for name in ("owner/name:en", "small"):
        source = replace(parse_source("owner/name:en"), name=name)
        monkeypatch.setattr(splits, "ALPACA", "small")
        options = TextSettings(data_column="body", streaming=streaming)
        found = open_training_data([source], byte_tokenizer(), options=options, token_limit=100)
        all_read = streaming is False or (streaming is None and name == "small")
        assert (found.stores[0].counts.documents == 9000) == all_read


def test_a_part_of_a_split_is_not_streamed(hub):
    with pytest.raises(UserError, match=r"must be of train, test, not streamed; add --no-streaming"):
        open_training_data(
            parse_sources(["owner/name:en@train[:10%]"]), byte_tokenizer(), options=TextSettings(data_column="body")
        )
    options = TextSettings(data_column="body", streaming=False)
    assert (
        open_training_data(parse_sources(["owner/name:en@train[:10%]"]), byte_tokenizer(), options=options)
        .stores[0]
        .counts.documents
        == 18
    )


def test_a_folder_with_the_hubs_layout_is_known_by_its_place_and_its_files(hub, tmp_path, monkeypatch):
    source, first = parse_source("owner/name:en"), training.source_identity(parse_source("owner/name:en"))
    (hub / "data" / "train.jsonl").write_text('{"body": "another"}\n')
    changed = training.source_identity(source)
    (tmp_path / "other" / "owner").mkdir(parents=True)
    shutil.copytree(hub, tmp_path / "other" / "owner" / "name")
    monkeypatch.chdir(tmp_path / "other")
    elsewhere = training.source_identity(parse_source("owner/name:en"))
    assert first != changed != elsewhere != first


def test_a_short_first_file_of_many_does_not_make_what_is_measured_short(tmp_path, monkeypatch):
    monkeypatch.setattr(splits, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(splits, "HELD_OUT_CHARACTERS", 500)
    (tmp_path / "0.jsonl").touch()
    for part, count in ((1, 2), (2, 200), (3, 200)):
        lines = [json.dumps({"text": f"{part} says {index}"}) for index in range(count)]
        (tmp_path / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
    train, test = (load_documents(parse_source(str(tmp_path)), split) for split in ("train", "test"))
    assert 400 < sum(map(len, test)) < 600
    assert test + train == [f"{part} says {index}" for part, n in ((1, 2), (2, 200), (3, 200)) for index in range(n)]
