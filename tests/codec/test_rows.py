"""Buffers are bounded, and a tier that needs more waits for them and continues."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import random
import time

import pytest

from kvstore.backends.base import RecordGeometry
from kvstore.backends.memory import MemoryBackend, MemoryConfig
from kvstore.codec.rows import address_of
from kvstore.namespace import Namespace
from kvstore.runtime.buffers import BufferPool, SlotBuffers
from kvstore.runtime.limits import Precedence
from kvstore.runtime.messages import JobKind, SubmitJob
from kvstore.tiers.block_mover import BlockMover, Limits, RunningJob
from kvstore.tiers.codecs import TierCodecs
from kvstore.types import Outcome
from tests.codec.coding import numbers

SLOT = 8192
BLOCKS = 60
NAMESPACE = Namespace({"dtype": "bfloat16"})


async def test_buffers_are_bounded_aligned_and_in_order() -> None:
    """Leases never exceed the limit; neighbours in memory are neighbours in the list, whoever leased them before."""
    pool = BufferPool(8192, 12)
    async with contextlib.AsyncExitStack() as stack:
        lent = [await stack.enter_async_context(pool.lease(3, Precedence.LOAD)) for _ in range(4)]
        assert len({address_of(row) for part in lent for row in part}) == 12
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05), pool.lease(1, Precedence.LOAD):
                pass
    async with pool.lease(12, Precedence.LOAD) as again:
        addresses = [address_of(row) for row in again]
        assert addresses == [addresses[0] + 8192 * i for i in range(12)] and addresses[0] % 4096 == 0
    assert await pool.take(0) == [] and pool.free_count == 12
    pool.close()
    pool.close()


async def test_many_jobs_share_few_rows() -> None:
    """Stores and loads of many times the available rows, all at once, some cancelled, end with the right bytes."""
    backend = MemoryBackend(MemoryConfig())
    await backend.open(NAMESPACE, RecordGeometry(backend.alignment, SLOT))
    original = numbers(BLOCKS * SLOT)
    primary = bytearray(original * 4)
    slots = SlotBuffers(memoryview(primary), SLOT)
    codecs = TierCodecs("byteplane+zstd:1", NAMESPACE)
    limits = Limits(batch_bytes=2 * SLOT, payload_batches=2)
    mover = BlockMover(backend, NAMESPACE, slots, 1 << 20, lambda keys: None, codecs, limits=limits)
    rng = random.Random(1)

    async def run(kind: JobKind, name: bytes, cancel: bool, place: int = 0) -> bytes:
        keys = tuple(name + bytes([i]) for i in range(BLOCKS))
        slots = tuple(range(place * BLOCKS, (place + 1) * BLOCKS))
        job = RunningJob(SubmitJob(1, kind, keys, slots, time.monotonic() + 60))
        moves = [asyncio.ensure_future(mover.move(part)) for part in mover.cut(job)]
        assert kind is JobKind.LOAD or len(moves) == BLOCKS // 2
        if cancel:
            for _ in range(rng.randrange(20)):
                await asyncio.sleep(0)
            for move in moves:
                move.cancel()
        await asyncio.gather(*moves, return_exceptions=cancel)
        return bytes(job.outcomes)

    stored = await asyncio.gather(*(run(JobKind.STORE, b"%d" % i, i % 3 == 2) for i in range(9)))
    assert [stored[i] for i in range(9) if i % 3 < 2] == [bytes([Outcome.OK]) * BLOCKS] * 6
    primary[:] = bytes(len(primary))
    names = (b"0", b"1", b"3", b"4")
    loaded = await asyncio.gather(*(run(JobKind.LOAD, name, name == b"3", i) for i, name in enumerate(names)))
    for place in (0, 1, 3):
        assert loaded[place] == bytes([Outcome.OK]) * BLOCKS
        assert primary[place * BLOCKS * SLOT : (place + 1) * BLOCKS * SLOT] == original
    assert codecs.stats()["decoded_blocks"] >= 3 * BLOCKS
    mover.close()
    await backend.close()


def test_addresses() -> None:
    """The address of a view includes its offset, for writable and read-only memory, and for empty views."""
    memory = memoryview(mmap.mmap(-1, 2 * mmap.PAGESIZE))
    assert address_of(memory) % mmap.PAGESIZE == 0
    assert address_of(memory[100:]) == address_of(memory) + 100
    content = bytes(range(200))
    assert address_of(memoryview(content)[7:]) == address_of(memoryview(content)) + 7
    assert isinstance(address_of(memory[:0]), int)
