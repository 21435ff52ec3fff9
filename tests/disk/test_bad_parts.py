"""Parts of a medium that can't be written cost only themselves, and are used again once they work."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvstore.backends.disk import index as index_module
from kvstore.backends.disk.drives import Drives
from kvstore.backends.disk.limits import Limits
from kvstore.diskio import OsDisk, Transfer
from kvstore.testing.waiting import eventually_async
from kvstore.types import BlockKey, Outcome
from tests.disk.rig import BadDisk, Rig, opened

BLOCKS = 128


class Clock:
    """The clock of rests."""

    now = 1000.0

    def pass_rest(self) -> None:
        """Let a rest pass."""
        self.now += index_module._REST_S


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """Return a clock that stands still."""
    clock = Clock()
    monkeypatch.setattr(index_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    yield clock


async def stores(rig: Rig, count: int) -> Counter[Outcome]:
    """Store new blocks one by one; return the outcomes."""
    return Counter([outcome for _ in range(count) for outcome in await rig.put({rig.maker.key(): rig.maker.payload()})])


async def there(rig: Rig, keys: Sequence[BlockKey]) -> list[BlockKey]:
    """Return those of these blocks that are found."""
    return [key for key, found in zip(keys, await rig.backend.exists(keys), strict=True) if found]


def holds(root: Path, key: BlockKey) -> bool:
    """Return whether a table in a root has a row with this key."""
    return any(key in table.read_bytes() for table in root.rglob("*.tab"))


async def test_bad_segment_stops_no_stores(tmp_path: Path, clock: Clock) -> None:
    """Two stores fail in a segment, then all go elsewhere; after a pause it is used again, if it can be."""
    disk = BadDisk()
    async with opened(tmp_path, BLOCKS, disk=disk, engine="threads") as rig:
        await rig.put_new(BLOCKS)
        disk.ops, disk.bad = ("pwritev",), "000003.seg"
        found = await stores(rig, 300)
        assert 0 < found[Outcome.IO_ERROR] <= 4, found
        assert await stores(rig, 100) == {Outcome.OK: 100}
        clock.pass_rest()
        found = await stores(rig, 100)
        assert found[Outcome.IO_ERROR] == 1, found
        disk.bad = "no file"
        clock.pass_rest()
        before = len(rig.removed)
        assert await stores(rig, 2 * BLOCKS) == {Outcome.OK: 2 * BLOCKS}
        assert rig.backend.stats().blocks > BLOCKS - 8
        assert len(rig.removed) > before


async def test_medium_that_takes_no_blocks_keeps_those_it_has(tmp_path: Path) -> None:
    """Stores that fail everywhere evict no more than an eighth of the blocks."""
    disk = BadDisk()
    async with opened(tmp_path, BLOCKS, disk=disk, engine="threads") as rig:
        values = await rig.put_new(BLOCKS)
        disk.ops, disk.bad = ("pwritev",), ".seg"
        assert Outcome.OK not in await stores(rig, 300)
        assert len(await there(rig, list(values))) >= BLOCKS - BLOCKS // 8 - 4
        disk.ops = ()
        assert (await stores(rig, 20))[Outcome.OK] == 20


async def test_root_that_does_not_answer_costs_few_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither new blocks nor evictions use its slots while another root works, and it is used again after that."""
    disk, gate, roots = BadDisk(), threading.Event(), [tmp_path / "a", tmp_path / "b"]
    async with opened(roots, BLOCKS, disk=disk, engine="threads", threads=2, limits=Limits(frozen_s=0.1)) as rig:
        for task in rig.session._tasks:
            task.cancel()
        await rig.put_new(BLOCKS)
        # All segments are there.
        rig.session.space._full_until = math.inf
        disk.ops, disk.bad, disk.gate = ("pwritev",), str(roots[1]), gate
        drives, storing = rig.session.drives, set[asyncio.Task[list[Outcome]]]()
        try:
            while not disk.waiting:
                storing.add(asyncio.create_task(rig.put(rig.new(1))))
                await asyncio.sleep(0.02)
            await eventually_async(lambda: drives.frozen() == {1})
            with monkeypatch.context() as patch:
                # A busy machine may be as slow with the other root.
                patch.setattr(drives, "frozen", lambda: {1})
                assert await stores(rig, BLOCKS // 2) == {Outcome.OK: BLOCKS // 2}
        finally:
            gate.set()
        await asyncio.wait(storing)
        assert {outcome for task in storing for outcome in task.result()} == {Outcome.OK}
        await eventually_async(lambda: not drives.frozen())
        disk.ops = ()

        async def is_used_again() -> bool:
            return any(holds(roots[1], key) for key in await rig.put_new(1))

        await eventually_async(is_used_again)


@pytest.mark.parametrize("op", ["pwritev", "fdatasync"])
async def test_failing_root_costs_itself_alone(tmp_path: Path, clock: Clock, op: str) -> None:
    """Few stores fail, the other root takes all further ones, and loads from both go on."""
    disk = BadDisk()
    roots = [tmp_path / "a", tmp_path / "b"]
    async with opened(roots, BLOCKS, disk=disk, engine="threads", durability="data") as rig:
        values = await rig.put_new(BLOCKS)
        kept = [key for key in values if holds(roots[1], key)]
        assert len(kept) > BLOCKS // 4
        disk.ops, disk.bad = (op,), str(roots[1])
        found = await stores(rig, 200)
        assert found[Outcome.IO_ERROR] <= 8, found
        assert await stores(rig, 300) == {Outcome.OK: 300}
        kept = await there(rig, kept)
        assert len(kept) >= BLOCKS // 2 - 12
        await rig.has_all({key: values[key] for key in kept})
        for _ in range(3):
            clock.pass_rest()
            found = await stores(rig, 100)
            assert found[Outcome.IO_ERROR] <= 2, found
        disk.ops = ()
        clock.pass_rest()
        await rig.backend.probe()
        assert await stores(rig, 3 * BLOCKS) == {Outcome.OK: 3 * BLOCKS}
        assert len(await there(rig, kept)) <= 2


async def test_root_that_takes_no_segments(tmp_path: Path) -> None:
    """All segments are made in the other root; once it is full, blocks are evicted there."""
    disk = BadDisk()
    roots = [tmp_path / "a", tmp_path / "b"]
    async with opened(roots, BLOCKS, disk=disk, engine="threads") as rig:
        disk.ops, disk.bad = ("open",), str(roots[1])
        assert await stores(rig, 2 * BLOCKS) == {Outcome.OK: 2 * BLOCKS}
        assert rig.backend.stats().blocks >= BLOCKS // 2 - 8
        assert not list(roots[1].rglob("*.tab"))


async def test_all_roots_fail(tmp_path: Path) -> None:
    """Blocks are not evicted for stores that fail, too."""
    disk = BadDisk()
    async with opened([tmp_path / "a", tmp_path / "b"], BLOCKS, disk=disk, engine="threads") as rig:
        await rig.put_new(BLOCKS)
        disk.ops, disk.bad = ("pwritev",), str(tmp_path)
        assert Outcome.OK not in await stores(rig, 300)
        assert len(rig.removed) <= BLOCKS // 8 + 8


def open_below(root: Path) -> list[str]:
    """Return the open files of this process in a directory."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        # Threads open and close files meanwhile.
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [name for name in names if name.startswith(str(root))]


@pytest.mark.parametrize("engine", ["threads", "auto"])
@pytest.mark.parametrize("turns", [1, 2, 5, 20])
async def test_cancelled_close_frees_all_files(tmp_path: Path, engine: str, turns: int) -> None:
    """However far it came, no file stays open and no lock is held once the last operation has ended."""
    async with opened(tmp_path, 64, engine=engine) as rig:
        values = await rig.put_new(8)
        storing = asyncio.create_task(rig.put(rig.new(4)))
        closing = asyncio.create_task(rig.backend.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        closing.cancel()
        await asyncio.gather(storing, closing, return_exceptions=True)
        await eventually_async(lambda: not open_below(tmp_path), what="no file open")
    async with opened(tmp_path, 64, engine=engine) as rig:
        assert rig.backend.stats().blocks >= 8
        await rig.has_all(values)


class OneWaits(OsDisk):
    """A disk where the write at offset 0 waits."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        assert offset or self.go.wait(30)
        return super().pwritev(fd, buffers, offset)


async def test_root_that_answers_another_write_is_not_frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A root is frozen once none of its writes has ended for some seconds, however long one of them takes."""
    now, disk = [0.0], OneWaits()
    monkeypatch.setattr("kvstore.backends.disk.drives.time", SimpleNamespace(monotonic=lambda: now[0]))
    drives = Drives(disk, "threads", 2, threads=2, frozen_s=2.0)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    drives.admit(0, fd)
    content = memoryview(bytes(8))
    waiting = asyncio.create_task(drives.write([Transfer(fd, 0, [content], 8)]))
    await asyncio.sleep(0)
    frozen: list[tuple[set[int], set[int]]] = []
    for now[0] in (1.0, 3.0, 5.0):
        before = drives.frozen()
        await drives.write([Transfer(fd, 8, [content], 8)])
        frozen.append((before, drives.frozen()))
    assert frozen == [(set(), set()), ({0}, set()), ({0}, set())]
    disk.go.set()
    await waiting
    assert await drives.close(5.0)
    os.close(fd)
