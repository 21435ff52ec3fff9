"""Engines that share a root: reads of several engines' blocks, and closes and removals at the same time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from kvstore.backends.disk.records import SlotRead
from kvstore.testing.waiting import eventually_async
from kvstore.types import Outcome
from tests.disk.rig import Rig, opened
from tests.diskio.faulty_disk import FaultyDisk


def once_read(rig: Rig, work: Callable[[], Awaitable[None]], *, first: bool = False) -> None:
    """Do something right after, or before, the next read of slots."""
    drives, read = rig.session.drives, rig.session.drives.read

    async def read_and_work(transfers: Sequence[Any], *args: Any) -> None:
        if not isinstance(transfers[0], SlotRead):
            await read(transfers, *args)
            return
        drives.read = read  # type: ignore[method-assign]
        if first:
            await work()
        await read(transfers, *args)
        if not first:
            await work()

    drives.read = read_and_work  # type: ignore[method-assign]


async def test_row_of_each_engine_is_read_again(tmp_path: Path) -> None:
    """Of a batch with blocks of several engines, none is delivered whose engine freed its slot during the read."""
    async with opened(tmp_path, 256) as one, opened(tmp_path, 256) as two, opened(tmp_path, 256) as reader:
        stored = [(rig, list(await rig.put_new(2))) for rig in (one, two)]
        keys = [key for _, some in stored for key in some]
        for rig, _ in stored:
            await rig.session.tables.end()
        await reader.session.followers[0].refresh()

        async def free_some() -> None:
            for rig, some in stored:
                await rig.backend.delete(some[:1])

        once_read(reader, free_some)
        assert await reader.outcomes_of(keys) == [Outcome.MISS, Outcome.OK] * 2


async def test_block_stored_again_during_a_read_is_not_lost(tmp_path: Path) -> None:
    """A read that finds another record in a slot removes its block only if the index still has it there."""
    async with opened(tmp_path, 16) as rig:
        values = await rig.put_new(1)

        async def store_again() -> None:
            await rig.backend.delete(list(values))
            assert await rig.put(values) == [Outcome.OK]

        once_read(rig, store_again, first=True)
        assert await rig.get(list(values)) == [None]
        await rig.has_all(values)
        assert rig.removed == []


async def test_own_copy_is_preferred(tmp_path: Path) -> None:
    """If two engines store a block at once, each keeps its own copy in its index."""
    async with opened(tmp_path, 256) as one, opened(tmp_path, 256) as two:
        values = one.new(4)
        await asyncio.gather(one.put(values), two.put(values))
        for rig in (one, two):
            await rig.session.tables.end()
        for rig in (one, two):
            await rig.session.followers[0].refresh()
            assert rig.backend.own(list(values)) == [True] * 4
            await rig.has_all(values)


async def test_segment_found_while_the_engine_closes_is_closed(tmp_path: Path) -> None:
    """Its files are opened on a thread; the cancelled follower leaves neither open."""
    found, goes_on = threading.Event(), threading.Event()

    class SlowDisk(FaultyDisk):
        def open_file(self, name: str, flags: int, dir_fd: int) -> int:
            fd = super().open_file(name, flags, dir_fd)
            if name.endswith(".seg"):
                found.set()
                assert goes_on.wait(30)
            return fd

    disk = SlowDisk()
    async with opened(tmp_path, 64, disk=disk) as rig, opened(tmp_path, 64) as other:
        await other.put_new(1)
        await asyncio.to_thread(found.wait, 30)
        tasks = rig.session._tasks
        closing = asyncio.create_task(rig.backend.close())
        await eventually_async(lambda: all(task.cancelling() for task in tasks), what="the follower is cancelled")
        goes_on.set()
        await closing
    assert disk.open_fds == {}


async def test_removed_block_of_another_engine_is_not_scanned(tmp_path: Path) -> None:
    """A block of another engine that is removed here stays there, and neither lookups nor scans here find it."""
    async with opened(tmp_path, 64) as one, opened(tmp_path, 64) as two:
        values = await one.put_new(8)
        await eventually_async(lambda: set(two.arrived) >= set(values))
        gone = list(values)[:3]
        await two.backend.delete(gone)
        assert await two.scanned() == set(values) - set(gone)
        await one.has_all(values)
