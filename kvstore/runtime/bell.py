"""A counter in shared memory that signals messages without a system call.

A read of a socket releases the GIL, and the thread may wait milliseconds to get it back. So the scheduler's thread
compares the counter, and reads the socket only when it has changed.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import Final

__all__ = ["Bell"]

_COUNT: Final = struct.Struct("<Q")


class Bell:
    """A count in a page of shared memory: one side increments it, the other reads it.

    Args:
        fd: Descriptor of the page, from another process; None makes a new one.
    """

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("kvstore-bell", os.MFD_CLOEXEC) if fd is None else fd
        try:
            if fd is None:
                os.ftruncate(self.fd, mmap.PAGESIZE)
            self._page = mmap.mmap(self.fd, mmap.PAGESIZE)
        except BaseException:
            os.close(self.fd)
            raise

    def ring(self) -> None:
        """Announce one more frame, which has been sent."""
        _COUNT.pack_into(self._page, 0, _COUNT.unpack_from(self._page, 0)[0] + 1)

    @property
    def count(self) -> int:
        """Number of rings so far."""
        count: int = _COUNT.unpack_from(self._page, 0)[0]
        return count

    def close(self) -> None:
        """Unmap the page and close its descriptor. Idempotent."""
        self._page.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
