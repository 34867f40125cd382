"""The C library's allocator: with `--memory small` it gives freed memory back, so a run peaks at what its tensors need.

glibc returns a large block to the system when it is freed. What counts as large grows to 32 MB with the blocks it sees, so
most tensors of a training step come from one heap, where freed blocks leave gaps. With the limit fixed at 256 KB, full
fine-tuning of SmolLM2-135M peaks at 4.8 GB instead of 6.0 GB, but every new block then takes fresh pages from the system:
17 s for a step instead of 12 s on a Xeon virtual machine (docs/log.md). A limit set by `MALLOC_MMAP_THRESHOLD_` in the
environment is left alone.
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
    """Give freed small blocks back to the system, after work that made many (tokenizing: 300 bytes per token)."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):  # TypeError: Windows
        return
