"""Whole transfers: short reads of files are completed here."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Final

from kvstore.diskio.disk import OsDisk
from kvstore.diskio.uring.memory import address_of

__all__ = ["ALIGNMENT", "after", "flat", "is_aligned", "read_into"]

ALIGNMENT: Final = 4096
"""Direct I/O unit, bytes, of address, length and offset: what every filesystem takes (many take 512 as well)."""

_STUCK_MAX: Final = 16
"""Short transfers in a row without progress before a disk is called broken; each may be cut at another place."""


def flat(buffers: Sequence[memoryview]) -> list[memoryview]:
    """Return the buffers as views of plain bytes, so that they can be cut; nothing is copied."""
    return [b if b.format == "B" and b.ndim == 1 else b.cast("B") for b in buffers]


def is_aligned(buffers: Sequence[memoryview]) -> bool:
    """Tell whether the address and length of each buffer are multiples of :data:`ALIGNMENT`."""
    if any(b.nbytes % ALIGNMENT for b in buffers):
        return False
    return all(address_of(b) % ALIGNMENT == 0 for b in buffers if b.nbytes)


def read_into(disk: OsDisk, fd: int, buffers: Sequence[memoryview], size_bytes: int, *, unit: int = 1) -> int:
    """Read a file from its start into the buffers.

    Args:
        disk: What to read with.
        fd: The file.
        buffers: Writable flat bytes, together at least ``size_bytes``; under direct I/O more, for the last unit.
        size_bytes: Length of the file.
        unit: Where a short read may be taken up again: 1, or :data:`ALIGNMENT` for direct I/O, so that the bytes after
            the last whole unit are read again.

    Returns:
        Bytes read: ``size_bytes``, or fewer if the file ended earlier.

    Raises:
        OSError: As the disk says; EIO if it keeps cutting the reads short.
    """
    done, stuck = 0, 0
    while done < size_bytes:
        got = disk.preadv(fd, after(buffers, done), done)
        if got == 0:
            return done
        before, done = done, _resume_at(done + got, size_bytes, unit)
        stuck = stuck + 1 if done <= before else 0
        if stuck > _STUCK_MAX:
            raise OSError(errno.EIO, f"reads stay short: {done} of {size_bytes} bytes")
    return min(done, size_bytes)


def after(buffers: Sequence[memoryview], skip: int) -> Sequence[memoryview]:
    """Return the buffers without their first ``skip`` bytes."""
    if skip == 0:
        return buffers
    rest = []
    for buffer in buffers:
        if skip < buffer.nbytes:
            rest.append(buffer[skip:])
        skip = max(0, skip - buffer.nbytes)
    return rest


def _resume_at(done: int, total: int, unit: int) -> int:
    """Return where to go on after ``done`` of ``total`` bytes."""
    return done if done >= total else done - done % unit
