"""Notifications of changed files (inotify)."""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
from collections.abc import Callable, Collection
from typing import Final

WRITES: Final = 0x2
"""Writes to a file: IN_MODIFY (inotify(7))."""

NAMES: Final = 0x40 | 0x80 | 0x100 | 0x200
"""New and removed names in a directory: IN_MOVED_FROM, IN_MOVED_TO, IN_CREATE, IN_DELETE."""

_EVENT: Final = struct.Struct("iIII")
"""Watch, mask, cookie, length of the name that follows."""

_libc = ctypes.CDLL(None, use_errno=True)


class Watch:
    """Calls back on the loop, with some delay, when watched files or directories change, with their watches.

    Changes by other machines cause no call. Without free inotify watches in the kernel, no change does. The caller
    therefore also polls.
    """

    def __init__(self, on_change: Callable[[Collection[int]], None]) -> None:
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._fd = int(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._notified)

    def add(self, fd: int, events: int = WRITES | NAMES) -> int:
        """Watch an open file or directory until it is removed; return its watch, or -1."""
        if self._fd < 0:
            return -1
        return int(_libc.inotify_add_watch(self._fd, f"/proc/self/fd/{fd}".encode(), ctypes.c_uint32(events)))

    def remove(self, watch: int) -> None:
        """Stop watching a file."""
        if self._fd >= 0 <= watch:
            _libc.inotify_rm_watch(self._fd, watch)

    def close(self) -> None:
        """Stop watching; idempotent."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _notified(self) -> None:
        try:
            events = os.read(self._fd, 65536)
        except BlockingIOError:
            return
        changed: set[int] = set()
        at = 0
        while at < len(events):
            watch, _, _, name_bytes = _EVENT.unpack_from(events, at)
            changed.add(watch)
            at += _EVENT.size + name_bytes
        self._on_change(changed)
