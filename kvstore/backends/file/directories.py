"""Open directories of one namespace: every access to a block starts from one of these, never from a path."""

from __future__ import annotations

import contextlib
import errno
import threading

from kvstore.backends.file.layout import shard_name
from kvstore.diskio import OsDisk

__all__ = ["Directories"]


class Directories:
    """The namespace's directory and its shards, opened when they are first needed. Thread-safe.

    A descriptor number, once handed out, means the same shard until :meth:`close`: a directory that was removed and
    made again takes its number over, so that threads may use one without a lock.

    Args:
        disk: What to call the system with.
        root_fd: The root directory.
        namespace_hex: Name of the namespace's directory.
        fanout: Number of shards.
        owner_uid: Whom the directories have to belong to.
    """

    def __init__(self, disk: OsDisk, root_fd: int, namespace_hex: str, fanout: int, owner_uid: int) -> None:
        self._disk = disk
        self._root_fd = root_fd
        self._name = namespace_hex
        self._owner_uid = owner_uid
        self._mutex = threading.Lock()
        self._shard_fds = [-1] * fanout
        self._closed = False
        self.fd = -1
        """The namespace's own directory."""

    def open(self) -> None:
        """Open the namespace's directory, making it if there is none.

        Raises:
            OSError: Neither is possible; ``PermissionError`` if it belongs to somebody else.
        """
        with self._mutex:
            self.fd = self._open_or_make(self._name, self._root_fd)

    def find(self, shard: int) -> int:
        """Return the directory of a shard.

        Raises:
            FileNotFoundError: There is none, so none of its blocks either.
            OSError: It can't be opened: something else has its name, or the disk fails.
        """
        fd = self._shard_fds[shard]
        if fd >= 0:
            return fd
        with self._mutex:
            if self._shard_fds[shard] < 0:
                self._shard_fds[shard] = self._open_checked(shard_name(shard), self._alive_fd())
            return self._shard_fds[shard]

    def ensure(self, shard: int) -> int:
        """Return the directory of a shard, making it if there is none."""
        fd = self._shard_fds[shard]
        if fd >= 0:
            return fd
        with self._mutex:
            if self._shard_fds[shard] < 0:
                self._shard_fds[shard] = self._open_shard(shard)
            return self._shard_fds[shard]

    def renew(self, shard: int) -> int:
        """Return the directory of a shard after the one that was open turned out to be removed."""
        with self._mutex:
            fd = self._open_shard(shard)
            if self._shard_fds[shard] < 0:
                self._shard_fds[shard] = fd
            else:
                try:
                    self._disk.dup2(fd, self._shard_fds[shard])
                finally:
                    self._disk.close(fd)
            return self._shard_fds[shard]

    def renew_removed(self) -> None:
        """Look for open directories that were removed, and open those that have taken their places."""
        for shard, fd in enumerate(self._shard_fds):
            if fd >= 0 and self._disk.fstat(fd).st_nlink == 0:
                self.renew(shard)

    def close(self) -> None:
        """Close everything; idempotent."""
        with self._mutex:
            self._closed = True
            fds = [self.fd, *self._shard_fds]
            self.fd = -1
            self._shard_fds = [-1] * len(self._shard_fds)
        for fd in fds:
            if fd >= 0:
                with contextlib.suppress(OSError):
                    self._disk.close(fd)

    def _open_shard(self, shard: int) -> int:
        """Open or make a shard; also make the namespace's directory again if it was removed."""
        try:
            return self._open_or_make(shard_name(shard), self._alive_fd())
        except FileNotFoundError:
            fd = self._open_or_make(self._name, self._root_fd)
            try:
                self._disk.dup2(fd, self.fd)
            finally:
                self._disk.close(fd)
            return self._open_or_make(shard_name(shard), self.fd)

    def _open_or_make(self, name: str, dir_fd: int) -> int:
        try:
            return self._open_checked(name, dir_fd)
        except FileNotFoundError:
            pass
        with contextlib.suppress(FileExistsError):
            self._disk.mkdir(name, dir_fd)
        return self._open_checked(name, dir_fd)

    def _open_checked(self, name: str, dir_fd: int) -> int:
        fd = self._disk.open_dir(name, dir_fd)
        try:
            if self._disk.fstat(fd).st_uid != self._owner_uid:
                raise PermissionError(errno.EPERM, f"directory {name} of the cache belongs to another user")
        except BaseException:
            self._disk.close(fd)
            raise
        return fd

    def _alive_fd(self) -> int:
        if self._closed or self.fd < 0:
            raise OSError(errno.EBADF, "the backend is closed")
        return self.fd
