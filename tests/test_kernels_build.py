"""Compiling the CPU kernels: cached, private, and never a reason to fail."""

import itertools
import logging
import os
import stat

import pytest

from edkm_cli.kernels import build, levels


@pytest.fixture(autouse=True)
def fresh_library(tmp_path, monkeypatch):
    """An empty cache directory, and no library remembered from before (nor remembered after)."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("EDKM_CACHE", raising=False)
    monkeypatch.setattr(build, "library", build.functools.cache(build.library.__wrapped__))
    monkeypatch.setattr(levels, "BUILT", "none")  # nothing was built in advance
    monkeypatch.setattr(levels, "FLAGS", ("-O0", *levels.FLAGS[1:]))  # quick to compile
    return tmp_path


def needs_compiler():
    if not any(levels.shutil.which(name) for name in levels.COMPILERS):
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


def test_a_cache_that_systems_share_holds_a_library_for_each(fresh_library, monkeypatch):
    needs_compiler()
    monkeypatch.delenv("EDKM_CPU_KERNELS", raising=False)
    for libc in (("glibc", "2.28"), ("glibc", "2.41")):
        monkeypatch.setattr(build, "_LIBC", libc)
        build.library.cache_clear()
        assert build.library() is not None
    assert len(list((fresh_library / "edkm" / "kernels").iterdir())) == 2


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
    monkeypatch.setattr(levels.shutil, "which", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert build.library() is None
        assert build.library() is None
    assert len(caplog.records) == 1
    assert "no C compiler" in caplog.text


def test_what_was_built_in_advance_needs_neither_a_compiler_nor_a_cache(fresh_library, monkeypatch, tmp_path):
    """A wheel's library lies beside its sources; the best one that the processor can run is taken."""
    needs_compiler()
    monkeypatch.delenv("EDKM_CPU_KERNELS", raising=False)
    wing = tmp_path / "wing"
    wing.mkdir()
    monkeypatch.setattr(levels, "BUILT", "built")
    for name, features in (("best", "never"), ("good", ""), ("plain", "")):
        (wing / "a.c").write_text(f'const char *name(void) {{ return "{name}"; }}')
        level = levels.Level(name, (), frozenset(features.split()))
        (wing / "built").mkdir(exist_ok=True)
        built = levels.compile_level(wing, level, wing / "built")
        (wing / "a.c").write_text("changed")
        built.rename(wing / "built" / levels.file_name(wing, name))
    order = [
        levels.Level(name, (), frozenset(f.split())) for name, f in (("best", "never"), ("good", ""), ("plain", ""))
    ]
    monkeypatch.setattr(levels, "levels", lambda: order)
    monkeypatch.setattr(levels.shutil, "which", lambda name: None)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    name = build.library(wing).name
    name.restype = build.ctypes.c_char_p
    assert name() == b"good"


def test_the_levels_of_a_family_ask_for_more_and_more(monkeypatch):
    monkeypatch.setattr(levels.platform, "machine", lambda: "x86_64")
    found = levels.levels()
    for better, worse in itertools.pairwise(found):
        assert better.features > worse.features
        assert set(better.flags) > set(worse.flags)
    assert (found[-1].flags, found[-1].features) == ((), frozenset())


def test_a_compiler_that_does_not_know_a_level_makes_the_next_one(fresh_library, monkeypatch):
    needs_compiler()
    monkeypatch.delenv("EDKM_CPU_KERNELS", raising=False)
    unknown = levels.Level("new", ("-mno-such-processor",), frozenset())
    monkeypatch.setattr(levels, "levels", lambda: (unknown, levels.Level("plain", (), frozenset())))
    assert build.library() is not None
    assert ["plain" in path.name for path in (fresh_library / "edkm" / "kernels").iterdir()] == [True]


def test_the_kernels_can_be_turned_off(monkeypatch):
    monkeypatch.setenv("EDKM_CPU_KERNELS", "0")
    assert build.library() is None
