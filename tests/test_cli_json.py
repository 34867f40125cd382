"""--json: nothing that is no regular file is replaced, and the result is printed whatever happens to the file."""

import json
import os

import pytest

from edkm_cli.cli.options import check_target, finish
from edkm_cli.errors import UserError
from edkm_cli.files import json_text


def test_a_pipe_is_written_to_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    check_target(pipe)
    finish("text", {"a": 1}, pipe)
    assert json.loads(os.read(reader, 1000)) == {"a": 1}
    os.close(reader)
    assert pipe.is_fifo()


def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path):
    (tmp_path / "real.json").write_text("{}")
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    check_target(tmp_path / "link.json")
    finish("text", {"a": 1}, tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "real.json").read_text()) == {"a": 1}


def test_the_result_is_printed_where_the_file_cannot_be_written(tmp_path, capsys):
    with pytest.raises(UserError, match="printed above"):
        finish("the result", {"a": 1}, tmp_path / "gone" / "file.json")
    assert "the result" in capsys.readouterr().out


def test_what_is_not_finite_is_null():
    assert json.loads(json_text({"a": [float("nan"), 1.0], "b": float("inf")})) == {"a": [None, 1.0], "b": None}


@pytest.mark.parametrize("error", [BrokenPipeError, OSError(28, "No space left on device")])
def test_the_file_is_written_where_nobody_reads_what_is_printed(tmp_path, monkeypatch, error):
    def broken(*_, **__):
        raise error

    monkeypatch.setattr("builtins.print", broken)
    with pytest.raises(OSError):  # noqa: PT011 - either of the two
        finish("text", {"a": 1}, tmp_path / "file.json")
    assert json.loads((tmp_path / "file.json").read_text()) == {"a": 1}


def test_a_pipe_that_nobody_reads_is_no_fault_of_the_file(tmp_path, monkeypatch):
    def broken(*_):
        raise BrokenPipeError

    monkeypatch.setattr("edkm_cli.export.ownership.replace_file", broken)
    with pytest.raises(BrokenPipeError):
        finish("text", {"a": 1}, tmp_path / "file.json")


def test_of_several_processes_the_first_speaks(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    finish("text", {"a": 1}, tmp_path / "file.json")
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "file.json").exists()
