"""Files and directories that have to be this user's own, and the small JSON files. All functions block."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
from typing import Any, Final

from kvstore.diskio import OsDisk

__all__ = [
    "close_all",
    "is_own_file",
    "names_in",
    "open_own_directory",
    "open_regular",
    "read_json",
    "remove_segment",
    "write_json",
]

_JSON_BYTES_MAX: Final = 4096


def open_regular(disk: OsDisk, name: str, flags: int, dir_fd: int) -> tuple[int, int]:
    """Open a regular file of this user with one name; return its descriptor and length.

    Raises:
        OSError: It can't be opened; EPERM if it is anything else.
    """
    fd = disk.open_file(name, flags, dir_fd)
    try:
        status = disk.fstat(fd)
        if not is_own_file(status):
            raise PermissionError(errno.EPERM, "not a regular file of this user alone", name)
    except BaseException:
        disk.close(fd)
        raise
    return fd, status.st_size


def is_own_file(status: os.stat_result) -> bool:
    """Return whether a file is a regular one of this user with one name."""
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink <= 1


def names_in(disk: OsDisk, dir_fd: int) -> list[str]:
    """Return the names in a directory, by a descriptor of its own: the position in the directory is shared."""
    fd = disk.open_dir(".", dir_fd)
    try:
        with disk.scandir(fd) as entries:
            return [entry.name for entry in entries]
    finally:
        disk.close(fd)


def open_own_directory(disk: OsDisk, name: str, dir_fd: int) -> int:
    """Open a directory of this user.

    Raises:
        OSError: It can't be opened; EPERM if it is another user's.
    """
    fd = disk.open_dir(name, dir_fd)
    if disk.fstat(fd).st_uid != os.geteuid():
        disk.close(fd)
        raise PermissionError(errno.EPERM, "a directory of another user", name)
    return fd


def close_all(disk: OsDisk, *fds: int) -> None:
    """Close descriptors that are open, whatever close says."""
    for fd in fds:
        if fd >= 0:
            with contextlib.suppress(OSError):
                disk.close(fd)


def remove_segment(disk: OsDisk, dir_fd: int, name: str) -> None:
    """Remove a segment, and free its space at once also if others have it open."""
    with contextlib.suppress(FileNotFoundError):
        with contextlib.suppress(PermissionError):
            fd, _ = open_regular(disk, name, os.O_WRONLY, dir_fd)
            try:
                disk.ftruncate(fd, 0)
            finally:
                disk.close(fd)
        disk.unlink(name, dir_fd)


def read_json(disk: OsDisk, name: str, dir_fd: int) -> dict[str, Any] | None:
    """Return a small JSON object; None if there is no such file, empty if its content is anything else."""
    try:
        fd, size = open_regular(disk, name, os.O_RDONLY, dir_fd)
    except FileNotFoundError:
        return None
    try:
        content = bytearray(min(size, _JSON_BYTES_MAX) or 1)
        length = disk.preadv(fd, [memoryview(content)], 0)
    finally:
        disk.close(fd)
    try:
        found = json.loads(content[:length])
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def write_json(disk: OsDisk, name: str, dir_fd: int, value: dict[str, Any]) -> None:
    """Replace a small JSON file, and wait until the new one survives a power cut."""
    tmp = f"{name}.{secrets.token_hex(4)}.tmp"
    fd, _ = open_regular(disk, tmp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, dir_fd)
    try:
        text = json.dumps(value).encode()
        if disk.pwritev(fd, [memoryview(text)], 0) != len(text):
            raise OSError(errno.EIO, f"{name} was written in part")
        disk.fsync(fd)
    finally:
        disk.close(fd)
    disk.rename(tmp, name, dir_fd, dir_fd)
