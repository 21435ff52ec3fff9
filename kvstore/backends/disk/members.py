"""The engines that share a root: each keeps a locked file there, with what it holds and asks for. All methods block.

A free lock proves that an engine has ended, and no time stamp is compared. The files decide only how engines share the
space: to whom a segment belongs depends on the locks of the segment alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import struct
from typing import Final, NamedTuple

from kvstore.backends.disk import files
from kvstore.backends.disk.files import FileLock
from kvstore.diskio import OsDisk

_is_member: Final = re.compile(r"engine\.[0-9a-f]{16}", re.ASCII).fullmatch
_STATE: Final = struct.Struct("<QQ32s")


class Member(NamedTuple):
    """State of an engine. Of two engines that hold as much, the name decides which one is larger."""

    held_bytes: int  # Length of its segments in this root.
    name: str
    asked_bytes: int  # Length of the segment that it asks for; 0: none.
    namespace: str

    def is_behind(self, held_bytes: int, more_bytes: int = 0) -> bool:
        """Return whether it asks for a segment, and would then hold no more than an engine with ``held_bytes``.

        ``more_bytes``: Length of the segment that the other engine gives up for it.
        """
        return self.asked_bytes > 0 and self.held_bytes + self.asked_bytes <= held_bytes - more_bytes


class Members:
    """This engine's file among those of the others."""

    def __init__(self, disk: OsDisk, state_fd: int, digest: bytes) -> None:
        self.name = f"engine.{secrets.token_hex(8)}"
        self.are_there = False  # Whether the last look found others.
        self._disk = disk
        self._state_fd = state_fd
        self._digest = digest
        self._lock = FileLock(disk, state_fd, self.name)
        self._stated = b""

    def state(self, held_bytes: int, asked_bytes: int = 0) -> None:
        """State what this engine holds and asks for. On a full or read-only disk, others see the previous state."""
        content = _STATE.pack(held_bytes, asked_bytes, self._digest)
        with contextlib.suppress(OSError):
            if self._lock.fd >= 0 and not self._disk.fstat(self._lock.fd).st_nlink:
                # The file was deleted.
                self._lock.release()
                self._stated = b""
            if self._stated != content and (self._lock.fd >= 0 or self._lock.try_acquire()):
                files.write_at(self._disk, self._lock.fd, content, 0)
                # A network filesystem would show it to other machines much later.
                self._disk.fdatasync(self._lock.fd)
                self._stated = content

    def others(self) -> list[Member]:
        """Return the other engines that run or are stopped; remove the files of those that have ended."""
        found: list[Member] = []
        for name in filter(_is_member, files.names_in(self._disk, self._state_fd)):
            # A file that can't be used counts as none. It may have been removed since.
            with contextlib.suppress(OSError):
                if name == self.name:
                    continue
                with files.opened(self._disk, name, os.O_RDONLY, self._state_fd) as (fd, _):
                    if not is_locked(self._disk, fd):
                        self._disk.unlink(name, self._state_fd)
                        continue
                    content = bytes(files.read_at(self._disk, fd, 0, _STATE.size)).ljust(_STATE.size, b"\0")
                held_bytes, asked_bytes, digest = _STATE.unpack(content)
                found.append(Member(held_bytes, name, asked_bytes, digest.hex()))
        self.are_there = bool(found)
        return found

    def leave(self) -> None:
        """Remove the file; idempotent."""
        if self._lock.fd >= 0:
            with contextlib.suppress(OSError):
                self._disk.unlink(self.name, self._state_fd)
        self._lock.release()


def is_locked(disk: OsDisk, fd: int) -> bool:
    """Return whether another open file has the lock on a file."""
    try:
        # Shared, so that two engines that look at once do not exclude each other.
        disk.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    # Not by the close alone: a process that is forked at this moment has the file open, too.
    disk.flock(fd, fcntl.LOCK_UN)
    return False
