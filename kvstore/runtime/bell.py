"""A counter in shared memory that says "there is something to read" without a system call.

A read of a socket drops the GIL, and a thread that has dropped it may wait milliseconds to get it back. So the
scheduler's thread looks at the bell, which is memory, and reads only when it has been rung.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import Final

__all__ = ["Bell"]

_COUNT: Final = struct.Struct("<Q")


class Bell:
    """One page of shared memory with a count in it; one side rings, the other looks.

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
        """Say that there is one more thing to read: it is on its way."""
        _COUNT.pack_into(self._page, 0, _COUNT.unpack_from(self._page, 0)[0] + 1)

    @property
    def count(self) -> int:
        """How often it was rung."""
        count: int = _COUNT.unpack_from(self._page, 0)[0]
        return count

    def close(self) -> None:
        """Let go of the page. Idempotent."""
        self._page.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
