"""Quarantine: damaged blocks go out of the way, a few are kept, good ones are never taken."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from kvstore.types import Outcome
from tests.file.rig import PAGE, Rig, key, keys


def kept(rig: Rig) -> list[Path]:
    """Return the blocks in quarantine, oldest first."""
    return sorted((rig.state / "quarantine").glob("*.bad"), key=lambda path: int(path.stem.rpartition("-")[2]))


@pytest.mark.parametrize("shared", [False, True])
async def test_a_damaged_block_is_kept_and_missed(tmp_path: Path, shared: bool) -> None:
    """After quarantine the key misses and can be stored again; the damaged bytes can be looked at, and are counted."""
    rig = Rig(tmp_path / "kv", shared=shared)
    async with rig.open() as backend:
        await rig.put(backend, [1, 2])
        await rig.get(backend, [1])
        await backend.quarantine([key(1)])
        assert await rig.get(backend, [1, 2]) == [Outcome.MISS, Outcome.OK]
        assert [path.read_bytes() for path in kept(rig)] == [rig.record(1)]
        assert key(1).hex() in kept(rig)[0].name
        assert await rig.put(backend, [1]) == [Outcome.OK]
        assert backend.stats().counters["quarantined_blocks"] == 1
        await rig.settled_at(backend, rig.used_bytes() + 2 * PAGE)
        assert rig.removed == []
    async with rig.open() as backend:
        await rig.settled_at(backend, rig.used_bytes() + 2 * PAGE)


async def test_it_is_bounded_by_count_and_by_bytes(tmp_path: Path) -> None:
    """The oldest are dropped; with a bound of zero nothing is kept."""
    for settings, left in (
        ({"quarantine_blocks": 3}, 3),
        ({"quarantine_bytes": 5 * PAGE}, 2),
        ({"quarantine_blocks": 0}, 0),
    ):
        rig = Rig(tmp_path / f"kv{left}", **settings)
        async with rig.open() as backend:
            await rig.put(backend, range(8))
            for number in range(8):
                await backend.quarantine([key(number)])
            assert [path.read_bytes() for path in kept(rig)] == [rig.record(n) for n in range(8 - left, 8)]
            assert rig.files() == []
            await rig.settled_at(backend, left * 2 * PAGE)


async def test_it_makes_room_before_any_block(tmp_path: Path) -> None:
    """Damaged blocks go first when space is needed."""
    rig = Rig(tmp_path / "kv", capacity=20 * PAGE, high_watermark=1.0, low_watermark=1.0)
    async with rig.open() as backend:
        await rig.put(backend, range(10))
        await backend.quarantine(keys([0, 1]))
        assert len(kept(rig)) == 2
        assert await rig.put(backend, [10, 11]) == [Outcome.OK] * 2
        assert kept(rig) == []
        assert rig.removed == []


@pytest.mark.parametrize("shared", [False, True])
async def test_a_block_replaced_since_is_left_alone(tmp_path: Path, shared: bool) -> None:
    """A good block that another writer has put in the place of the damaged one is not taken away."""
    rig = Rig(tmp_path / "kv", shared=shared)
    async with rig.open() as backend:
        await rig.put(backend, [1])
        await rig.get(backend, [1])
        rig.path(1).rename(tmp_path / "old")
        rig.path(1).write_bytes(rig.record(1))
        rig.path(1).chmod(0o600)
        await backend.quarantine([key(1)])
        assert await rig.get(backend, [1]) == [Outcome.OK]
        assert kept(rig) == []


@pytest.mark.parametrize("op", ["rename", "mkdir", "scandir"])
async def test_what_can_not_be_kept_is_deleted(tmp_path: Path, op: str) -> None:
    """A damaged block never stays in its place because the quarantine fails."""
    rig = Rig(tmp_path / "kv")
    async with rig.open() as backend:
        await rig.put(backend, [1])
        rig.disk.fail(op, errno.EIO, forever=True)
        await backend.quarantine([key(1)])
        assert not rig.path(1).exists()
        await rig.settled(backend)


async def test_a_block_that_can_not_be_removed_at_all(tmp_path: Path) -> None:
    """Quarantine and delete on a read-only disk say so without an exception; the block is still known."""
    rig = Rig(tmp_path / "kv")
    async with rig.open() as backend:
        await rig.put(backend, [1])
        for op in ("rename", "unlink"):
            rig.disk.fail(op, errno.EROFS, forever=True)
        await backend.quarantine([key(1)])
        assert list(await backend.delete([key(1)])) == [False]
        assert backend.stats().blocks == 1
        assert backend.stats().counters["io_errors"] == 2
        rig.disk.heal()
        assert list(await backend.delete([key(1)])) == [True]
        await rig.settled(backend)
