"""Files and slots in use by a read: they stay open, and keep their block, until the call has ended."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvstore.testing.waiting import eventually_async
from kvstore.types import BlockKey, RemovalCause
from tests.disk.rig import Rig, opened, tables
from tests.diskio.faulty_disk import DiskFault, FaultyDisk

pytestmark = pytest.mark.parametrize("engine", ["io_uring", "threads"])


@asynccontextmanager
async def reading(rig: Rig, disk: FaultyDisk, key: BlockKey) -> AsyncIterator[asyncio.Task[list[bytes | None]]]:
    """Load a block; the read of its slot begins before the context and ends after it."""
    disk.add(DiskFault("preadv", stall=(gate := threading.Event())))
    loading = asyncio.create_task(rig.get([key]))
    try:
        await eventually_async(lambda: disk.stalled, what="the read has begun")
        yield loading
        assert disk.stalled
    finally:
        gate.set()
    await asyncio.wait({loading})


async def test_segment_removed_during_a_read_is_a_miss(tmp_path: Path, engine: str) -> None:
    """The space is free at once; the reader's file stays open until the read has ended, and the read is a miss."""
    disk = FaultyDisk()
    async with opened(tmp_path, 16) as one, opened(tmp_path, 16, disk=disk, engine=engine) as two:
        (key,) = await one.put_new(1)
        await one.session.tables.end()
        await two.session.followers[0].refresh()
        for task in two.session._tasks:
            task.cancel()
        space, (segment,) = one.session.space, one.session.index.segments.values()
        with tables(tmp_path)[0].with_suffix(".seg").open("rb") as file:
            async with reading(two, disk, key) as loading:
                await space._give_up(segment, RemovalCause.EVICTED, remove=True)
                await space._let_go(one.session.roots[0], segment)
                assert os.fstat(file.fileno()).st_size == 0
                await two.session.followers[0].refresh()
                assert dict(two.removed) == {key: RemovalCause.EVICTED}
                assert "000000.seg" in disk.open_fds.values()
        assert await loading == [None]
        await two.session.followers[0].refresh()
        assert "000000.seg" not in disk.open_fds.values()


async def test_block_that_is_removed_while_it_is_read(tmp_path: Path, engine: str) -> None:
    """The slot is reused only after the read has ended; the read returns the block's own bytes or a miss."""
    disk = FaultyDisk()
    async with opened(tmp_path, 16, disk=disk, engine=engine) as rig:
        values = await rig.put_new(16)
        key = list(values)[3]
        new: dict[BlockKey, bytes] = {}
        async with reading(rig, disk, key) as loading:
            assert await rig.backend.delete([key]) == [True]
            for _ in range(10):
                new |= await rig.put_new(2)
            left = await rig.still_there(new)
            assert len(left) >= 14
        assert await loading in ([None], [values[key]])
        await rig.has_all(await rig.still_there(new))
        while rig.backend.stats().blocks < 16:
            await rig.put_new(1)
