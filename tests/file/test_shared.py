"""Several engines over one root: what one stores the others find, and together they keep to the capacity."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path

from kvstore.testing.seeds import fresh_seed
from kvstore.types import Outcome, RemovalCause
from tests.file.rig import PAGE, Rig, key, keys

REPOSITORY = Path(__file__).parents[2]
BLOCK = 2 * PAGE


async def test_what_one_stores_the_other_finds(tmp_path: Path) -> None:
    """Blocks are found and loaded at once, without a rescan, and are known from then on."""
    rig = Rig(tmp_path / "kv", shared=True)
    async with rig.open() as first, rig.open() as second:
        await rig.put(first, range(8))
        assert second.stats().blocks == 0
        assert list(await second.exists(keys(range(10)))) == [True] * 8 + [False] * 2
        assert second.stats().blocks == 8
        assert await rig.get(second, range(8)) == [Outcome.OK] * 8
        await first.delete(keys(range(4)))
        assert list(await second.exists(keys(range(8)))) == [False] * 4 + [True] * 4
        assert await rig.get(second, range(8)) == [Outcome.MISS] * 4 + [Outcome.OK] * 4


async def test_many_keys_are_asked_in_one_batch(tmp_path: Path) -> None:
    """``exists`` of 200 keys is one batch for the disk: a stat each, nothing more."""
    rig = Rig(tmp_path / "kv", shared=True)
    async with rig.open() as backend:
        await rig.put(backend, range(200))
        before = rig.disk.count()
        assert list(await backend.exists(keys(range(200)))) == [True] * 200
        assert rig.disk.count() - before == 200


async def test_a_rescan_learns_of_foreign_blocks_and_of_losses(tmp_path: Path) -> None:
    """Eviction needs to know all blocks: a rescan finds those of others, and tells of those that are gone."""
    rig = Rig(tmp_path / "kv", shared=True)
    async with rig.open() as first, rig.open() as second:
        await rig.put(second, range(100, 104))
        await rig.put(first, range(8))
        await first.delete([key(100)])
        rig.path(101).unlink()
        machine, other = second._machine, first._machine
        assert machine is not None
        assert other is not None
        # What the first has in hand counts twice otherwise, to be on the safe side, until the next scan.
        await other.upkeep._tick()
        assert await machine.recovery.scan()
        assert second.stats().blocks == 10
        assert sorted(rig.removed) == sorted((gone, RemovalCause.LOST) for gone in keys([100, 101]))
        await rig.settled(second)


async def test_a_block_that_another_engine_uses_is_not_evicted(tmp_path: Path) -> None:
    """A use noted in the file's times by another engine keeps a block that looks cold from here."""
    rig = Rig(tmp_path / "kv", shared=True, capacity=10 * BLOCK, high_watermark=1.0, low_watermark=0.8)
    async with rig.open() as first, rig.open() as second:
        await rig.put(first, range(10))
        machine = first._machine
        assert machine is not None
        for number in range(10):
            entry = machine.index.get(key(number))
            assert entry is not None
            entry.used_at = time.time() - 3600
            os.utime(rig.path(number), (entry.used_at, entry.used_at))
        await rig.get(second, [0, 1])
        upkeep = second._machine
        assert upkeep is not None
        await upkeep.upkeep._tick()
        assert rig.path(0).stat().st_mtime > time.time() - 600
        assert await rig.put(first, [10]) == [Outcome.OK]
        assert rig.path(0).exists()
        assert rig.path(1).exists()
        assert not rig.path(2).exists()
        assert key(0) not in dict(rig.removed)


async def test_uses_are_noted_once_a_minute(tmp_path: Path) -> None:
    """Loading a block again and again writes its times once."""
    rig = Rig(tmp_path / "kv", shared=True)
    async with rig.open() as backend:
        machine = backend._machine
        assert machine is not None
        await rig.put(backend, [1])
        os.utime(rig.path(1), (1e9, 1e9))
        for _ in range(5):
            await rig.get(backend, [1])
            backend.touch([key(1)])
            await machine.upkeep._tick()
        assert rig.disk.count("utime") == 1
        assert rig.path(1).stat().st_mtime > 1.5e9


async def test_the_identity_of_the_block_counts_in_a_stale_index(tmp_path: Path) -> None:
    """A store of a block that the index has, but another engine evicted, writes it again."""
    rig = Rig(tmp_path / "kv", shared=True)
    async with rig.open() as first, rig.open() as second:
        await rig.put(first, [1])
        await second.delete([key(1)])
        assert await rig.put(first, [1]) == [Outcome.OK]
        assert await rig.get(second, [1]) == [Outcome.OK]


async def test_three_engines_in_processes_of_their_own(tmp_path: Path) -> None:
    """Under random stores, loads and evictions of three processes: no wrong byte, never above the capacity."""
    seed = fresh_seed()
    capacity = 60 * BLOCK
    plans = [
        {"root": str(tmp_path / "kv"), "seed": seed + n, "rounds": 120, "universe": 200, "capacity": capacity}
        for n in range(3)
    ]
    engines = [
        await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.file.engine",
            json.dumps(plan),
            cwd=REPOSITORY,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        for plan in plans
    ]
    for engine in engines:
        out, err = await engine.communicate()
        assert engine.returncode == 0, (seed, err.decode())
        seen = json.loads(out)
        assert seen["peak"] <= capacity, (seed, seen)
        assert set(seen) <= {"peak", "evicted", "store.OK", "store.EXISTS", "store.NO_SPACE", "load.OK", "load.MISS"}
        assert seen["store.OK"] > 0, (seed, seen)
        assert seen["evicted"] > 0, (seed, seen)
    rig = Rig(tmp_path / "kv", capacity=capacity, shared=True)
    async with rig.open() as backend:
        await rig.settled(backend)
        assert backend.stats().used_bytes == rig.used_bytes()
        assert not list(rig.root.rglob(".tmp.*"))
