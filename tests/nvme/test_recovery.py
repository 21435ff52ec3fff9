"""What crashes leave: nothing is lost that was stored, nothing comes back that was removed, no byte is wrong."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.backends.nvme.layout import SNAPSHOT_NAME
from kvstore.testing.seeds import fresh_seed
from tests.nvme.rig import clone, opened, room_for


@pytest.fixture(params=["io_uring", "threads"])
def engine(request: pytest.FixtureRequest) -> str:
    """Either engine."""
    return str(request.param)


async def test_a_crash_without_a_snapshot_loses_nothing(tmp_path: Path, engine: str) -> None:
    """After a kill before the first snapshot the scan finds every block, and new ones go elsewhere."""
    async with opened(tmp_path / "a", room_for(700), engine=engine) as rig:
        values = await rig.put_new(600)
        crashed = clone(tmp_path / "a", tmp_path / "b")
    async with opened(crashed, room_for(700), engine=engine, seed=2) as rig:
        assert await rig.scanned() == set(values)
        more = await rig.put_new(90)
        assert rig.removed == []
        everything = values | more
        assert await rig.get(list(everything)) == list(everything.values())


async def test_a_stale_snapshot_is_corrected(tmp_path: Path, engine: str) -> None:
    """Blocks that were replaced since the snapshot are misses and told to be lost; those stored since are found."""
    async with opened(tmp_path / "a", room_for(40), engine=engine) as rig:
        old = await rig.put_new(40)
    async with opened(tmp_path / "a", room_for(40), engine=engine, seed=2) as rig:
        new = await rig.put_new(25)
        gone = set(rig.removed)
        crashed = clone(tmp_path / "a", tmp_path / "b")
    async with opened(crashed, room_for(40), engine=engine, seed=3) as rig:
        everything = old | new
        expected = {key: None if key in gone else payload for key, payload in everything.items()}
        early = await rig.get(list(expected))
        for (key, payload), got in zip(expected.items(), early, strict=True):
            assert got in (None, payload), key.hex()
        assert await rig.scanned() == {key for key, payload in expected.items() if payload is not None}
        assert set(rig.removed) == gone
        assert await rig.get(list(expected)) == list(expected.values())


async def test_a_removed_block_does_not_come_back(tmp_path: Path, engine: str) -> None:
    """What was deleted or quarantined is gone after a crash too, as its header was wiped."""
    async with opened(tmp_path / "a", room_for(20), engine=engine) as rig:
        values = await rig.put_new(20)
        keys = list(values)
        assert list(await rig.backend.delete(keys[:5])) == [True] * 5
        await rig.backend.quarantine(keys[5:8])
        crashed = clone(tmp_path / "a", tmp_path / "b")
    async with opened(crashed, room_for(20), engine=engine) as rig:
        assert await rig.scanned() == set(keys[8:])


def cut_in_half(path: Path) -> None:
    """Cut a file in half."""
    os.truncate(path, path.stat().st_size // 2)


def flip_a_byte(path: Path) -> None:
    """Change one byte in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    """Leave nothing in a file."""
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [cut_in_half, flip_a_byte, empty, Path.unlink])
async def test_a_damaged_snapshot_costs_a_scan(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """However a snapshot is damaged, even after a clean close, the slots tell what is there."""
    async with opened(tmp_path, room_for(20)) as rig:
        values = await rig.put_new(15)
    damage(tmp_path / SNAPSHOT_NAME)
    async with opened(tmp_path, room_for(20)) as rig:
        assert await rig.scanned() == set(values)
        assert rig.backend.stats().counters["recovery_found_blocks"] == 15
        assert await rig.get(list(values)) == list(values.values())


async def test_a_snapshot_of_an_earlier_life_is_not_believed(tmp_path: Path) -> None:
    """A snapshot that was put back from an earlier clean close is only a hint, as the epoch shows."""
    async with opened(tmp_path, room_for(10)) as rig:
        old = await rig.put_new(10)
    kept = (tmp_path / SNAPSHOT_NAME).read_bytes()
    async with opened(tmp_path, room_for(10), seed=2) as rig:
        new = await rig.put_new(10)
    (tmp_path / SNAPSHOT_NAME).write_bytes(kept)
    async with opened(tmp_path, room_for(10)) as rig:
        assert await rig.scanned() == set(new)
        assert await rig.get(list(old)) == [None] * 10
        assert await rig.get(list(new)) == list(new.values())


async def test_random_lives(tmp_path: Path) -> None:
    """Through crashes, clean closes, evictions and removals, a read gives the block's bytes or a miss."""
    seed = fresh_seed()
    rng = random.Random(seed)
    path = tmp_path / "0"
    values: dict[bytes, bytes] = {}
    deleted: set[bytes] = set()
    for life in range(25):
        engine = rng.choice(["io_uring", "threads"])
        async with opened(path, room_for(30), seed=rng.randrange(1 << 30), engine=engine) as rig:
            for _ in range(rng.randrange(6)):
                what = rng.random()
                if what < 0.5:
                    values |= await rig.put_new(rng.randrange(1, 6)) if rng.random() < 0.9 else {}
                elif what < 0.7 and values:
                    keys = rng.sample(sorted(values), min(3, len(values)))
                    await rig.backend.delete(keys)
                    deleted |= set(keys)
                else:
                    await rig.scanned()
                keys = rng.sample(sorted(values), min(10, len(values)))
                for key, got in zip(keys, await rig.get(keys), strict=True):
                    assert got in (None, values[key]), (seed, life, key.hex())
                    assert key not in deleted or got is None, (seed, life, "a removed block came back")
            if rng.random() < 0.5:
                path = clone(path, tmp_path / str(life + 1))
        async with opened(path, room_for(30)) as rig:
            found = await rig.scanned()
            got = await rig.get(sorted(found))
            assert got == [values[key] for key in sorted(found)], (seed, life)
            assert not found & deleted, (seed, life)
            stats = rig.backend.stats()
            assert stats.blocks + stats.gauges["free_slots"] == 30, (seed, life, "a slot is lost")
