"""Locks on files; the kernel releases them when their holder and the last of its I/O have ended."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import weakref
from typing import Final

from kvstore.backends.disk.files import close_all, open_regular
from kvstore.diskio import OsDisk

__all__ = ["FileLock"]

_TRIES_MAX: Final = 100
"""How often a lock file may vanish between opening and locking it."""

_held: Final[weakref.WeakSet[FileLock]] = weakref.WeakSet()


class FileLock:
    """An advisory lock (``flock``) on a named file in a directory. All methods block; none waits for another holder."""

    def __init__(self, disk: OsDisk, dir_fd: int, name: str) -> None:
        self.fd = -1
        self._disk = disk
        self._dir_fd = dir_fd
        self._name = name

    def try_acquire(self, *, exclusive: bool = True, create: bool = True) -> bool:
        """Take the lock if it is free; return whether it is held now.

        Raises:
            OSError: The file can't be opened or locked; ``FileNotFoundError`` without ``create``.
        """
        operation = (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB
        for _ in range(_TRIES_MAX):
            fd, _ = open_regular(self._disk, self._name, os.O_RDWR | (os.O_CREAT if create else 0), self._dir_fd)
            try:
                self._disk.flock(fd, operation)
                if self._is_current(fd):
                    self.fd, fd = fd, -1
                    _held.add(self)
                    return True
            except BlockingIOError:
                return False
            finally:
                close_all(self._disk, fd)
        raise OSError(errno.EIO, f"the lock file {self._name} vanishes each time it is opened")

    def release(self) -> None:
        """Release it; idempotent."""
        fd, self.fd = self.fd, -1
        _held.discard(self)
        if fd >= 0:
            with contextlib.suppress(OSError):
                # A ring may keep the file open for a moment longer.
                self._disk.flock(fd, fcntl.LOCK_UN)
            close_all(self._disk, fd)

    def _is_current(self, fd: int) -> bool:
        """Return whether the open file still has the name, so that everyone locks the same file."""
        opened = self._disk.fstat(fd)
        try:
            named = self._disk.stat(self._name, self._dir_fd)
        except FileNotFoundError:
            return False
        return (opened.st_dev, opened.st_ino) == (named.st_dev, named.st_ino)


def _close_in_child() -> None:
    """Close inherited locks in a forked process: they would outlive their holder."""
    for lock in list(_held):
        with contextlib.suppress(OSError):
            os.close(lock.fd)
        lock.fd = -1


os.register_at_fork(after_in_child=_close_in_child)
