"""Proof that a process has ended, with all that the kernel still did for it.

A process that was killed is gone before its io_uring is: operations that a drive has begun go on for as long as the
drive takes, and write to memory that the process shared. So it locks an open file, its rings keep that file open, and
the lock is free only when the process and the last operation of the last ring have ended.
"""

from __future__ import annotations

import fcntl
import os
from typing import Final

__all__ = ["Lifetime", "held", "hold"]

_holding: Final[list[int]] = []


class Lifetime:
    """The lock, as another process sees it.

    Attributes:
        fd: Descriptor to pass to the process that is to :func:`hold` it; -1 once its end was seen.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("kvstore-lifetime", os.MFD_CLOEXEC)

    @property
    def has_ended(self) -> bool:
        """Whether nobody holds it. To be asked once the process itself is gone: it holds nothing before it starts."""
        if self.fd >= 0:
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            self.close()
        return True

    def close(self) -> None:
        """Let go of the descriptor. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def hold(fd: int) -> None:
    """Lock what another process passed on, until this process and its rings have ended; closes the descriptor.

    Raises:
        OSError: It can't be opened anew, or is locked by somebody else.
    """
    # Anew: a lock belongs to an open file, and the one that was passed on is the other process's, too.
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)
    _holding.append(own)


def held() -> int | None:
    """Return the descriptor that this process holds, for its rings to keep open; None if nobody asked it to."""
    return _holding[-1] if _holding else None
