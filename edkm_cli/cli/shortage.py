"""What a machine runs out of in the middle of a command, told in one line: a full disk, a disk that cannot be written,
memory."""

import errno

from edkm_cli.errors import UserError

_DISK = {
    errno.ENOSPC: "free some room",
    errno.EDQUOT: "free some room, or have the quota raised",
    errno.EROFS: "give a place that can be written to",
    errno.EACCES: "give a place that this user may write to",
    errno.EPERM: "give a place that this user may write to",
    errno.EIO: "check the disk",
    errno.EFBIG: "have the limit of file sizes raised",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ENOMEM: "give it less to do, or a machine with more memory",
}
# What torch says where it has no exception of its own.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "Cannot allocate memory")
_RESUME = "what was running can go on with --resume from its last checkpoint, if it has one"


def shortage(error: BaseException) -> UserError | None:
    """The one line for an error that is the machine's; None for one that is ours.

    MemoryError, what torch raises for it (on a GPU and on a CPU), and an OSError of a disk: full, read-only or broken.
    """
    torch_says = isinstance(error, RuntimeError) and any(sign in str(error) for sign in _NO_MEMORY)
    text = (str(error).splitlines() or [""])[0][:300]
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or torch_says:
        return UserError(f"not enough memory ({text or 'MemoryError'}); --dry-run says what needs less; {_RESUME}")
    number = error.errno if isinstance(error, OSError) else None
    if number is None:  # libraries in Rust give it as text only: `No space left on device (os error 28)`
        number = next((known for known in _DISK if f"(os error {known})" in str(error)), None)
    if number not in _DISK:
        return None
    return UserError(f"a file cannot be written or read ({text}); {_DISK[number]}; {_RESUME}")
