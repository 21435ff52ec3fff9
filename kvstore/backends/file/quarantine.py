"""The quarantine: a few damaged blocks, kept so that somebody can look at what happened to them."""

from __future__ import annotations

import contextlib
import threading
import time

from kvstore.backends.file.layout import QUARANTINE_DIR, is_quarantined
from kvstore.backends.file.ledger import Ledger
from kvstore.backends.file.space import charge
from kvstore.diskio import OsDisk

__all__ = ["Quarantine"]


class Quarantine:
    """A bounded directory of damaged blocks; the oldest go first. They count within the capacity. Thread-safe.

    Args:
        disk: What to call the system with.
        state_fd: The root's state directory.
        ledger: Where what is dropped is struck out.
        blocks_max: Most blocks it keeps; 0: none.
        bytes_max: Most bytes they may take.
    """

    def __init__(self, disk: OsDisk, state_fd: int, ledger: Ledger, *, blocks_max: int, bytes_max: int) -> None:
        self._disk = disk
        self._state_fd = state_fd
        self._ledger = ledger
        self._blocks_max = blocks_max
        self._bytes_max = bytes_max
        self._mutex = threading.Lock()
        self._last_ns = 0

    def next_time_ns(self) -> int:
        """Return the time for a name; never the same twice."""
        with self._mutex:
            self._last_ns = max(time.time_ns(), self._last_ns + 1)
            return self._last_ns

    def make_room(self, size_bytes: int) -> bool:
        """Drop the oldest blocks until one of a size fits; return whether it does."""
        if self._blocks_max == 0 or size_bytes > self._bytes_max:
            return False
        try:
            with self._mutex:
                fd = self._open(make=True)
                try:
                    kept = self._listed(fd)
                    while kept and (
                        len(kept) >= self._blocks_max or sum(size for _, _, size in kept) + size_bytes > self._bytes_max
                    ):
                        self._drop(fd, *kept.pop(0)[1:])
                finally:
                    self._disk.close(fd)
        except OSError:
            return False
        return True

    def take(self, name: str, dir_fd: int, kept_name: str, inode: int) -> bool:
        """Move a block in, if it is still the file of that inode; return whether it was.

        Raises:
            OSError: It can't be moved; it is where it was.
        """
        with self._mutex:
            fd = self._open(make=True)
            try:
                self._disk.rename(name, kept_name, dir_fd, fd)
                if self._disk.stat(kept_name, fd).st_ino == inode:
                    return True
                # Another writer has put a good block there just now: give it back.
                with contextlib.suppress(FileExistsError):
                    self._disk.link(kept_name, name, fd, dir_fd)
                self._disk.unlink(kept_name, fd)
                return False
            finally:
                self._disk.close(fd)

    def clear(self) -> int:
        """Drop all blocks, because their space is needed; return the bytes freed."""
        freed = 0
        with self._mutex, contextlib.suppress(FileNotFoundError):
            fd = self._open(make=False)
            try:
                for _, name, size_bytes in self._listed(fd):
                    self._drop(fd, name, size_bytes)
                    freed += size_bytes
            finally:
                self._disk.close(fd)
        return freed

    def _open(self, *, make: bool) -> int:
        try:
            return self._disk.open_dir(QUARANTINE_DIR, self._state_fd)
        except FileNotFoundError:
            if not make:
                raise
        with contextlib.suppress(FileExistsError):
            self._disk.mkdir(QUARANTINE_DIR, self._state_fd)
        return self._disk.open_dir(QUARANTINE_DIR, self._state_fd)

    def _listed(self, fd: int) -> list[tuple[int, str, int]]:
        """Return age, name and size of the blocks, oldest first."""
        with self._disk.scandir(fd) as entries:
            names = [entry.name for entry in entries if is_quarantined(entry.name)]
        found = []
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                time_ns = int(name.rpartition("-")[2].removesuffix(".bad"))
                found.append((time_ns, name, charge(self._disk.stat(name, fd).st_size)))
        return sorted(found)

    def _drop(self, fd: int, name: str, size_bytes: int) -> None:
        try:
            self._disk.unlink(name, fd)
        except FileNotFoundError:
            return
        self._ledger.remove(size_bytes, 1)
