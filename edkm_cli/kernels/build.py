"""The compiled C files of a wing (kernels, runtime): those that a wheel brings, or compiled at first use.

A wheel, and an editable checkout, hold libraries for levels of processors (levels.py); the best one that the processor can
run is loaded. Where none fits, the system's compiler makes it, a few seconds once a machine and version, in the user's
cache. Where that fails, too, plain PyTorch does the same, more slowly. `EDKM_CPU_KERNELS=0` asks for that.
"""

import ctypes
import functools
import importlib.machinery
import importlib.util
import logging
import os
import platform
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from edkm_cli.kernels import levels
from edkm_cli.settings import cache_directory

_LOG = logging.getLogger(__name__)
_HERE = Path(__file__).parent
_LIBC = platform.libc_ver()  # what is compiled with a new one does not load beside an older one, and homes are shared


def _cache_directory() -> Path:
    """Our own part of the cache directory: created 0700; refused if someone else owns or can write it."""
    directory = cache_directory() / "kernels"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
        raise levels.Unavailable(f"{directory} must belong to this user and be writable by no one else")
    return directory


def _file(wing: Path, candidates: Sequence[levels.Level]) -> Path:
    """The first library that lies beside a wing's sources, or one in the cache, compiled if it is not there."""
    for level in candidates:
        if (built := wing / levels.BUILT / levels.file_name(wing, level.name)).exists():
            return built
    directory = _cache_directory()
    for level in candidates:
        if (cached := directory / levels.file_name(wing, level.name, _LIBC)).exists():
            return cached
        try:
            return levels.compile_level(wing, level, directory, _LIBC)
        except levels.Unavailable:  # a compiler that doesn't know this level
            if level is candidates[-1]:
                raise
    raise AssertionError("the last level asks for nothing")


@functools.cache
def library(wing: Path = _HERE) -> ctypes.CDLL | None:
    """The compiled kernels of a wing, a folder of C files, or None where they can't be had; says why, once."""
    if os.environ.get("EDKM_CPU_KERNELS") in ("0", "off"):
        _LOG.info("CPU kernels are off (EDKM_CPU_KERNELS=0); what they do runs in plain PyTorch")
        return None
    try:
        return ctypes.CDLL(str(_file(wing, levels.fitting())))
    except (levels.Unavailable, OSError, RuntimeError, subprocess.SubprocessError) as error:
        _LOG.warning("CPU kernels are not available, what they do runs in plain PyTorch (slower): %s", error)
        return None


@functools.cache
def calls(wing: Path) -> ModuleType | None:
    """calls.c as a Python module, or None where Python's headers or a compiler are missing: ctypes serves as well."""
    if library(wing) is None:
        return None
    try:
        loader = importlib.machinery.ExtensionFileLoader("edkm_calls", str(_file(wing, [levels.calls()])))
        spec = importlib.util.spec_from_loader("edkm_calls", loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except (levels.Unavailable, OSError, ImportError, RuntimeError, subprocess.SubprocessError) as error:
        _LOG.info("calls of CPU kernels go by ctypes, which takes microseconds more: %s", error)
        return None
    return module
