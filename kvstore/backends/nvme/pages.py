"""Page-aligned memory: header pages, and bounce buffers for what direct I/O can't take as it lies."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvstore.backends.nvme.layout import PAGE
from kvstore.diskio.uring.memory import address_of

__all__ = ["Page", "PagePool", "aligned_buffer"]

_CHUNK_PAGES: Final = 256


class Page(NamedTuple):
    """A page of memory, and its address, which is asked for once and used for every transfer."""

    view: memoryview
    address: int

    @classmethod
    def of(cls, view: memoryview) -> Page:
        """Return one for memory that stays where it is."""
        return cls(view, address_of(view))


class PagePool:
    """Header pages, reused; grows to what was in use at once, which the tier bounds. Used from the loop thread."""

    def __init__(self) -> None:
        self._free: list[Page] = []

    def take(self, count: int) -> list[Page]:
        """Return pages; their content is whatever the last user left."""
        while len(self._free) < count:
            chunk = memoryview(mmap.mmap(-1, _CHUNK_PAGES * PAGE))
            self._free.extend(Page.of(chunk[i : i + PAGE]) for i in range(0, _CHUNK_PAGES * PAGE, PAGE))
        taken = self._free[-count:] if count else []
        del self._free[len(self._free) - count :]
        return taken

    def give_back(self, pages: Sequence[Page]) -> None:
        """Return pages that nothing uses any more."""
        self._free.extend(pages)


def aligned_buffer(size_bytes: int) -> memoryview:
    """Return a new page-aligned buffer of zeros, rounded up to whole pages."""
    return memoryview(mmap.mmap(-1, max(1, -(-size_bytes // PAGE)) * PAGE))
