"""Finding what lies behind a piece of memory, so that another process can map it too."""

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
        offset: Where in the file the memory begins (a multiple of the page size).
        skip: Bytes between that and the first byte of the memory.
        size_bytes: Length of the memory.
    """

    fd: int
    offset: int
    skip: int
    size_bytes: int


def find_backing(memory: memoryview) -> SharedBacking | None:
    """Return what backs a piece of memory, or None if it is private or can't be opened.

    The kernel tells in ``/proc/self/maps`` which file an address belongs to; that the file found under the name is
    that very file is checked by device and inode. A file without a name (memfd, or removed) is found among this
    process's own descriptors.
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
            continue  # A descriptor that is gone by now, or one that may not be opened again.
    return None
