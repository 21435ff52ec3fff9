"""Rows of scratch memory, where payloads lie that are not their blocks: bounded, page-aligned, made when first used."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from kvstore.codec.rows import address_of
from kvstore.runtime.buffers import BufferPool
from kvstore.runtime.limits import Precedence

__all__ = ["PayloadRows"]

_PAGE: Final = 4096

_BATCH_BYTES: Final = 4 << 20
"""Blocks that are encoded together have about so many bytes: enough that the wait for the GIL at the end does not
count, and little enough that two threads share a job."""

_BATCH_BLOCKS_MAX: Final = 256
"""And so many blocks, where they are small: views of all rows are made at once."""

_PAYLOAD_BATCHES: Final = 8
"""Batches of encoded payloads on their way to the medium: one is on its way while the next is encoded, and a network
needs some in flight."""

_SCRATCH_BATCHES: Final = 4
"""Batches of scratch: two threads, and two sides that steps go between."""


class PayloadRows:
    """Lends rows as long as a slot (rounded up to pages).

    Nobody who waits for scratch can be waited for: those who hold some need nothing else. Belongs to one event loop.

    Args:
        slot_bytes: Length of a slot.

    Attributes:
        batch_blocks: Most blocks that a batch may have, so that rows for it can be lent.
    """

    def __init__(self, slot_bytes: int) -> None:
        self._row_bytes = -(-slot_bytes // _PAGE) * _PAGE
        self.batch_blocks = min(_BATCH_BLOCKS_MAX, max(1, _BATCH_BYTES // slot_bytes))
        self._payloads: BufferPool | None = None
        self._scratch: BufferPool | None = None
        self._addresses: dict[int, int] = {}
        """Of the rows by their ids: the pools keep their rows, and to ask for an address takes microseconds."""

    @asynccontextmanager
    async def payloads(self, count: int) -> AsyncIterator[list[memoryview]]:
        """Lend rows for payloads until they have been put."""
        if not count:
            yield []
            return
        if self._payloads is None:
            self._payloads = BufferPool(self._row_bytes, self.batch_blocks * _PAYLOAD_BATCHES)
        async with self._payloads.lease(count, Precedence.STORE) as rows:
            yield self._sorted(rows)

    @asynccontextmanager
    async def scratch(self, count: int, precedence: Precedence) -> AsyncIterator[list[memoryview]]:
        """Lend rows for one piece of work on a worker thread; nothing else is waited for while they are held."""
        if not count:
            yield []
            return
        if self._scratch is None:
            self._scratch = BufferPool(self._row_bytes, self.batch_blocks * _SCRATCH_BATCHES)
        async with self._scratch.lease(count, precedence) as rows:
            yield self._sorted(rows)

    def close(self) -> None:
        """Give the memory back; only when nothing is lent. Idempotent."""
        for pool in (self._payloads, self._scratch):
            if pool is not None:
                pool.close()
        self._payloads = self._scratch = None
        self._addresses.clear()

    def _sorted(self, rows: list[memoryview]) -> list[memoryview]:
        """Return rows in the order of their addresses: neighbours are worked on by one call."""
        for row in rows:
            if id(row) not in self._addresses:
                self._addresses[id(row)] = address_of(row)
        return sorted(rows, key=lambda row: self._addresses[id(row)])
