"""Proof that a process and all its kernel I/O have ended.

A killed process ends before its io_uring: operations in the drive continue, and write to shared memory. The process
therefore locks an open file that its rings keep open. The lock is released only when the process and the last operation
of its last ring have ended.
"""

from __future__ import annotations

import fcntl
import os
from typing import Final

_holding: Final[list[int]] = []


class Lifetime:
    """The lock, as seen by another process."""

    def __init__(self) -> None:
        # Descriptor for the process that will :func:`hold` it; -1 after its end was detected.
        self.fd = os.memfd_create("kvstore-lifetime", os.MFD_CLOEXEC)

    @property
    def has_ended(self) -> bool:
        """Whether the lock is free. Valid only after the process has ended: before its start, the lock is free too."""
        if self.fd >= 0:
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            self.close()
        return True

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def hold(fd: int) -> None:
    """Lock a descriptor from another process until this process and its rings have ended; closes the descriptor.

    Raises:
        OSError: It cannot be reopened, or another process has locked it.
    """
    # Reopened, because locks belong to open file descriptions, and the inherited one is shared with the other process.
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)
    _holding.append(own)


def held() -> int | None:
    """Return the locked descriptor, which rings keep open; None if :func:`hold` was not called."""
    return _holding[-1] if _holding else None
