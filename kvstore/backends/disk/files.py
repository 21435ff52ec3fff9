"""Opening, locking, reading and writing files and directories that must belong to this user. All calls block."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import numpy as np

from kvstore.backends.disk.layout import is_namespace
from kvstore.diskio import OsDisk
from kvstore.runtime.forks import leave_at_fork

_JSON_BYTES_MAX: Final = 1 << 20

_LOCK_TRIES_MAX: Final = 100
"""Attempts to lock a file that is removed between opening and locking."""


class ForeignFileError(PermissionError):
    """A file is another user's, has several hard links, or is not a regular one."""


def open_regular(disk: OsDisk, name: str, flags: int, dir_fd: int) -> tuple[int, int]:
    """Open a regular file of this user with a single hard link; return its descriptor and length.

    Raises:
        OSError: It can't be opened; EPERM for any other file.
    """
    fd = disk.open_file(name, flags, dir_fd)
    try:
        status = disk.fstat(fd)
        if not is_own_file(status):
            raise ForeignFileError(errno.EPERM, "not a regular file of this user with one hard link", name)
    except BaseException:
        disk.close(fd)
        raise
    return fd, status.st_size


@contextlib.contextmanager
def opened(disk: OsDisk, name: str, flags: int, dir_fd: int) -> Iterator[tuple[int, int]]:
    """Hold a file open; descriptor, length and errors are those of :func:`open_regular`."""
    fd, size_bytes = open_regular(disk, name, flags, dir_fd)
    try:
        yield fd, size_bytes
    finally:
        close_all(disk, fd)


def is_own_file(status: os.stat_result) -> bool:
    """Return whether a file is a regular file of this user with a single hard link."""
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink <= 1


def named(disk: OsDisk, fd: int, name: str, dir_fd: int) -> os.stat_result | None:
    """Return the status of an open file or directory; None if it has not this name any more."""
    status = disk.fstat(fd)
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(status, disk.stat(name, dir_fd)):
            return status
    return None


def names_in(disk: OsDisk, dir_fd: int) -> list[str]:
    """Return the names in a directory. Opens a new descriptor, because the read position belongs to the descriptor."""
    fd = disk.open_dir(".", dir_fd)
    try:
        with disk.scandir(fd) as entries:
            return [entry.name for entry in entries]
    finally:
        disk.close(fd)


def entries_in(
    disk: OsDisk, dir_fd: int, is_wanted: Callable[[str], object] = lambda _: True
) -> dict[str, os.stat_result]:
    """Return the entries of a directory by name, of those with a name that is wanted."""
    found = {}
    for name in filter(is_wanted, names_in(disk, dir_fd)):
        # Another engine may remove it at the same time.
        with contextlib.suppress(FileNotFoundError):
            found[name] = disk.stat(name, dir_fd)
    return found


def namespaces_in(disk: OsDisk, root_fd: int) -> list[str]:
    """Return the namespaces that have a directory of this user in a root."""
    return [
        name
        for name, status in entries_in(disk, root_fd, is_namespace).items()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    ]


def open_own_directory(disk: OsDisk, name: str, dir_fd: int) -> int:
    """Open a directory of this user.

    Raises:
        OSError: It can't be opened; EPERM if it is another user's.
    """
    fd = disk.open_dir(name, dir_fd)
    try:
        if disk.fstat(fd).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "a directory of another user", name)
    except BaseException:
        disk.close(fd)
        raise
    return fd


def close_all(disk: OsDisk, *fds: int) -> None:
    """Close the descriptors that are open (not -1), ignoring errors."""
    for fd in fds:
        if fd >= 0:
            with contextlib.suppress(OSError):
                disk.close(fd)


def remove_segment(disk: OsDisk, dir_fd: int, name: str) -> None:
    """Remove a segment, and free its space immediately even if other processes have it open."""
    with contextlib.suppress(FileNotFoundError):
        with contextlib.suppress(PermissionError), opened(disk, name, os.O_WRONLY, dir_fd) as (fd, _):
            disk.ftruncate(fd, 0)
        disk.unlink(name, dir_fd)


def read_json(disk: OsDisk, name: str, dir_fd: int) -> dict[str, Any] | None:
    """Return a small JSON object; None if there is no such file, empty if the file holds anything else."""
    try:
        with opened(disk, name, os.O_RDONLY, dir_fd) as (fd, size):
            found = json.loads(bytes(read_at(disk, fd, 0, min(size, _JSON_BYTES_MAX))))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def write_json(disk: OsDisk, name: str, dir_fd: int, value: dict[str, Any]) -> None:
    """Replace a small JSON file. The caller holds the ledger, so a file of a killed start is written again here."""
    replace_file(disk, name, f"{name}.tmp", dir_fd, [json.dumps(value).encode()])


def replace_file(disk: OsDisk, name: str, tmp_name: str, dir_fd: int, parts: Iterable[bytes]) -> None:
    """Write a file under a temporary name, flush it to the device, and rename it.

    Raises:
        OSError: It could not be written; the previous file is still there.
    """
    offset = 0
    with opened(disk, tmp_name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, dir_fd) as (fd, _):
        for part in parts:
            write_at(disk, fd, part, offset)
            offset += len(part)
        disk.fdatasync(fd)
    disk.rename(tmp_name, name, dir_fd)


def read_at(disk: OsDisk, fd: int, offset: int, size_bytes: int) -> memoryview:
    """Return the bytes at an offset; fewer at the end of the file."""
    content: memoryview = np.empty(size_bytes, np.uint8).data
    length = 0
    while length < size_bytes and (got := disk.preadv(fd, [content[length:]], offset + length)) > 0:
        length += got
    return content[:length]


def write_at(disk: OsDisk, fd: int, content: bytes, offset: int) -> None:
    """Write all bytes at an offset."""
    done = 0
    with memoryview(content) as view:
        while done < len(content):
            written = disk.pwritev(fd, [view[done:]], offset + done)
            if written <= 0:
                raise OSError(errno.EIO, "a write of nothing")
            done += written


class FileLock:
    """A lock (``flock``) on a named file; the kernel releases it when the holder and its last I/O have ended."""

    def __init__(self, disk: OsDisk, dir_fd: int, name: str) -> None:
        self.fd = -1
        self._disk = disk
        self._dir_fd = dir_fd
        self._name = name
        leave_at_fork(self)

    def try_acquire(self, *, exclusive: bool = True, create: bool = True, flags: int = os.O_RDONLY) -> bool:
        """Take the lock if it is free; return whether it is held now.

        ``flags`` opens the file without ``create``; read-only, because opening for writing may block on a frozen
        filesystem.

        Raises:
            OSError: The file can't be opened or locked; ``FileNotFoundError`` without ``create``.
        """
        operation = (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB
        if create:
            flags = os.O_RDWR | os.O_CREAT
        for _ in range(_LOCK_TRIES_MAX):
            fd, _ = open_regular(self._disk, self._name, flags, self._dir_fd)
            try:
                self._disk.flock(fd, operation)
                # Only a lock on the file that has the name now excludes other processes.
                if named(self._disk, fd, self._name, self._dir_fd) is not None:
                    self.fd, fd = fd, -1
                    return True
            except BlockingIOError:
                return False
            finally:
                close_all(self._disk, fd)
        raise OSError(errno.EIO, f"the lock file {self._name} vanishes each time it is opened")

    def release(self) -> None:
        """Release the lock; idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                # An io_uring may keep the file open for a moment after the close.
                self._disk.flock(fd, fcntl.LOCK_UN)
            close_all(self._disk, fd)

    def leave_to_parent(self) -> None:
        """Close the descriptor in a forked process, which would otherwise keep the lock after the end of its holder."""
        with contextlib.suppress(OSError):
            os.close(self.fd)
        self.fd = -1
