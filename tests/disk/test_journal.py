"""The journal seen by its writer and its followers: both agree whichever write fails."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.backends.disk import followers as followers_module
from kvstore.backends.disk import journal as journal_module
from kvstore.backends.disk import layout
from kvstore.backends.disk.journal import JournalEnd, JournalReader, create_journal
from kvstore.backends.disk.layout import (
    FRAME_BYTES,
    JOURNAL_HEADER_BYTES,
    RECORD,
    Geometry,
    Kind,
    digest_of,
    journal_name,
)
from kvstore.backends.disk.table import DigestTable
from kvstore.diskio import OsDisk
from kvstore.testing.waiting import eventually_async
from kvstore.types import BlockKey, Outcome
from tests.disk.filled_root import filled, frame_ends, home, journal
from tests.disk.rig import SLOT, NoFrames, Rig, clone, opened, room_for


class UnsyncedDisk(OsDisk):
    """A disk that accepts writes, and fails to sync some files while ``fails`` is set."""

    fails = False

    def __init__(self, pattern: str = "journal.*") -> None:
        self._pattern = pattern

    def fdatasync(self, fd: int) -> None:
        if self.fails and Path(os.readlink(f"/proc/self/fd/{fd}")).match(self._pattern):
            raise OSError(errno.EIO, "not synced")
        super().fdatasync(fd)


async def finds_all(rig: Rig, values: dict[BlockKey, bytes]) -> bool:
    """Return whether an engine finds all of these blocks."""
    return all(await rig.backend.exists(list(values)))


@pytest.mark.parametrize("failures", [1, 3])
async def test_a_frame_that_is_not_synced_keeps_followers_in_step(tmp_path: Path, failures: int) -> None:
    """Followers may have read a frame whose fdatasync failed: its blocks are withdrawn, and later frames arrive."""
    disk = UnsyncedDisk()
    async with opened(tmp_path, "64MiB", disk=disk, durability="data") as one, opened(tmp_path, "64MiB") as two:
        values = await one.put_new(2)
        failed: dict[BlockKey, bytes] = {}
        disk.fails = True
        for _ in range(failures):
            new = one.new(3)
            assert await one.put(new) == [Outcome.IO_ERROR] * 3
            failed |= new
            await two.session.followers.refresh()
        disk.fails = False
        values |= await one.put_new(2)
        await two.session.followers.refresh()
        await two.has_all(values)
        assert not any(await two.backend.exists(list(failed)))
        gone = list(values)[:1]
        await one.backend.delete(gone)
        await two.session.followers.refresh()
        assert await two.backend.exists(gone) == [False]
        copy = clone(tmp_path, tmp_path.with_name(tmp_path.name + "-copy"))
    async with opened(copy, "64MiB") as heir:
        assert heir.session.owner.intact
        assert await heir.scanned() == set(values) - set(gone)


class Landing(OsDisk):
    """A disk that fails frames of journals while ``fails`` is set, after it has written ``lands`` bytes of them."""

    fails = False
    lands = 1 << 30

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        if not self.fails or not offset or not Path(os.readlink(f"/proc/self/fd/{fd}")).match("journal.*"):
            return super().pwritev(fd, buffers, offset)
        super().pwritev(fd, [b"".join(buffers)[: self.lands]], offset)
        raise OSError(errno.EIO, "written all the same")


@pytest.mark.parametrize("lands", [0, 50, 1 << 30], ids=["nothing", "a part", "all"])
@pytest.mark.parametrize("failures", [1, 3])
async def test_a_frame_that_landed_in_spite_of_an_error_stops_no_follower(
    tmp_path: Path, failures: int, lands: int
) -> None:
    """Followers may have read a frame whose write failed: its blocks are withdrawn, and later frames arrive."""
    disk = Landing()
    disk.lands = lands
    options: dict[str, Any] = {"disk": disk, "engine": "threads"}
    async with opened(tmp_path / "a", room_for(64), **options) as one, opened(tmp_path / "a", room_for(64)) as two:
        values = await one.put_new(3)
        failed: dict[BlockKey, bytes] = {}
        disk.fails = True
        for count in range(1, failures + 1):
            new = one.new(count)
            assert await one.put(new) == [Outcome.IO_ERROR] * count
            failed |= new
            await two.session.followers.refresh()
            assert set(await two.get(list(new))) <= {None, *new.values()}
        gone = list(values)[:1]
        await one.backend.delete(gone)
        await two.session.followers.refresh()
        disk.fails = False
        # Records of other lengths than the failed ones, and more blocks than slots.
        for count in (2, 3, 1, 60):
            values |= await one.put_new(count)
            await two.session.followers.refresh()
            assert two.session.followers.others
            assert not any(await two.backend.exists([*failed, *gone]))
            await two.has_all(await one.still_there({key: values[key] for key in list(values)[-count:]}))
        left = {key for key in await one.still_there(values) if key not in gone}
        await two.session.followers.refresh()
        assert await two.scanned() == left
        copy = clone(tmp_path / "a", tmp_path / "b")
    async with opened(copy, room_for(64)) as heir:
        assert heir.session.owner.intact
        assert await heir.scanned() == left


@pytest.mark.parametrize("lands", [0, 50, 1 << 30], ids=["nothing", "a part", "all"])
async def test_a_switch_that_landed_in_spite_of_an_error_is_made(tmp_path: Path, lands: int) -> None:
    """Followers may wait in the next journal: its writer continues there once it can, and takes its snapshot later."""
    disk = Landing()
    disk.lands = lands
    options: dict[str, Any] = {"disk": disk, "engine": "threads", "snapshot_interval": 0}
    async with opened(tmp_path / "a", "64MiB", **options) as one, opened(tmp_path / "a", "64MiB") as two:
        values = await one.put_new(2)
        await two.session.followers.refresh()
        disk.fails = True
        for _ in range(2):
            await one.session._write_snapshot()
            await two.session.followers.refresh()
        assert await one.put(one.new(1)) == [Outcome.IO_ERROR]
        disk.fails = False
        for _ in range(2):
            values |= await one.put_new(2)
            await two.session.followers.refresh()
            assert await finds_all(two, values)
            clone(tmp_path / "a", tmp_path / f"b-{len(values)}")
            await one.session._write_snapshot()
        await two.has_all(values)
        assert one.backend.stats().counters["snapshots"] == 2
        clone(tmp_path / "a", tmp_path / "b")
    for copy in tmp_path.glob("b*"):
        async with opened(copy, "64MiB") as heir:
            assert heir.session.owner.intact
            found = await heir.scanned()
            assert found <= set(values)
            assert len(found) >= 4


def open_journals(root: Path) -> list[str]:
    """Return the journals under a directory that this process has open for writing."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{number}")
            if path.startswith(str(root)) and os.path.basename(path).startswith("journal."):
                found.append(path)
    return found


async def test_a_switch_in_doubt_leaves_no_file_open(tmp_path: Path) -> None:
    """A journal closed before its switch could be made closes the next one, too."""
    disk = Landing()
    options: dict[str, Any] = {"disk": disk, "engine": "threads", "snapshot_interval": 0}
    async with opened(tmp_path, "64MiB", **options) as one:
        await one.put_new(2)
        disk.fails = True
        await one.session._write_snapshot()
        assert len(open_journals(tmp_path)) == 2
    assert not open_journals(tmp_path)


class Hanging(Landing):
    """A disk whose failing writes of journals last until ``goes_on`` is set."""

    def __init__(self) -> None:
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        try:
            return super().pwritev(fd, buffers, offset)
        except OSError:
            self.begun.set()
            assert self.goes_on.wait(60)
            raise


async def test_a_switch_after_the_close_leaves_no_file_open(tmp_path: Path) -> None:
    """A journal closed while the disk hangs on the last frame of a switch closes the next one when that fails."""
    disk = Hanging()
    async with opened(tmp_path, "64MiB", disk=disk, engine="threads") as one:
        await one.put_new(2)
        journal, disk.fails = one.session.journal, True
        switch = asyncio.create_task(journal.switch(one.session.owner.create_journal))
        await asyncio.to_thread(disk.begun.wait, 60)
        journal.close()
        disk.goes_on.set()
        assert await switch == 0
        assert not open_journals(tmp_path)


class Stuck(Landing):
    """A disk that writes a part of each frame while ``fails`` is set, then nothing more, without an error."""

    lands = 50

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        try:
            return super().pwritev(fd, buffers, offset)
        except OSError:
            return 0


async def test_a_frame_of_which_a_part_was_written_is_written_again(tmp_path: Path) -> None:
    """A short write without an error is a failed one: later frames follow the whole frame."""
    disk = Stuck()
    async with opened(tmp_path / "a", "64MiB", disk=disk, engine="threads") as one:
        values = await one.put_new(2)
        disk.fails = True
        assert await one.put(one.new(2)) == [Outcome.IO_ERROR] * 2
        disk.fails = False
        values |= await one.put_new(2)
        copy = clone(tmp_path / "a", tmp_path / "b")
    async with opened(copy, "64MiB") as heir:
        assert heir.session.owner.intact
        assert await heir.scanned() == set(values)


async def test_a_frame_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting records share a frame up to its limit; the others go into further frames, in order."""
    monkeypatch.setattr(journal_module, "_FRAME_ROWS_MAX", 4)
    async with opened(tmp_path, "64MiB") as rig:
        written, before = rig.session.journal, rig.session.journal.frames
        applied: list[int] = []
        rows = [(Kind.REMOVE, 0, 0, 0, b"")]
        counts = [2, 2, 3, 3, 9]
        appends = [written.append(count * rows, partial(applied.append, i)) for i, count in enumerate(counts)]
        await asyncio.gather(*appends)
        assert written.frames - before == 4
        assert applied == [0, 1, 2, 3, 4]


async def test_pending_removals_are_recorded_first_in_bounded_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of failed frames precede all others, in order, and no frame is longer than the limit."""
    monkeypatch.setattr(journal_module, "_FRAME_ROWS_MAX", 4)
    disk = NoFrames()
    async with opened(tmp_path, "64MiB", disk=disk, engine="threads") as rig:
        await rig.put_new(1)
        written, start = rig.session.journal, rig.session.journal.end.offset
        applied: list[int] = []
        disk.fails = True
        for i, count in enumerate([3, 3, 10, 1]):
            with pytest.raises(OSError, match="no frame"):
                await written.append([(Kind.REMOVE, i, 0, 0, b"")] * count, partial(applied.append, i), lasting=True)
        assert (applied, written.is_behind) == ([], True)
        disk.fails = False
        await written.append([(Kind.REMOVE, 4, 0, 0, b"")], partial(applied.append, 4))
        assert (applied, written.is_behind) == ([0, 1, 2, 3, 4], False)
        content = journal(tmp_path).read_bytes()
    ends = [end for end in frame_ends(content) if end >= start]
    counts = [(end - begin - FRAME_BYTES) // RECORD.itemsize for begin, end in pairwise(ends)]
    assert max(counts) <= 4
    slots = np.concatenate(
        [np.frombuffer(content[begin + FRAME_BYTES : end], RECORD)["slot"] for begin, end in pairwise(ends)]
    )
    # The frame that failed first may have been read, so it is written again before its records are repeated.
    assert slots.tolist() == [0] * 3 + [0] * 3 + [1] * 3 + [2] * 10 + [3, 4]


class UnwritableAfterwards(UnsyncedDisk):
    """A disk that refuses every write of a journal after a failed sync."""

    refuses = False

    def fdatasync(self, fd: int) -> None:
        try:
            super().fdatasync(fd)
        except OSError:
            self.refuses = True
            raise

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        if self.refuses and Path(os.readlink(f"/proc/self/fd/{fd}")).match("journal.*"):
            raise OSError(errno.EIO, "not written")
        return super().pwritev(fd, buffers, offset)


async def test_a_frame_that_could_not_be_taken_back_is_taken_back_later(tmp_path: Path) -> None:
    """Followers have read the frame, and its revoking frame fails as well: the next successful frame revokes it."""
    disk = UnwritableAfterwards()
    options = {"durability": "data", "engine": "threads"}
    async with opened(tmp_path, "64MiB", disk=disk, **options) as one, opened(tmp_path, "64MiB") as two:
        await one.put_new(1)
        await two.session.followers.refresh()
        failed = one.new(3)
        disk.fails = True
        assert await one.put(failed) == [Outcome.IO_ERROR] * 3
        await two.session.followers.refresh()
        assert await finds_all(two, failed)
        disk.fails = disk.refuses = False
        await one.put_new(1)
        await two.session.followers.refresh()
        assert not any(await two.backend.exists(list(failed)))


async def test_a_slot_is_not_reused_before_its_record_is_reverted(tmp_path: Path) -> None:
    """While other engines find a block whose frame failed, its slot keeps its bytes; later the slot is free again."""
    disk = UnwritableAfterwards()
    options = {"durability": "data", "engine": "threads"}
    async with opened(tmp_path, "64MiB", disk=disk, **options) as one, opened(tmp_path, "64MiB") as two:
        await one.put_new(1)
        failed = one.new(3)
        disk.fails = True
        assert await one.put(failed) == [Outcome.IO_ERROR] * 3
        assert Outcome.OK not in await one.put(one.new(3))
        await two.session.followers.refresh()
        await two.has_all(failed)
        disk.fails = disk.refuses = False
        await one.backend.probe()
        gauges = one.backend.stats().gauges
        assert gauges["free_slots"] + 1 == gauges["segments"] * one.session.geometry.segment_slots
        await two.session.followers.refresh()
        assert not any(await two.backend.exists(list(failed)))


async def test_a_switch_that_is_not_synced_is_made(tmp_path: Path) -> None:
    """Followers switch to the next journal once they have read of it, and so does its writer."""
    disk = UnsyncedDisk()
    async with opened(tmp_path, "64MiB", disk=disk, durability="data") as one, opened(tmp_path, "64MiB") as two:
        values = await one.put_new(2)
        await two.session.followers.refresh()

        def create(number: int) -> JournalEnd:
            end = one.session.owner.create_journal(number)
            disk.fails = True
            return end

        await one.session.journal.switch(create)
        disk.fails = False
        await two.session.followers.refresh()
        values |= await one.put_new(2)
        await two.session.followers.refresh()
        assert one.session.journal.end.number == 2
        await two.has_all(values)


async def test_records_that_are_not_synced_are_not_stored(tmp_path: Path) -> None:
    """With ``durability: data`` a record counts only once its slot is on the device."""
    disk = UnsyncedDisk("*.seg")
    async with opened(tmp_path, "64MiB", disk=disk, durability="data") as rig:
        new = rig.new(3)
        disk.fails = True
        assert await rig.put(new) == [Outcome.IO_ERROR] * 3
        assert not await finds_all(rig, new)
        disk.fails = False
        assert await rig.put(new) == [Outcome.OK] * 3


def test_one_owner_has_one_geometry(tmp_path: Path) -> None:
    """A journal with another slot length is not accepted as the continuation of an earlier one."""
    here = os.open(tmp_path, os.O_RDONLY)
    disk, owner, digest = OsDisk(), 5, bytes(32)
    for number, slots in ((1, 4), (2, 8), (3, 4)):
        os.close(create_journal(disk, here, number, owner, Geometry(SLOT, slots, 1), digest).fd)
    reader = JournalReader(disk, [here], owner, digest)
    assert [reader.open(journal_name(number), number) for number in (1, 2, 3)] == [True, False, True]
    assert reader.end.number == 3
    reader.close()
    os.close(here)


async def test_a_restart_keeps_the_order_of_eviction(tmp_path: Path) -> None:
    """A snapshot keeps the ages of blocks: blocks used last before a restart are evicted last after it."""
    async with opened(tmp_path, room_for(64)) as rig:
        values: dict[BlockKey, bytes] = {}
        for _ in range(15):
            values |= await rig.put_new(4)
        used = list(values)[:20]
        await rig.get(used)
    async with opened(tmp_path, room_for(64)) as rig:
        for _ in range(8):
            await rig.put_new(4)
        left = {key for key, there in zip(values, await rig.backend.exists(list(values)), strict=True) if there}
        assert len(left) < 50
        assert set(used) <= left


async def test_a_block_found_twice_is_one_block(tmp_path: Path) -> None:
    """Two intact copies of a block found by a scan count as one block, and the other slot is free."""
    async with opened(tmp_path / "live", room_for(16)) as rig:
        values = await rig.put_new(1)
        (key,) = values
        index = rig.session.index
        # Eviction leaves the slot's bytes unchanged; the block is then stored again elsewhere.
        first = index.slot(key)
        rows = index.evict(1)
        index.pin((0,))
        await rig.session.space.leave(rows, None)
        assert await rig.put(values) == [Outcome.OK]
        assert index.slot(key) != first
        clone(tmp_path / "live", tmp_path / "a")
    os.truncate(journal(tmp_path / "a"), JOURNAL_HEADER_BYTES)
    with journal(tmp_path / "a").open("ab") as file:
        file.write(b"torn")
    async with opened(tmp_path / "a", room_for(16)) as rig:
        await rig.session.recovered.wait()
        assert rig.backend.stats().blocks == 1
        assert rig.session.counts["recovery_found_blocks"] == 1
        await rig.has_all(values)
        new: dict[BlockKey, bytes] = {}
        for _ in range(15):
            new |= await rig.put_new(1)
        assert rig.backend.stats().blocks == 16
        await rig.has_all(values | new)


async def test_an_owner_of_many_blocks_is_taken_in_by_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop keeps running while the blocks of an owner enter the table, and while they leave it."""
    monkeypatch.setattr(followers_module, "_TURN_SLOTS", 256)
    monkeypatch.setattr(followers_module, "_TURN_ROWS", 256)
    longest = dict.fromkeys(("added", "searched"), 0)
    add_all, remove_places = DigestTable.add_all, DigestTable.remove_places

    def added(self: DigestTable, digests: Any, places: Any) -> Any:
        longest["added"] = max(longest["added"], len(digests))
        return add_all(self, digests, places)

    def searched(self: DigestTable, first: int, end: int, start: int, rows: int) -> int:
        longest["searched"] = max(longest["searched"], rows)
        return remove_places(self, first, end, start, rows)

    async with opened(tmp_path, "512MiB") as one:
        keys = [b"%036d" % i for i in range(4000)]
        for start in range(0, 4000, 500):
            slots = await one.session.space.take(500)
            rows = [
                (Kind.ADD, slot, SLOT, digest_of(key), key)
                for slot, key in zip(slots, keys[start : start + 500], strict=True)
            ]
            await one.session.journal.append(rows, lambda rows=rows: one.session.index.add(rows))  # type: ignore[misc]
            one.session.index.unpin(slots)
        async with opened(tmp_path, "512MiB") as two:
            monkeypatch.setattr(DigestTable, "add_all", added)
            monkeypatch.setattr(DigestTable, "remove_places", searched)
            table = two.session.index.table
            assert all(await two.backend.exists(keys))
            (other,) = two.session.followers.others.values()
            two.session.followers._forget(other)
            await two.session.followers._clear_rows()
            assert len(table) == 0
            await two.session.followers.refresh()
            assert all(await two.backend.exists(keys))
            assert len(two.arrived) >= 4000
    assert longest == {"added": 256, "searched": 256}


async def test_a_close_encodes_few_slots_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many blocks there are, the snapshot holds the GIL, and so the loop, for one frame at most."""
    monkeypatch.setattr(journal_module, "_SNAPSHOT_FRAME_SLOTS", 8)
    lengths: list[int] = []
    encode = layout.encode_frame

    def encode_frame(records: bytes, *args: int) -> bytes:
        lengths.append(len(records) // layout.RECORD.itemsize)
        return encode(records, *args)

    async with opened(tmp_path, room_for(64)) as rig:
        values = await rig.put_new(48)
        monkeypatch.setattr(layout, "encode_frame", encode_frame)
    assert sum(lengths) >= 48
    # The list of segments is one frame, too.
    assert max(lengths) <= 16
    monkeypatch.undo()
    async with opened(tmp_path, room_for(64)) as rig:
        await rig.has_all(values)


async def test_a_sparse_journal_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal with a terabyte of zeros after its frames costs a bounded read and loses no block."""
    values = await filled(tmp_path / "a", 5)
    os.truncate(journal(tmp_path / "a"), 1 << 40)
    async with opened(tmp_path / "a", "64MiB") as rig:
        await rig.session.recovered.wait()
        assert await rig.scanned() == set(values)
        assert journal(tmp_path / "a").stat().st_size < 1 << 20
        await rig.put_new(1)


async def test_a_file_in_the_place_of_a_root_of_an_owner(tmp_path: Path) -> None:
    """A user's own file with the name of a segment is removed only inside an owner's directory, and never adopted."""
    values = await filled(tmp_path / "a", 5)
    (segment,) = home(tmp_path / "a").glob("*.seg")
    image = tmp_path / "a" / "000000.seg"
    image.write_bytes(bytes(8192) + b"a disk image whose first sectors are empty")
    shutil.copy(image, home(tmp_path / "a") / "000001.seg")
    async with opened(tmp_path / "a", "64MiB") as rig:
        await rig.has_all(values)
        assert not (home(tmp_path / "a") / "000001.seg").exists()
    assert image.stat().st_size > 8192
    assert segment.exists()


async def test_followers_see_no_block_twice_after_a_reload(tmp_path: Path) -> None:
    """An owner whose journal broke off is reloaded, and its blocks are found under its new number only."""
    async with opened(tmp_path, "64MiB") as one, opened(tmp_path, "64MiB") as two:
        values = await one.put_new(6)
        await eventually_async(lambda: len(two.arrived) == 6, what="the other engine is told")
        (other,) = two.session.followers.others.values()
        os.close(other._reader.end.fd)
        other._reader.end.fd = os.open("/dev/null", os.O_WRONLY)
        await two.session.followers.refresh()
        await two.session.followers.refresh()
        assert len(two.session.index.table) == 6
        await two.has_all(values)
