"""Page-aligned memory: header pages, and bounce buffers for what direct I/O can't take as it lies."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Final

from kvstore.backends.nvme.layout import PAGE
from kvstore.diskio.uring.memory import address_of

__all__ = ["PagePool", "aligned_buffer", "is_direct"]

_CHUNK_PAGES: Final = 256


class PagePool:
    """Header pages, reused; grows to what was in use at once, which the tier bounds. Used from the loop thread."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []

    def take(self, count: int) -> list[memoryview]:
        """Return pages; their content is whatever the last user left."""
        while len(self._free) < count:
            chunk = memoryview(mmap.mmap(-1, _CHUNK_PAGES * PAGE))
            self._free.extend(chunk[i : i + PAGE] for i in range(0, _CHUNK_PAGES * PAGE, PAGE))
        taken = self._free[-count:] if count else []
        del self._free[len(self._free) - count :]
        return taken

    def give_back(self, pages: Sequence[memoryview]) -> None:
        """Return pages that nothing uses any more."""
        self._free.extend(pages)


def aligned_buffer(size_bytes: int) -> memoryview:
    """Return a new page-aligned buffer of zeros, rounded up to whole pages."""
    return memoryview(mmap.mmap(-1, max(1, -(-size_bytes // PAGE)) * PAGE))


def is_direct(buffer: memoryview) -> bool:
    """Tell whether direct I/O takes a buffer as it lies."""
    return buffer.nbytes % PAGE == 0 and buffer.nbytes > 0 and address_of(buffer) % PAGE == 0
