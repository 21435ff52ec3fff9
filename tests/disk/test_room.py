"""Room on the disk: failed and stalled segments, files of another length, failed rows, cancelled work."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.backends.disk.limits import Limits
from kvstore.backends.disk.root import Stored
from kvstore.config import Capacity
from kvstore.diskio import OsDisk
from kvstore.testing.waiting import eventually_async
from kvstore.types import BlockKey, Outcome, RemovalCause
from tests.disk.rig import OTHER_NAMESPACE, SLOT, NoRows, clone, filled, opened, proved, segment_bytes, tables
from tests.diskio.faulty_disk import DiskFault, FaultyDisk


async def test_two_engines_share_out_room_one_after_the_other(tmp_path: Path) -> None:
    """While one engine creates the last segment that fits, however long that takes, no other engine creates one."""
    disk = FaultyDisk()
    async with opened(tmp_path, 16, disk=disk, engine="threads") as one, opened(tmp_path, 16) as two:
        for _ in range(15):
            await two.put_new(1)
        made = threading.Event()
        disk.add(DiskFault("fallocate", stall=made))
        storing = asyncio.create_task(one.put(one.new(1)))
        await eventually_async(lambda: disk.stalled, what="the first one makes it")
        await two.put(two.new(2))
        made.set()
        await storing
        assert segment_bytes(tmp_path) <= 16 * SLOT


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
async def test_a_segment_that_could_not_be_made_takes_no_room(tmp_path: Path, error: int) -> None:
    """The remains of a failed allocation are removed at once (some filesystems keep the blocks)."""
    disk = FaultyDisk()
    async with opened(tmp_path, 16, disk=disk) as rig:
        disk.fail("fallocate", error, after=True)
        assert set(await rig.put(rig.new(1))) <= {Outcome.NO_SPACE, Outcome.IO_ERROR}
        assert list(tmp_path.rglob("*.seg")) == []


@pytest.mark.parametrize("length", [0, SLOT, 50 * SLOT])
@pytest.mark.parametrize("when", ["ended", "running"])
async def test_segment_of_another_length_is_removed(tmp_path: Path, length: int, when: str) -> None:
    """A segment that was cut or extended costs its own blocks only, and its room is used again."""
    async with contextlib.AsyncExitStack() as stack:
        rig = await stack.enter_async_context(opened(tmp_path, 64))
        values = await rig.put_new(56)
        segment = sorted(tmp_path.rglob("*.seg"))[3]
        if when == "ended":
            await stack.aclose()
        os.truncate(segment, length)
        if when == "ended":
            rig = await stack.enter_async_context(opened(tmp_path, 64))
        # Upkeep does it, once a second.
        await eventually_async(lambda: rig.backend.stats().blocks == 52)
        assert await proved(rig, values) == 52

        async def is_full() -> bool:
            await rig.put(rig.new(1))
            return segment_bytes(tmp_path) == rig.backend.stats().gauges["segment_bytes"] == 64 * SLOT

        await eventually_async(is_full, what="its room is used again")


@pytest.mark.parametrize("count", [12, 16])
async def test_row_failure_fails_stores_and_loses_no_slot(tmp_path: Path, count: int) -> None:
    """Stores and evictions fail without losing a slot; when rows can be written again, both succeed."""
    disk = NoRows()
    async with opened(tmp_path, 16, disk=disk, engine="threads") as rig:
        values = await rig.put_new(count)
        disk.fails = True
        for _ in range(5):
            new = rig.new(4)
            assert Outcome.OK not in await rig.put(new)
            assert await rig.backend.exists(list(new)) == [False] * 4
        await rig.has_all(await rig.still_there(values))
        disk.fails = False
        await rig.backend.probe()
        # Until a store succeeds, few blocks are evicted.
        assert Outcome.OK in await rig.put(rig.new(4))
        stored: dict[BlockKey, bytes] = {}
        for _ in range(6):
            stored |= await rig.put_new(4)
        await rig.has_all(await rig.still_there(values | stored))
        assert rig.backend.stats().blocks + rig.backend.stats().gauges["free_slots"] == 16


async def test_removal_of_a_segment_yields_to_other_work(tmp_path: Path) -> None:
    """However many blocks a segment has, the loop runs other work after each few of them; all are reported."""
    turns: list[int] = []
    async with opened(tmp_path, 128, limits=Limits(turn_slots=2)) as rig:
        values = await rig.put_new(8)
        causes: Counter[RemovalCause] = Counter()

        def removed(keys: Sequence[BlockKey], cause: RemovalCause) -> None:
            turns.append(len(keys))
            causes[cause] += len(keys)

        rig.backend.set_removal_listener(removed)
        next(tmp_path.rglob("*.seg")).unlink()
        await eventually_async(lambda: causes == {RemovalCause.LOST: len(values)})
        assert turns == [2, 2, 2, 2]


class HeldRows(OsDisk):
    """A disk where the rows of tables wait for ``go``, and then perhaps fail."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.waits = False
        self.fails = False

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        if not self.go.is_set() and os.readlink(f"/proc/self/fd/{fd}").endswith(".tab"):
            self.waits = True
            assert self.go.wait(30)
            if self.fails:
                raise OSError(errno.EIO, "no row is written")
        return super().pwritev(fd, buffers, offset)


async def test_an_eviction_goes_on_when_its_store_is_cancelled(tmp_path: Path) -> None:
    """Its slots become free, other stores use them, and a removal of its blocks waits for it."""
    disk = HeldRows()
    async with opened(tmp_path, 16, disk=disk, engine="threads") as rig:
        values = await rig.put_new(16)
        await rig.session.tables.end()
        disk.go.clear()
        store = asyncio.create_task(rig.put(rig.new(4)))
        await eventually_async(lambda: disk.waits, what="the eviction")
        store.cancel()
        await asyncio.wait([store])
        removing = asyncio.create_task(rig.backend.delete(list(values)))
        await asyncio.sleep(0)
        disk.go.set()
        assert sum(await removing) == 16 - len(rig.removed)
        assert await rig.get(list(values)) == [None] * 16
        await rig.has_all(await rig.put_new(16))


@pytest.mark.parametrize("fails", [True, False])
async def test_eviction_from_a_segment_that_leaves_is_reported(tmp_path: Path, fails: bool) -> None:
    """A segment was given up meanwhile, so lookups find the block no more, and its removal is reported."""
    disk = HeldRows()
    async with opened(tmp_path, 16, disk=disk, engine="threads") as rig:
        values = await rig.put_new(16)
        await rig.session.tables.end()
        disk.go.clear()
        store = asyncio.create_task(rig.put(rig.new(4)))
        await eventually_async(lambda: disk.waits, what="the eviction")
        for table in tables(tmp_path):
            table.unlink()
        await rig.session.space.drop_lost(rig.session.roots[0])
        disk.fails = fails
        disk.go.set()
        await store
        assert {key for key, _ in rig.removed} >= set(values)
        assert await rig.backend.exists(list(values)) == [False] * 16


async def test_a_cancelled_removal_wipes_its_blocks(tmp_path: Path) -> None:
    """A removal cancelled while its rows are written is completed, so that no later engine finds the blocks."""
    disk = HeldRows()
    async with opened(tmp_path / "a", 16, disk=disk, engine="threads") as rig:
        values = await rig.put_new(4)
        await rig.session.tables.end()
        disk.go.clear()
        removal = asyncio.create_task(rig.backend.delete(list(values)))
        await eventually_async(lambda: disk.waits, what="the removal")
        removal.cancel()
        await asyncio.sleep(0)
        disk.go.set()
        with pytest.raises(asyncio.CancelledError):
            await removal
        copy = clone(tmp_path / "a", tmp_path / "b")
    assert all(b"\x89kvstor" not in path.read_bytes() for path in copy.rglob("*.seg"))
    async with opened(copy, 16) as heir:
        assert await heir.get(list(values)) == [None] * 4


async def test_a_failure_after_a_cancelled_store_is_no_error_of_the_loop(tmp_path: Path) -> None:
    """Work for room goes on when its store is cancelled; its failure then concerns no caller."""
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    disk, goes_on = FaultyDisk(), threading.Event()
    async with opened(tmp_path, 64, disk=disk) as rig:
        disk.add(DiskFault("fallocate", error=errno.EIO, stall=goes_on))
        storing = asyncio.create_task(rig.put(rig.new(2)))
        await eventually_async(lambda: disk.stalled, what="a segment is made")
        storing.cancel()
        await asyncio.wait({storing})
        goes_on.set()
        await rig.session.space.close()
    gc.collect()
    assert not reported


async def test_segments_of_ended_engines_go_when_the_capacity_is_smaller(tmp_path: Path) -> None:
    """Without a store, segments that no engine holds are removed until the capacity holds."""
    await filled(tmp_path, 64)
    async with opened(tmp_path, 32, namespace=OTHER_NAMESPACE) as rig:
        await rig.session.space.share(rig.session.roots[0])
        assert segment_bytes(tmp_path) <= 32 * SLOT


async def test_segment_that_was_taken_since_is_not_removed(tmp_path: Path) -> None:
    """An engine that found a segment without a holder removes it only under its locks."""
    async with opened(tmp_path, 64) as one, opened(tmp_path, 64) as two:
        values = await one.put_new(1)
        (table,), (root,) = tables(tmp_path), two.session.roots
        assert root._remove(Stored(table.parent.name, table.stem, SLOT)) == 0
        assert table.exists()
        await one.has_all(values)


async def test_block_that_was_being_stored_during_an_eviction_is_evicted_later(tmp_path: Path) -> None:
    """An eviction passes over a block whose store or removal has not ended, and a later one finds it."""
    async with opened(tmp_path, 16) as rig:
        key, *others = await rig.put_new(16)
        space = rig.session.space
        with space._claims.held([key]):
            assert await space._evict(16, SLOT)
            assert await rig.backend.exists([key, *others]) == [True] + [False] * 15
        assert await space._evict(16, SLOT)
        assert await rig.backend.exists([key]) == [False]


async def test_slot_of_a_block_removed_during_its_eviction_is_free_once(tmp_path: Path) -> None:
    """A removal waits for the eviction of its block, so that the slot is given to one other block."""
    disk = HeldRows()
    async with opened(tmp_path, 16, disk=disk, engine="threads") as rig:
        values = await rig.put_new(16)
        disk.go.clear()
        store = asyncio.create_task(rig.put(rig.new(1)))
        await eventually_async(lambda: disk.waits, what="the row of the evicted block")
        removal = asyncio.create_task(rig.backend.delete(list(values)))
        await asyncio.sleep(0)
        disk.go.set()
        assert await store == [Outcome.OK]
        assert sorted(await removal) == [False] + [True] * 15
        stats = rig.backend.stats()
        assert stats.blocks + stats.gauges["free_slots"] == 16


async def test_block_of_a_segment_taken_during_its_store_has_one_copy(tmp_path: Path) -> None:
    """A store whose block arrives with a segment that is taken meanwhile frees its own slot, also on the disk."""
    disk = HeldRows()
    async with opened(tmp_path, 64, disk=disk, engine="threads") as rig:
        for task in rig.session._tasks:
            task.cancel()
        async with opened(tmp_path, 64) as other:
            values = await other.put_new(1)
            disk.go.clear()
            store = asyncio.create_task(rig.put(values))
            await eventually_async(lambda: disk.waits, what="the row of the store")
        await rig.session.space.take_segments(rig.session.roots[0], report=True)
        disk.go.set()
        assert await store == [Outcome.EXISTS]
        await rig.backend.probe()
        assert rig.backend.stats().gauges["free_slots"] == segment_bytes(tmp_path) // SLOT - 1
        await rig.has_all(values)


async def test_segment_with_a_row_of_unknown_state_is_not_removed(tmp_path: Path) -> None:
    """To restore the capacity, an engine removes a segment whose rows are all known, even if it is used more."""
    disk = NoRows()
    async with opened(tmp_path, 64, disk=disk, engine="threads") as rig:
        for task in rig.session._tasks:
            task.cancel()
        more, less = await rig.put_new(4), await rig.put_new(1)
        disk.fails = True
        assert await rig.put(rig.new(1)) == [Outcome.IO_ERROR]
        disk.fails = False
        (root,) = rig.session.roots
        root.capacity = Capacity(4 * SLOT)
        await rig.session.space.share(root)
        assert {key for key, _ in rig.removed} == set(more)
        await rig.has_all(less)


async def test_rows_of_another_root_stay_unsettled(tmp_path: Path) -> None:
    """Each root settles its own rows, so that one that fails or freezes stops no other one."""
    disk = NoRows()
    async with opened([tmp_path / "a", tmp_path / "b"], 64, disk=disk, engine="threads") as rig:
        for task in rig.session._tasks:
            task.cancel()
        await rig.put_new(4)
        tables_writer, index = rig.session.tables, rig.session.index
        disk.fails = True
        await rig.backend.delete([info.key async for info in rig.backend.scan()])
        await rig.put(rig.new(4))
        disk.fails = False
        before = {index.at(place)[0].root for place in tables_writer.unsettled}
        await tables_writer.settle(0)
        assert {index.at(place)[0].root for place in tables_writer.unsettled} == before - {0} != before
