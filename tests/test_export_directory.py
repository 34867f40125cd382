"""The output directory: checkpoints are not thrown away, and two runs do not share it."""

import os
import subprocess
import sys
import textwrap

import pytest

from edkm_cli.errors import UserError
from edkm_cli.export.directory import Lock, OutputDirectory


@pytest.fixture
def unfinished(tmp_path):
    """An output whose unfinished run has a checkpoint."""
    output = OutputDirectory(tmp_path / "out")
    output.begin()
    output.mark({})
    (output.partial / "checkpoints" / "step-000050").mkdir(parents=True)
    return tmp_path / "out"


def test_the_same_command_again_does_not_delete_checkpoints(unfinished):
    with pytest.raises(UserError, match=r"step-000050.*--resume"):
        OutputDirectory(unfinished)
    held = OutputDirectory(unfinished, resume=True)
    with pytest.raises(UserError, match="--overwrite"):
        held.begin(keep=False)  # the mark is damaged, say: still nobody gave the checkpoints up
    assert (held.partial / "checkpoints" / "step-000050").is_dir()


def test_overwrite_gives_them_up(unfinished):
    output = OutputDirectory(unfinished, overwrite=True)
    output.begin()
    assert not (output.partial / "checkpoints").exists()


def test_a_second_run_is_told_who_holds_the_directory(tmp_path):
    first, second = OutputDirectory(tmp_path / "out"), OutputDirectory(tmp_path / "out")
    with first, pytest.raises(UserError, match=f"process {os.getpid()} on "), second:
        pass
    with second:
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="kill -9")
def test_a_killed_process_lets_go(tmp_path):
    script = """
        import os, signal, sys
        from pathlib import Path
        from edkm_cli.export.directory import Lock
        Lock(Path(sys.argv[1])).acquire()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "out")], check=False)
    assert done.returncode == -9
    lock = Lock(tmp_path / "out")
    assert lock.path.exists()
    lock.acquire()
    lock.release()


def test_a_system_without_atomic_exchange_still_commits(tmp_path, monkeypatch):
    """Windows has no C library to ask (ctypes.CDLL(None) is a TypeError), macOS no renameat2."""
    import ctypes

    def none(*_, **__):
        raise TypeError

    monkeypatch.setattr(ctypes, "CDLL", none)
    for text in ("old", "new"):
        output = OutputDirectory(tmp_path / "out", overwrite=True)
        (output.begin() / "report.json").write_text(text)
        output.mark({})
        output.commit()
    assert (tmp_path / "out" / "report.json").read_text() == "new"


def test_what_is_named_as_unfinished_results_are_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"must not end in \.partial"):
        OutputDirectory(tmp_path / "out.partial")
