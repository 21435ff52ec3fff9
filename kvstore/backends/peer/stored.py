"""Reads records of this engine's own storage tiers into a few buffers, to send them to peers."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final

from kvstore.backends.base import Backend, RecordRead
from kvstore.codec.record import HEADER_BYTES, RecordCodec
from kvstore.config import TierConfig
from kvstore.errors import KVStoreError, RecordError
from kvstore.namespace import Namespace
from kvstore.runtime.buffers import BufferPool
from kvstore.types import BlockKey, Outcome

BATCH_MAX: Final = 4
"""Most records that one connection reads at once: enough to keep a drive busy, without taking most buffers."""

_BUFFERS_BYTES: Final = 64 << 20
"""Memory of all buffers; they hold at least one batch, whatever the length of blocks."""


class StoredRecords:
    """Finds and reads records of backends that run on the same loop.

    Records are verified before they are sent, because a client would distrust this engine after a damaged one.

    Args:
        backends: Backends with records of a 256-byte header and an unencoded payload. The list may grow. Backends with
            another configured ``namespace`` or ``epoch`` are skipped.
        config: Configuration of the serving tier.
        namespace: Namespace of the blocks.
        payload_bytes: Length of the longest payload.
    """

    def __init__(
        self, backends: Sequence[Backend], config: TierConfig, namespace: Namespace, payload_bytes: int
    ) -> None:
        self._all_backends = backends
        self._config = config
        self._records = RecordCodec(namespace, header_bytes=HEADER_BYTES)
        # The header ends a page, so that the payload begins a page and direct I/O needs no copy.
        room = mmap.PAGESIZE + -payload_bytes % mmap.PAGESIZE + payload_bytes
        self._pool = BufferPool(room, max(BATCH_MAX, _BUFFERS_BYTES // room))
        self._payload_bytes = payload_bytes
        self._reads: set[asyncio.Task[Mapping[BlockKey, Sequence[memoryview]]]] = set()

    def __bool__(self) -> bool:
        return bool(self._backends)

    @property
    def _backends(self) -> list[Backend]:
        """The backends with blocks of our namespace. Iterates over a copy, because the list may grow."""
        ours = self._config.namespace, self._config.epoch
        return [one for one in tuple(self._all_backends) if (one.config.namespace, one.config.epoch) == ours]

    async def keys(self) -> AsyncIterator[Sequence[BlockKey]]:
        """Yield the keys of all blocks, in batches."""
        for backend in self._backends:
            async for keys in backend.scan_keys():
                yield keys

    async def find(self, keys: Sequence[BlockKey], timeout_s: float) -> set[BlockKey]:
        """Return the blocks that a backend has; at the time limit, those found by then."""
        found: set[BlockKey] = set()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for backend in self._backends:
                    with suppress(KVStoreError):
                        found.update(key for key, there in zip(keys, await backend.exists(keys), strict=True) if there)
        return found

    @asynccontextmanager
    async def reading(
        self, keys: Sequence[BlockKey], timeout_s: float
    ) -> AsyncIterator[Mapping[BlockKey, Sequence[memoryview]]]:
        """Read at most ``BATCH_MAX`` records; they are valid within the ``async with``.

        Records that are missing, damaged or late are left out.
        """
        try:
            async with asyncio.timeout(timeout_s):
                buffers = await self._pool.take(len(keys))
        except TimeoutError:
            yield {}
            return
        read = asyncio.get_running_loop().create_task(self._read(keys, buffers))
        self._reads.add(read)
        read.add_done_callback(self._reads.discard)
        try:
            await asyncio.wait({read}, timeout=timeout_s)
            yield read.result() if read.done() else {}
        finally:
            if read.done():
                self._pool.give_back(buffers)
            else:
                # A hanging disk may still write to the buffers, so they are not reused before the read has ended.
                read.add_done_callback(lambda _: self._pool.give_back(buffers))

    def close(self) -> None:
        """Release the memory, unless a hanging disk still uses some of it."""
        if not self._reads:
            with suppress(BufferError):
                self._pool.close()

    async def _read(
        self, keys: Sequence[BlockKey], buffers: Sequence[memoryview]
    ) -> Mapping[BlockKey, Sequence[memoryview]]:
        left = dict(zip(keys, buffers, strict=True))
        found: dict[BlockKey, Sequence[memoryview]] = {}
        for backend in self._backends:
            reads = [RecordRead(key, self._cut(buffer)) for key, buffer in left.items()]
            with suppress(KVStoreError):
                for read, outcome in zip(reads, await backend.get_into(reads), strict=True):
                    header, payload = read.buffers
                    with suppress(RecordError):
                        if outcome is Outcome.OK:
                            length = self._records.verify(read.key, header, payload, read.filled_bytes)
                            found[read.key] = (header, payload[:length])
                            del left[read.key]
        return found

    def _cut(self, buffer: memoryview) -> Sequence[memoryview]:
        page = mmap.PAGESIZE
        return buffer[page - HEADER_BYTES : page], buffer[page : page + self._payload_bytes]
