"""The disk fails, stalls or is locked by others: no wrong block, no lasting loss, and no blocked loop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import random
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.backends.base import RecordWrite
from kvstore.backends.disk import backend as backend_module
from kvstore.backends.disk import followers as followers_module
from kvstore.backends.disk import space as space_module
from kvstore.backends.disk.blocks import Blocks
from kvstore.backends.disk.files import open_own_directory
from kvstore.diskio import OsDisk
from kvstore.errors import KVStoreError
from kvstore.testing.seeds import fresh_seed
from kvstore.testing.waiting import eventually_async
from kvstore.types import BlockKey, Outcome
from tests.disk.rig import NAMESPACE, OTHER_NAMESPACE, PAYLOAD, Rig, opened, room_for, segment_bytes
from tests.diskio.faulty_disk import DiskFault, FaultyDisk
from tests.sizes import sized

FAULTS: dict[str, dict[str, Any]] = {
    "EIO": {"error": errno.EIO},
    "ENOSPC": {"error": errno.ENOSPC},
    "EINTR": {"error": errno.EINTR},
    "EMFILE": {"error": errno.EMFILE},
    "short": {"short": True},
}

SAMPLES = sized(8, full=40, quick=3)
"""Number of calls made to fail in a lifecycle, by kind of fault."""


async def proved(rig: Rig, values: dict[BlockKey, bytes]) -> int:
    """Check that every block found is right; return the number of blocks found."""
    got = await rig.get(list(values))
    for payload, back in zip(values.values(), got, strict=True):
        assert back in (None, payload)
    return sum(back is not None for back in got)


async def life(root: Path, disk: FaultyDisk, engine: str) -> tuple[dict[BlockKey, bytes], set[BlockKey]]:
    """Exercise all operations; return the blocks put, and those reported as removed."""
    values: dict[BlockKey, bytes] = {}
    removed: set[BlockKey] = set()
    async with opened(root, room_for(16), disk=disk, engine=engine, seed=7) as rig:
        for _ in range(6):
            new = rig.new(4)
            values |= new
            await rig.put(new)
            await proved(rig, values)
        keys = list(values)[-4:-2]
        gone = await rig.backend.delete(keys)
        removed = {key for key, was_there in zip(keys, gone, strict=True) if was_there}
        await rig.backend.quarantine(list(values)[-1:])
        await rig.session._write_snapshot()
        await proved(rig, values)
    return values, removed


@pytest.mark.parametrize("engine", ["threads", "io_uring"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.timeout(600)
async def test_one_call_fails(tmp_path: Path, fault: str, engine: str) -> None:
    """Whichever single call fails, errors are named, no wrong block is read, and the next engine stores and loads."""
    quiet = FaultyDisk()
    await life(tmp_path / "quiet", quiet, engine)
    total = quiet.count()
    assert total > 100
    # Different calls for each kind of fault, also with the same seed.
    seed = fresh_seed()
    for nth in random.Random(f"{seed} {fault} {engine}").sample(range(1, total), SAMPLES):
        root = tmp_path / f"root-{nth}"
        disk = FaultyDisk()
        struck = disk.add(DiskFault("any", nth, **FAULTS[fault]))
        values: dict[BlockKey, bytes] = {}
        removed: set[BlockKey] = set()
        with contextlib.suppress(KVStoreError):
            values, removed = await life(root, disk, engine)
        assert not disk.open_fds or struck.hits, (seed, nth, disk.open_fds)
        disk.heal()
        async with opened(root, room_for(16), disk=disk, engine=engine) as rig:
            await rig.session.recovered.wait()
            await proved(rig, values)
            fresh = rig.new(4)
            async with asyncio.timeout(20):
                # A failed unlock may keep the previous engine's directory locked a moment longer.
                while set(await rig.put(fresh)) - {Outcome.OK, Outcome.EXISTS}:
                    await asyncio.sleep(0.01)
            await rig.has_all(fresh)
            assert True not in await rig.backend.exists(list(removed)), (seed, nth)
            total_bytes = sum(path.stat().st_size for path in root.rglob("*.seg"))
            assert total_bytes <= room_for(16), (seed, nth, total_bytes)
        shutil.rmtree(root)


async def test_descriptors_are_all_closed(tmp_path: Path) -> None:
    """No descriptor is open after a close, however many were opened before."""
    disk = FaultyDisk()
    await life(tmp_path / "a", disk, "io_uring")
    root, capacity = tmp_path / "a", room_for(16)
    async with opened(root, capacity, disk=disk) as one, opened(root, capacity, disk=disk) as two:
        values = await one.put_new(2)
        await eventually_async(lambda: len(two.arrived) == 2, what="the other engine is told")
        await two.has_all(values)
    assert disk.open_fds == {}


async def test_the_ledger_held_by_a_stopped_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a stopped process holds the ledger's lock, stores evict or are refused, and the loop keeps running."""
    monkeypatch.setattr(space_module, "_TRANSIENT_S", 0.2)
    async with opened(tmp_path, room_for(64)) as rig:
        values = await rig.put_new(4)
        with (tmp_path / ".kvstore" / "ledger.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            async with asyncio.timeout(10):
                for _ in range(6):
                    outcomes = await rig.put(rig.new(4))
                    assert set(outcomes) <= {Outcome.OK, Outcome.NO_SPACE}
                await rig.has_all(await rig.still_there(values))
        await eventually_async(
            lambda: rig.session.space._full_until < asyncio.get_running_loop().time(), what="asked again"
        )
        await rig.put_new(8)


async def test_an_engine_that_waits_for_the_ledger_evicts_nothing(tmp_path: Path) -> None:
    """While another engine creates a segment, a store that needs one waits for the lock instead of evicting."""
    async with opened(tmp_path, room_for(64)) as rig:
        values = await rig.put_new(4)
        with (tmp_path / ".kvstore" / "ledger.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            storing = asyncio.create_task(rig.put_new(8))
            await eventually_async(lambda: rig.session.space._failing_since > 0, what="the store waits")
            # As long as the allocation of a large segment takes on a busy drive.
            done, _ = await asyncio.wait({storing}, timeout=0.5)
            assert not done
        values |= await storing
        assert rig.removed == []
        await rig.has_all(values)


@pytest.mark.parametrize("op", ["pwritev", "preadv", "fallocate", "open", "fdatasync", "statvfs"])
async def test_the_loop_goes_on_while_the_disk_stalls(tmp_path: Path, op: str) -> None:
    """A stalled disk call delays only its callers: the loop keeps running and lookups are answered."""
    disk = FaultyDisk()
    async with opened(tmp_path, room_for(64), disk=disk, durability="data", engine="threads") as rig:
        values = await rig.put_new(4)
        stall = threading.Event()
        disk.add(DiskFault(op, 1, stall=stall, forever=True))
        store = asyncio.create_task(rig.put(rig.new(12)))
        load = asyncio.create_task(rig.get(list(values)))
        try:
            for _ in range(200):
                before = asyncio.get_running_loop().time()
                assert await rig.backend.exists(list(values)) == [True] * 4
                await asyncio.sleep(0.001)
                assert asyncio.get_running_loop().time() - before < 1
        finally:
            stall.set()
            disk.heal()
        assert await load == list(values.values())
        assert await store == [Outcome.OK] * 12


async def test_a_cancelled_put_leaves_no_slot_behind(tmp_path: Path) -> None:
    """However often puts are cancelled, every slot is either free or holds a block."""
    async with opened(tmp_path, room_for(16)) as rig:
        for turns in range(90):
            call = asyncio.create_task(rig.put(rig.new(3)))
            for _ in range(turns % 9):
                await asyncio.sleep(0)
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await call
        await eventually_async(lambda: not rig.session.claims, what="all has ended")
        await rig.put_new(4)
        index = rig.session.index

        def is_accounted() -> bool:
            slots = int((index.columns.segments != 0).sum()) * rig.session.geometry.segment_slots
            return len(index) + index.free_slots == slots > 0

        await eventually_async(is_accounted, what="every slot is free or holds a block")
        assert not index._readers
        assert not index._left_behind


async def test_a_load_cancelled_while_its_segment_is_opened_leaves_no_descriptor(tmp_path: Path) -> None:
    """The file that was opened for the load is closed with the others."""
    disk, gate = FaultyDisk(), threading.Event()
    async with opened(tmp_path, "64MiB", disk=disk) as rig:
        values = await rig.put_new(1)
        rig.session.segments.close()
        before = len(disk.calls)
        disk.add(DiskFault("open", stall=gate, forever=True))
        loading = asyncio.create_task(rig.get(list(values)))
        await eventually_async(
            lambda: any(call.name.endswith(".seg") for call in disk.calls[before:]), what="the segment is being opened"
        )
        loading.cancel()
        await asyncio.sleep(0)
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await loading
    assert disk.open_fds == {}


async def test_a_removal_wins_over_a_store_that_was_asked_for_before(tmp_path: Path) -> None:
    """A block that is removed while it is being stored is absent afterwards."""
    async with opened(tmp_path, "64MiB") as rig:
        values = rig.new(8)
        store = asyncio.create_task(rig.put(values))
        await asyncio.sleep(0)
        removed = await rig.backend.delete(list(values))
        assert await store == [Outcome.OK] * 8
        assert removed == [True] * 8
        assert await rig.backend.exists(list(values)) == [False] * 8


async def test_a_store_of_a_block_that_is_being_stored_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks for the block again when the other store has ended, and leaves the loop to others meanwhile."""
    looks, choose = [], Blocks._choose

    def counted(*args: Any) -> Any:
        looks.append(args)
        assert len(looks) <= 3, "it does not wait"
        return choose(*args)

    monkeypatch.setattr(Blocks, "_choose", counted)
    async with opened(tmp_path, "64MiB") as rig:
        values = rig.new(1)
        outcomes = await asyncio.gather(rig.put(values), rig.put(values))
        assert sorted(outcomes) == sorted([[Outcome.OK], [Outcome.EXISTS]])
        assert len(looks) == 3


async def test_few_descriptors(tmp_path: Path) -> None:
    """An engine works with more segments than may be open at once."""
    async with opened(tmp_path, room_for(16)) as rig:
        rig.session.segments._open_max = 2
        values = await rig.put_new(16)
        for _ in range(3):
            await rig.has_all(values)
        assert len(rig.session.segments._open) <= 2


async def test_ended_owners_need_no_descriptors(tmp_path: Path) -> None:
    """Blocks of ended owners are found and read without an open file for each owner, and so are later changes."""

    async def opened_files(ended: int) -> int:
        root, values = tmp_path / str(ended), {}
        async with contextlib.AsyncExitStack() as stack:
            rigs = [await stack.enter_async_context(opened(root, "64MiB")) for _ in range(ended + 2)]
            for rig in rigs:
                values |= await rig.put_new(1)
        async with opened(root, "64MiB") as one:
            one.session.segments._open_max = 1
            await one.has_all(values)
            counts = []
            for _ in range(20):  # The upkeep opens directories for a moment.
                files = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
                counts.append(sum(path.readlink().is_relative_to(root) for path in files if path.is_symlink()))
                await asyncio.sleep(0.01)
            async with opened(root, "64MiB") as adopter:
                new = await adopter.put_new(2)
                await one.session.followers.refresh()
                await one.has_all(values | new)
                await adopter.backend.delete(list(new))
                await one.session.followers.refresh()
                assert await one.get(list(new)) == [None] * 2
        return min(counts)

    assert await opened_files(12) == await opened_files(2)


async def test_the_journal_of_an_engine_that_ends_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that follows another one closes its journal after the other's end, and still loads its blocks."""
    monkeypatch.setattr(followers_module, "_TRY_LOCK_S", 0.0)
    disk = FaultyDisk()
    async with opened(tmp_path, "64MiB", disk=disk) as one:
        async with opened(tmp_path, "64MiB") as two:
            values = await two.put_new(2)
            await one.session.followers.refresh()
            assert any(name.startswith("journal") for name in watched(disk, one)), "it is followed"
        await one.session.followers.refresh()
        assert not any(name.startswith("journal") for name in watched(disk, one))
        await one.has_all(values)


def test_a_directory_that_cannot_be_examined_is_closed(tmp_path: Path) -> None:
    """A stale handle of a network file system (ESTALE) leaves no descriptor."""
    disk = FaultyDisk()
    (tmp_path / "owner").mkdir()
    root = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        disk.fail("fstat", errno.ESTALE)
        with pytest.raises(OSError, match="Stale"):
            open_own_directory(disk, "owner", root)
        assert disk.open_fds == {}
    finally:
        os.close(root)


async def test_an_owner_that_cannot_be_listed_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new owner whose segments can't be listed is tried again, and no try keeps its journal open."""
    disk, tries = FaultyDisk(), 0

    def unlisted(*_: Any) -> dict[int, os.stat_result]:
        nonlocal tries
        tries += 1
        raise OSError(errno.EMFILE, "too many open files")

    async with contextlib.AsyncExitStack() as stack:
        one = await stack.enter_async_context(opened(tmp_path, "64MiB", disk=disk))
        with monkeypatch.context() as patch:
            patch.setattr(followers_module, "segments_in", unlisted)
            two = await stack.enter_async_context(opened(tmp_path, "64MiB"))
            await two.put_new(1)
            for _ in range(3):
                await one.session.followers.refresh()
            assert tries >= 3
            await eventually_async(
                lambda: not any(name.startswith("journal") for name in watched(disk, one)), 5, "all journals are closed"
            )
        await eventually_async(lambda: len(one.arrived) == 1, what="the owner is followed")


def watched(disk: FaultyDisk, rig: Rig) -> list[str]:
    """Return the names of the files that an engine has open, without its own journal."""
    return [name for fd, name in disk.open_fds.items() if fd != rig.session.journal.end.fd]


async def test_a_short_write_is_never_published(tmp_path: Path) -> None:
    """A record that the disk repeatedly writes in part is an error and never a block."""
    disk = FaultyDisk()
    async with opened(tmp_path, "64MiB", disk=disk) as rig:
        await rig.put_new(1)
        fault = disk.add(DiskFault("pwritev", 1, short=True, forever=True))
        values = rig.new(2)
        outcomes = await rig.put(values)
        disk.heal()
        assert fault.hits
        for key, outcome in zip(values, outcomes, strict=True):
            got = await rig.get([key])
            assert got == [values[key] if outcome is Outcome.OK else None]


@pytest.mark.parametrize("engine", ["threads", "io_uring"])
async def test_a_read_that_fails_loses_no_block(tmp_path: Path, engine: str) -> None:
    """A failed read is a failure and not a miss: the block is there on the next read."""
    disk = FaultyDisk()
    async with opened(tmp_path, "64MiB", engine=engine) as one:
        values = await one.put_new(2)
        async with opened(tmp_path, "64MiB", disk=disk, engine=engine) as two:
            values |= await two.put_new(2)
            await two.has_all(values)
            disk.fail("preadv", errno.EIO, forever=True)
            targets = [two.maker.target(key) for key in values]
            outcomes = await two.backend.get_into([target.read for target in targets])
            disk.heal()
            assert set(outcomes[2:]) == {Outcome.IO_ERROR}
            assert Outcome.OK not in outcomes
            await two.has_all(dict(list(values.items())[2:]))


@pytest.mark.parametrize("written", [0, 4096, 8192])
async def test_a_write_that_ends_early_is_not_stored(tmp_path: Path, written: int) -> None:
    """A record written in part without an error is not published, and can be stored again."""

    class Ending(OsDisk):
        fails = False

        def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
            if self.fails and os.readlink(f"/proc/self/fd/{fd}").endswith(".seg"):
                first = b"".join(map(bytes, buffers))[: max(0, written - offset)]
                return super().pwritev(fd, [first], offset) if first else 0
            return super().pwritev(fd, buffers, offset)

    disk = Ending()
    async with opened(tmp_path, room_for(16), disk=disk, engine="threads") as rig:
        new = rig.new(1)
        disk.fails = True
        assert await rig.put(new) == [Outcome.IO_ERROR]
        assert await rig.backend.exists(list(new)) == [False]
        disk.fails = False
        assert await rig.put(new) == [Outcome.OK]
        await rig.has_all(new)


async def test_a_stalled_write_keeps_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that closes during a pending write leaves its files open: no other engine adopts its directory."""
    monkeypatch.setattr(backend_module, "_CLOSE_TIMEOUT_S", 0.1)
    stalls, thawed = threading.Event(), threading.Event()

    class Stalling(OsDisk):
        armed = False

        def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
            if self.armed and os.readlink(f"/proc/self/fd/{fd}").endswith(".seg"):
                stalls.set()
                thawed.wait()
            return super().pwritev(fd, buffers, offset)

    disk = Stalling()
    async with opened(tmp_path, room_for(16), disk=disk, engine="threads") as rig:
        session, name = rig.session, rig.session.owner.name
        disk.armed = True
        store = asyncio.create_task(rig.put(rig.new(1)))
        await eventually_async(stalls.is_set, what="the write stalls")
    try:
        async with opened(tmp_path, room_for(16)) as rig:
            assert rig.session.owner.name != name
    finally:
        thawed.set()
        assert await store == [Outcome.IO_ERROR], "its journal is closed"
        await session._release(5)
    async with opened(tmp_path, room_for(16)) as rig:
        assert name in {rig.session.owner.name, *(other.name for other in rig.session.followers.others.values())}


@pytest.mark.parametrize(
    ("key", "payload_bytes"), [(b"", 1), (b"k" * 65, 1), (b"key", PAYLOAD + 1), (b"key", PAYLOAD + 4096)]
)
async def test_a_record_that_fits_no_slot_is_refused(tmp_path: Path, key: bytes, payload_bytes: int) -> None:
    """The record is not written, least of all over the block in the next slot."""
    async with opened(tmp_path, room_for(16)) as rig:
        values = await rig.put_new(2)
        too_long = RecordWrite(key, [memoryview(bytearray(256)), memoryview(bytearray(payload_bytes))])
        # The free slot precedes the slot of the other block.
        (first, _) = values
        await rig.backend.delete([first])
        assert await rig.backend.put([too_long]) == [Outcome.REFUSED]
        del values[first]
        await rig.has_all(values)


class UnreadableDirectory(OsDisk):
    """A disk that fails to open the directory named ``bad``."""

    bad = ""

    def open_dir(self, name: str, dir_fd: int) -> int:
        if name == self.bad:
            raise OSError(errno.EIO, "not read")
        return super().open_dir(name, dir_fd)


@pytest.mark.parametrize("what", ["own", "owner", "namespace"])
async def test_an_unreadable_directory_costs_itself_alone(tmp_path: Path, what: str) -> None:
    """Engines store and write snapshots beside it, and count it with its last known size."""
    disk = UnreadableDirectory()
    async with opened(tmp_path, room_for(64), namespace=OTHER_NAMESPACE) as ended:
        await ended.put_new(24)
        name = ended.session.owner.name
    async with opened(tmp_path, room_for(64), disk=disk, engine="threads") as rig:
        await rig.put_new(8)
        disk.bad = {"own": rig.session.owner.name, "owner": name, "namespace": OTHER_NAMESPACE.hex}[what]
        for _ in range(20):
            await rig.put_new(4)
        assert segment_bytes(tmp_path) == room_for(64)
        assert segment_bytes(tmp_path / NAMESPACE.hex) == room_for(64 if what == "own" else 64 - 24)
        await rig.session._write_snapshot()
        assert rig.session.counts["snapshots"] == 1
        assert rig.session.counts["segments_given_up"] == 0
    async with opened(tmp_path, room_for(64), disk=disk, engine="threads") as rig:
        await rig.put_new(4)


async def test_segment_deleted_without_a_readable_directory_is_replaced(tmp_path: Path) -> None:
    """A new segment takes the place of a deleted one."""
    disk = UnreadableDirectory()
    async with opened(tmp_path, room_for(64), disk=disk, engine="threads") as rig:
        await rig.put_new(64)
        assert segment_bytes(tmp_path) == room_for(64)
        disk.bad = rig.session.owner.name
        next(tmp_path.glob("*/*/*.seg")).unlink()
        await rig.session.space.match_files()
        assert rig.session.counts["segments_given_up"] == 1
        for _ in range(20):
            await rig.put_new(4)
        assert segment_bytes(tmp_path) == room_for(64)


async def test_a_failing_duty_of_upkeep_stops_no_other(tmp_path: Path) -> None:
    """While free space can't be measured, snapshots are written; the failures are counted for each duty."""
    disk = FaultyDisk()
    async with opened(tmp_path, room_for(64), disk=disk, snapshot_interval=0.01) as rig:
        await rig.put_new(1)
        disk.fail("statvfs", errno.EIO, forever=True)
        counts = rig.session.counts
        await eventually_async(lambda: counts["upkeep_shares_errors"] >= 2, what="the duty has failed twice")
        await rig.put_new(1)
        before = counts["snapshots"]
        await eventually_async(lambda: counts["snapshots"] > before, what="a snapshot is written")
        assert counts["upkeep_errors"] == counts["upkeep_shares_errors"]
