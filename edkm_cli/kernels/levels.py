"""How the C files of a wing (kernels, runtime) are compiled: one library for each level of a family of processors.

A wheel holds all levels (setup.py), an editable checkout that of its own processor; what is loaded is decided by what the
processor says (build.py). A library's name holds its level and a hash of its sources, so a stale one is never loaded. This
file imports the standard library only: setup.py runs it where nothing is installed yet.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
COMPILERS = ("cc", "gcc", "clang")
WINGS = ("kernels", "runtime")
BUILT = "built"  # the folder of a wing where libraries that were compiled in advance lie
_COMPILE_SECONDS = 900
_HERE = Path(__file__).parent
_CALLS = f"calls-{sysconfig.get_config_var('SOABI') or sys.implementation.cache_tag}"
_INCLUDE = Path(sysconfig.get_paths()["include"])


class Unavailable(Exception):
    """Why the kernels can't be compiled here."""


class Level(NamedTuple):
    """What a compiler may use, and which words the processor's list of features must hold for it."""

    name: str
    flags: tuple[str, ...]
    features: frozenset[str]


_WIDE = "avx512f avx512bw avx512cd avx512dq avx512vl"
_X86 = (  # each with all that those before it have; AMX is asked for once more where it is used
    ("avx2", "avx2 fma f16c bmi bmi2 lzcnt", "avx2 fma f16c bmi1 bmi2 abm"),
    ("avx512", f"{_WIDE} prefer-vector-width=512", _WIDE),
    ("avx512-bf16", "avx512bf16 avx512vbmi avx512vbmi2", "avx512_bf16 avx512vbmi avx512_vbmi2"),
    ("avx512-fp16", "avx512fp16 amx-tile amx-bf16", "avx512_fp16"),
)


def levels() -> tuple[Level, ...]:
    """Those of this machine's family of processors, from the best to the plainest; aarch64 has NEON without asking."""
    found = [Level("plain", (), frozenset())]
    for name, flags, features in _X86 if platform.machine().lower() in ("x86_64", "amd64") else ():
        more = tuple(f"-m{flag}" for flag in flags.split())
        found.append(Level(name, found[-1].flags + more, found[-1].features | set(features.split())))
    return tuple(reversed(found))


def features() -> frozenset[str]:
    """What this processor says that it can do, in Linux's words; nothing where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def fitting() -> list[Level]:
    """The levels that this processor can run, the best one first."""
    has = features()
    return [level for level in levels() if level.features <= has]


def calls() -> Level:
    """calls.c, an extension module for this Python, which runs on any processor; compiling it takes Python's headers."""
    later = ("-Wl,-undefined,dynamic_lookup",) * (sys.platform == "darwin")  # Python's functions are in no library
    return Level(_CALLS, (f"-I{_INCLUDE}", *later), frozenset())


def _sources(wing: Path, name: str) -> list[Path]:
    extension = wing / "calls.c"
    return [extension] if name == _CALLS else sorted({*wing.glob("*.c")} - {extension})


def file_name(wing: Path, name: str, system: Sequence[str] = ()) -> str:
    """The library of a wing for a level's `name`, on a `system`; a hash of its sources and of the headers that wings share
    is in it."""
    digest = hashlib.sha256(repr((FLAGS, _X86, sys.platform, platform.machine(), *system)).encode())
    for file in (*_sources(wing, name), *sorted([*wing.glob("*.h"), *_HERE.glob("*.h")])):
        digest.update(file.read_bytes())
    return f"{wing.name}-{name}-{digest.hexdigest()[:16]}.so"


def compile_level(wing: Path, level: Level, directory: Path, system: Sequence[str] = ()) -> Path:
    """The library of a wing for a level, put into `directory`. Raises Unavailable without a compiler that makes it."""
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise Unavailable(f"no C compiler ({', '.join(COMPILERS)}) on PATH")
    if level.name == _CALLS and not (_INCLUDE / "Python.h").is_file():
        raise Unavailable(f"no Python.h in {_INCLUDE}")
    library = directory / file_name(wing, level.name, system)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        built = Path(scratch) / library.name
        files = [f"-I{_HERE}", *map(str, _sources(wing, level.name))]
        command = [compiler, *FLAGS, *level.flags, *files, "-o", str(built), "-lm"]
        done = subprocess.run(command, capture_output=True, errors="replace", timeout=_COMPILE_SECONDS, check=False)
        if done.returncode != 0:
            raise Unavailable(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")
        with open(built, "rb") as whole:
            os.fsync(whole.fileno())
        os.replace(built, library)  # atomic: another process sees the whole library or none
    return library
