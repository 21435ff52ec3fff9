"""Files in /dev/shm that hold the primary tier of an engine with several processes, and do not outlive it.

Every process of an engine that has such a file open holds a shared lock (``flock``) on it, which the kernel releases
when the process is killed. So a file without a lock belongs to an engine that has ended, and the next start of any
engine removes it. A process that opens the file at that moment notices that it has no name any more, and makes another.
The names end in ``.locked.mmap``; other files, which have no lock, are never removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import stat
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore.errors import KVStoreError
from kvstore.primary.memory import size_text
from kvstore.primary.pages import populate

SHM: Final = Path("/dev/shm")
SUFFIX: Final = ".locked.mmap"
"""End of the names of files with a lock."""

_TRAILER: Final = struct.Struct("<8sQ")
"""In the page behind the primary tier: a mark that all of it is allocated, and the bytes in huge pages."""

_ALLOCATED: Final = b"kvstore1"
_OPEN_TRIES: Final = 1000
_OPEN_PAUSE_S: Final = 0.005
"""Each failure means that another process makes or removes the file."""

logger = logging.getLogger("kvstore.primary.shared")


@dataclass(frozen=True, slots=True)
class SharedFile:
    """An open and locked file. ``fd`` keeps the lock, as long as no other descriptor has one."""

    fd: int
    is_maker: bool  # Whether this call made the file.


def open_shared(path: Path, size_bytes: int) -> SharedFile:
    """Open the file of an engine's primary tier and lock it; the first process makes it.

    ``size_bytes``: length of the primary tier. The file has a page more.

    Raises:
        KVStoreError: Another program removes the file.
    """
    for _ in range(_OPEN_TRIES):
        remove_dead_files(path.parent)
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            is_maker = not path.exists()
            flags = os.O_RDWR | os.O_CLOEXEC
            descriptor = _made(path, size_bytes + mmap.PAGESIZE) if is_maker else os.open(path, flags)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            found = os.fstat(descriptor)
            if found.st_nlink and found.st_size:
                return SharedFile(descriptor, is_maker)
            os.close(descriptor)  # Removed, or without its length, before it was locked here.
        time.sleep(_OPEN_PAUSE_S)
    raise KVStoreError(f"{path} is removed again and again. End the program that does it.")


def allocate(descriptor: int, *, huge_pages: bool) -> int:
    """Allocate the primary tier in its file, unless another process has; returns the bytes in huge pages.

    One process of an engine allocates, and the others wait for it. It must precede everything that pins the memory.

    Args:
        descriptor: Of the file.
        huge_pages: As for :func:`kvstore.primary.pages.populate`.

    Raises:
        ConfigError: The memory of the machine, the container or the file system does not suffice.
    """
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW, _range_lock(fcntl.F_WRLCK))
    try:
        file_bytes = os.fstat(descriptor).st_size
        size_bytes = file_bytes - mmap.PAGESIZE
        mark, huge_bytes = _TRAILER.unpack(os.pread(descriptor, _TRAILER.size, size_bytes))
        if mark != _ALLOCATED:
            huge_bytes = min(size_bytes, populate(descriptor, file_bytes, huge_pages=huge_pages))
            os.pwrite(descriptor, _TRAILER.pack(_ALLOCATED, huge_bytes), size_bytes)
        return int(huge_bytes)
    finally:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _range_lock(fcntl.F_UNLCK))


def remove_dead_files(directory: Path = SHM) -> None:
    """Remove the files of engines that have ended, which hold memory."""
    for path in directory.glob(f"*{SUFFIX}"):
        with contextlib.suppress(OSError):
            # Any user may make a pipe there, whose opening would wait.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found = os.fstat(descriptor)
                if stat.S_ISREG(found.st_mode) and os.path.samestat(found, os.stat(path)):
                    path.unlink()
                    logger.info("Removed %s of an engine that has ended, %s", path, size_text(found.st_blocks * 512))
            finally:
                os.close(descriptor)


def _made(path: Path, size_bytes: int) -> int:
    """Make a file; processes that open it wait until it has its length."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.ftruncate(descriptor, size_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _range_lock(kind: int) -> bytes:
    """Return C's ``struct flock`` of the lock of an allocation, which is independent of ``flock()``."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 1, 0)
