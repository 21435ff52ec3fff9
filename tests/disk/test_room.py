"""Room on the disk: the reserve, the ledger, segments that could not be created, and deleted segments."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore import Namespace
from kvstore.backends.disk import root as root_module
from kvstore.backends.disk import space as space_module
from kvstore.backends.disk.columns import EMPTY
from kvstore.backends.disk.journal import OwnerState, load_owner
from kvstore.backends.disk.layout import JOURNAL_HEADER_BYTES, Row
from kvstore.diskio import OsDisk
from kvstore.testing.waiting import eventually_async
from kvstore.types import BlockKey, Outcome, RemovalCause
from tests.disk.filled_root import journal
from tests.disk.rig import NAMESPACE, OTHER_NAMESPACE, SLOT, NoFrames, Rig, clone, opened, room_for, segment_bytes
from tests.diskio.faulty_disk import DiskFault, FaultyDisk


class FullDisk(OsDisk):
    """A disk that reports a fixed number of free bytes."""

    free = 1 << 40
    total = 1 << 40

    def statvfs(self, fd: int) -> Any:
        return SimpleNamespace(f_bavail=self.free, f_frsize=1, f_blocks=self.total)


async def test_the_reserve_stays_free(tmp_path: Path) -> None:
    """No segment is created that would leave less free space than the reserve; with room again, stores succeed."""
    disk = FullDisk()
    segment = 4 * SLOT
    async with opened(tmp_path, room_for(64), disk=disk, reserve="1MiB") as rig:
        disk.free = (1 << 20) + segment - 1
        assert set(await rig.put(rig.new(2))) == {Outcome.NO_SPACE}
        assert segment_bytes(tmp_path) == 0
        disk.free = (1 << 20) + segment
        while Outcome.OK not in await rig.put(rig.new(2)):
            await asyncio.sleep(0.01)
        assert segment_bytes(tmp_path) >= segment


async def test_shares_follow_the_size_of_the_volume(tmp_path: Path) -> None:
    """An engine uses its share of a volume that grew while it ran, and keeps the larger reserve free."""
    disk = FullDisk()
    disk.total = room_for(16)
    async with opened(tmp_path, "100%", disk=disk, reserve="25%") as rig:
        for _ in range(16):
            await rig.put_new(4)
        assert segment_bytes(tmp_path) <= room_for(16)
        disk.total, disk.free = room_for(128), room_for(64)
        while segment_bytes(tmp_path) < room_for(64):
            await rig.put_new(4)
        assert rig.backend.stats().capacity_bytes == room_for(128)
        disk.free = room_for(32) - 1
        made = segment_bytes(tmp_path)
        while segment_bytes(tmp_path) >= made:
            await rig.session.space.give_up_excess()
            await asyncio.sleep(0.01)


async def test_segments_are_removed_to_restore_the_reserve(tmp_path: Path) -> None:
    """An engine keeps its segments while others fill the disk up to the reserve, and removes some beyond it."""
    disk = FullDisk()
    async with opened(tmp_path, room_for(64), disk=disk, reserve="1MiB") as rig:
        await rig.put_new(64)
        made = segment_bytes(tmp_path)
        disk.free = 1 << 20
        await rig.session.space.give_up_excess()
        assert segment_bytes(tmp_path) == made
        disk.free -= 1
        await rig.session.space.give_up_excess()
        # The engine's housekeeping may have removed one more.
        assert segment_bytes(tmp_path) < made
        assert len(rig.removed) >= 4
        disk.free = 1 << 40


async def test_two_engines_share_out_room_one_after_the_other(tmp_path: Path) -> None:
    """While one engine creates the last segment that fits, however long that takes, no other engine creates one."""
    disk = FaultyDisk()
    async with (
        opened(tmp_path, room_for(16), disk=disk, engine="threads") as one,
        opened(tmp_path, room_for(16)) as two,
    ):
        for _ in range(15):
            await two.put_new(1)
        made = threading.Event()
        disk.add(DiskFault("fallocate", stall=made))
        storing = asyncio.create_task(one.put(one.new(1)))
        await eventually_async(lambda: disk.stalled, what="the first one makes it")
        await two.put(two.new(2))
        made.set()
        await storing
        assert segment_bytes(tmp_path) <= room_for(16)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
async def test_a_segment_that_could_not_be_made_takes_no_room(tmp_path: Path, error: int) -> None:
    """The remains of a failed allocation are removed at once (some filesystems keep the blocks)."""
    disk = FaultyDisk()
    async with opened(tmp_path, room_for(16), disk=disk) as rig:
        disk.fail("fallocate", error, after=True)
        assert set(await rig.put(rig.new(1))) <= {Outcome.NO_SPACE, Outcome.IO_ERROR}
        assert list(tmp_path.rglob("*.seg")) == []


async def test_idle_namespaces_are_reclaimed_before_own_dead_owners(tmp_path: Path) -> None:
    """Idle namespaces go first even if used later: engines of today still look up the blocks of our own dead owners."""
    async with opened(tmp_path, room_for(64)) as one, opened(tmp_path, room_for(64)) as two:
        ours = await one.put_new(12) | await two.put_new(12)
    async with opened(tmp_path, room_for(64), namespace=OTHER_NAMESPACE) as rig:
        for _ in range(10):
            await rig.put_new(4)
    for path in (tmp_path / NAMESPACE.hex).rglob("*"):
        os.utime(path, (1000, 1000))
    async with opened(tmp_path, room_for(64)) as rig:
        for _ in range(10):
            await rig.put_new(4)
        assert rig.removed == []
        await rig.has_all(ours)
        left = sum(path.stat().st_size for path in (tmp_path / OTHER_NAMESPACE.hex).rglob("*.seg"))
        assert left < room_for(40)


async def test_the_ledger_is_free_while_an_ended_owner_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that reclaims segments reads their owner's journals before it takes the ledger's lock."""
    async with opened(tmp_path, room_for(64)) as one, opened(tmp_path, room_for(64)) as two:
        await one.put_new(32)
        await two.put_new(28)
    was_free: list[bool] = []
    async with opened(tmp_path, room_for(64)) as rig:
        root = rig.session.roots[0]

        def load(*args: Any) -> OwnerState | None:
            with contextlib.closing(SimpleNamespace(close=(ledger := root.ledger()).release)):
                was_free.append(ledger.try_acquire())
            return load_owner(*args)

        monkeypatch.setattr(root_module, "load_owner", load)
        for _ in range(6):
            await rig.has_all(await rig.put_new(4))
    assert was_free
    assert all(was_free)


async def test_segments_are_reclaimed_under_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine removes no segment of an ended owner while another one creates or removes segments."""
    async with opened(tmp_path, room_for(64)) as ended:
        await ended.put_new(60)
    async with opened(tmp_path, room_for(64), seed=1, namespace=Namespace({"other": 1})) as rig:
        root = rig.session.roots[0]
        with contextlib.closing(SimpleNamespace(close=(ledger := root.ledger()).release)):

            def load(*args: Any) -> OwnerState | None:
                assert ledger.fd >= 0 or ledger.try_acquire()
                return load_owner(*args)

            monkeypatch.setattr(root_module, "load_owner", load)
            before = set(tmp_path.glob("*/*/*.seg"))
            await rig.put(rig.new(16))
            assert ledger.fd >= 0
            assert before <= set(tmp_path.glob("*/*/*.seg"))
        monkeypatch.undo()
        await rig.has_all(await rig.put_new(4))


async def test_no_more_segments_are_reclaimed_than_needed(tmp_path: Path) -> None:
    """An engine that needs one segment takes one from an ended owner, whose other blocks stay."""
    async with opened(tmp_path, room_for(64)) as ended:
        await ended.put_new(64)
    async with opened(tmp_path, room_for(64), seed=1, namespace=Namespace({"other": 1})) as rig:
        before = set(tmp_path.glob("*/*/*.seg"))
        await rig.has_all(await rig.put_new(1))
        assert len(before - set(tmp_path.glob("*/*/*.seg"))) == 1


async def test_an_ended_owner_without_segments_is_removed(tmp_path: Path) -> None:
    """Once an ended owner's last segments were reclaimed, the next engine that needs room removes its directory."""
    async with opened(tmp_path, room_for(64)) as ended:
        await ended.put_new(8)
        directory = tmp_path / NAMESPACE.hex / ended.session.owner.name
    async with opened(tmp_path, room_for(64), namespace=OTHER_NAMESPACE) as rig:
        for _ in range(40):
            await rig.put(rig.new(4))
        await eventually_async(lambda: not directory.exists(), what="its directory is removed")


async def test_no_segment_is_removed_while_ended_owners_hold_room(tmp_path: Path) -> None:
    """An engine above its share keeps its blocks as long as the directory of an ended engine can be reclaimed."""
    async with opened(tmp_path, room_for(64)) as one, opened(tmp_path, room_for(64)) as two:
        async with opened(tmp_path, room_for(64)) as ended:
            await ended.put_new(4)
        await two.put_new(4)
        for _ in range(14):
            await one.put_new(4)
        two.session.roots[0].want(two.session.owner.name, wanted=True)
        await one.session.space.give_up_excess()
        assert one.session.counts["segments_given_up"] == 0
        # The space of the ended engine is reclaimed, for the engine that requests it.
        await one.put_new(4)
        await two.put_new(4)
        two.session.roots[0].want(two.session.owner.name, wanted=True)
        await one.session.space.give_up_excess()
        assert one.session.counts["segments_given_up"] > 0


async def test_request_for_room_counts_once_per_running_engine(tmp_path: Path) -> None:
    """An engine above its share removes one segment per request of a running engine, and none for an ended engine."""
    async with opened(tmp_path, room_for(64)) as one, opened(tmp_path, room_for(64)) as two:
        for _ in range(16):
            await one.put_new(4)
        root, name, given_up = two.session.roots[0], two.session.owner.name, one.session.counts
        left = "0" * 16
        root.want(left, wanted=True)
        await one.session.space.give_up_excess()
        assert given_up["segments_given_up"] == 0
        assert not (tmp_path / ".kvstore" / f"want.{left}").exists()
        root.want(name, wanted=True)
        for _ in range(3):
            await one.session.space.give_up_excess()
            assert given_up["segments_given_up"] == 1
        await two.put_new(1)
        root.want(name, wanted=True)
        await one.session.space.give_up_excess()
        assert given_up["segments_given_up"] == 2


async def test_segments_that_are_deleted_under_an_engine_are_noticed(tmp_path: Path) -> None:
    """Their room is freed, later blocks are not stored in them, and their blocks are misses."""
    async with opened(tmp_path, room_for(64)) as rig:
        values: dict[BlockKey, bytes] = {}
        for _ in range(16):
            values |= await rig.put_new(4)
        values = await rig.still_there(values)
        await rig.has_all(values)
        for path in list(tmp_path.rglob("*.seg"))[:8]:
            path.unlink()
        await eventually_async(lambda: rig.backend.stats().gauges["segments"] == 8, what="it is noticed")
        await eventually_async(lambda: not deleted_files(tmp_path), what="they are closed")
        got = await rig.get(list(values))
        assert len(values) - 32 <= len(got) - got.count(None) <= 32
        lost = {key for key, payload in zip(values, got, strict=True) if payload is None}
        assert lost <= {key for key, _ in rig.removed}
        new: dict[BlockKey, bytes] = {}
        while segment_bytes(tmp_path) < room_for(64):
            new |= await rig.put_new(4)
        async with opened(tmp_path, room_for(64)) as other:
            left = await rig.still_there(new)
            assert left
            await other.has_all(left)


def deleted_files(root: Path) -> list[str]:
    """Return the deleted segments that this process has open."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue
    return [link for link in links if link.startswith(str(root)) and link.endswith(".seg (deleted)")]


@pytest.mark.parametrize("count", [12, 16])
async def test_journal_failure_fails_stores_and_loses_no_slot(tmp_path: Path, count: int) -> None:
    """Stores and evictions fail without losing a slot; when frames can be written again, both succeed."""
    disk = NoFrames()
    async with opened(tmp_path, room_for(16), disk=disk, engine="threads") as rig:
        values = await rig.put_new(count)
        disk.fails = True
        for _ in range(5):
            new = rig.new(4)
            assert Outcome.OK not in await rig.put(new)
            assert await rig.backend.exists(list(new)) == [False] * 4
        kept = await rig.still_there(values)
        await rig.has_all(kept)
        disk.fails = False
        stored: dict[BlockKey, bytes] = {}
        for _ in range(6):
            stored |= await rig.put_new(4)
        assert rig.backend.stats().blocks == 16
        left = await rig.still_there(stored)
        assert len(left) == 16
        await rig.has_all(left)


async def test_a_journal_that_can_not_be_ended_goes_on(tmp_path: Path) -> None:
    """If the switch to the next journal fails, the snapshot is postponed, and no later record is lost."""
    disk = NoFrames()
    async with opened(tmp_path / "a", room_for(64), disk=disk, engine="threads") as rig:
        values = await rig.put_new(4)
        disk.fails = True
        await rig.session._write_snapshot()
        disk.fails = False
        values |= await rig.put_new(4)
        gone = list(values)[:2]
        await rig.backend.delete(gone)
        shot = clone(tmp_path / "a", tmp_path / "b")
    async with opened(shot, room_for(64)) as rig:
        await rig.scanned()
        assert await rig.backend.exists(gone) == [False] * 2
        await rig.has_all({key: payload for key, payload in values.items() if key not in gone})


async def test_a_segment_that_the_journal_does_not_take_leaves_no_file(tmp_path: Path) -> None:
    """The segment's file is deleted, so that its room does not count as used until the next start."""
    disk = NoFrames()
    async with opened(tmp_path, room_for(16), disk=disk, engine="threads") as rig:
        disk.fails = True
        assert await rig.put(rig.new(1)) == [Outcome.IO_ERROR]
        assert segment_bytes(tmp_path) == 0


async def test_a_segment_is_kept_while_a_block_there_is_removed(tmp_path: Path) -> None:
    """Otherwise the slot of the removed block would become free in a removed segment."""
    async with opened(tmp_path, room_for(16)) as rig:
        values = await rig.put_new(1)
        engine, write = rig.session.engine, rig.session.engine.write

        async def remove_first(transfers: Any, *args: Any) -> None:
            engine.write = write  # type: ignore[method-assign]
            await rig.session.space._give_up([0])
            await write(transfers, *args)

        engine.write = remove_first  # type: ignore[method-assign]
        assert await rig.backend.delete(list(values)) == [True]
        assert rig.session.counts["segments_given_up"] == 0
        await rig.has_all(await rig.put_new(16))


async def test_removal_of_a_segment_yields_to_other_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many blocks a segment has, the loop runs other work after each few of them; all are gone at the end."""
    monkeypatch.setattr(space_module, "_TURN_ROWS", 2)
    async with opened(tmp_path, room_for(128)) as rig, opened(tmp_path, room_for(128)) as other:
        values = await rig.put_new(8)
        index, turns = rig.session.index, []
        leave = index.leave
        monkeypatch.setattr(index, "leave", lambda rows: (turns.append(len(rows)), leave(rows)))
        assert await rig.session.space._give_up([0])
        assert turns == [2, 2, 2, 2, 1]
        assert sorted(rig.removed) == sorted((key, RemovalCause.EVICTED) for key in values)
        await other.session.followers.refresh()
        assert not any(await other.backend.exists(list(values)))
        assert segment_bytes(tmp_path) == 0


async def test_segment_is_removed_before_the_journal_is_written(tmp_path: Path) -> None:
    """Its file is removed first: before that, a full disk has no room for a frame."""
    disk = NoFrames()
    async with opened(tmp_path, room_for(16), disk=disk, engine="threads") as rig:
        await rig.put_new(1)
        disk.fails = True
        with pytest.raises(OSError, match="no frame"):
            await rig.session.space._give_up([0])
        assert segment_bytes(tmp_path) == 0


async def test_an_eviction_goes_on_when_its_store_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slots become free, and other stores use them."""
    begun, goes_on = asyncio.Event(), asyncio.Event()
    async with opened(tmp_path, room_for(16)) as rig:
        await rig.put_new(16)
        append = rig.session.journal.append

        async def late(*args: Any, **options: Any) -> None:
            begun.set()
            await goes_on.wait()
            await append(*args, **options)

        with monkeypatch.context() as context:
            context.setattr(rig.session.journal, "append", late)
            store = asyncio.create_task(rig.put(rig.new(4)))
            await begun.wait()
            store.cancel()
            await asyncio.wait([store])
            goes_on.set()
        await eventually_async(lambda: rig.session.index.free_slots == 4, what="the slots are free")
        await rig.has_all(await rig.put_new(16))


async def test_slots_that_another_store_takes_first_are_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store evicts again if others took the slots that it freed."""
    async with opened(tmp_path, room_for(16)) as rig:
        await rig.put_new(16)
        index = rig.session.index
        leave, taken = index.leave, list[int]()

        def contended(rows: Sequence[Row]) -> None:
            leave(rows)
            if not taken:
                taken.extend(index.take(3))

        monkeypatch.setattr(index, "leave", contended)
        await rig.has_all(await rig.put_new(4))
        assert len(taken) == 3
        index.give_back(taken)


async def test_a_full_filesystem_is_no_failure(tmp_path: Path) -> None:
    """If no segment can be allocated for lack of room, stores evict at once."""
    disk = FaultyDisk()
    async with opened(tmp_path, room_for(16), disk=disk) as rig:
        await rig.put_new(4)
        disk.fail("fallocate", errno.ENOSPC, forever=True)
        await rig.put_new(4)
        assert len(rig.removed) == 4


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS])
async def test_a_medium_without_frames_keeps_its_blocks(tmp_path: Path, error: int) -> None:
    """However many stores are refused, all blocks stay except those of the first refused store, and no slot is lost."""
    disk = NoFrames()
    disk.error = error
    async with opened(tmp_path, room_for(64), disk=disk, engine="threads") as rig:
        values: dict[BlockKey, bytes] = {}
        for _ in range(20):
            values |= await rig.put_new(4)
        held = await rig.still_there(values)
        disk.fails = True
        refused = Outcome.NO_SPACE if error == errno.ENOSPC else Outcome.REFUSED
        for _ in range(16):
            assert await rig.put(rig.new(4)) == [refused] * 4
        assert await rig.still_there(values) == held, "blocks were reported as removed although no frame was written"
        await rig.has_all(held)
        disk.fails = False
        new = await rig.put_new(4)
        assert len(await rig.still_there(held)) >= len(held) - 8
        await rig.has_all(new | await rig.still_there(held))
        index = rig.session.index
        assert len(index) + index.free_slots == 64


async def test_a_deleted_block_is_gone_although_its_eviction_is_not_journalled(tmp_path: Path) -> None:
    """A block that was about to leave is wiped as any other, so that no later engine finds it."""
    disk = NoFrames()
    async with opened(tmp_path, room_for(16), disk=disk, engine="threads") as rig:
        values = await rig.put_new(16)
        disk.fails = True
        await rig.put(rig.new(2))
        index = rig.session.index
        assert any(index.columns.age_view[index.place(key)] == EMPTY for key in values), "some are about to leave"
        assert await rig.backend.delete(list(values)) == [True] * 16
        copy = clone(tmp_path, tmp_path.with_name(tmp_path.name + "-copy"))
        disk.fails = False
    async with opened(copy, room_for(16)) as heir:
        assert await heir.get(list(values)) == [None] * 16


async def test_quarantined_slot_is_retired_during_its_eviction(tmp_path: Path) -> None:
    """No block is stored in a quarantined slot, by this engine or the next, whenever its eviction is journalled."""
    disk = NoFrames()
    async with opened(tmp_path, room_for(16), disk=disk, engine="threads") as rig:
        values = await rig.put_new(16)
        disk.fails = True
        await rig.put(rig.new(2))
        index = rig.session.index
        assert 0 < sum(index.columns.age_view[index.place(key)] == EMPTY for key in values) < 16
        await rig.backend.quarantine(list(values))
        disk.fails = False
        await rig.backend.probe()
        assert await rig.put(rig.new(2)) == [Outcome.NO_SPACE] * 2
        copy = clone(tmp_path, tmp_path.with_name(tmp_path.name + "-copy"))
    async with opened(copy, room_for(16)) as heir:
        assert await heir.put(heir.new(2)) == [Outcome.NO_SPACE] * 2


class HeldFrames(OsDisk):
    """A disk where the frames of a journal wait for ``go``."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        if os.path.basename(os.readlink(f"/proc/self/fd/{fd}")).startswith("journal.") and offset:
            self.go.wait(30)
        return super().pwritev(fd, buffers, offset)


async def test_a_cancelled_removal_wipes_its_blocks(tmp_path: Path) -> None:
    """A removal cancelled while its frame is written still zeroes the header pages, so that no scan finds the block."""
    disk = HeldFrames()
    async with opened(tmp_path, room_for(16), disk=disk, engine="threads") as rig:
        values = await rig.put_new(4)
        disk.go.clear()
        removal = asyncio.create_task(rig.backend.delete(list(values)))
        await asyncio.sleep(0)
        removal.cancel()
        await asyncio.sleep(0)
        disk.go.set()
        with pytest.raises(asyncio.CancelledError):
            await removal
        copy = clone(tmp_path, tmp_path.with_name(tmp_path.name + "-copy"))
    os.truncate(journal(copy), JOURNAL_HEADER_BYTES + 5)
    async with opened(copy, room_for(16)) as heir:
        await heir.session.recovered.wait()
        assert await heir.get(list(values)) == [None] * 4
        assert heir.backend.stats().counters["recovery_scanned_slots"] > 0


async def test_no_slot_is_reused_before_its_removal_is_journalled(tmp_path: Path) -> None:
    """After failed frames of evictions and removals, other engines never find a block in the slot of another one."""
    disk = NoFrames()
    async with opened(tmp_path, room_for(16), disk=disk, engine="threads") as rig:
        values = await rig.put_new(16)
        disk.fails = True
        await rig.put(rig.new(2))
        removed = list(values)[-2:]
        await rig.backend.delete(removed)
        assert await rig.backend.exists(removed) == [False] * 2
        assert rig.session.index.free_slots == 0
        disk.fails = False
        await rig.backend.probe()
        assert rig.session.index.free_slots == 4
        await rig.put_new(4)
        copy = clone(tmp_path, tmp_path.with_name(tmp_path.name + "-copy"))
        left = await rig.still_there(values)
    async with opened(copy, room_for(16)) as heir:
        assert heir.session.owner.intact
        assert await heir.backend.exists(removed) == [False] * 2
        kept = {key: payload for key, payload in left.items() if key not in removed}
        await heir.has_all(kept)


async def test_a_segment_on_a_read_only_disk_stays_until_it_can_go(tmp_path: Path) -> None:
    """Where neither frame nor file can be changed, at most one segment is to be removed, and its blocks are found."""
    disk = FaultyDisk()
    async with opened(tmp_path, room_for(64), disk=disk, engine="threads") as rig:
        values: dict[BlockKey, bytes] = {}
        for _ in range(16):
            values |= await rig.put_new(4)
        values = await rig.still_there(values)
        disk.fail("pwritev", errno.EROFS, forever=True)
        disk.fail("ftruncate", errno.EROFS, forever=True)
        disk.fail("unlink", errno.EROFS, forever=True)
        own, told = rig.session.space._own_segments(), list(rig.removed)
        for _ in range(3):
            with pytest.raises(OSError, match="ead-only"):
                await rig.session.space._give_up(own)
        assert rig.removed == told
        await rig.has_all(values)
        disk.heal()
        await rig.session.space.retry()
        assert len(await rig.still_there(values)) >= len(values) - 4
        await rig.session.space.match_files()
        assert segment_bytes(tmp_path) == rig.backend.stats().gauges["segment_bytes"] == room_for(60)
        await rig.has_all(await rig.put_new(4))


async def shared_out(rigs: Sequence[Rig], rounds: int) -> list[int]:
    """Let engines in turn store and do their upkeep; return the number of segments of each."""
    for _ in range(rounds):
        for rig in rigs:
            rig.session.space._full_until = 0.0
            await rig.put(rig.new(1))
            await rig.session.space.close()
        for rig in rigs:
            await rig.session.space.give_up_excess()
    return [int(rig.backend.stats().gauges["segments"]) for rig in rigs]


async def test_shares_settle(tmp_path: Path) -> None:
    """Shares differ by a segment at most where the capacity is no multiple; then no segment changes hands any more."""
    async with contextlib.AsyncExitStack() as stack:
        rigs = [await stack.enter_async_context(opened(tmp_path, room_for(64))) for _ in range(3)]
        for _ in range(16):
            await rigs[0].put_new(4)
        assert sorted(await shared_out(rigs, 40)) == [5, 5, 6]
        given_up = [rig.session.counts["segments_given_up"] for rig in rigs]
        assert sorted(await shared_out(rigs, 10)) == [5, 5, 6]
        assert given_up == [rig.session.counts["segments_given_up"] for rig in rigs]


async def test_several_engines_remove_one_missing_segment_in_all(tmp_path: Path) -> None:
    """If several engines see that the reserve is missed by less than a segment, they remove one segment in all."""

    class Reserved(OsDisk):
        missing = False

        def statvfs(self, fd: int) -> Any:
            free = (1 << 20) + room_for(32) - segment_bytes(tmp_path) - self.missing
            return SimpleNamespace(f_bavail=free, f_frsize=1, f_blocks=1 << 40)

    disk = Reserved()
    async with contextlib.AsyncExitStack() as stack:
        rigs = [
            await stack.enter_async_context(opened(tmp_path, room_for(64), disk=disk, reserve="1MiB")) for _ in "ab"
        ]
        for _ in range(4):
            for rig in rigs:
                await rig.put_new(4)
        assert segment_bytes(tmp_path) == room_for(32)
        disk.missing = True
        given_up = [rig.session.counts for rig in rigs]
        await asyncio.gather(*[rig.session.space.give_up_excess() for rig in rigs for _ in range(3)])
        # The engine that is due may have found the ledger locked by the other each time.
        await eventually_async(lambda: sum(counts["segments_given_up"] for counts in given_up) > 0)
        await asyncio.gather(*[rig.session.space.give_up_excess() for rig in rigs])
        assert sum(counts["segments_given_up"] for counts in given_up) == 1
        assert segment_bytes(tmp_path) == room_for(28)


@pytest.mark.parametrize("length", [0, SLOT, 50 * SLOT])
@pytest.mark.parametrize("when", ["ended", "running"])
async def test_segment_of_another_length_is_removed(tmp_path: Path, length: int, when: str) -> None:
    """A segment that was cut or extended costs its own blocks only: files and statistics agree, and it is remade."""
    async with contextlib.AsyncExitStack() as stack:
        rig = await stack.enter_async_context(opened(tmp_path, room_for(64)))
        values = await rig.put_new(56)
        segment = sorted(tmp_path.rglob("*.seg"))[3]
        if when == "ended":
            await stack.aclose()
            os.truncate(segment, length)
            rig = await stack.enter_async_context(opened(tmp_path, room_for(64)))
        else:
            os.truncate(segment, length)
        # Upkeep does it, once a second.
        await eventually_async(
            lambda: segment_bytes(tmp_path) == rig.backend.stats().gauges["segment_bytes"] == room_for(52)
        )
        got = dict(zip(values, await rig.get(list(values)), strict=True))
        assert Counter(got[key] == payload for key, payload in values.items()) == {True: 52, False: 4}
        assert {payload for key, payload in got.items() if payload != values[key]} == {None}
        await rig.put_new(12)
        assert segment_bytes(tmp_path) == rig.backend.stats().gauges["segment_bytes"] == room_for(64)
