"""The C library's allocator, told to give memory back: a run's peak is then what its tensors need.

glibc takes a large block from the system and returns it when it is freed, but what counts as large grows to 32 MB with
the blocks it sees: then most tensors of a training step come from one heap, which freed neighbours leave full of holes.
With the limit fixed, SmolLM2-135M's full fine-tuning peaks at 4.8 GB instead of 6.0 GB. What it costs depends on how dear a
fresh page is: nothing to speak of on one day; on another, on the same virtual machine, 17 s a step instead of 12 s.
`MALLOC_MMAP_THRESHOLD_=33554432` in the environment trades it back.
"""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGE_BYTES = 256 * 1024


def return_large_blocks() -> None:
    """Have freed blocks from 256 KB on go back to the system, from now on. Only glibc can; a limit that the user has set
    in the environment stays."""
    if "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # TypeError: Windows
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _LARGE_BYTES)


def return_small_blocks() -> None:
    """Give freed small blocks back to the system, after work that made many (tokenizing: 300 bytes a token)."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):  # TypeError: Windows
        return
