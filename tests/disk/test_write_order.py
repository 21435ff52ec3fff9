"""Order of writes, and rows that could not be written."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvstore.backends.disk.layout import PAGE, State, decode_rows
from kvstore.diskio import OsDisk
from kvstore.errors import BackendUnavailableError
from kvstore.types import Outcome, RemovalCause
from tests.disk.rig import NoRows, clone, head_of, opened, tables


class Recorder(OsDisk):
    """Notes the writes and flushes of slots and rows."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        # The generations are on the second page.
        if offset != PAGE:
            self._note("write", fd)
        return super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        self._note("sync", fd)
        super().fdatasync(fd)

    def _note(self, what: str, fd: int) -> None:
        if (ending := os.path.splitext(os.readlink(f"/proc/self/fd/{fd}"))[1]) in (".seg", ".tab"):
            self.calls.append(f"{what} {ending}")


class BadTable(OsDisk):
    """A disk that refuses writes to the rows of one table."""

    name = ""

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        if offset and os.path.basename(os.readlink(f"/proc/self/fd/{fd}")) == self.name:
            raise OSError(errno.EIO, "a bad sector")
        return super().pwritev(fd, buffers, offset)


async def test_slot_is_durable_before_its_row(tmp_path: Path) -> None:
    """A durable store writes and flushes the slot, then writes and flushes the row."""
    disk = Recorder()
    async with opened(tmp_path / "a", 64, disk=disk, engine="threads", durability="data") as rig:
        await rig.put_new(1)
        disk.calls.clear()
        await rig.put_new(1)
        assert disk.calls == ["write .seg", "sync .seg", "write .tab", "sync .tab"]


async def test_rows_of_neighbours_are_one_write(tmp_path: Path) -> None:
    """The rows of a batch in neighbouring slots take one write."""
    disk = Recorder()
    async with opened(tmp_path / "a", 1024, disk=disk, engine="threads") as rig:
        await rig.put_new(1)
        disk.calls.clear()
        await rig.put_new(32)
        assert disk.calls.count("write .tab") == 1


async def test_row_is_free_before_its_slot_is_written_again(tmp_path: Path) -> None:
    """An eviction writes the row before any write to the slot; a removal wipes the slot after the row."""
    disk = Recorder()
    async with opened(tmp_path / "a", 16, disk=disk, engine="threads") as rig:
        values = await rig.put_new(16)
        disk.calls.clear()
        await rig.put_new(1)
        assert disk.calls[:3] == ["write .tab", "write .seg", "write .tab"]
        await rig.backend._open.space.close()  # type: ignore[union-attr]
        disk.calls.clear()
        there = [key for key, found in zip(values, await rig.backend.exists(list(values)), strict=True) if found]
        await rig.backend.delete(there[:1])
        assert disk.calls == ["write .tab", "write .seg"]


class NoFlushOfRows(OsDisk):
    """A disk that flushes no table while ``fails`` is set."""

    fails = False

    def fdatasync(self, fd: int) -> None:
        if self.fails and os.readlink(f"/proc/self/fd/{fd}").endswith(".tab"):
            raise OSError(errno.EIO, "no row is flushed")
        super().fdatasync(fd)


async def test_row_that_is_not_durable_publishes_nothing(tmp_path: Path) -> None:
    """A durable store whose row can't be flushed fails; its slot is not used until another row was flushed."""
    disk = NoFlushOfRows()
    async with opened(tmp_path / "a", 64, disk=disk, engine="threads", durability="data") as rig:
        kept = await rig.put_new(2)
        disk.fails = True
        failed = rig.new(1)
        assert await rig.put(failed) == [Outcome.IO_ERROR]
        assert list(await rig.backend.exists(list(failed))) == [False]
        assert rig.backend.stats().gauges["unsettled_rows"] == 1
        disk.fails = False
        await rig.backend.probe()
        assert await rig.put(failed) == [Outcome.OK]
        await rig.has_all(kept | failed)


@pytest.mark.parametrize("after", [False, True], ids=["not written", "written"])
async def test_failed_row_of_a_store_publishes_nothing(tmp_path: Path, after: bool) -> None:
    """The store fails, and its slot is not used until its row was written as free."""
    disk = NoRows()
    disk.after = after
    async with opened(tmp_path / "a", 64, disk=disk, engine="threads") as rig:
        kept = await rig.put_new(2)
        disk.fails = True
        failed = {rig.maker.key(): rig.maker.payload()}
        assert await rig.put(failed) == [Outcome.IO_ERROR]
        assert list(await rig.backend.exists(list(failed))) == [False]
        assert rig.backend.stats().gauges["unsettled_rows"] == 1
        free = rig.backend.stats().gauges["free_slots"]
        for task in rig.session._tasks:
            task.cancel()
        with pytest.raises(BackendUnavailableError):
            await rig.backend.probe()
        assert rig.backend.stats().gauges["unsettled_rows"] == 1
        disk.fails = False
        await rig.backend.probe()
        assert rig.backend.stats().gauges["unsettled_rows"] == 0
        assert rig.backend.stats().gauges["free_slots"] == free + 1
        copy = clone(tmp_path / "a", tmp_path / "b")
        assert await rig.put(failed) == [Outcome.OK]
        await rig.has_all(kept | failed)
    async with opened(copy, 64) as rig:
        await rig.has_all(kept)
        assert list(await rig.backend.exists(list(failed))) == [False]


@pytest.mark.parametrize("after", [False, True], ids=["not written", "written"])
async def test_block_stays_when_its_eviction_fails(tmp_path: Path, after: bool) -> None:
    """While rows can't be written, nothing is evicted, and every block is still loaded."""
    disk = NoRows()
    async with opened(tmp_path / "a", 16, disk=disk, engine="threads") as rig:
        values = await rig.put_new(16)
        disk.fails, disk.after = True, after
        assert await rig.put({rig.maker.key(): rig.maker.payload()}) == [Outcome.IO_ERROR]
        assert rig.removed == []
        await rig.has_all(values)
        disk.fails = False
        new = await rig.put_new(1)
        assert [cause for _, cause in rig.removed] == [RemovalCause.EVICTED]
        await rig.has_all(new)
        await rig.put_new(16)
        assert {key for key, _ in rig.removed} == {*values, *new}, "a block can't be evicted any more"


@pytest.mark.parametrize("after", [False, True], ids=["not written", "written"])
async def test_failed_removal_of_a_row_is_made_later(tmp_path: Path, after: bool) -> None:
    """The block is gone at once, its slot stays unused, and a kill after the next upkeep does not bring it back."""
    disk = NoRows()
    disk.after = after
    async with opened(tmp_path / "a", 64, disk=disk, engine="threads") as rig:
        values = await rig.put_new(2)
        first, second = values
        disk.fails = True
        assert list(await rig.backend.delete([first, first])) == [True, False]
        await rig.backend.quarantine([second])
        assert await rig.get(list(values)) == [None, None]
        assert [info async for info in rig.backend.scan()] == []
        disk.fails = False
        await rig.backend.probe()
        free = rig.backend.stats().gauges["free_slots"]
        copy = clone(tmp_path / "a", tmp_path / "b")
    async with opened(copy, 64) as rig:
        assert rig.backend.stats().blocks == 0
        assert rig.backend.stats().gauges["free_slots"] == free


async def test_one_bad_row_does_not_stop_evictions(tmp_path: Path) -> None:
    """If the row of a block can't be written, other blocks are evicted, and the block stays."""
    disk = BadTable()
    async with opened(tmp_path / "a", 16, disk=disk, engine="threads") as rig:
        values = await rig.put_new(16)
        disk.name = tables(tmp_path)[0].name
        outcomes = [outcome for _ in range(12) for outcome in await rig.put({rig.maker.key(): rig.maker.payload()})]
        assert outcomes.count(Outcome.OK) >= 11
        assert sum(await rig.backend.exists(list(values))) >= 1


async def test_generation_grows_with_each_change_of_a_row(tmp_path: Path) -> None:
    """A row has a generation that it never had, also after a write that failed, and in the next engine."""
    disk = NoRows()
    disk.after = True
    generations: list[int] = []

    def note() -> None:
        table = tables(tmp_path)[0]
        head = head_of(table)
        rows, _ = decode_rows(table.read_bytes()[head.rows_at :], np.arange(head.slots), head)
        generations.append(int(rows["generation"][0]))

    async with opened(tmp_path / "a", 16, disk=disk, engine="threads") as rig:
        first = list(await rig.put_new(1))
        note()
        await rig.backend.delete(first)
        note()
        disk.fails = True
        assert await rig.put({rig.maker.key(): rig.maker.payload()}) == [Outcome.IO_ERROR]
        note()
        disk.fails = False
        await rig.backend.probe()
        note()
    async with opened(tmp_path / "a", 16, engine="threads") as rig:
        await rig.put_new(16)
        note()
    assert generations == sorted(set(generations)), generations


async def test_slot_is_retired_after_a_failed_row(tmp_path: Path) -> None:
    """The slot of a damaged record is not used again, although its row was written only after a failure."""
    disk = NoRows()
    async with opened(tmp_path / "a", 64, disk=disk, engine="threads") as rig:
        values = await rig.put_new(1)
        for task in rig.session._tasks:
            task.cancel()
        disk.fails = True
        await rig.backend.quarantine(list(values))
        disk.fails = False
        await rig.backend.probe()
        (segment,) = rig.session.index.segments.values()
        assert np.count_nonzero(segment.state == State.RETIRED) == 1
