"""Frozen disks: a closed engine holds up no other, loads wait for no report of uses, segments for their last write."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvstore.backends.disk.layout import PAGE
from kvstore.backends.disk.limits import Limits
from kvstore.diskio import OsDisk
from kvstore.testing.waiting import eventually_async
from kvstore.types import Outcome, RemovalCause
from tests.disk.rig import opened
from tests.diskio.faulty_disk import DiskFault, FaultyDisk


async def test_an_engine_closed_on_a_frozen_disk_holds_up_no_other(tmp_path: Path) -> None:
    """The ledger and all files of a closed engine are free once its last call has left the kernel."""
    disk, thawed = FaultyDisk(), threading.Event()
    async with opened(tmp_path, 64) as other:
        async with opened(tmp_path, 64, disk=disk, engine="threads", limits=Limits(close_s=0.1)) as rig:
            values = await rig.put_new(4)
            disk.add(DiskFault("fallocate", stall=thawed))
            storing = asyncio.create_task(rig.put(rig.new(4)))
            await eventually_async(lambda: disk.stalled, what="a segment is made under the ledger's lock")
        assert disk.open_fds, "the call is still in the kernel"
        thawed.set()
        assert Outcome.OK not in await storing
        await eventually_async(lambda: not disk.open_fds, what="its files are closed")
        await eventually_async(lambda: other.backend.stats().blocks == 4, what="its segment is taken")
        await other.has_all(values)
        await other.has_all(await other.put_new(8))


class SlowUses(OsDisk):
    """A disk where files of uses wait for ``thawed``, once there is one."""

    thawed: threading.Event | None = None
    waiting = False

    def syscall(self, op: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self.thawed is not None and op == "pwritev" and os.readlink(f"/proc/self/fd/{args[0]}").endswith(".use"):
            self.waiting = True
            self.thawed.wait(60)
        return super().syscall(op, function, *args, **kwargs)


async def test_loads_of_other_engines_blocks_wait_for_no_count_of_uses(tmp_path: Path) -> None:
    """While a disk takes no writes, the blocks of other engines are still loaded."""
    disk = SlowUses()
    async with opened(tmp_path, 64) as other, opened(tmp_path, 64, disk=disk, engine="threads", threads=4) as rig:
        values = await other.put_new(4)
        await eventually_async(lambda: set(rig.arrived) >= set(values), what="the other engine's blocks")
        disk.thawed = threading.Event()
        try:
            await rig.has_all(values)
            await eventually_async(lambda: disk.waiting, what="a report of uses")
            async with asyncio.timeout(10):
                await rig.has_all(values)
        finally:
            disk.thawed.set()


class SlowGenerations(OsDisk):
    """A disk where the generations of a table wait for ``thawed``, once there is one."""

    thawed: threading.Event | None = None
    waiting = False

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        if self.thawed is not None and offset == PAGE and os.readlink(f"/proc/self/fd/{fd}").endswith(".tab"):
            self.waiting = True
            self.thawed.wait(60)
        return super().pwritev(fd, buffers, offset)


async def test_segment_is_given_once_its_generations_are_written(tmp_path: Path) -> None:
    """Generations that are on their way to the disk can't overwrite those of the segment's next holder."""
    disk = SlowGenerations()
    async with opened(tmp_path, 64, disk=disk, engine="threads") as rig:
        for task in rig.session._tasks:
            task.cancel()
        await rig.put_new(1)
        await rig.session.tables.end()
        disk.thawed = threading.Event()
        try:
            await rig.put_new(1)
            await eventually_async(lambda: disk.waiting, what="the generations are on their way")
            space, (segment,), (root,) = rig.session.space, rig.session.index.segments.values(), rig.session.roots
            await space._give_up(segment, RemovalCause.EVICTED, remove=False)
            await space._let_go(root, segment)
            assert root.held_segments() == [segment.number]
        finally:
            disk.thawed.set()
        await rig.session.tables.end()
        await space._let_go(root, segment)
        assert root.held_segments() == []
