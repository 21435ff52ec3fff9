"""Output files of a command: checked before its work begins, written at its end."""

from __future__ import annotations

import os
from pathlib import Path

from kvstore.errors import ConfigError, KVStoreError

__all__ = ["OutputError", "check_output", "write_output"]


class OutputError(KVStoreError):
    """A file could not be written; its contents were printed."""


def check_output(path: Path | None, option: str) -> None:
    """Check that a file can be written, before minutes of work produce its contents.

    Args:
        path: The file; None for no file.
        option: Name of the option, for errors.

    Raises:
        ConfigError: Its directory does not exist, it is a directory, or this user may not write it.
    """
    if path is None:
        return
    if not path.parent.is_dir():
        raise ConfigError(f"{option} is {str(path)!r}, but there is no directory {str(path.parent)!r}. Make it first.")
    if path.is_dir():
        raise ConfigError(f"{option} is {str(path)!r}, which is a directory. Give the name of a file.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{option} is {str(path)!r}, which this user may not write. Give another file.")


def write_output(path: Path | None, data: str | bytes, option: str) -> None:
    """Write a file, if ``path`` is given.

    Args:
        path: The file; None for no file.
        data: Its contents.
        option: Name of the option, for errors.

    Raises:
        OutputError: It can't be written.
    """
    if path is None:
        return
    try:
        path.write_bytes(data.encode() if isinstance(data, str) else data)
    except OSError as error:
        raise OutputError(f"{option} {str(path)!r} can't be written: {error.strerror}. Give another file.") from error
