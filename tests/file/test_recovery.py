"""Recovery: from a snapshot, from the files alone, from a damaged snapshot, and what dead writers left."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.backends.base import RecordGeometry
from kvstore.backends.file import FileBackend
from kvstore.backends.file.recovery import Recovery
from kvstore.backends.file.snapshot import decode_snapshot, encode_snapshot
from kvstore.testing import DiskFault
from kvstore.types import BlockInfo, Outcome, RemovalCause
from tests.file.rig import NAMESPACE, OTHER_NAMESPACE, PAGE, Rig, key, keys

SNAPSHOT = f"snapshot.{NAMESPACE.hex}"


async def scanned(backend: FileBackend) -> list[BlockInfo]:
    """Return what a scan yields."""
    return [info async for info in backend.scan()]


async def stored_root(tmp_path: Path, count: int = 20) -> Rig:
    """Return a rig whose root holds blocks of a closed engine."""
    rig = Rig(tmp_path / "kv")
    async with rig.open() as backend:
        assert set(await rig.put(backend, range(count))) == {Outcome.OK}
    return rig


async def test_a_snapshot_brings_blocks_and_their_order_back(tmp_path: Path) -> None:
    """After a clean end the next start knows all blocks, their sizes and which were used last."""
    rig = await stored_root(tmp_path)
    async with rig.open() as backend:
        backend.touch(keys([3, 1]))
    async with rig.open() as backend:
        found = await scanned(backend)
        assert [info.key for info in found] == keys([n for n in range(20) if n not in (1, 3)] + [3, 1])
        assert {info.size_bytes for info in found} == {2 * PAGE}
        assert backend.stats().counters["recovered_from_snapshot"] == 20
        assert backend.stats().counters["recovered_from_scan"] == 0
        assert set(await rig.get(backend, range(20))) == {Outcome.OK}


async def test_without_a_snapshot_the_files_tell(tmp_path: Path) -> None:
    """Keys come from the names, the order from the times of the files."""
    rig = await stored_root(tmp_path)
    (rig.state / SNAPSHOT).unlink()
    order = list(range(20))
    random.Random(5).shuffle(order)
    for place, number in enumerate(order):
        os.utime(rig.path(number), (1e9 + place, 1e9 + place))
    async with rig.open() as backend:
        found = await scanned(backend)
        assert [info.key for info in found] == keys(order)
        assert [info.used_at for info in found] == [1e9 + place for place in range(20)]
        assert backend.stats().counters["recovered_from_scan"] == 20


def flip_a_bit(path: Path) -> None:
    """Damage one byte in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    """Cut off the second half."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def empty(path: Path) -> None:
    """Leave nothing in it."""
    path.write_bytes(b"")


def of_another_namespace(path: Path) -> None:
    """Put a good snapshot of another namespace in its place."""
    path.write_bytes(encode_snapshot(OTHER_NAMESPACE.digest, [(key(77), PAGE, 1.0)], 2.0))


def garbage(path: Path) -> None:
    """Fill it with noise."""
    path.write_bytes(random.Random(1).randbytes(5000))


@pytest.mark.parametrize("damage", [flip_a_bit, cut, empty, of_another_namespace, garbage])
async def test_a_damaged_snapshot_is_ignored(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """The files alone bring everything back, and the next close writes a good snapshot."""
    rig = await stored_root(tmp_path)
    damage(rig.state / SNAPSHOT)
    async with rig.open() as backend:
        assert {info.key for info in await scanned(backend)} == set(keys(range(20)))
        assert backend.stats().counters["recovered_from_snapshot"] == 0
    assert len(decode_snapshot(NAMESPACE.digest, (rig.state / SNAPSHOT).read_bytes())) == 20


async def test_every_truncation_and_many_flips_of_a_snapshot_are_seen(tmp_path: Path) -> None:
    """No damage of a snapshot is taken for a snapshot."""
    blocks = [(key(n), n * PAGE, float(n)) for n in range(5)] + [(b"x", 1, 2.0)]
    content = encode_snapshot(NAMESPACE.digest, blocks, 3.0)
    assert decode_snapshot(NAMESPACE.digest, content) == blocks
    damaged = [content[:length] for length in range(len(content))] + [content + b"x"]
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << (place % 8)
        damaged.append(bytes(flipped))
    for bad in damaged:
        with pytest.raises(ValueError, match=r"too short|checksum"):
            decode_snapshot(NAMESPACE.digest, bad)


async def test_the_files_correct_an_old_snapshot(tmp_path: Path) -> None:
    """Blocks that went since are told LOST, blocks that came since are found, both without a restart."""
    rig = await stored_root(tmp_path)
    old = (rig.state / SNAPSHOT).read_bytes()
    async with rig.open() as backend:
        await rig.put(backend, range(20, 30))
    (rig.state / SNAPSHOT).write_bytes(old)
    for number in range(5):
        rig.path(number).unlink()
    rig.removed.clear()
    async with rig.open() as backend:
        assert {info.key for info in await scanned(backend)} == set(keys(range(5, 30)))
        assert sorted(rig.removed) == sorted((gone, RemovalCause.LOST) for gone in keys(range(5)))
        assert backend.stats().counters["lost_blocks"] == 5
        await rig.settled(backend)


async def test_scan_yields_the_snapshot_before_the_files_were_looked_at(tmp_path: Path) -> None:
    """A start with a snapshot need not wait for the directory; loads and lookups work meanwhile."""
    rig = await stored_root(tmp_path)
    async with rig.open(recovered=False) as backend:
        scan = backend.scan()
        first = [await anext(scan) for _ in range(20)]
        assert {info.key for info in first} == set(keys(range(20)))
        assert set(await rig.get(backend, range(20))) == {Outcome.OK}
        with pytest.raises(StopAsyncIteration):
            await anext(scan)
        assert backend.stats().gauges["recovering"] == 0


async def test_blocks_stored_during_recovery_are_the_warmest(tmp_path: Path) -> None:
    """What is stored while the files are still looked at does not end up below what is found."""
    rig = await stored_root(tmp_path)
    (rig.state / SNAPSHOT).unlink()
    async with rig.open(recovered=False) as backend:
        await rig.put(backend, [50])
        await scanned(backend)
        found = [info.key for info in await scanned(backend)]
        assert found[-1] == key(50)
        assert len(found) == 21


async def test_a_scan_that_fails_takes_nothing_away(tmp_path: Path) -> None:
    """When a directory can't be read, the snapshot's blocks are still believed, and the ledger is left alone."""
    rig = await stored_root(tmp_path)
    backend = rig.backend()
    rig.disk.fail("scandir", errno.EIO, forever=True)
    await backend.open(NAMESPACE, RecordGeometry(PAGE, PAGE))
    try:
        assert len(await scanned(backend)) == 20
        assert backend.stats().counters["scan_errors"] > 0
        assert rig.removed == []
        rig.disk.heal()
        assert set(await rig.get(backend, range(20))) == {Outcome.OK}
        assert await rig.put(backend, [20]) == [Outcome.OK]
    finally:
        await backend.close()


def dead_writer() -> str:
    """Return the identity of a process that has ended."""
    child = subprocess.run(["/bin/sh", "-c", "echo $$"], capture_output=True, text=True, check=True)
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    return f"{boot_id}.{child.stdout.strip()}.123456"


def live_writer() -> str:
    """Return the identity of another process that runs: the one that started this."""
    fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    return f"{boot_id}.{os.getppid()}.{fields[19]}"


async def test_litter_of_dead_writers_is_swept(tmp_path: Path) -> None:
    """Unpublished files go if their process ended or the machine was restarted, in every namespace; others stay."""
    rig = await stored_root(tmp_path)
    async with rig.open(OTHER_NAMESPACE) as backend:
        await rig.put(backend, [1])
    other_boot = f"{'0' * 32}.{live_writer().partition('.')[2]}"
    places = [rig.shard(1), rig.state, rig.shard(1, OTHER_NAMESPACE), rig.root / OTHER_NAMESPACE.hex]
    dead = [
        place / f".tmp.{writer}.{n:x}" for place in places for n, writer in enumerate((dead_writer(), other_boot), 1)
    ]
    alive = [place / f".tmp.{live_writer()}.9" for place in places]
    for path in dead + alive:
        path.write_bytes(b"x" * PAGE)
    (rig.state / f"writer.{dead_writer()}.00000001").write_bytes(b"")
    async with rig.open() as backend:
        assert [path for path in dead if path.exists()] == []
        assert [path for path in alive if not path.exists()] == []
        assert backend.stats().counters["swept_tmp"] == len(dead)
        assert len([path for path in rig.state.iterdir() if path.name.startswith("writer.")]) == 1
        # A live writer's unpublished blocks take space, whoever they belong to.
        await rig.settled_at(backend, rig.used_bytes() + 2 * PAGE)
    assert [path.name for path in rig.state.iterdir() if path.name.startswith("writer.")] == []


async def test_files_cut_by_a_power_failure_are_swept(tmp_path: Path) -> None:
    """A file shorter than a header is no block; the key can be stored again, before and after the scan."""
    rig = await stored_root(tmp_path, 4)
    for number in (0, 1):
        rig.path(number).write_bytes(b"")
    async with rig.open() as backend:
        assert backend.stats().blocks == 2
        assert backend.stats().counters["swept_torn"] == 2
        assert await rig.put(backend, [0]) == [Outcome.OK]
        rig.path(2).write_bytes(b"short")
        machine = backend._machine
        assert machine is not None
        machine.index.remove(key(2))
        assert await rig.put(backend, [2]) == [Outcome.OK]
        assert await rig.get(backend, [0, 2, 3]) == [Outcome.OK] * 3


async def test_closing_during_recovery_is_quick_and_harmless(tmp_path: Path) -> None:
    """An engine that ends before its recovery did loses nothing, and keeps the old snapshot."""
    rig = await stored_root(tmp_path)
    before = (rig.state / SNAPSHOT).read_bytes()
    for _ in range(5):
        async with rig.open(recovered=False):
            pass
    assert (rig.state / SNAPSHOT).read_bytes()[:40] == before[:40]
    async with rig.open() as backend:
        assert set(await rig.get(backend, range(20))) == {Outcome.OK}


async def test_a_snapshot_that_can_not_be_written_is_no_failure(tmp_path: Path) -> None:
    """Closing on a full disk keeps the old snapshot and leaves no litter."""
    rig = await stored_root(tmp_path)
    async with rig.open() as backend:
        await rig.put(backend, [30])
        rig.disk.fail("rename", errno.ENOSPC, forever=True)
    assert list(rig.root.rglob(".tmp.*")) == []
    rig.disk.heal()
    async with rig.open() as backend:
        assert backend.stats().blocks == 21


async def test_snapshots_are_written_now_and_then(tmp_path: Path) -> None:
    """A killed engine finds its last snapshot; without changes none is written."""
    rig = await stored_root(tmp_path)
    async with rig.open(snapshot_interval=1) as backend:
        machine = backend._machine
        assert machine is not None
        await rig.put(backend, [30])
        machine.upkeep._snapshot_at -= 10
        await machine.upkeep._tick()
        assert len(decode_snapshot(NAMESPACE.digest, (rig.state / SNAPSHOT).read_bytes())) == 21
        machine.upkeep._snapshot_at -= 10
        await machine.upkeep._tick()
        assert backend.stats().counters["snapshots"] == 1


async def test_recovery_does_not_bring_back_what_is_removed_meanwhile(tmp_path: Path) -> None:
    """A block deleted while the scan that saw it goes on stays deleted: nobody hears of it once it is gone."""
    rig = await stored_root(tmp_path)
    (rig.state / SNAPSHOT).unlink()
    async with rig.open(recovered=False) as backend:
        gone = False
        told_late: set[bytes] = set()

        async def scan() -> None:
            async for found in backend.scan_keys():
                if gone:
                    told_late.update(found)

        scanning = asyncio.create_task(scan())
        await backend.delete(keys(range(10)))
        gone = True
        await scanning
        assert told_late.isdisjoint(keys(range(10)))
        assert {info.key for info in await scanned(backend)} == {*keys(range(10, 20))}
        assert list(await backend.exists(keys(range(20)))) == [False] * 10 + [True] * 10
        assert backend.stats().blocks == 10


async def test_recovery_does_not_bring_back_what_it_saw_before_it_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that the scan has seen, and that is deleted before the index knows of it, does not enter the index."""
    seen, go_on = asyncio.Event(), asyncio.Event()
    add = Recovery._add

    async def held(recovery: Recovery, *args: Any) -> None:
        seen.set()
        await go_on.wait()
        await add(recovery, *args)

    rig = await stored_root(tmp_path)
    (rig.state / SNAPSHOT).unlink()
    monkeypatch.setattr(Recovery, "_add", held)
    async with rig.open(recovered=False) as backend:
        try:
            await asyncio.wait_for(seen.wait(), 60)
            assert list(await backend.delete(keys(range(10)))) == [True] * 10
        finally:
            go_on.set()
        assert {info.key for info in await scanned(backend)} == {*keys(range(10, 20))}
        assert backend.stats().blocks == 10
        await rig.put(backend, [3])
        assert backend.stats().blocks == 11


async def test_interrupted_scans_go_on(tmp_path: Path) -> None:
    """EINTR and short reads during recovery change nothing."""
    rig = await stored_root(tmp_path)
    for op in ("open", "scandir", "stat", "flock", "preadv"):
        rig.disk.fail(op, errno.EINTR, nth=3)
    rig.disk.add(DiskFault("preadv", nth=2, short=True))
    async with rig.open() as backend:
        assert backend.stats().blocks == 20
        assert backend.stats().counters["scan_errors"] == 0
