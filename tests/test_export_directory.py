"""The output directory: checkpoints are not thrown away, and two runs do not share it."""

import errno
import json
import os
import shutil
import subprocess
import sys
import textwrap

import pytest

from edkm_cli.errors import UserError
from edkm_cli.export import directory as module
from edkm_cli.export.directory import Lock, OutputDirectory
from edkm_cli.files import sync


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


def committed(path, **files):
    output = OutputDirectory(path)
    for name, text in {"report": "{}", **files}.items():
        (output.begin(keep=True) / f"{name}.json").write_text(text)
    (output.partial / "model.safetensors").write_bytes(b"weights")
    output.mark({"a": 1})
    output.commit()


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_a_finished_result_whose_weights_are_not_what_was_written_is_not_taken_for_done(tmp_path, damage):
    committed(tmp_path / "out")
    again = OutputDirectory(tmp_path / "out", resume=True)
    assert again.finished("report.json", {"a": 1}, {}) == {}
    weights = tmp_path / "out" / "model.safetensors"
    weights.write_bytes(b"Weights") if damage == "changed" else weights.unlink()
    with pytest.raises(UserError, match=r"its model\.safetensors is missing or damaged.*--overwrite"):
        again.finished("report.json", {"a": 1}, {})


def test_a_finished_run_was_not_held_to_another_limit(tmp_path):
    committed(tmp_path / "out", report='{"config": {"max_perplexity_ratio": 0}}')
    again = OutputDirectory(tmp_path / "out", resume=True)
    assert again.finished("report.json", {"a": 1}, {"max_perplexity_ratio": 0})
    with pytest.raises(UserError, match=r"max_perplexity_ratio was 0 and is 1\.1"):
        again.finished("report.json", {"a": 1}, {"max_perplexity_ratio": 1.1})


def test_a_place_where_a_disk_is_mounted_is_refused_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path / "out")
    with pytest.raises(UserError, match="where a disk is mounted"):
        OutputDirectory(tmp_path / "out")
    OutputDirectory(tmp_path / "other")


def test_a_parent_that_cannot_be_written_to_is_refused_before_the_work(tmp_path, monkeypatch):
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path and access(path, mode))
    with pytest.raises(UserError, match="needs a directory that can be written to"):
        OutputDirectory(tmp_path / "new" / "out")


def test_a_link_in_the_place_of_the_unfinished_result_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out.partial").symlink_to("elsewhere")
    with pytest.raises(UserError, match="is needed for the unfinished result, but is none"):
        OutputDirectory(tmp_path / "out")


@pytest.mark.skipif(os.name == "nt", reason="names are not bytes")
def test_a_name_that_is_no_text_is_refused_before_the_work(tmp_path):
    with pytest.raises(UserError, match="a name in UTF-8"):
        OutputDirectory(tmp_path / os.fsdecode(b"caf\xe9"))


def test_an_empty_directory_is_replaced_without_being_moved(tmp_path, monkeypatch):
    """As one of a container's image cannot be."""
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(module, "_exchange", lambda *paths: pytest.fail("it was moved"))
    committed(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_what_comes_into_the_way_during_the_run_stays(tmp_path):
    output = OutputDirectory(tmp_path / "out")
    output.begin()
    (tmp_path / "out").write_text("precious")
    with pytest.raises(UserError, match="has become a file"):
        output.commit()
    assert (tmp_path / "out").read_text() == "precious"
    (tmp_path / "out").unlink()
    committed(tmp_path / "other")
    os.rename(tmp_path / "other", tmp_path / "out")  # a result, but not one that this run was told to overwrite
    with pytest.raises(UserError, match="is not empty any more; move it away"):
        output.commit()
    assert (tmp_path / "out" / "model.safetensors").is_file()
    os.rename(tmp_path / "out", tmp_path / "other")
    module.ownership.remove(output.partial)
    with pytest.raises(UserError, match="was removed"):
        output.commit()
    assert not (tmp_path / "out").exists()


def test_a_lock_that_cannot_be_had_is_not_done_without(tmp_path, monkeypatch):
    lock = Lock(tmp_path / "out")

    def refuse(number):
        def acquire(*_, **__):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(lock._lock, "acquire", acquire)

    refuse(errno.ENOSYS)  # a file system without locks
    lock.acquire()
    refuse(errno.EACCES)
    with pytest.raises(PermissionError):
        lock.acquire()


def test_on_a_file_system_without_locks_a_run_begins(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", flock)
    for _ in range(2):
        with OutputDirectory(tmp_path / "out"):
            pass


def test_a_page_that_was_moved_away_damages_no_result(tmp_path):
    committed(tmp_path / "out")
    page = tmp_path / "out" / "report.html"
    page.write_text("page")
    listed = module.ownership.listing(tmp_path / "out")
    listed["files"]["report.html"] = module.ownership.entry_of(page)
    (tmp_path / "out" / "edkm-files.json").write_text(json.dumps(listed))
    page.unlink()
    assert OutputDirectory(tmp_path / "out", resume=True).finished("report.json", {"a": 1}, {}) == {}


def test_what_a_run_has_written_counts_as_room(unfinished, monkeypatch):
    (unfinished.with_name("out.partial") / "checkpoints" / "step-000050" / "state.safetensors").write_bytes(
        bytes(10**6)
    )
    free = shutil.disk_usage(unfinished.parent).free
    usage = shutil._ntuple_diskusage(free, 0, module._SPARE_BYTES + 10**6)
    monkeypatch.setattr("edkm_cli.files.shutil.disk_usage", lambda folder: usage)
    OutputDirectory(unfinished, resume=True).rehearse(19 * 10**5)
    with pytest.raises(UserError, match="--output needs"):
        OutputDirectory(unfinished, resume=True).rehearse(21 * 10**5)


def test_a_place_that_moves_no_directories_is_refused_before_the_work(tmp_path, monkeypatch):
    rename = os.rename

    def files_only(source, target):
        if os.path.isdir(source):  # as gcsfuse does
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        rename(source, target)

    monkeypatch.setattr("os.rename", files_only)
    with pytest.raises(UserError, match=r"--output must be on a writable disk.*take another"):
        OutputDirectory(tmp_path / "out").rehearse(1)
    assert os.listdir(tmp_path) == []


def test_a_directory_that_cannot_be_synced_is_none_less_and_a_file_is(tmp_path, monkeypatch):
    def refused(descriptor):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    (tmp_path / "file").write_text("x")
    monkeypatch.setattr("os.fsync", refused)
    sync(tmp_path)
    with pytest.raises(OSError, match="Invalid argument"):
        sync(tmp_path / "file")


def test_a_killed_start_is_not_thrown_away_unasked(tmp_path):
    output = OutputDirectory(tmp_path / "out")
    output.begin()
    output.mark({})
    start = output.partial / "checkpoints" / "start"
    start.mkdir(parents=True)
    (start / "progress.json").write_text("{}")
    with pytest.raises(UserError, match=r"start/progress\.json.*--resume"):
        OutputDirectory(tmp_path / "out")
