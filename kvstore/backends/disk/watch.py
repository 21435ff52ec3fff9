"""Being told of changes in directories (inotify), where the kernel tells."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from typing import Final

__all__ = ["Watch"]

_EVENTS: Final = 0x2 | 0x40 | 0x80 | 0x100 | 0x200
"""IN_MODIFY, IN_MOVED_FROM, IN_MOVED_TO, IN_CREATE, IN_DELETE (inotify(7))."""

_libc = ctypes.CDLL(None, use_errno=True)


class Watch:
    """Calls back on the loop when something changes in a directory; says nothing of what, and may say it late.

    Changes by other machines are not told, and where the kernel has no watches left nothing is: whoever uses this
    also looks by himself now and then.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._fd = int(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._told)

    def add(self, fd: int) -> None:
        """Watch an open directory; on any thread. It ends by itself when the directory goes."""
        if self._fd >= 0:
            _libc.inotify_add_watch(self._fd, f"/proc/self/fd/{fd}".encode(), ctypes.c_uint32(_EVENTS))

    def close(self) -> None:
        """End it; idempotent."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _told(self) -> None:
        try:
            os.read(self._fd, 65536)
        except BlockingIOError:
            return
        self._on_change()
