"""Huge pages behind the memory of a region.

A transfer to a drive is a list of physically contiguous segments: 128 KiB are up to 32 segments in small pages, but one
in a huge page. Drives accept a bounded number of segments per request. The cost of direct I/O and of address
translation grows with the number of pages.

On most systems shared memory gets small pages regardless of a process's advice
(``/sys/kernel/mm/transparent_hugepage/shmem_enabled`` is "never"). Since Linux 6.1, ``madvise(MADV_COLLAPSE)`` makes
huge pages regardless of that setting. This module calls it once, before the memory is used.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Callable

import numpy as np

HUGE_PAGE_BYTES = mmap.PAGESIZE // 8 * mmap.PAGESIZE
"""Memory that one page of 8-byte page table entries maps: 2 MiB with pages of 4 KiB, 512 MiB with pages of 64 KiB."""

_MADV_COLLAPSE = 25
"""Linux 6.1, include/uapi/asm-generic/mman-common.h; Python has no name for it."""

_STEP_BYTES = max(64 << 20, HUGE_PAGE_BYTES)
"""Memory per call. ``mmap.madvise`` holds the GIL; other threads and signals run between two calls."""

_PLACES_MAX = 64
"""Maximum addresses tried for a mapping. Usually the second is aligned. Each hole in the address space that just fits
the mapping costs one more attempt (three system calls)."""

_KINDS = (mmap.MAP_PRIVATE, mmap.MAP_SHARED)
"""Kinds of placeholder mappings, used alternately. Depending on version and settings, the kernel may align one kind to
huge pages. Such a placeholder leaves a gap above it, and the next mapping is as misaligned as before."""


def map_for_huge_pages(make: Callable[[], mmap.mmap]) -> mmap.mmap:
    """Return a mapping, aligned to huge pages if possible.

    Kernels without huge pages for shared memory by default do not align such mappings. They place a mapping at the end
    of the highest hole that is long enough. So a placeholder of the right length below a misaligned mapping moves the
    next mapping to an aligned address. The placeholder is longer than the mapping, so it fits no hole above.

    Args:
        make: Makes the mapping. It may be called several times, and two of its mappings may exist at once.

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
                # If the address space of the process is limited, the current mapping is kept.
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
    """Advise the kernel to use huge pages; effective only if the system settings allow it.

    Only pages that this process allocates later are affected.
    """
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)


def take_huge_pages(mapping: mmap.mmap, fd: int) -> int:
    """Convert a shared mapping to huge pages as far as possible, preserving its content.

    Best effort: an old kernel, a misaligned mapping, fragmented memory, and memory that is already pinned or registered
    leave the rest in small pages.

    Args:
        mapping: A whole file in memory (memfd, or in /dev/shm), mapped from its start.

    Returns:
        Bytes that the kernel converted. A step converted in part does not count.

    Raises:
        OSError: No memory is left (``ENOSPC``, ``ENOMEM``), not even in small pages.
    """
    taken = 0
    whole = len(mapping) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    for start in range(0, whole, _STEP_BYTES):
        size = min(_STEP_BYTES, whole - start)
        for at in range(start, start + size, HUGE_PAGE_BYTES):
            # The kernel converts only ranges with at least one allocated page.
            os.posix_fallocate(fd, at, mmap.PAGESIZE)
        try:
            mapping.madvise(_MADV_COLLAPSE, start, size)
        except OSError as error:
            # EAGAIN: a page is temporarily in use. Other errors (fragmented memory, no such call) are permanent.
            if error.errno != errno.EAGAIN:
                break
        else:
            taken += size
    return taken


def _between(off: int, length: int, kind: int) -> mmap.mmap:
    """Reserve addresses (no memory) so that a mapping of the given length just below them is aligned."""
    pages = -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
    reserved = -(-pages // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES + (off - pages) % HUGE_PAGE_BYTES
    return mmap.mmap(-1, reserved, flags=kind | mmap.MAP_ANONYMOUS, prot=0)


def _address_of(mapping: mmap.mmap) -> int:
    # The array is gone on return, so the mapping can be closed.
    return int(np.frombuffer(mapping, np.uint8).ctypes.data)
