"""The exceptions that are shown as one line."""


class UserError(Exception):
    """Something the user can mend. The message is one line: the rule, the actual value, the remedy. Exit status 2."""


class Preempted(Exception):
    """The run was asked to stop and has saved its state. Exit status 143, as of a process that SIGTERM ended."""
