"""Locks on files in the state directory; the kernel lets go of them when their holder dies."""

from __future__ import annotations

import fcntl
import os
import stat
from typing import Final

from kvstore.diskio import OsDisk

__all__ = ["FileLock"]

_TRIES_MAX: Final = 100
"""How often a lock file may vanish between opening and locking it before something is wrong."""

_TEXT_BYTES_MAX: Final = 512


class FileLock:
    """An advisory lock (``flock``) on a named file. Not thread-safe.

    Args:
        disk: What to call the system with.
        dir_fd: Directory of the lock file.
        name: Its name.
    """

    def __init__(self, disk: OsDisk, dir_fd: int, name: str) -> None:
        self._disk = disk
        self._dir_fd = dir_fd
        self._name = name
        self._fd = -1

    @property
    def is_held(self) -> bool:
        """Whether this object holds the lock."""
        return self._fd >= 0

    def try_acquire(self, *, exclusive: bool, create: bool = True) -> bool:
        """Take the lock if it is free.

        Args:
            exclusive: For one holder alone, or shared with others who ask for it shared.
            create: Make the file if there is none; otherwise that is a ``FileNotFoundError``.

        Returns:
            Whether it is held now.

        Raises:
            OSError: The file can't be opened or locked.
        """
        operation = (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB
        for _ in range(_TRIES_MAX):
            fd = self._disk.open_file(self._name, os.O_RDWR | (os.O_CREAT if create else 0), self._dir_fd)
            try:
                self._disk.flock(fd, operation)
                if self._is_current(fd):
                    self._fd, fd = fd, -1
                    return True
            except BlockingIOError:
                return False
            finally:
                if fd >= 0:
                    self._disk.close(fd)
        raise OSError(f"lock file {self._name} vanishes each time it is opened")

    def describe(self, text: str) -> None:
        """Write into the file who holds the lock, for others to read."""
        self._disk.ftruncate(self._fd, 0)
        self._disk.pwritev(self._fd, [text.encode()[:_TEXT_BYTES_MAX]], 0)

    def owner(self) -> str:
        """Return what the last holder wrote; empty if nothing can be read."""
        buffer = bytearray(_TEXT_BYTES_MAX)
        try:
            fd = self._disk.open_file(self._name, os.O_RDONLY, self._dir_fd)
            try:
                length = self._disk.preadv(fd, [memoryview(buffer)], 0)
            finally:
                self._disk.close(fd)
        except OSError:
            return ""
        return buffer[:length].decode("utf-8", "replace")

    def release(self, *, remove: bool = False) -> None:
        """Let go; idempotent.

        Args:
            remove: Also remove the file; only to be asked for by an exclusive holder.
        """
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        try:
            if remove:
                # Before letting go: whoever opened the file meanwhile sees that it has no name any more.
                self._disk.unlink(self._name, self._dir_fd)
        finally:
            self._disk.close(fd)

    def _is_current(self, fd: int) -> bool:
        """Tell whether the open file still has the name, so that all who lock it lock the same file."""
        opened = self._disk.fstat(fd)
        if not stat.S_ISREG(opened.st_mode):
            raise PermissionError(f"{self._name} in the state directory is no regular file")
        try:
            named = self._disk.stat(self._name, self._dir_fd)
        except FileNotFoundError:
            return False
        return (opened.st_dev, opened.st_ino) == (named.st_dev, named.st_ino)
