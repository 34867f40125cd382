"""User errors, and the configuration of a run: frozen dataclasses read from YAML and flags.

Standard library and yaml only: nothing here imports torch, so `--help` and the checks of a configuration are instant.
"""

from __future__ import annotations


class UserError(Exception):
    """Something the user can mend. The message is one line: the rule, the actual value, the remedy. Exit status 2."""
