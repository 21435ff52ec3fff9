"""Finds the shared file behind a piece of memory, for another process to map."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

__all__ = ["SharedBacking", "find_backing"]


@dataclass(frozen=True, slots=True)
class SharedBacking:
    """A shared file behind a piece of memory.

    Attributes:
        fd: An open descriptor of it; the holder closes it.
        offset: Offset in the file of the page with the first byte (a multiple of the page size).
        skip: Bytes between ``offset`` and the first byte of the memory.
        size_bytes: Length of the memory.
    """

    fd: int
    offset: int
    skip: int
    size_bytes: int


def find_backing(memory: memoryview) -> SharedBacking | None:
    """Return the file that backs a piece of memory; None if it is private or can't be opened.

    ``/proc/self/maps`` names the file of an address; device and inode are compared, because another file may have that
    name now. A file without a name (memfd, or removed) is found among the descriptors of this process.
    """
    if not memory.nbytes:
        return None
    start = int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
    end = start + memory.nbytes
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            fields = line.split(maxsplit=5)
            low, high = (int(part, 16) for part in fields[0].split("-"))
            if low <= start < high:
                if end > high or not fields[1].endswith("s") or "w" not in fields[1]:
                    return None
                path = fields[5].strip() if len(fields) == 6 else ""
                fd = _open_inode(path, fields[3], int(fields[4]))
                page_start = start - start % os.sysconf("SC_PAGESIZE")
                if fd is None:
                    return None
                return SharedBacking(fd, int(fields[2], 16) + page_start - low, start - page_start, memory.nbytes)
    return None


def _open_inode(path: str, device: str, inode: int) -> int | None:
    candidates = [path] if path.startswith("/") and not path.endswith(" (deleted)") else []
    candidates += [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    for candidate in candidates:
        try:
            found = os.stat(candidate)
            if found.st_ino != inode or f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}" != device:
                continue
            return os.open(candidate, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # A descriptor that was closed meanwhile, or cannot be reopened.
    return None
