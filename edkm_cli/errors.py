"""The exceptions that are shown as one line, and what other errors say, in one."""


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


class Preempted(Exception):
    """The run was asked to stop and has saved its state. Exit status 143, as of a process that SIGTERM ended."""


class PeerLost(Exception):
    """Another process of the run is gone, so this one cannot go on. Exit status 1."""
