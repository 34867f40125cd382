"""What the C library does with freed memory on a CPU: keep it for reuse (`--memory speed`), or give it back (`small`).

A page that comes from the system is cleared first, at a page fault: on virtual machines that is dear, and a training step
frees and takes all its tensors anew. So `speed` takes everything from one heap and never trims it, or, where weights stay
packed, everything but blocks from 16 MB on: without that freed pieces are half as much again as what is in use, and from
4 MB on a start is a twelfth slower. `small` takes all blocks from 256 KB on from the system: the peak is then what the
tensors need. What each costs is in docs/log.md. Between phases, and between the layers of a start, free blocks go back
wherever they are (`return_free_blocks`).
"""

import ctypes
import os
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # malloc.h
_LARGE_BYTES, HUGE_BYTES = 256 * 1024, 16 * 2**20
_NEVER = 2**31 - 1
# What a user may have set in the environment, which then stays: the variables' and the tunables' names.
_LIMITS = ("mmap_threshold", "trim_threshold", "mmap_max")


def keep_freed_blocks(*, huge: bool = True) -> None:
    """Have freed blocks wait for reuse, from now on: no more page faults than the peak has pages. Without `huge`, those of
    16 MB and more go back to the system, and the end of the heap from 64 MB on. Only glibc can."""
    some = {_M_TRIM_THRESHOLD: 4 * HUGE_BYTES, _M_MMAP_THRESHOLD: HUGE_BYTES}
    _set({_M_TRIM_THRESHOLD: _NEVER, _M_MMAP_MAX: 0} if huge else some)


def return_large_blocks() -> None:
    """Have freed blocks from 256 KB on go back to the system, from now on. Only glibc can."""
    _set({_M_MMAP_THRESHOLD: _LARGE_BYTES, _M_TRIM_THRESHOLD: _LARGE_BYTES})


def _set(limits: dict[int, int]) -> None:
    """mallopt, unless the user has set limits in the environment."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if any(f"MALLOC_{name.upper()}_" in os.environ or f"malloc.{name}" in tunables for name in _LIMITS):
        return
    for parameter, value in limits.items():
        _of_libc("mallopt", parameter, value)


def return_free_blocks() -> None:
    """Give free blocks of the heap back to the system, small ones, too: after work of another kind than what follows."""
    _of_libc("malloc_trim", 0)


def _of_libc(name: str, *arguments: int) -> None:
    """Call a function of glibc, where there is one."""
    with suppress(OSError, AttributeError, TypeError):  # TypeError: Windows
        getattr(ctypes.CDLL(None), name)(*arguments)
