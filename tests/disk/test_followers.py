"""Engines that share a root: each writes only its own segments, all read all blocks."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from kvstore.backends.disk.layout import PAGE
from kvstore.diskio import OsDisk
from kvstore.testing.waiting import eventually_async
from kvstore.types import BlockKey, Outcome, RemovalCause
from tests.disk.rig import PAYLOAD, BadDisk, Rig, opened, tables


class Paused(OsDisk):
    """A disk whose reads of slots stop before or after their header, until they are let go."""

    def __init__(self, header_first: bool) -> None:
        self.stops = False
        self.stopped = threading.Event()
        self.goes_on = threading.Event()
        self._header_first = header_first

    async def stopped_load(self, rig: Rig, keys: Iterable[BlockKey]) -> asyncio.Task[list[Outcome]]:
        """Begin to load blocks; return once a read has stopped."""
        self.stops = True
        loading = asyncio.create_task(rig.outcomes_of(list(keys)))
        await asyncio.to_thread(self.stopped.wait, 30)
        return loading

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if not (self.stops and os.readlink(f"/proc/self/fd/{fd}").endswith(".seg")):
            return super().preadv(fd, buffers, offset)
        header = super().preadv(fd, buffers[:1], offset) if self._header_first else 0
        self.stopped.set()
        assert self.goes_on.wait(30)
        return header + super().preadv(fd, buffers[1 if header else 0 :], offset + header)


class Silent(OsDisk):
    """A disk that loses announcements of changed rows, or refuses them."""

    is_silent = False
    refuses = False

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        if offset == PAGE and os.readlink(f"/proc/self/fd/{fd}").endswith(".tab"):
            if self.is_silent:
                return sum(len(each) for each in buffers)
            if self.refuses:
                raise OSError(errno.EIO, "a bad sector")
        return super().pwritev(fd, buffers, offset)


class NoTables(OsDisk):
    """A disk that can't read rows of tables while ``fails`` is set."""

    fails = False

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.fails and os.readlink(f"/proc/self/fd/{fd}").endswith(".tab"):
            raise OSError(errno.EIO, "a bad sector")
        return super().preadv(fd, buffers, offset)


async def follows(rig: Rig, keys: Sequence[BlockKey] | dict[BlockKey, bytes]) -> None:
    """Wait until an engine has been told of blocks of other engines."""
    await eventually_async(lambda: set(rig.arrived) >= set(keys), what="the other engine is told")


async def test_blocks_of_another_engine_are_found(tmp_path: Path) -> None:
    """A block stored by one engine is reported to the other one, which finds, loads, and does not store it again."""
    async with opened(tmp_path, 256) as one, opened(tmp_path, 256) as two:
        values = await one.put_new(20)
        await follows(two, values)
        assert sorted(two.arrived) == sorted(values)
        assert await two.backend.exists(list(values)) == [True] * 20
        await two.has_all(values)
        assert await two.put(values) == [Outcome.EXISTS] * 20
        assert {info.key async for info in two.backend.scan()} == set(values)
        assert two.backend.own(list(values)) == [False] * 20
        assert one.backend.own(list(values)) == [True] * 20
        assert two.backend.stats().gauges["foreign_blocks"] == 20


async def test_root_that_can_not_be_listed_does_not_hide_the_others(tmp_path: Path) -> None:
    """New segments in the other root are found, although the root before it can't be listed."""
    roots, disk = [tmp_path / "a", tmp_path / "b"], BadDisk()
    async with opened(roots, 64, disk=disk) as reader:
        disk.ops, disk.bad = ("scandir",), str(roots[0])
        async with opened(roots[1], 64) as writer:
            values = await writer.put_new(20)
            await follows(reader, values)
            await reader.has_all(values)
        disk.ops = ()


async def test_blocks_that_were_there_at_start_are_found(tmp_path: Path) -> None:
    """An engine knows the blocks of running engines when it is open; a scan reports them."""
    async with opened(tmp_path, 256) as one:
        values = await one.put_new(20)
        async with opened(tmp_path, 256) as two:
            await two.has_all(values)
            assert two.arrived == []


async def test_stores_wake_other_engines(tmp_path: Path) -> None:
    """A table wakes the other engines, not their poll: twenty stores are seen in less time than ten polls."""
    async with opened(tmp_path, 256) as one, opened(tmp_path, 256) as two:
        started = asyncio.get_running_loop().time()
        for _ in range(20):
            await follows(two, await one.put_new(1))
        assert asyncio.get_running_loop().time() - started < 10


async def test_removed_block_is_gone_in_other_engines(tmp_path: Path) -> None:
    """A block that its engine removed is a miss in other engines, and is reported there."""
    async with opened(tmp_path, 256) as one, opened(tmp_path, 256) as two:
        values = await one.put_new(4)
        await follows(two, values)
        gone = list(values)[:2]
        assert await one.backend.delete(gone) == [True, True]
        await eventually_async(lambda: len(two.removed) == 2, what="the other engine is told")
        assert {key for key, _ in two.removed} == set(gone)
        assert await two.get(list(values)) == [None, None, *list(values.values())[2:]]


async def test_request_to_remove_a_block_of_another_engine_hides_it(tmp_path: Path) -> None:
    """An engine that removes another engine's block does not find it any more, and can store it again."""
    async with opened(tmp_path, 256) as one, opened(tmp_path, 256) as two:
        values = await one.put_new(4)
        await follows(two, values)
        damaged, removed, *_ = values
        await two.backend.quarantine([damaged])
        assert await two.backend.delete([removed]) == [True]
        assert await two.backend.exists(list(values)) == [False, False, True, True]
        assert two.backend.stats().counters.get("quarantined_blocks", 0) == 0
        assert await two.put({key: values[key] for key in (damaged, removed)}) == [Outcome.OK] * 2
        await one.has_all(values)
        await two.has_all(values)


@pytest.mark.parametrize("header_first", [False, True], ids=["before", "between header and payload"])
async def test_slot_reused_during_a_read_is_a_miss(tmp_path: Path, header_first: bool) -> None:
    """A reader returns nothing from a slot that its engine has given to another block meanwhile."""
    disk = Paused(header_first)
    async with opened(tmp_path, 32) as one, opened(tmp_path, 32, disk=disk, engine="threads") as two:
        values = await one.put_new(8)
        await follows(two, values)
        loading = await disk.stopped_load(two, values)
        while not {key for key, _ in one.removed} >= set(values):
            await one.put_new(4)
        disk.goes_on.set()
        assert await loading == [Outcome.MISS] * 8


async def test_block_without_a_second_look_at_its_row_is_not_delivered(tmp_path: Path) -> None:
    """Without a second look at the row, a reuse of the slot during the read can't be excluded."""
    disk = NoTables()
    async with opened(tmp_path, 256) as one, opened(tmp_path, 256, disk=disk, engine="threads") as two:
        values = await one.put_new(3)
        own = await two.put_new(1)
        await follows(two, values)
        disk.fails = True
        assert await two.outcomes_of([*values, *own]) == [Outcome.IO_ERROR] * 3 + [Outcome.OK]


async def test_blocks_that_another_engine_reads_are_kept(tmp_path: Path) -> None:
    """A block that another engine keeps reading is not among those that its engine evicts."""
    async with opened(tmp_path, 64) as one, opened(tmp_path, 64) as two:
        hot = await one.put_new(4)
        await follows(two, hot)
        (table,) = tables(tmp_path)
        uses = table.with_suffix(".use")
        uses.touch(0o600)
        for _ in range(6):
            before = uses.stat().st_mtime_ns
            await two.has_all(hot)
            await eventually_async(
                lambda before=before: uses.stat().st_mtime_ns > before and not uses.stat().st_size,
                what="uses are reported and counted",
            )
            await one.put_new(16)
        assert len(one.removed) > 20
        assert not {key for key, _ in one.removed} & set(hot)


async def test_segments_of_an_ended_engine_change_hands(tmp_path: Path) -> None:
    """Blocks of an engine that ends stay loadable; the engine that takes them reports them once more, as its own."""
    async with opened(tmp_path, 256) as two:
        async with opened(tmp_path, 256) as one:
            values = await one.put_new(20)
            await follows(two, values)
            gone = next(iter(values))
            await one.backend.delete([gone])
        del values[gone]
        await eventually_async(lambda: all(two.backend.own(list(values))), what="the segment is taken")
        assert Counter(two.arrived) == Counter([gone, *values, *values])
        assert two.removed == [(gone, RemovalCause.EVICTED)]
        await two.has_all(values)
        await two.has_all(await two.put_new(8))


@pytest.mark.parametrize("reads", [True, False])
async def test_change_that_was_not_announced_is_seen(tmp_path: Path, reads: bool) -> None:
    """An engine that is killed may not have announced its last rows: a read of one of them finds the others.

    So does the next engine that holds its segment.
    """
    disk = Silent()
    async with opened(tmp_path, 256) as reader:
        async with opened(tmp_path, 256, disk=disk, engine="threads") as one:
            values = await one.put_new(4)
            await follows(reader, values)
            await one.session.tables.end()
            await reader.session.followers[0].refresh()
            disk.is_silent = True
            gone = list(values)[:2]
            await one.backend.delete(gone)
            new = await one.put_new(1)
            if reads:
                assert await reader.get(gone) == [None, None]
                await follows(reader, new)
        await follows(reader, new)
        assert {key for key, _ in reader.removed} == set(gone)
        await reader.has_all(new)


async def test_announcement_that_failed_is_repeated(tmp_path: Path) -> None:
    """Rows whose announcement could not be written are announced by a later round of upkeep."""
    disk = Silent()
    async with opened(tmp_path, 256) as reader, opened(tmp_path, 256, disk=disk, engine="threads") as one:
        await follows(reader, await one.put_new(4))
        disk.refuses = True
        values = await one.put_new(4)
        await asyncio.sleep(0.05)
        disk.refuses = False
        await follows(reader, values)


async def test_restored_table_is_read_again(tmp_path: Path) -> None:
    """Of a table replaced by an older state of itself, with the same generations, the blocks of then are found."""
    async with opened(tmp_path / "root", 64) as one:
        (first,) = await one.put_new(1)
        await one.backend.delete([first])
    shutil.copytree(tmp_path / "root", tmp_path / "copy")
    states = []
    for root in ("root", "copy"):
        async with opened(tmp_path / root, 64) as one:
            states.append(await one.put_new(1))
    values, others = states
    async with opened(tmp_path / "root", 64) as one, opened(tmp_path / "root", 64) as reader:
        await reader.has_all(values)
        for path in [*tables(tmp_path / "root"), *tables(tmp_path / "root")]:
            for ending in (".tab", ".seg"):
                copy = tmp_path / "copy" / path.relative_to(tmp_path / "root")
                with path.with_suffix(ending).open("r+b") as file:
                    file.write(copy.with_suffix(ending).read_bytes())
        assert await reader.get(list(values)) == [None]
        await follows(reader, others)
        assert await reader.backend.exists(list(values)) == [False]
        await reader.has_all(others)
        del one


async def test_moved_block_is_found(tmp_path: Path) -> None:
    """A block that was evicted and stored again in another slot between two looks is still found, and not reported."""
    async with opened(tmp_path, 64) as one, opened(tmp_path, 64) as reader:
        values = await one.put_new(8)
        await follows(reader, values)
        reader.arrived.clear()
        async with reader.session.followers[0]._looking:
            *others, last = values
            await one.backend.delete(others)
            await one.backend.delete([last])
            assert await one.put({last: values[last]}) == [Outcome.OK]
            await one.session.tables.end()
        await eventually_async(lambda: len(reader.removed) == len(others), what="the others are reported as removed")
        await reader.has_all({last: values[last]})
        assert reader.arrived == []


async def test_block_of_two_other_engines_is_found_until_both_have_removed_it(tmp_path: Path) -> None:
    """A reader finds the copy of one engine once the other one has removed its own; then it is reported as removed."""
    async with opened(tmp_path, 256) as one, opened(tmp_path, 256) as two, opened(tmp_path, 256) as reader:
        values = one.new(4)
        await asyncio.gather(one.put(values), two.put(values))
        for rig in (one, two):
            await rig.session.tables.end()
        await reader.session.followers[0].refresh()
        for rig in (one, two):
            await reader.has_all(values)
            assert reader.removed == []
            await rig.backend.delete(list(values))
            await rig.session.tables.end()
            await reader.session.followers[0].refresh()
        assert await reader.get(list(values)) == [None] * 4
        assert {key for key, _ in reader.removed} == set(values)


async def test_frozen_root_stops_no_other_one(tmp_path: Path) -> None:
    """While a call on one root hangs, probes pass, new blocks elsewhere are found, and lost segments noticed."""
    roots, disk, gate = [tmp_path / "a", tmp_path / "b"], BadDisk(), threading.Event()
    async with opened(roots, 256, disk=disk) as reader, opened(roots[1], 128) as writer:
        own = await reader.put_new(128)
        disk.ops, disk.bad, disk.gate = ("scandir", "fstat", "statvfs"), str(roots[0]), gate
        try:
            values = await writer.put_new(20)
            await follows(reader, values)
            await eventually_async(lambda: disk.waiting > 0, what="a call hangs")
            async with asyncio.timeout(20):
                await reader.backend.probe()
            lost = set(reader.session.index.segments_in(1))
            numbers = {each.number for each in lost}
            for table in tables(roots[1]):
                if int(table.stem) in numbers:
                    table.unlink()
            await eventually_async(
                lambda: lost.isdisjoint(reader.session.index.segments_in(1)), what="lost segments are dropped"
            )
            assert {key for key, _ in reader.removed} < set(own)
        finally:
            gate.set()


def remove_table(table: Path) -> None:
    """Remove a table and its segment."""
    table.unlink()
    table.with_suffix(".seg").unlink()


def cut_table(table: Path) -> None:
    """Truncate a table."""
    os.truncate(table, PAGE)


def cut_segment(table: Path) -> None:
    """Truncate a segment."""
    os.truncate(table.with_suffix(".seg"), PAYLOAD)


@pytest.mark.parametrize("damage", [remove_table, cut_table, cut_segment])
async def test_files_removed_by_hand_cost_only_their_blocks(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """When a table or segment of another engine vanishes, its blocks are misses, and all others are loaded."""
    async with opened(tmp_path, 256) as one, opened(tmp_path, 256) as two, opened(tmp_path, 256) as reader:
        values = await one.put_new(8)
        (table,) = tables(tmp_path)
        others = await two.put_new(8)
        await follows(reader, [*values, *others])
        damage(table)
        outcomes = await reader.outcomes_of(list(values))
        assert set(outcomes) <= {Outcome.OK, Outcome.MISS, Outcome.IO_ERROR}
        await reader.has_all(others)
        await eventually_async(
            lambda: {key for key, _ in reader.removed} == set(values) or damage is cut_segment,
            what="the blocks are reported as removed",
        )
        if damage is not cut_segment:
            assert await reader.get(list(values)) == [None] * 8


async def test_new_segment_under_an_old_name_is_followed(tmp_path: Path) -> None:
    """A segment that was removed and made again with the same name has none of the blocks of the old one."""
    async with opened(tmp_path, 256) as reader, opened(tmp_path, 256) as one:
        values = await one.put_new(8)
        await follows(reader, values)
        (table,) = tables(tmp_path)
        remove_table(table)
        await eventually_async(lambda: len(one.removed) == 8, what="the engine has noticed")
        new = await one.put_new(8)
        assert tables(tmp_path) == [table]
        await follows(reader, new)
        await eventually_async(lambda: len(reader.removed) == 8, what="the blocks are reported as removed")
        assert await reader.get(list(values)) == [None] * 8
        await reader.has_all(new)


async def test_table_replaced_in_one_step_is_followed_no_more(tmp_path: Path) -> None:
    """The blocks of a table whose name leads to another file are gone, although its own file stays readable."""
    async with opened(tmp_path, 256) as reader, opened(tmp_path, 256) as one:
        values = await one.put_new(8)
        await follows(reader, values)
        (table,) = tables(tmp_path)
        other = tmp_path / "other"
        other.write_bytes(bytes(table.stat().st_size))
        other.replace(table)
        await eventually_async(lambda: len(reader.removed) == 8, what="the blocks are reported as removed")


async def test_new_holder_announces_all_rows(tmp_path: Path) -> None:
    """Rows that engines wrote just before they ended are seen by all others once one engine has all their segments."""
    disk = Silent()
    async with opened(tmp_path, 64) as reader:
        for task in reader.session._tasks:
            task.cancel()
        async with contextlib.AsyncExitStack() as stack:
            ended = [await stack.enter_async_context(opened(tmp_path, 64, disk=disk, engine="threads")) for _ in "ab"]
            for one in ended:
                await one.put_new(1)
                await one.session.tables.end()
            await reader.session.followers[0].refresh()
            disk.is_silent = True
            values = await ended[0].put_new(2) | await ended[1].put_new(2)
        async with opened(tmp_path, 64) as taker:
            await taker.has_all(values)
            await taker.session.tables.end()
            await reader.session.followers[0].refresh()
            assert await reader.backend.exists(list(values)) == [True] * 4
            await reader.has_all(values)


async def test_segment_taken_after_its_table_was_read_is_not_followed(tmp_path: Path) -> None:
    """An engine that takes a segment while it opens the segment for following has it once."""
    async with opened(tmp_path, 64) as rig:
        for task in rig.session._tasks:
            task.cancel()
        (followers,) = rig.session.followers
        async with opened(tmp_path, 64) as other:
            values = await other.put_new(1)
            found = next(followers._opened([]))
        await rig.session.space.take_segments(rig.session.roots[0], report=True)
        await followers._follow(*found, report=True)
        assert (len(followers), len(rig.session.index.known)) == (0, 1)
        await rig.has_all(values)


async def test_block_in_two_engines_is_found_until_both_have_evicted_it(tmp_path: Path) -> None:
    """Two engines that stored one block at once each keep their copy; the loss of one is no loss of the other."""
    async with opened(tmp_path, 256) as one, opened(tmp_path, 256) as two:
        values = {one.maker.key(): one.maker.payload()}
        outcomes = await asyncio.gather(one.put(values), two.put(values))
        assert outcomes == [[Outcome.OK], [Outcome.OK]]
        await asyncio.sleep(0.1)
        assert await one.backend.delete(list(values)) == [True]
        await asyncio.sleep(0.1)
        await two.has_all(values)


async def test_block_that_was_evicted_here_is_found_in_another_engine(tmp_path: Path) -> None:
    """After an engine has evicted its copy of a block, it loads the other engine's, and reports no removal."""
    disk = Silent()
    async with opened(tmp_path, 256, disk=disk, engine="threads") as one, opened(tmp_path, 256) as two:
        # The other engine reads the table of these blocks, and is not told of those that follow.
        await follows(two, await one.put_new(1))
        disk.is_silent = True
        values = one.new(2)
        assert [await rig.put(values) for rig in (one, two)] == [[Outcome.OK] * 2] * 2
        await two.session.tables.end()
        await one.session.followers[0].refresh()
        ours = [one.session.index.place(key) for key in values]
        while any(one.session.index.place(key) in ours for key in values):
            await one.put_new(32)
        await one.has_all(values)
        assert not {key for key, _ in one.removed} & set(values)


class Unseen(OsDisk):
    """A read-only mount, on which an engine can't state that it is there."""

    def open_file(self, name: str, flags: int, dir_fd: int) -> int:
        if flags & os.O_ACCMODE != os.O_RDONLY and (name.startswith("engine.") or name[:6].isdigit()):
            raise OSError(errno.EROFS, "read-only")
        return super().open_file(name, flags, dir_fd)


async def test_engine_with_a_read_only_mount_finds_new_blocks(tmp_path: Path) -> None:
    """An engine that the others can't see finds their blocks, too, a little later."""
    async with opened(tmp_path, 64) as one, opened(tmp_path, 64, disk=Unseen()) as unseen:
        # Of one segment, whose table has been read when the second block is stored.
        for _ in range(3):
            values = await one.put_new(1)
            await follows(unseen, values)
            await unseen.has_all(values)


async def test_read_of_a_segment_removed_meanwhile_is_a_miss(tmp_path: Path) -> None:
    """Blocks of a segment that another engine removes are misses, and none of them counts as damaged or lost."""
    disk = Paused(header_first=False)
    async with opened(tmp_path, 256) as one, opened(tmp_path, 256, disk=disk, engine="threads") as two:
        values = await one.put_new(8)
        await follows(two, values)
        loading = await disk.stopped_load(two, values)
        (segment,) = one.session.index.segments.values()
        one.session.roots[0].remove_segment(segment)
        disk.goes_on.set()
        assert await loading == [Outcome.MISS] * 8
        await eventually_async(lambda: len(two.removed) == 8, what="the segment is gone")
        assert {cause for _, cause in two.removed} == {RemovalCause.EVICTED}
        assert not two.backend.stats().counters.get("stale_blocks", 0)
