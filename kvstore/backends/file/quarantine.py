"""The quarantine: a few damaged blocks, kept so that somebody can look at what happened to them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence

from kvstore.backends.file.layout import QUARANTINE_DIR, is_quarantined
from kvstore.backends.file.ledger import Ledger, Removal
from kvstore.backends.file.space import charge
from kvstore.diskio import OsDisk

__all__ = ["Quarantine", "surplus"]


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
                    count = surplus([size for _, _, size in kept], size_bytes, self._blocks_max, self._bytes_max)
                    self._drop(fd, kept[:count])
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
        with self._mutex, contextlib.suppress(FileNotFoundError):
            fd = self._open(make=False)
            try:
                return self._drop(fd, self._listed(fd))
            finally:
                self._disk.close(fd)
        return 0

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

    def _drop(self, fd: int, dropped: Sequence[tuple[int, str, int]]) -> int:
        """Remove blocks; return the bytes freed."""
        if not dropped:
            return 0
        removal = Removal(sum(size for _, _, size in dropped), len(dropped))
        freed, files = 0, 0
        self._ledger.begin(removal)
        try:
            for _, name, size_bytes in dropped:
                with contextlib.suppress(FileNotFoundError):
                    self._disk.unlink(name, fd)
                    freed += size_bytes
                    files += 1
        finally:
            self._ledger.end(removal, (freed, files))
        return freed


def surplus(sizes: Sequence[int], size_bytes: int, blocks_max: int, bytes_max: int) -> int:
    """Return how many of the first blocks have to go so that one more of ``size_bytes`` keeps both bounds."""
    count = max(0, len(sizes) + 1 - blocks_max)
    while sum(sizes[count:]) + size_bytes > bytes_max and count < len(sizes):
        count += 1
    return count
