"""Capacity, watermarks, reserve and inodes: the disk never fills, and the right blocks go."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from kvstore.diskio import OsDisk
from kvstore.testing.waiting import eventually_async
from kvstore.types import Outcome, RemovalCause
from tests.file.rig import OTHER_NAMESPACE, PAGE, Rig, key, keys

pytestmark = pytest.mark.usefixtures("either_engine")

BLOCK = 2 * PAGE


def rig_for(tmp_path: Path, blocks: int, **settings: Any) -> Rig:
    """Return a rig whose root holds so many blocks."""
    return Rig(tmp_path / "kv", capacity=blocks * BLOCK, **settings)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("eviction", ["lru", "s3fifo"])
async def test_capacity_is_never_exceeded(tmp_path: Path, eviction: str, shared: bool) -> None:
    """While five times the capacity is stored, the files never take more than it, and each eviction is told."""
    rig = rig_for(tmp_path, 40, eviction=eviction, shared=shared)
    async with rig.open() as backend:
        peak = 0
        for start in range(0, 200, 4):
            outcomes = await rig.put(backend, range(start, start + 4))
            assert set(outcomes) <= {Outcome.OK, Outcome.NO_SPACE}
            peak = max(peak, rig.used_bytes())
        assert 20 * BLOCK < peak <= 40 * BLOCK
        machine = backend._machine
        assert machine is not None
        await machine.evictor.make_room([])
        here = [number for number in range(200) if rig.path(number).exists()]
        told = {gone for gone, cause in rig.removed if cause is RemovalCause.EVICTED}
        assert told.isdisjoint(keys(here))
        stored = 200 - backend.stats().counters["no_space_blocks"]
        assert len(told) == len(rig.removed) == stored - len(here) == backend.stats().counters["evicted_blocks"]
        assert set(await rig.get(backend, here)) == {Outcome.OK}
        await rig.settled(backend)


async def test_eviction_goes_down_to_the_low_watermark(tmp_path: Path) -> None:
    """Above the high watermark eviction starts by itself and ends at the low one."""
    rig = rig_for(tmp_path, 100, high_watermark=0.8, low_watermark=0.5)
    async with rig.open() as backend:
        for start in range(0, 80, 8):
            await rig.put(backend, range(start, start + 8))
        assert backend.stats().blocks == 80
        assert rig.removed == []
        await rig.put(backend, [80])
        await eventually_async(lambda: len(rig.removed) == 31)
        assert backend.stats().blocks == 50
        assert [gone for gone, _ in rig.removed] == keys(range(31))
        await rig.settled(backend)


async def test_lru_keeps_what_is_used(tmp_path: Path) -> None:
    """Blocks that are loaded or touched stay, those that were not used for longest go."""
    rig = rig_for(tmp_path, 20, high_watermark=1.0, low_watermark=0.8)
    async with rig.open() as backend:
        await rig.put(backend, range(20))
        await rig.get(backend, [0, 1])
        backend.touch(keys([2]))
        await rig.put(backend, [20])
        gone = [gone for gone, _ in rig.removed]
        assert gone == keys(range(3, 3 + len(gone)))
        assert len(gone) == 4


async def test_s3fifo_lets_one_scan_pass(tmp_path: Path) -> None:
    """Blocks that were used again outlive any number of blocks that are stored once."""
    rig = rig_for(tmp_path, 40, eviction="s3fifo", high_watermark=1.0, low_watermark=0.9)
    async with rig.open() as backend:
        hot = list(range(10))
        await rig.put(backend, hot)
        for _ in range(2):
            await rig.get(backend, hot)
        for number in range(100, 300):
            await rig.put(backend, [number])
        assert set(await rig.get(backend, hot)) == {Outcome.OK}


async def test_blocks_of_idle_namespaces_go_first(tmp_path: Path) -> None:
    """What no running engine can use makes room, oldest first, and its directory goes with its last block."""
    rig = rig_for(tmp_path, 40, high_watermark=1.0, low_watermark=0.9)
    async with rig.open(OTHER_NAMESPACE) as backend:
        await rig.put(backend, range(20))
        for number in range(20):
            os.utime(rig.path(number, OTHER_NAMESPACE), (1e9 + number, 1e9 + number))
    async with rig.open() as backend:
        await rig.put(backend, range(100, 120))
        assert rig.removed == []
        await rig.put(backend, [120])
        left = [number for number in range(20) if rig.path(number, OTHER_NAMESPACE).exists()]
        assert left == list(range(20 - len(left), 20))
        assert 10 < len(left) < 20
        for number in range(121, 140):
            assert await rig.put(backend, [number]) == [Outcome.OK]
        assert backend.stats().blocks == 40 - len(rig.files(OTHER_NAMESPACE))
        assert rig.removed == []
        await rig.put(backend, range(140, 150))
        assert not (rig.root / OTHER_NAMESPACE.hex).exists()
        assert sorted(path.name[:8] for path in rig.state.iterdir() if OTHER_NAMESPACE.hex in path.name) == []
        await rig.settled(backend)


async def test_blocks_of_running_engines_stay(tmp_path: Path) -> None:
    """An engine never evicts from a namespace that another one holds; both together keep to the capacity."""
    rig = rig_for(tmp_path, 40)
    async with rig.open(OTHER_NAMESPACE) as other, rig.open() as backend:
        await rig.put(other, range(30))
        for number in range(100, 160):
            await rig.put(backend, [number])
            assert rig.used_bytes() <= 40 * BLOCK
        assert len(rig.files(OTHER_NAMESPACE)) == 30
        assert 0 < len(rig.files()) - 30 <= 10
        # The other gives way when it stores, since the root is full by then.
        await rig.put(other, range(200, 210))
        assert rig.used_bytes() <= 40 * BLOCK


async def test_a_batch_larger_than_the_capacity(tmp_path: Path) -> None:
    """What fits of it is stored, the rest is NO_SPACE; its own blocks don't push each other out."""
    rig = rig_for(tmp_path, 10)
    async with rig.open() as backend:
        outcomes = await rig.put(backend, range(25))
        assert outcomes.count(Outcome.OK) == 10
        assert outcomes.count(Outcome.NO_SPACE) == 15
        assert rig.used_bytes() == 10 * BLOCK


class SmallDisk(OsDisk):
    """A disk that tells of as much free space as a test says."""

    free_bytes: int | None = None
    free_files: int | None = None

    def syscall(self, op, function, /, *args, **kwargs):  # type: ignore[no-untyped-def]
        """Change what statvfs tells."""
        result = function(*args, **kwargs)
        if op != "statvfs":
            return result
        fields = list(result)
        if self.free_bytes is not None:
            fields[4] = self.free_bytes // result.f_frsize
        if self.free_files is not None:
            # Some filesystems have no limit, and tell so by a total of zero.
            fields[5], fields[7] = 10_000, self.free_files
        return os.statvfs_result(fields)


async def test_the_reserve_stays_free(tmp_path: Path) -> None:
    """When others fill the disk, stores make room among our own blocks, and stop when there are none; loads go on."""
    rig = rig_for(tmp_path, 1000, reserve=100 * BLOCK)
    disk = SmallDisk()
    async with rig.open(disk=disk) as backend:
        await rig.put(backend, range(20))
        disk.free_bytes = 100 * BLOCK
        assert await rig.get(backend, range(5, 20)) == [Outcome.OK] * 15
        # This disk does not get emptier by what we remove, so that all of it goes.
        assert await rig.put(backend, [20]) == [Outcome.NO_SPACE]
        assert backend.stats().blocks == 0
        disk.free_bytes = 102 * BLOCK
        assert await rig.put(backend, [21, 22, 23]) == [Outcome.OK, Outcome.OK, Outcome.NO_SPACE]


async def test_inodes_are_a_limit_too(tmp_path: Path) -> None:
    """A filesystem that runs out of inodes is full, however many bytes are free."""
    rig = rig_for(tmp_path, 1000)
    disk = SmallDisk()
    async with rig.open(disk=disk) as backend:
        machine = backend._machine
        assert machine is not None
        await rig.put(backend, range(20))
        disk.free_files = machine.limits.reserve_files
        assert await rig.put(backend, [20]) == [Outcome.NO_SPACE]
        disk.free_files = machine.limits.reserve_files + 2
        assert await rig.put(backend, [21, 22, 23]) == [Outcome.OK, Outcome.OK, Outcome.NO_SPACE]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("op", ["pwritev", "tmpfile", "link", "mkdir"])
async def test_a_disk_that_is_full_in_the_middle(tmp_path: Path, op: str, error: int) -> None:
    """ENOSPC and EDQUOT are NO_SPACE, leave nothing behind, and have blocks evicted for the next store."""
    rig = rig_for(tmp_path, 100)
    async with rig.open() as backend:
        await rig.put(backend, range(10))
        fresh = next(n for n in range(50, 500) if not rig.shard(n).exists())
        rig.disk.fail(op, error, nth=2 if op == "pwritev" else 1)
        assert await rig.put(backend, [fresh]) == [Outcome.NO_SPACE]
        assert not rig.path(fresh).exists()
        assert not Outcome.NO_SPACE.is_failure
        await rig.settled(backend)
        assert await rig.put(backend, [fresh]) == [Outcome.OK]


async def test_the_ledger_outlives_a_restart(tmp_path: Path) -> None:
    """Space that an earlier run used counts from the first store on."""
    rig = rig_for(tmp_path, 20)
    async with rig.open() as backend:
        await rig.put(backend, range(15))
    async with rig.open(recovered=False) as backend:
        await rig.put(backend, range(100, 120))
        assert rig.used_bytes() <= 20 * BLOCK
    async with rig.open() as backend:
        await rig.settled(backend)


async def test_a_lost_ledger_is_counted_anew_before_anything_is_stored(tmp_path: Path) -> None:
    """A root with blocks and a missing or damaged ledger does not grow past its capacity."""
    rig = rig_for(tmp_path, 20)
    for damage in (
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b"x" * 8192),
        lambda path: path.write_bytes(b""),
    ):
        async with rig.open() as backend:
            await rig.put(backend, range(18))
        damage(rig.state / "ledger")
        async with rig.open(recovered=False) as backend:
            await rig.put(backend, range(100, 120))
            assert rig.used_bytes() <= 20 * BLOCK
            await rig.settled(backend)


async def test_a_crash_leaves_the_ledger_too_high_and_the_next_start_sets_it_right(tmp_path: Path) -> None:
    """What was entered by a process that died is struck out by the scan of the next one."""
    rig = rig_for(tmp_path, 50)
    async with rig.open() as backend:
        await rig.put(backend, range(10))
        machine = backend._machine
        assert machine is not None
        ledger = machine.session.ledger
        ledger._writer = f"{'0' * 32}.1.1.deadbeef"
        ledger.reserve([BLOCK] * 30, lambda charges, usage: len(charges))
        await rig.settled_at(backend, 40 * BLOCK)
        # A process that dies closes nothing; its entry stays.
        ledger.close = lambda: None  # type: ignore[method-assign]
    async with rig.open() as backend:
        await rig.settled(backend)
        assert backend.stats().used_bytes == 10 * BLOCK


async def test_files_removed_by_others_are_counted_off(tmp_path: Path) -> None:
    """When somebody empties the directory, lookups miss, and stores find the room once the root was counted again."""
    rig = rig_for(tmp_path, 20, high_watermark=1.0)
    async with rig.open() as backend:
        await rig.put(backend, range(20))
        for path in rig.files():
            path.unlink()
        assert await rig.get(backend, range(20)) == [Outcome.MISS] * 20
        assert backend.stats().blocks == 0
        assert {cause for _, cause in rig.removed} == {RemovalCause.LOST}
        assert await rig.put(backend, range(20)) == [Outcome.NO_SPACE] * 20
        machine = backend._machine
        assert machine is not None
        assert await machine.recovery.scan()
        assert await rig.put(backend, range(20)) == [Outcome.OK] * 20


async def test_an_eviction_that_fails_keeps_its_count(tmp_path: Path) -> None:
    """Blocks that can't be removed still take their space; nothing is stored in it."""
    rig = rig_for(tmp_path, 20, high_watermark=1.0)
    async with rig.open() as backend:
        await rig.put(backend, range(20))
        rig.disk.fail("unlink", errno.EIO, forever=True)
        assert await rig.put(backend, [20]) == [Outcome.NO_SPACE]
        assert rig.used_bytes() == 20 * BLOCK
        assert backend.stats().counters["eviction_errors"] > 0
        rig.disk.heal()
        machine = backend._machine
        assert machine is not None
        assert await machine.recovery.scan()
        assert await rig.put(backend, [20]) == [Outcome.OK]
        await rig.settled(backend)


async def test_loads_go_on_while_blocks_are_evicted(tmp_path: Path) -> None:
    """A block that is being read is not evicted; loads beside a storm of stores are right or misses."""
    rig = rig_for(tmp_path, 30)
    async with rig.open() as backend:
        stored = 0

        async def store() -> None:
            nonlocal stored
            for start in range(0, 400, 8):
                await rig.put(backend, range(start, start + 8))
                stored = start + 8

        async def load() -> int:
            hits = 0
            while stored < 400:
                outcomes = await rig.get(backend, range(max(0, stored - 40), stored))
                assert set(outcomes) <= {Outcome.OK, Outcome.MISS}
                hits += outcomes.count(Outcome.OK)
            return hits

        _, first, second = await asyncio.gather(store(), load(), load())
        assert rig.used_bytes() <= 30 * BLOCK
        assert first + second > 0
        assert RemovalCause.LOST not in {cause for _, cause in rig.removed}


async def test_a_store_waits_for_the_removal_of_its_key(tmp_path: Path) -> None:
    """A key that is being removed is stored again when its old file has gone, never taken for stored already."""
    rig = rig_for(tmp_path, 30)
    async with rig.open() as backend:
        for _ in range(30):
            await rig.put(backend, [1])
            deleted, stored = await asyncio.gather(backend.delete([key(1)]), rig.put(backend, [1]))
            assert (list(deleted), stored) == ([True], [Outcome.OK])
            assert await rig.get(backend, [1]) == [Outcome.OK]
