"""The WikiText-2 files hold the rows of the hub's data set."""

import runpy
from pathlib import Path

import datasets
import pytest

from edkm_cli.data.reading import wikitext_rows

SCRIPT = Path(__file__).parent.parent / "scripts" / "get_wikitext2.py"
ROWS = ["", " = A title = \n", "", " The first paragraph , with <unk> and “ quotes ” . \n", " A second one .\n", ""]


@pytest.fixture
def script():
    return runpy.run_path(str(SCRIPT))


def test_the_files_are_read_as_the_rows_of_the_data_set(script, tmp_path, monkeypatch, capsys):
    asked = []

    def load_dataset(name, configuration, *, split):
        asked.append((name, configuration, split))
        return datasets.Dataset.from_dict({"text": ROWS})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    script["main"](tmp_path)
    assert asked == [
        ("Salesforce/wikitext", "wikitext-2-raw-v1", "test"),
        ("Salesforce/wikitext", "wikitext-2-v1", "validation"),
    ]
    for name in script["FILES"]:
        assert wikitext_rows((tmp_path / name).read_text(encoding="utf-8")) == ROWS
    assert capsys.readouterr().out.count("NOT the text of the recorded figures") == 2


def test_a_directory_that_does_not_exist_is_refused_before_the_download(script, tmp_path):
    with pytest.raises(SystemExit, match="make it first"):
        script["main"](tmp_path / "missing")
