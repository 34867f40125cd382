"""The exceptions that are shown as one line, and what other errors say, in one: a full disk, memory that is not there."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

_DISK = {
    errno.ENOSPC: "free some room",
    errno.EDQUOT: "free some room, or have the quota raised",
    errno.EROFS: "give a place that can be written to",
    errno.EACCES: "give a place that this user may read and write",
    errno.EPERM: "give a place that this user may read and write",
    errno.EBUSY: "give a directory inside it",  # something is mounted there
    errno.EXDEV: "give a place on one file system",
    errno.EMFILE: "have the limit of open files raised",
    errno.EIO: "check the disk",
    errno.EFBIG: "have the limit of file sizes raised",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ENOMEM: "give it less to do, or a machine with more memory",
}
# What torch says where it has no exception of its own.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "Cannot allocate memory")
_RESUME = "what was running can go on with --resume from its last checkpoint, if it has one"


class UserError(Exception):
    """Something the user can correct. The message is one line: the rule, the actual value, the remedy. Exit status 2.

    `everywhere` is set where all processes of a run raise the same one; the first then speaks for all.
    """

    def __init__(self, message: str, *, everywhere: bool = False):
        super().__init__(message)
        self.everywhere = everywhere


def brief(error: object, most: int = 160) -> str:
    """The beginning of what an error says, in one line."""
    text = " ".join(str(error).split())
    return text[:most] + "..." * (len(text) > most)


def named(error: BaseException, most: int = 160) -> str:
    """The same after the name of its kind."""
    return f"{type(error).__name__}: {brief(error, most)}"


@contextmanager
def explained(rule: str, remedy: str = "") -> Iterator[None]:
    """Whatever fails inside, in a library that has errors of its own, is `rule (what it was)remedy`; errors of ours and a
    lack of memory or disk say more by themselves."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (UserError, PeerLost, Preempted)) or shortage(error) is not None:
            raise
        raise UserError(f"{rule} ({named(error)}){remedy}") from error


class Preempted(Exception):
    """The run was asked to stop and has saved its state. Exit status 143, as of a process that SIGTERM ended."""


class PeerLost(Exception):
    """Another process of the run is gone, so this one cannot go on. Exit status 1."""


def shortage(error: BaseException) -> UserError | None:
    """The one line for an error that is the machine's; None for one that is ours.

    MemoryError, what torch raises for it (on a GPU and on a CPU), and an OSError of a disk: full, read-only or broken.
    """
    torch_says = isinstance(error, RuntimeError) and any(sign in str(error) for sign in _NO_MEMORY)
    text = (str(error).splitlines() or [""])[0][:300]
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or torch_says:
        return UserError(f"not enough memory ({text or 'MemoryError'}); --dry-run says what needs less; {_RESUME}")
    if isinstance(error, RuntimeError) and "home directory" in text:  # of pathlib
        rule = f"a path begins with ~ and a user who is not known here ({text})"
        return UserError(f"{rule}; give it in full, or set HOME")
    if isinstance(error, FileNotFoundError) and "temporary directory" in text:  # of tempfile
        return UserError(f"temporary files need a place, and there is none ({text}); set TMPDIR")
    if isinstance(error, IndexError) and text == "index out of range in self":  # of positions, as a rule
        return UserError("a text must not be longer than the model's table of positions, but one is; give fewer tokens")
    number = error.errno if isinstance(error, OSError) else None
    if number is None:  # libraries in Rust give it as text only: `No space left on device (os error 28)`
        number = next((known for known in _DISK if f"(os error {known})" in str(error)), None)
    if number not in _DISK:
        return None
    return UserError(f"a file cannot be written or read ({text}); {_DISK[number]}; {_RESUME}")
