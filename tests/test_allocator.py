"""Freed memory goes back to the system while a run goes on."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

LARGE = """
block = bytearray(b"1") * 30_000_000  # glibc takes this for the size of a usual block, unless it is told otherwise
del block
blocks = [bytearray(b"1") * 4_000_000 for _ in range(40)]
full = resident()
del blocks[::2]
print(full - resident())
"""

SMALL = """
texts = [str(i) * 100 for i in range(200_000)]  # of a size that Python leaves to malloc
full = resident()
keep = texts[::1000]
del texts
return_free_blocks()
print(full - resident())
"""

PRELUDE = """
import os
from pathlib import Path
from edkm_cli.allocator import keep_freed_blocks, return_large_blocks, return_free_blocks

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

"""


def returned_bytes(code, **environment):
    command = [sys.executable, "-c", PRELUDE + code]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={"PATH": "", **environment})
    return int(done.stdout)


needs_glibc = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc"
)


@needs_glibc
def test_large_blocks_go_back_even_if_their_neighbours_stay():
    assert returned_bytes("return_large_blocks()\n" + LARGE) > 70e6  # 20 of 40 blocks of 4 MB


@needs_glibc
def test_kept_blocks_are_reused_without_a_page_fault():
    faults = """
import resource
def round():
    block = bytearray(100_000_000)  # glibc would map it, and unmap it when it is freed
    del block
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
first = round()
print((round() - first) * os.sysconf("SC_PAGE_SIZE"))
"""
    assert returned_bytes(faults) > 90e6
    assert returned_bytes("keep_freed_blocks()\n" + faults) < 10e6


@needs_glibc
def test_a_limit_in_the_environment_stays():
    limits = {"MALLOC_MMAP_THRESHOLD_": "33554432", "MALLOC_TRIM_THRESHOLD_": "1073741824"}
    assert returned_bytes("return_large_blocks()\n" + LARGE, **limits) < 10e6


@needs_glibc
def test_small_blocks_go_back():
    assert returned_bytes(SMALL) > 50e6
