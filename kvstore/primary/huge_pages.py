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
import errno
import mmap
import os
from collections.abc import Callable

import numpy as np

__all__ = ["HUGE_PAGE_BYTES", "advise_huge_pages", "map_for_huge_pages", "take_huge_pages"]

HUGE_PAGE_BYTES = mmap.PAGESIZE // 8 * mmap.PAGESIZE
"""What one page of 8-byte page table entries maps: 2 MiB with small pages of 4 KiB, 512 MiB with those of 64 KiB."""

_MADV_COLLAPSE = 25
"""Linux 6.1, include/uapi/asm-generic/mman-common.h; Python has no name for it."""

_STEP_BYTES = max(64 << 20, HUGE_PAGE_BYTES)
"""Memory asked for at once. ``mmap.madvise`` holds the GIL: between two steps other threads and signals have a turn."""

_PLACES_MAX = 64
"""Places to try for a mapping. Usually the second is good; each hole in the address space that is just long enough for
the mapping costs one more. A place costs three system calls."""

_KINDS = (mmap.MAP_PRIVATE, mmap.MAP_SHARED)
"""Kinds of memory to put in the way, by turns: what suits huge pages by itself, by the kernel's version and settings,
leaves a gap above, and then what is below it is off by as much as before."""


def map_for_huge_pages(make: Callable[[], mmap.mmap]) -> mmap.mmap:
    """Return a mapping, at an address that suits huge pages if it can be had.

    Kernels that give shared memory no huge pages by themselves put it anywhere. They fill the highest hole that is
    long enough, from its end downwards. So something of the right length below a mapping that is off moves the next
    one to a good address; as it is longer than the mapping, it does not go to a hole above.

    Args:
        make: Makes the mapping. It may be called several times, and two of its mappings may be there at once.

    Raises:
        OSError: The first mapping can't be made.
    """
    mapping = make()
    try:
        with contextlib.ExitStack() as in_the_way:
            for place in range(_PLACES_MAX - 1):
                off = _address_of(mapping) % HUGE_PAGE_BYTES
                if not off or len(mapping) < HUGE_PAGE_BYTES:
                    break
                # Where the address space of a process is limited, what there is has to do.
                with contextlib.suppress(OSError):
                    in_the_way.enter_context(_between(off, len(mapping), _KINDS[place % 2]))
                    better = make()
                    in_the_way.enter_context(mapping)
                    mapping = better
    except BaseException:
        mapping.close()
        raise
    return mapping


def advise_huge_pages(mapping: mmap.mmap) -> None:
    """Tell the kernel that huge pages are welcome, for where the system lets it heed that.

    It changes what this process takes from now on: pages that are there already stay as they are.
    """
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
        Bytes for which the kernel said it has done so. Of a step that it did in part nothing is counted.

    Raises:
        OSError: There is no memory left (``ENOSPC``, ``ENOMEM``), not even in small pages.
    """
    taken = 0
    whole = len(mapping) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    for start in range(0, whole, _STEP_BYTES):
        size = min(_STEP_BYTES, whole - start)
        for at in range(start, start + size, HUGE_PAGE_BYTES):
            # The kernel makes nothing huge out of what isn't there at all; one small page is enough.
            os.posix_fallocate(fd, at, mmap.PAGESIZE)
        try:
            mapping.madvise(_MADV_COLLAPSE, start, size)
        except OSError as error:
            # EAGAIN: some page is in use just now. Anything else (no memory in one piece, no such call) will not end,
            # and asking on would cost time for nothing.
            if error.errno != errno.EAGAIN:
                break
        else:
            taken += size
    return taken


def _between(off: int, length: int, kind: int) -> mmap.mmap:
    """Reserve addresses so that a mapping of that length just below them is not off any more.

    Nothing may touch them, so no memory is taken.
    """
    pages = -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
    reserved = -(-pages // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES + (off - pages) % HUGE_PAGE_BYTES
    return mmap.mmap(-1, reserved, flags=kind | mmap.MAP_ANONYMOUS, prot=0)


def _address_of(mapping: mmap.mmap) -> int:
    # The array is gone on return, so the mapping can be closed.
    return int(np.frombuffer(mapping, np.uint8).ctypes.data)
