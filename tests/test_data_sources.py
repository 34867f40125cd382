"""What a `--data` name stands for, its weight, and the line for one that names nothing."""

import pytest

from edkm_cli.data import load_documents, parse_source, parse_sources
from edkm_cli.data.sources import repeated
from edkm_cli.data.training import measured_split, require_held_out
from edkm_cli.errors import UserError


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b.jsonl", "a.jsonl", "c.txt", "deep/d.parquet", "deep/.hidden.json", "deep/state.json", "x=0.5.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "kind", "files"),
    [
        ("builtin", "builtin", []),
        ("self", "self", []),
        ("a.jsonl", "files", ["a.jsonl"]),
        ("*.jsonl", "files", ["a.jsonl", "b.jsonl"]),
        ("**/*.parquet", "files", ["d.parquet"]),
        ("deep", "files", ["d.parquet"]),
        (".", "files", ["a.jsonl", "b.jsonl", "c.txt", "d.parquet", "x=0.5.txt"]),
        ("x=0.5.txt", "files", ["x=0.5.txt"]),
    ],
)
def test_a_name_stands_for_files_in_order(here, name, kind, files):
    source = parse_source(name)
    assert source.kind == kind
    assert sorted(path.name for path in source.files) == files
    assert list(source.files) == sorted(source.files)


@pytest.mark.parametrize(
    ("name", "repository", "config", "split"),
    [
        ("wikitext2", "Salesforce/wikitext", "wikitext-2-raw-v1", None),
        ("c4@validation", "allenai/c4", "en", "validation"),
        ("owner/name", "owner/name", None, None),
        ("owner/name:en", "owner/name", "en", None),
        ("owner/name@train[:10%]", "owner/name", None, "train[:10%]"),
        ("owner/name:en@dev", "owner/name", "en", "dev"),
        ("owner/na.me-2", "owner/na.me-2", None, None),
    ],
)
def test_a_name_stands_for_a_set_of_the_hub(here, name, repository, config, split):
    source = parse_source(name)
    assert (source.kind, source.repository, source.config, source.split) == ("hub", repository, config, split)


def test_weights_are_for_all_or_for_none(here):
    assert [(s.name, s.weight) for s in parse_sources(["a.jsonl=0.7", "owner/name:en=2", "builtin=0.1"])] == [
        ("a.jsonl", 0.7),
        ("owner/name:en", 2.0),
        ("builtin", 0.1),
    ]
    assert [source.weight for source in parse_sources(["a.jsonl", "builtin"])] == [None, None]
    with pytest.raises(UserError, match=r"for each source or for none; write builtin=0\.5"):
        parse_sources(["a.jsonl=0.7", "builtin"])
    for bad in ("a.jsonl=0", "a.jsonl=-1", "a.jsonl=nan", "a.jsonl=inf"):
        with pytest.raises(UserError, match="positive"):
            parse_source(bad)


def test_what_is_named_twice_is_told(here):
    sources = parse_sources(["b.jsonl", "builtin", "*.jsonl", "owner/name:en", "owner/name:de", "builtin"])
    assert repeated(sources) == {"*.jsonl": "b.jsonl", "builtin": "builtin"}
    assert repeated(sources[:2]) == {}


def test_a_copy_of_a_text_that_is_trained_on_is_not_measured(tmp_path):
    for name, text in (("train.txt", "One.\nTwo.\n"), ("copy.txt", "One.\nTwo.\n"), ("test.txt", "One.\nTwo!\n")):
        (tmp_path / name).write_text(text)
    train, copy, test = (parse_source(str(tmp_path / name)) for name in ("train.txt", "copy.txt", "test.txt"))
    require_held_out([train], test)
    with pytest.raises(UserError, match=r"must not be trained on, but \S+copy\.txt is in --data \S+train\.txt"):
        require_held_out([train], copy)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "must be wikitext2, alpaca, c4, fineweb-edu, builtin, builtin-prose or a file"),
        ("missing.jsonl", "does not exist"),
        ("./missing", "does not exist"),
        ("deep/missing.txt", "does not exist"),
        ("*.parquet", "matches no file"),
        ("text.csv", "must end in"),
        ("a/b/c", "must be wikitext2"),
        ("", "must be wikitext2"),
    ],
)
def test_what_names_nothing_gets_one_line(here, name, message):
    with pytest.raises(UserError, match=message) as caught:
        parse_source(name)
    assert "\n" not in str(caught.value)


def test_an_empty_directory_is_refused(tmp_path):
    with pytest.raises(UserError, match="directory without files"):
        parse_source(str(tmp_path))


def test_the_prose_that_comes_with_the_package_is_measured_whole_and_never_when_trained_on():
    prose, documentation = parse_source("builtin-prose"), parse_source("builtin")
    assert measured_split(prose) == "all"
    texts = load_documents(parse_source("builtin-prose"), "all")
    assert texts[0].count("\n\n") == 13
    assert sum(map(len, texts)) > 8000  # four windows of 512 tokens
    require_held_out([documentation], prose)
    with pytest.raises(UserError, match="must not be trained on"):
        require_held_out([prose], prose)


def test_a_link_to_a_directory_is_not_left_out_in_silence(tmp_path):
    for name in ("texts", "elsewhere"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("text")
    (tmp_path / "texts" / "more").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="holds a link to a directory"):
        parse_source(str(tmp_path / "texts"))


def test_a_directory_holds_no_text_twice(tmp_path):
    for name in ("data-00000-of-00001.arrow", "cache-0123456789abcdef.arrow"):  # what `map` of a data set leaves there
        (tmp_path / name).write_bytes(b"")
    assert [file.name for file in parse_source(str(tmp_path)).files] == ["data-00000-of-00001.arrow"]
    for name in ("a.jsonl", "a.jsonl.gz"):  # zstd keeps what it packs
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(UserError, match=r"a\.jsonl\.gz packed and unpacked; keep one"):
        parse_source(str(tmp_path))


def test_a_link_to_a_directory_that_is_hidden_is_none_of_the_text(tmp_path):
    for name in ("texts", "elsewhere"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("text")
    (tmp_path / "texts" / ".more").symlink_to(tmp_path / "elsewhere")
    assert [file.name for file in parse_source(str(tmp_path / "texts")).files] == ["a.txt"]
