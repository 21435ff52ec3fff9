"""The ledger of a root: a lock under which engines make and remove files of segments, and no other file work waits."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterator
from typing import Final

from kvstore.backends.disk.files import FileLock
from kvstore.diskio import OsDisk

LEDGER_NAME: Final = "ledger.lock"
READ_ONLY: Final = frozenset({errno.EROFS, errno.EACCES})
"""Errors of a disk on which files are read and not written."""

_WAIT_S: Final = 1.0
_RETRY_S: Final = 0.01
"""Longest wait for the ledger, and the pause between two tries; making a segment takes up to half a second."""


class LedgerBusyError(Exception):
    """Another engine holds the ledger's lock; try again."""


@contextlib.contextmanager
def ledger_held(disk: OsDisk, state_fd: int, wait_s: float = _WAIT_S) -> Iterator[None]:
    """Hold the ledger's lock.

    Raises:
        LedgerBusyError: Another engine holds it for longer than ``wait_s``.
        OSError: The disk fails.
    """
    lock = FileLock(disk, state_fd, LEDGER_NAME)
    deadline = time.monotonic() + wait_s
    while not _acquire(lock):
        if time.monotonic() >= deadline:
            raise LedgerBusyError
        time.sleep(_RETRY_S)
    try:
        yield
    finally:
        lock.release()


def _acquire(lock: FileLock) -> bool:
    try:
        return lock.try_acquire()
    except OSError as error:
        if error.errno not in READ_ONLY:
            raise
        return lock.try_acquire(create=False)
