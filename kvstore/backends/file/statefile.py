"""Small files of state: read whole, replaced whole."""

from __future__ import annotations

import os
import stat

from kvstore.diskio import OsDisk, read_into, write_all

__all__ = ["publish_file", "read_file"]


def read_file(disk: OsDisk, name: str, dir_fd: int, size_bytes_max: int) -> bytearray | None:
    """Return the content of a regular file, or None if there is none, or none of such a size."""
    try:
        fd = disk.open_file(name, os.O_RDONLY, dir_fd)
    except FileNotFoundError:
        return None
    try:
        status = disk.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > size_bytes_max:
            return None
        content = bytearray(status.st_size)
        length = read_into(disk, fd, [memoryview(content)], len(content))
        return content[:length]
    finally:
        disk.close(fd)


def publish_file(
    disk: OsDisk, name: str, dir_fd: int, content: bytes, *, tmp: str, replace: bool, sync: bool = False
) -> bool:
    """Make a file that is seen whole or not at all.

    Args:
        disk: What to call the system with.
        name: Its name.
        dir_fd: Its directory.
        content: Its bytes.
        tmp: Name to write it under first, in the same directory.
        replace: Take the place of a file of that name; otherwise the first one stays.
        sync: Have it survive a power cut.

    Returns:
        Whether the file has this content now (False: another was first).

    Raises:
        OSError: It could not be written; nothing is left of it.
    """
    fd = disk.open_file(tmp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd)
    renamed = False
    try:
        try:
            write_all(disk, fd, [memoryview(content)])
            if sync:
                disk.fsync(fd)
        finally:
            disk.close(fd)
        if replace:
            disk.rename(tmp, name, dir_fd, dir_fd)
            renamed = True
        else:
            try:
                disk.link(tmp, name, dir_fd, dir_fd)
            except FileExistsError:
                return False
        if sync:
            disk.fsync(dir_fd)
    finally:
        if not renamed:
            disk.unlink(tmp, dir_fd)
    return True
