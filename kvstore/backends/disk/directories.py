"""The directories of a root: opening, creating, and refusing those that others could change. All calls block."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from typing import Final

from kvstore.backends.disk import files
from kvstore.diskio import OsDisk
from kvstore.errors import AbsentError, ConfigError

_log: Final = logging.getLogger("kvstore.backends.disk")


def open_directory(disk: OsDisk, path: str) -> int:
    """Open a root, and create it if only its last component is missing.

    Raises:
        ConfigError: The path is not a directory.
        AbsentError: There is no directory above it.
    """
    try:
        return disk.open_root(path)
    except FileNotFoundError:
        pass
    except NotADirectoryError as error:
        raise ConfigError(f"'path' is {path!r}, which is not a directory. Name a directory.") from error
    try:
        # Another engine may make it at the same time.
        with contextlib.suppress(FileExistsError):
            disk.mkdir(path)
        return disk.open_root(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise AbsentError(
            f"'path' is {path!r}, but there is no directory {os.path.dirname(path)!r}. Mount the disk or make that "
            "directory; only the last component is made by kvstore."
        ) from error


def check_mode(mode: int, path: str) -> None:
    """Refuse a root where any user could remove our directories; warn if its group could."""
    if mode & stat.S_ISVTX:
        return
    if mode & stat.S_IWOTH:
        raise ConfigError(
            f"'path' is {path!r}, which every user may write to (mode {mode & 0o7777:04o}). Blocks hold what users "
            f"asked. Do 'chmod o-w' on it, or name a directory below it, such as {os.path.join(path, 'kvstore')!r}, "
            "which is made with mode 0700."
        )
    if mode & stat.S_IWGRP:
        _log.warning("%s may be written to by its group (mode %04o), which could remove blocks", path, mode & 0o7777)


def enter(disk: OsDisk, name: str, dir_fd: int, path: str) -> int:
    """Open a directory of ours below the root, and create it if it is missing."""
    try:
        return own_directory(disk, name, dir_fd, path)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            disk.mkdir(name, dir_fd)
    return own_directory(disk, name, dir_fd, path)


def own_directory(disk: OsDisk, name: str, dir_fd: int, path: str) -> int:
    """Open a directory of ours below the root ``path``."""
    try:
        return files.open_own_directory(disk, name, dir_fd)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP, errno.EPERM):
            raise
        raise ConfigError(
            f"{os.path.join(path, name)!r} is not a directory of this user ({error.strerror}). Remove it, run as "
            "its owner, or name another 'path'."
        ) from error


def takes_direct(disk: OsDisk, name: str, dir_fd: int, path: str) -> bool:
    """Return whether the filesystem of a root supports direct I/O; ``name``: a file of ours, which may be created."""
    try:
        fd = disk.open_file(name, os.O_RDWR | os.O_CREAT | os.O_DIRECT, dir_fd)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _log.warning("%s refuses direct I/O; reading and writing through the page cache", path)
        return False
    disk.close(fd)
    return True
