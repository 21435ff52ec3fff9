"""The disk fails, stalls or is locked by others: no wrong block, no lasting loss, and no blocked loop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import itertools
import os
import random
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.backends.base import RecordWrite
from kvstore.backends.disk.files import open_own_directory
from kvstore.backends.disk.limits import Limits
from kvstore.diskio import OsDisk
from kvstore.errors import KVStoreError
from kvstore.testing.seeds import fresh_seed
from kvstore.testing.waiting import eventually_async
from kvstore.types import BlockKey, Outcome
from tests.disk.rig import NAMESPACE, OTHER_NAMESPACE, PAYLOAD, SLOT, Rig, opened, proved, segment_bytes, tables
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


async def life(root: Path, disk: FaultyDisk, engine: str) -> tuple[dict[BlockKey, bytes], set[BlockKey]]:
    """Exercise all operations; return the blocks put, and those reported as removed."""
    values: dict[BlockKey, bytes] = {}
    async with opened(root, 16, disk=disk, engine=engine, seed=7) as rig:
        for _ in range(6):
            new = rig.new(4)
            values |= new
            await rig.put(new)
            await proved(rig, values)
        keys = list(values)[-4:-2]
        removed = set(itertools.compress(keys, await rig.backend.delete(keys)))
        await rig.backend.quarantine(list(values)[-1:])
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
        async with opened(root, 16, disk=disk, engine=engine) as rig:
            await proved(rig, values)
            fresh = rig.new(4)
            async with asyncio.timeout(20):
                # A failed unlock may keep the segments of the previous engine locked a moment longer.
                while set(await rig.put(fresh)) - {Outcome.OK, Outcome.EXISTS}:
                    await asyncio.sleep(0.01)
            await rig.has_all(fresh)
            assert True not in await rig.backend.exists(list(removed)), (seed, nth)
            assert segment_bytes(root) <= 16 * SLOT, (seed, nth)
        shutil.rmtree(root)


async def test_descriptors_are_all_closed(tmp_path: Path) -> None:
    """No descriptor is open after a close, however many were opened before."""
    disk = FaultyDisk()
    await life(tmp_path / "a", disk, "io_uring")
    async with opened(tmp_path / "a", 16, disk=disk) as one, opened(tmp_path / "a", 16, disk=disk) as two:
        values = await one.put_new(2)
        await eventually_async(lambda: set(two.arrived) >= set(values), what="the other engine is told")
        await two.has_all(values)
    assert disk.open_fds == {}


@contextlib.contextmanager
def ledger_taken(root: Path) -> Any:
    """Hold the ledger's lock, as an engine does that makes a segment."""
    with (root / ".kvstore" / "ledger.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


async def test_the_ledger_held_by_a_stopped_process(tmp_path: Path) -> None:
    """While a stopped process holds the ledger's lock, stores evict or are refused, and the loop keeps running."""
    async with opened(tmp_path, 64, limits=Limits(transient_s=0.2)) as rig:
        values = await rig.put_new(4)
        with ledger_taken(tmp_path):
            # Only the first stores wait for the lock, and then report a failure.
            outcomes = {outcome for _ in range(6) for outcome in await rig.put(rig.new(4))}
            assert outcomes <= {Outcome.OK, Outcome.NO_SPACE, Outcome.IO_ERROR}
            assert Outcome.OK in outcomes
            await rig.has_all(await rig.still_there(values))
        await eventually_async(lambda: has_grown(rig), what="a segment is made")


async def has_grown(rig: Rig) -> bool:
    """Store; return whether the engine has more than one segment."""
    await rig.put_new(1)
    return rig.backend.stats().gauges["segments"] > 1


async def test_an_engine_that_waits_for_the_ledger_evicts_nothing(tmp_path: Path) -> None:
    """While another engine creates a segment, a store that needs one waits for the lock instead of evicting."""
    disk = FaultyDisk()
    async with opened(tmp_path, 64, disk=disk) as rig:
        values = await rig.put_new(4)
        with ledger_taken(tmp_path):
            before = disk.count("flock")
            storing = asyncio.create_task(rig.put_new(8))
            await eventually_async(lambda: disk.count("flock") > before + 5, what="the store waits")
            assert not storing.done()
        values |= await storing
        assert rig.removed == []
        await rig.has_all(values)


@pytest.mark.parametrize("op", ["pwritev", "preadv", "fallocate", "open", "fdatasync", "statvfs"])
async def test_the_loop_goes_on_while_the_disk_stalls(tmp_path: Path, op: str) -> None:
    """A stalled disk call delays only its callers: the loop keeps running and lookups are answered."""
    disk = FaultyDisk()
    async with opened(tmp_path, 64, disk=disk, durability="data", engine="threads") as rig:
        values = await rig.put_new(4)
        stall = threading.Event()
        disk.add(DiskFault(op, 1, stall=stall, forever=True))
        store = asyncio.create_task(rig.put(rig.new(12)))
        load = asyncio.create_task(rig.get(list(values)))
        try:
            await eventually_async(lambda: disk.stalled, what="the disk stalls")
            for _ in range(200):
                assert await rig.backend.exists(list(values)) == [True] * 4
                await asyncio.sleep(0.001)
        finally:
            stall.set()
            disk.heal()
        assert await load == list(values.values())
        assert await store == [Outcome.OK] * 12


async def test_a_cancelled_put_leaves_no_slot_behind(tmp_path: Path) -> None:
    """However often puts are cancelled, every slot is either free or holds a block."""
    async with opened(tmp_path, 16) as rig:
        for turns in range(90):
            call = asyncio.create_task(rig.put(rig.new(3)))
            for _ in range(turns % 9):
                await asyncio.sleep(0)
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await call

        def is_accounted() -> bool:
            stats = rig.backend.stats()
            return stats.blocks + stats.gauges["free_slots"] == stats.gauges["segment_bytes"] // SLOT > 0

        await eventually_async(is_accounted, what="every slot is free or holds a block")
        assert not any(segment.failures for segment in rig.session.index.segments.values())
        await rig.has_all(await rig.put_new(8))


async def test_a_removal_wins_over_a_store_that_was_asked_for_before(tmp_path: Path) -> None:
    """A block that is removed while it is being stored is absent afterwards."""
    async with opened(tmp_path, 64) as rig:
        values = rig.new(8)
        store = asyncio.create_task(rig.put(values))
        await asyncio.sleep(0)
        removed = await rig.backend.delete(list(values))
        assert await store == [Outcome.OK] * 8
        assert removed == [True] * 8
        assert await rig.backend.exists(list(values)) == [False] * 8


def test_a_directory_that_cannot_be_examined_is_closed(tmp_path: Path) -> None:
    """A stale handle of a network file system (ESTALE) leaves no descriptor."""
    disk = FaultyDisk()
    (tmp_path / "namespace").mkdir()
    root = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        disk.fail("fstat", errno.ESTALE)
        with pytest.raises(OSError, match="Stale"):
            open_own_directory(disk, "namespace", root)
        assert disk.open_fds == {}
    finally:
        os.close(root)


class TableFails(FaultyDisk):
    """A disk where the nth call on a table or segment fails, or waits."""

    nth = 0
    goes_on: threading.Event | None = None

    def syscall(self, op: str, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        path = args[0] if op == "open" else os.readlink(f"/proc/self/fd/{args[0]}") if op in ("fstat", "preadv") else ""
        if self.nth and str(path).endswith((".tab", ".seg")):
            self.nth -= 1
            if not self.nth and self.goes_on is None:
                raise OSError(errno.EIO, "a bad sector")
            if not self.nth:
                assert self.goes_on is not None
                assert self.goes_on.wait(30)
        return super().syscall(op, function, *args, **kwargs)


@pytest.mark.parametrize("nth", range(1, 10))
async def test_a_table_that_cannot_be_read_leaves_no_descriptor(tmp_path: Path, nth: int) -> None:
    """A new table of another engine is tried again, and the try that failed keeps none of its files open."""
    disk = TableFails()
    async with opened(tmp_path, 256, disk=disk, engine="threads") as reader, opened(tmp_path, 256) as one:
        disk.nth = nth
        values = await one.put_new(2)
        await eventually_async(lambda: set(reader.arrived) >= set(values), what="the table is followed")
        assert not disk.nth, "no call has failed"
        await reader.has_all(values)
        # Each look opens the table for a moment.
        await eventually_async(lambda: sum(name.endswith((".tab", ".seg")) for name in disk.open_fds.values()) == 2)


async def test_an_end_while_a_table_is_opened_leaves_no_descriptor(tmp_path: Path) -> None:
    """An engine that ends while it opens a table of another engine closes that one, too."""
    disk = TableFails()
    async with opened(tmp_path, 256) as one:
        async with opened(tmp_path, 256, disk=disk, engine="threads") as reader:
            disk.goes_on, disk.nth = threading.Event(), 3
            await one.put_new(2)
            await eventually_async(lambda: not disk.nth, what="the table is being opened")
            ending = asyncio.create_task(reader.backend.close())
            await asyncio.sleep(0.01)
            disk.goes_on.set()
            await ending
        assert disk.open_fds == {}


async def test_a_short_write_is_never_published(tmp_path: Path) -> None:
    """A record that the disk repeatedly writes in part is an error and never a block."""
    disk = FaultyDisk()
    async with opened(tmp_path, 64, disk=disk) as rig:
        await rig.put_new(1)
        fault = disk.add(DiskFault("pwritev", 1, short=True, forever=True))
        values = rig.new(2)
        outcomes = await rig.put(values)
        disk.heal()
        assert fault.hits
        for key, outcome in zip(values, outcomes, strict=True):
            assert await rig.get([key]) == [values[key] if outcome is Outcome.OK else None]


@pytest.mark.parametrize("engine", ["threads", "io_uring"])
async def test_a_read_that_fails_loses_no_block(tmp_path: Path, engine: str) -> None:
    """A failed read is a failure and not a miss: the block is there on the next read, whoever stored it."""
    disk = FaultyDisk()
    async with opened(tmp_path, 64, engine=engine) as one:
        values = await one.put_new(2)
        async with opened(tmp_path, 64, disk=disk, engine=engine) as two:
            own = await two.put_new(2)
            await two.has_all(values | own)
            disk.fail("preadv", errno.EIO, forever=True)
            assert set(await two.outcomes_of([*values, *own])) == {Outcome.IO_ERROR}
            disk.heal()
            await two.has_all(own)
            await eventually_async(lambda: has_all_again(two, values), what="the other engine's blocks are found again")


async def has_all_again(rig: Rig, values: dict[BlockKey, bytes]) -> bool:
    """Return whether all blocks are found; a table that could not be read is opened again."""
    return await proved(rig, values) == len(values)


class SlotWrites(OsDisk):
    """A disk whose writes to slots end early, or wait."""

    written = -1  # Bytes written of each record; negative: all.
    thawed: threading.Event | None = None
    stalls = False

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        if not os.readlink(f"/proc/self/fd/{fd}").endswith(".seg"):
            return super().pwritev(fd, buffers, offset)
        if self.thawed is not None:
            self.stalls = True
            self.thawed.wait()
        if self.written >= 0:
            first = b"".join(map(bytes, buffers))[: max(0, self.written - offset)]
            return super().pwritev(fd, [first], offset) if first else 0
        return super().pwritev(fd, buffers, offset)


@pytest.mark.parametrize("written", [0, 4096, 8192])
async def test_a_write_that_ends_early_is_not_stored(tmp_path: Path, written: int) -> None:
    """A record written in part without an error is not published, and can be stored again."""
    disk = SlotWrites()
    async with opened(tmp_path, 16, disk=disk, engine="threads") as rig:
        new = rig.new(1)
        disk.written = written
        assert await rig.put(new) == [Outcome.IO_ERROR]
        assert await rig.backend.exists(list(new)) == [False]
        disk.written = -1
        assert await rig.put(new) == [Outcome.OK]
        await rig.has_all(new)


async def test_a_stalled_write_keeps_the_lock(tmp_path: Path) -> None:
    """The segments of an engine that closes during a pending write are taken only once that write has ended."""
    disk = SlotWrites()
    async with opened(tmp_path, 64, disk=disk, engine="threads", limits=Limits(close_s=0.1)) as rig:
        values = await rig.put_new(1)
        disk.thawed = threading.Event()
        store = asyncio.create_task(rig.put(rig.new(1)))
        await eventually_async(lambda: disk.stalls, what="the write stalls")
    async with opened(tmp_path, 64) as heir:
        try:
            assert heir.backend.own(list(values)) == [False]
            await heir.has_all(values)
        finally:
            disk.thawed.set()
        assert await store == [Outcome.IO_ERROR], "its table is closed"
        await eventually_async(lambda: heir.backend.own(list(values)) == [True], what="the segment is taken")
        await heir.has_all(values)


@pytest.mark.parametrize(
    ("key", "payload_bytes"), [(b"", 1), (b"k" * 65, 1), (b"key", PAYLOAD + 1), (b"key", PAYLOAD + 4096)]
)
async def test_a_record_that_fits_no_slot_is_refused(tmp_path: Path, key: bytes, payload_bytes: int) -> None:
    """The record is not written, least of all over the block in the next slot."""
    async with opened(tmp_path, 32) as rig:
        first, second = await rig.put_new(2), await rig.put_new(2)
        too_long = RecordWrite(key, [memoryview(bytearray(256)), memoryview(bytearray(payload_bytes))])
        # The free slots precede those of other blocks.
        await rig.backend.delete([next(iter(first)), next(iter(second))])
        assert await rig.backend.put([too_long]) == [Outcome.REFUSED]
        await rig.has_all(dict([*first.items()][1:] + [*second.items()][1:]))


class Unreadable(OsDisk):
    """A disk that fails to open the path that ends with ``bad``."""

    bad = "no file"

    def syscall(self, op: str, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        where = os.readlink(f"/proc/self/fd/{kwargs['dir_fd']}") if "dir_fd" in kwargs else ""
        if op == "open" and f"{where}/{args[0]}".endswith(self.bad):
            raise OSError(errno.EIO, "not read")
        return super().syscall(op, function, *args, **kwargs)


@pytest.mark.parametrize(
    ("what", "lost"),
    [
        (NAMESPACE.hex, 0),
        (OTHER_NAMESPACE.hex, 24),
        (f"{OTHER_NAMESPACE.hex}/000003.seg", 4),
        (f"{OTHER_NAMESPACE.hex}/000003.tab", 4),
    ],
    ids=["own", "namespace", "segment", "table"],
)
async def test_an_unreadable_object_costs_itself_alone(tmp_path: Path, what: str, lost: int) -> None:
    """Engines start, store and load beside an unreadable file or directory, and count it with its last known size."""
    disk = Unreadable()
    async with opened(tmp_path, 64, namespace=OTHER_NAMESPACE) as ended:
        for _ in range(6):
            await ended.put_new(4)
    async with opened(tmp_path, 64, disk=disk, engine="threads") as rig:
        values = await rig.put_new(8)
        disk.bad = what
        for _ in range(20):
            await rig.put_new(4)
        await rig.has_all(await rig.still_there(values))
        assert segment_bytes(tmp_path) == 64 * SLOT
        assert segment_bytes(tmp_path / NAMESPACE.hex) == (64 - lost) * SLOT
        assert rig.backend.stats().counters["segments_given_up"] == 0
    if what != NAMESPACE.hex:
        async with opened(tmp_path, 64, disk=disk, engine="threads") as rig:
            await rig.has_all(await rig.put_new(4))


async def test_a_failing_duty_of_upkeep_stops_no_other(tmp_path: Path) -> None:
    """While free space can't be measured, lost files are noticed; the failures are counted for each duty."""
    disk = FaultyDisk()
    async with opened(tmp_path, 64, disk=disk, limits=Limits(upkeep_s=0.01)) as rig:
        await rig.put_new(1)
        disk.fail("statvfs", errno.EIO, forever=True)

        def failures(name: str) -> int:
            return rig.backend.stats().counters.get(f"upkeep_{name}errors", 0)

        await eventually_async(lambda: failures("shares_") >= 2, what="the duty has failed twice")
        tables(tmp_path)[0].unlink()
        await eventually_async(lambda: rig.backend.stats().blocks == 0, what="the lost segment is noticed")
        disk.heal()
        assert failures("") == failures("shares_") + failures("segments_")
