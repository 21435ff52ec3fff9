"""Memory for records in transit: leased header buffers, and views of the slots of the primary tier."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvstore.errors import ConfigError
from kvstore.runtime.limits import Limiter, Precedence


class BufferPool:
    """Buffers of equal size in one anonymous mapping, leased in groups.

    If ``size_bytes`` is a multiple of the page size, every buffer is page-aligned and usable for direct I/O. The
    content of a leased buffer is undefined. ``Limiter`` defines the guarantees and the order of leases.
    """

    def __init__(self, size_bytes: int, count: int) -> None:
        if size_bytes < 1:
            raise ConfigError(f"Buffers of {size_bytes} bytes: the size must be at least 1.")
        self._limiter = Limiter(count)
        self.size_bytes = size_bytes
        self.count = count
        self._map = mmap.mmap(-1, size_bytes * count)
        with memoryview(self._map) as whole:
            self._views = [whole[i * size_bytes : (i + 1) * size_bytes] for i in range(count)]
        self._places = {id(view): place for place, view in enumerate(self._views)}
        self._free = list(range(count))

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @property
    def free_count(self) -> int:
        """Number of buffers not leased."""
        return len(self._free)

    @asynccontextmanager
    async def lease(self, count: int, precedence: Precedence = Precedence.LOAD) -> AsyncIterator[list[memoryview]]:
        """Lease ``count`` buffers, waiting until they are free.

        Raises:
            ConfigError: ``count`` is more than the pool has.
        """
        taken = await self.take(count, precedence)
        try:
            yield taken
        finally:
            self.give_back(taken)

    async def take(self, count: int, precedence: Precedence = Precedence.LOAD) -> list[memoryview]:
        """Lease buffers, in the order of their addresses, until they are passed to :meth:`give_back`.

        Raises:
            ConfigError: ``count`` is more than the pool has.
        """
        if count > self.count:
            raise ConfigError(f"{count} buffers asked of a pool of {self.count}; split the batch.")
        await self._limiter.enter(count, precedence)
        # In order, because one call can process adjacent buffers.
        places = sorted(self._free[len(self._free) - count :])
        del self._free[len(self._free) - count :]
        return [self._views[place] for place in places]

    def give_back(self, buffers: list[memoryview]) -> None:
        """End a lease."""
        self._free.extend([self._places[id(buffer)] for buffer in buffers])
        self._limiter.leave(len(buffers))

    def close(self) -> None:
        """Release the memory; only while nothing is leased. Idempotent."""
        for view in self._views:
            view.release()
        self._views.clear()
        self._map.close()


class SlotBuffers:
    """The rows of a primary tier, on the I/O side.

    Args:
        primary: The whole primary tier; any shape and format, C-contiguous and writable.
        slot_bytes: Length of a row. Row ``i`` begins at ``i * slot_bytes``.
    """

    def __init__(self, primary: memoryview, slot_bytes: int) -> None:
        if primary.readonly or not primary.c_contiguous:
            raise ConfigError(
                "The primary tier must be one writable, C-contiguous buffer, such as an mmap or a bytearray."
            )
        if slot_bytes < 1 or primary.nbytes % slot_bytes:
            raise ConfigError(f"A primary tier of {primary.nbytes} bytes does not divide into slots of {slot_bytes}.")
        self.slot_bytes = slot_bytes
        self.count = primary.nbytes // slot_bytes
        # cast() refuses empty shapes, and an empty primary tier has no rows.
        self._flat = primary.cast("B") if primary.nbytes else memoryview(bytearray())

    def view(self, slot: int) -> memoryview:
        """Return a view of one row; the caller releases it."""
        if not 0 <= slot < self.count:
            raise IndexError(f"Slot {slot} of a primary tier that has {self.count}.")
        return self._flat[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def release(self) -> None:
        """Release the primary tier. Idempotent."""
        self._flat.release()
