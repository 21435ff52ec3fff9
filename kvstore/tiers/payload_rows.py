"""Rows of scratch memory for encoded payloads: bounded, page-aligned, allocated at first use."""

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
"""Bytes of blocks encoded together, about: enough to make the wait for the GIL at the end negligible, and few enough
for two threads to share a job."""

_BATCH_BLOCKS_MAX: Final = 256
"""Most blocks encoded together, because views of all rows are made at once."""

_PAYLOAD_BATCHES: Final = 8
"""Batches of encoded payloads in flight to the medium: one is written while the next is encoded, and a network needs
several."""

_SCRATCH_BATCHES: Final = 4
"""Batches of scratch: for two threads, and two sides between which steps alternate."""


class PayloadRows:
    """Lends rows as long as a slot (rounded up to pages).

    A deadlock is impossible, because a holder of scratch waits for nothing else. Belongs to one event loop.

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
        """Addresses of rows by ``id``: the pools keep their rows, and determining an address takes microseconds."""

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
        """Lend rows for one call on a worker thread; the holder must wait for nothing else."""
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
        """Return rows in the order of their addresses, because neighbours are processed by one call."""
        for row in rows:
            if id(row) not in self._addresses:
                self._addresses[id(row)] = address_of(row)
        return sorted(rows, key=lambda row: self._addresses[id(row)])
