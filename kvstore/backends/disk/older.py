"""Roots of older formats: their blocks are removed, and the cache starts cold once. All calls block."""

from __future__ import annotations

import logging
import stat
from typing import Final

from kvstore.backends.disk import files
from kvstore.backends.disk.layout import FORMAT, LAYOUT_NAME
from kvstore.backends.disk.ledger import ledger_held
from kvstore.diskio import OsDisk

_log = logging.getLogger("kvstore.backends.disk")

_EMPTYING_S: Final = 30.0
"""Longest wait for another engine that empties the root. Removing a terabyte takes some seconds."""


_STATE_PREFIXES: Final = ("members.lock", "want.")
"""Start of the names of files that only older formats have in the state directory."""


def older_format(disk: OsDisk, state_fd: int) -> int | None:
    """Return the format of a root that an older kvstore made; None of any other."""
    stated = (files.read_json(disk, LAYOUT_NAME, state_fd) or {}).get("format")
    return stated if isinstance(stated, int) and stated < FORMAT else None


def empty_older(disk: OsDisk, path: str, root_fd: int, state_fd: int) -> bool:
    """Remove all blocks of a root that an older kvstore made; return whether it had any.

    Files of other programs stay.

    An engine of that version that still runs finds its directory deleted, and makes no new one in this root.

    Raises:
        LedgerBusyError: Another engine holds the ledger's lock.
        OSError: The disk fails.
    """
    if older_format(disk, state_fd) is None:
        return False
    with ledger_held(disk, state_fd, _EMPTYING_S):
        # Another engine may have emptied it meanwhile.
        if (found := older_format(disk, state_fd)) is None:
            return False
        for name in files.namespaces_in(disk, root_fd):
            _walk(disk, name, root_fd, remove=True)
        for name in files.names_in(disk, state_fd):
            if name.startswith(_STATE_PREFIXES):
                disk.unlink(name, state_fd)
        # Last, so that a start that is killed is repeated.
        disk.unlink(LAYOUT_NAME, state_fd)
    _log.warning("%s held blocks of format %d; they are removed, and the cache starts cold", path, found)
    return True


def older_bytes(disk: OsDisk, root_fd: int) -> int:
    """Return the length of the files that :func:`empty_older` removes."""
    return sum(_walk(disk, name, root_fd, remove=False) for name in files.namespaces_in(disk, root_fd))


def _walk(disk: OsDisk, name: str, dir_fd: int, *, remove: bool) -> int:
    """Return the length of the files in a directory; with ``remove``, remove it."""
    size_bytes = 0
    fd = files.open_own_directory(disk, name, dir_fd)
    try:
        for entry, status in files.entries_in(disk, fd).items():
            if stat.S_ISDIR(status.st_mode):
                size_bytes += _walk(disk, entry, fd, remove=remove)
                continue
            size_bytes += status.st_size
            if remove and files.is_own_file(status):
                files.remove_segment(disk, fd, entry)
            elif remove:
                # A link or a pipe can't be opened for that.
                disk.unlink(entry, fd)
    finally:
        disk.close(fd)
    if remove:
        disk.rmdir(name, dir_fd)
    return size_bytes
