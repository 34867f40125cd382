"""The one exception that is the user's to mend."""


class UserError(Exception):
    """Something the user can mend. The message is one line: the rule, the actual value, the remedy. Exit status 2."""
