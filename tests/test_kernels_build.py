"""Compiling the CPU kernels: cached, private, and never a reason to fail."""

import logging
import os
import stat

import pytest

from edkm_cli.kernels import build


@pytest.fixture(autouse=True)
def fresh_library(tmp_path, monkeypatch):
    """An empty cache directory, and no library remembered from before (nor remembered after)."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("EDKM_CACHE", raising=False)
    monkeypatch.setattr(build, "library", build.functools.cache(build.library.__wrapped__))
    return tmp_path


def needs_compiler():
    if not any(build.shutil.which(name) for name in ("cc", "gcc", "clang")):
        pytest.skip("no C compiler here")


def test_the_library_is_built_once_in_a_private_directory(fresh_library, monkeypatch):
    needs_compiler()
    monkeypatch.delenv("EDKM_CPU_KERNELS", raising=False)
    assert build.library() is not None
    directory = fresh_library / "edkm" / "kernels"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    (built,) = directory.iterdir()
    before = built.stat().st_mtime_ns
    build.library.cache_clear()
    assert build.library() is not None
    assert built.stat().st_mtime_ns == before


def test_a_cache_that_others_can_write_is_refused(fresh_library, monkeypatch, caplog):
    needs_compiler()
    monkeypatch.delenv("EDKM_CPU_KERNELS", raising=False)
    (fresh_library / "edkm" / "kernels").mkdir(parents=True)
    (fresh_library / "edkm" / "kernels").chmod(0o777)
    with caplog.at_level(logging.WARNING):
        assert build.library() is None
    assert "writable by no one else" in caplog.text


def test_a_cache_directory_that_a_group_may_write_holds_our_own(fresh_library, monkeypatch):
    needs_compiler()
    monkeypatch.delenv("EDKM_CPU_KERNELS", raising=False)
    monkeypatch.setenv("EDKM_CACHE", str(fresh_library / "named"))
    former = os.umask(0o002)
    try:
        assert build.library() is not None
    finally:
        os.umask(former)
    assert [path.suffix for path in (fresh_library / "named" / "kernels").iterdir()] == [".so"]


def test_without_a_compiler_there_is_one_line_and_no_error(monkeypatch, caplog):
    monkeypatch.delenv("EDKM_CPU_KERNELS", raising=False)
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert build.library() is None
        assert build.library() is None
    assert len(caplog.records) == 1
    assert "no C compiler" in caplog.text


def test_the_kernels_can_be_turned_off(monkeypatch):
    monkeypatch.setenv("EDKM_CPU_KERNELS", "0")
    assert build.library() is None
