"""Exit status of the command line tools, the same for every command."""

from __future__ import annotations

import enum

__all__ = ["ExitCode"]


class ExitCode(enum.IntEnum):
    """Exit status of a command."""

    OK = 0
    FAILED = 1
    """It ran and did not succeed: a medium failed, a check failed, a comparison is over its limit."""
    USAGE = 2
    """It did not run: an option, a configuration or a target can't be used."""
    WRONG_BYTES = 3
    """A block differs from the one stored under its key, or its record does not verify."""
    INTERRUPTED = 130
    """Ctrl-C; the results until then were reported."""
