"""What a machine runs out of is one line with what to do; an error of ours stays one of ours."""

import errno
import os
import re
import tempfile

import pytest
import torch

from edkm_cli.cli import runs as command
from edkm_cli.errors import PeerLost, UserError, explained, shortage
from families import family
from helpers import byte_tokenizer, run


def raised(what):
    try:
        what()
    except Exception as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "No space left on device.*free some room"),
        (OSError(errno.EROFS, os.strerror(errno.EROFS), "/out"), "Read-only file system: '/out'"),
        (Exception("No space left on device (os error 28)"), "free some room"),  # of tokenizers
        (MemoryError(), "not enough memory"),
        (raised(lambda: torch.empty(2**46)), "not enough memory"),
    ],
)
def test_what_a_machine_lacks_is_one_line_with_a_remedy(error, message):
    line = str(shortage(error))
    assert re.search(message, line)
    assert "--resume" in line


def test_no_place_for_temporary_files_is_told(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/no/such/place"])
    assert re.search("temporary files need a place.*set TMPDIR", str(shortage(raised(tempfile.TemporaryFile))))


@pytest.mark.parametrize("error", [OSError(errno.ENOENT, "x"), RuntimeError("shape mismatch"), KeyError("a")])
def test_an_error_of_ours_is_none_of_the_machines(error):
    assert shortage(error) is None


@pytest.mark.parametrize(("error", "status"), [(MemoryError(), 2), (KeyError("ours"), None)])
def test_the_command_ends_with_2_for_a_shortage_and_shows_what_is_ours(monkeypatch, tmp_path, error, status):
    def fail(model):
        raise error

    monkeypatch.setattr(command, "require_model", fail)
    arguments = ["compress", "--model", "x", "-o", tmp_path / "out"]
    if status is None:
        with pytest.raises(KeyError):
            run(*arguments)
        return
    found, out, err = run(*arguments)
    assert (found, out) == (status, "")
    assert len(err.strip().splitlines()) == 1
    assert "Traceback" not in err


def test_a_text_beyond_a_table_of_positions_gets_one_line(text_file, tmp_path):
    family("biogpt", max_position_embeddings=32).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    status, _, err = run("eval", tmp_path, "--data", text_file, "--context", 64, "--max-windows", 1)
    assert status == 2
    assert "table of positions" in err.splitlines()[-1]
    assert run("eval", tmp_path, "--data", text_file, "--context", 32, "--max-windows", 1)[0] == 0


def test_what_a_library_raises_is_explained_and_a_shortage_is_not_blamed_on_the_files():
    with (
        pytest.raises(UserError, match=r"it does not load \(KeyError: 'a'\); fetch it again"),
        explained("it does not load", "; fetch it again"),
    ):
        raise KeyError("a")
    for error in (UserError("clear"), MemoryError(), RuntimeError("CUDA out of memory"), PeerLost("gone")):
        with pytest.raises(type(error), match=re.escape(str(error))), explained("it does not load"):
            raise error
