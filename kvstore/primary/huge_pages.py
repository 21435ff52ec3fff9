"""Huge pages behind the memory of a region.

A drive is told of a transfer piece by piece, and a piece ends where physical memory does: 128 KiB in small pages are up
to 32 pieces, in a huge page it is one. Drives take a bounded number of pieces at a time, and the kernel's work for
direct I/O, and the processor's to find a page, grow with the number of pages.

Most systems give memory that processes share small pages, whatever a process advises
(``/sys/kernel/mm/transparent_hugepage/shmem_enabled`` is "never"). Since Linux 6.1 a process can ask for huge ones by
hand, ``madvise(MADV_COLLAPSE)``, whatever that says. That is done here, once, before anybody uses the memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable

import numpy as np

__all__ = ["HUGE_PAGE_BYTES", "advise_huge_pages", "map_for_huge_pages", "take_huge_pages"]

HUGE_PAGE_BYTES = 2 << 20
"""Length of a huge page on x86-64, and on ARM with small pages of 4 KiB; where it is longer, the kernel declines."""

_MADV_COLLAPSE = 25
"""Linux 6.1, include/uapi/asm-generic/mman-common.h; Python has no name for it."""

_STEP_BYTES = 64 << 20
"""Memory asked for at once: a signal can interrupt the start between two steps, and a decline ends the asking."""


_PLACES_MAX = 4
"""Places to try for a mapping; the second is good unless other threads map memory just then."""


def map_for_huge_pages(make: Callable[[], mmap.mmap]) -> mmap.mmap:
    """Return a mapping, at an address that suits huge pages if it can be had.

    Kernels before 6.12 or so put shared memory anywhere. They fill the address space downwards, so something small in
    the way, as long as the last place was off, moves the next one down by that.

    Args:
        make: Makes the mapping; may be called several times.
    """
    in_the_way: list[mmap.mmap] = []
    try:
        for _ in range(_PLACES_MAX):
            mapping = make()
            off = _address_of(mapping) % HUGE_PAGE_BYTES
            if not off or len(mapping) < HUGE_PAGE_BYTES:
                return mapping
            mapping.close()
            in_the_way.append(mmap.mmap(-1, off, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        return make()
    finally:
        for mapping in in_the_way:
            mapping.close()


def advise_huge_pages(mapping: mmap.mmap) -> None:
    """Tell the kernel that huge pages are welcome, for where the system lets it heed that."""
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)


def take_huge_pages(mapping: mmap.mmap, fd: int) -> int:
    """Take as much of a shared mapping as there are huge pages for; what is in the memory stays.

    Best effort: an old kernel, a mapping at an address that is no multiple of a huge page, and memory without 2 MiB in
    one piece leave the rest as it was. Memory that is pinned or registered already is left as it is, too.

    Args:
        mapping: The whole of a file in memory (memfd, or in /dev/shm), mapped from its start.
        fd: That file.

    Returns:
        Bytes for which the kernel said it has done so, all from the start.

    Raises:
        OSError: There is no memory left (``ENOSPC``, ``ENOMEM``), not even in small pages.
    """
    whole = len(mapping) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    for start in range(0, whole, _STEP_BYTES):
        size = min(_STEP_BYTES, whole - start)
        for at in range(start, start + size, HUGE_PAGE_BYTES):
            # The kernel makes nothing huge out of what isn't there at all; one small page is enough.
            os.posix_fallocate(fd, at, mmap.PAGESIZE)
        try:
            mapping.madvise(_MADV_COLLAPSE, start, size)
        except OSError:
            return start
    return whole


def _address_of(mapping: mmap.mmap) -> int:
    return int(np.frombuffer(mapping, np.uint8).ctypes.data)
