"""Compile the C files of a wing (kernels, runtime) at first use, once a machine and version, into the user's cache.

One call of the system compiler, a few seconds; the library's name is a hash of sources, compiler, flags and processor,
so a stale one is never loaded. A missing or failing compiler is no error: plain PyTorch does the same, more slowly.
`EDKM_CPU_KERNELS=0` asks for that.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from edkm_cli.config import cache_directory

_LOG = logging.getLogger(__name__)
_HERE = Path(__file__).parent
_FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_COMPILE_SECONDS = 300


class _Unavailable(Exception):
    """Why the kernels can't be used here."""


def _cache_directory() -> Path:
    """Our own part of the cache directory: created 0700; refused if someone else owns or can write it."""
    directory = cache_directory() / "kernels"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
        raise _Unavailable(f"{directory} must belong to this user and be writable by no one else")
    return directory


def _processor() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}))


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False)
    if done.returncode != 0:
        raise _Unavailable(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")
    return done.stdout


def _compile(name: str, sources: Sequence[Path], *more: str) -> Path:
    """The shared library `name` made of `sources`, with `more` flags."""
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if compiler is None:
        raise _Unavailable("no C compiler (cc, gcc or clang) on PATH")
    headers = sorted(file for folder in {_HERE, sources[0].parent} for file in folder.glob("*.h"))
    digest = hashlib.sha256()
    for part in (_run([compiler, "--version"]), *_FLAGS, *more, _processor()):
        digest.update(part.encode())
    for file in (*headers, *sources):
        digest.update(file.read_bytes())
    directory = _cache_directory()
    library = directory / f"{name}-{digest.hexdigest()[:32]}.so"
    if library.exists():
        return library
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        built = Path(scratch) / f"{name}.so"
        files = [f"-I{_HERE}", *map(str, sources)]
        try:
            _run([compiler, "-march=native", *_FLAGS, *more, *files, "-o", str(built), "-lm"])
        except _Unavailable:  # a compiler that doesn't know this processor
            _run([compiler, *_FLAGS, *more, *files, "-o", str(built), "-lm"])
        os.replace(built, library)  # atomic: another process sees the whole library or none
    return library


@functools.cache
def library(wing: Path = _HERE) -> ctypes.CDLL | None:
    """The compiled kernels of a wing, a folder of C files, or None where they can't be had; says why, once."""
    if os.environ.get("EDKM_CPU_KERNELS", "1") == "0":
        _LOG.info("CPU kernels are off (EDKM_CPU_KERNELS=0); what they do runs in plain PyTorch")
        return None
    try:
        return ctypes.CDLL(str(_compile(wing.name, sorted(set(wing.glob("*.c")) - {wing / "calls.c"}))))
    except (_Unavailable, OSError, RuntimeError, subprocess.SubprocessError) as error:
        _LOG.warning("CPU kernels are not available, what they do runs in plain PyTorch (slower): %s", error)
        return None


@functools.cache
def calls(wing: Path) -> ModuleType | None:
    """calls.c as a Python module, or None where Python's headers or a compiler are missing: ctypes serves as well."""
    include = Path(sysconfig.get_paths()["include"])
    if library(wing) is None or not (include / "Python.h").is_file():
        return None
    try:
        built = _compile("calls", [wing / "calls.c"], f"-I{include}", f"-DFOR_PYTHON_{sys.hexversion:x}")
        loader = importlib.machinery.ExtensionFileLoader("edkm_calls", str(built))
        spec = importlib.util.spec_from_loader("edkm_calls", loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except (_Unavailable, OSError, ImportError, RuntimeError, subprocess.SubprocessError) as error:
        _LOG.info("calls of CPU kernels go by ctypes, which takes microseconds more: %s", error)
        return None
    return module
