"""Parts of a medium that can't be written, and closes that are cut short: neither costs more than itself."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
from collections import Counter
from pathlib import Path

import pytest

from kvstore.backends.disk import index as index_module
from kvstore.backends.disk.layout import segment_name
from kvstore.diskio import OsDisk
from kvstore.testing.tier_rig import TierRig
from kvstore.testing.waiting import eventually_async
from kvstore.types import Outcome
from tests.disk.rig import NAMESPACE, Rig, opened, room_for


class BadDisk(OsDisk):
    """A disk with segments that can't be written."""

    bad = ""
    """Part of the names of these segments; empty: none is bad."""

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        name = os.readlink(f"/proc/self/fd/{fd}")
        if self.bad and name.endswith(".seg") and self.bad in name:
            raise OSError(errno.EIO, "bad for the test")
        return super().pwritev(fd, buffers, offset)


async def stores(rig: Rig, count: int) -> Counter[Outcome]:
    """Store new blocks one by one; return the outcomes."""
    return Counter([outcome for _ in range(count) for outcome in await rig.put(rig.new(1))])


async def test_a_bad_segment_stops_no_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stores fail in a new segment, then all go elsewhere; after a pause it is used again, if it can be."""
    disk = BadDisk()
    async with opened(tmp_path, room_for(64), disk=disk, engine="threads") as rig:
        await rig.put_new(32)
        disk.bad = segment_name(8)
        found = await stores(rig, 200)
        assert found[Outcome.IO_ERROR] == 2, found
        disk.bad = segment_name(3)
        found = await stores(rig, 300)
        # Each of its four blocks leaves once, and its slot is tried once.
        assert found[Outcome.IO_ERROR] <= 4, found
        assert await stores(rig, 100) == {Outcome.OK: 100}
        disk.bad = ""
        monkeypatch.setattr(index_module, "_REST_S", 0.0)
        for slot in rig.session.index._resting:
            rig.session.index._resting[slot] = 0.0
        await stores(rig, 64)
        assert not rig.session.index._resting


async def test_a_medium_that_takes_no_blocks_keeps_those_it_has(tmp_path: Path) -> None:
    """Stores that fail everywhere evict no more than an eighth of the blocks."""
    disk = BadDisk()
    async with opened(tmp_path, room_for(64), disk=disk, engine="threads") as rig:
        values = await rig.put_new(64)
        disk.bad = ".seg"
        assert Outcome.OK not in await stores(rig, 200)
        assert len(await rig.still_there(values)) >= 64 - 64 // 8 - 4
        disk.bad = ""
        assert (await stores(rig, 20))[Outcome.OK] == 20


@pytest.mark.parametrize("engine", ["threads", "auto"])
def test_failed_writes_keep_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    """A closed tier has no view of the slots, although errors of their writes have tracebacks."""

    def fail(self: OsDisk, fd: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, "bad for the test")

    config = {"backend": "file", "path": str(tmp_path / "kv"), "capacity": "8MiB", "reserve": 0, "engine": engine}
    gc.disable()
    try:
        with TierRig(config, namespace=NAMESPACE, slot_bytes=4096, slots=32) as rig:
            assert rig.store([b"good"]).success
            monkeypatch.setattr(OsDisk, "pwritev", fail)
            for number in range(20):
                rig.store([b"%d %d" % (number, i) for i in range(20)])
            monkeypatch.undo()
    finally:
        gc.enable()


@pytest.mark.parametrize("engine", ["threads", "auto"])
@pytest.mark.parametrize("turns", [1, 2, 5, 20])
async def test_a_cancelled_close_frees_all_files(tmp_path: Path, engine: str, turns: int) -> None:
    """However far it came, no file stays open and no lock is held once the last operation has ended."""
    async with opened(tmp_path, room_for(64), engine=engine) as rig:
        await rig.put_new(8)
        storing = asyncio.create_task(rig.put(rig.new(4)))
        closing = asyncio.create_task(rig.backend.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        closing.cancel()
        await asyncio.gather(storing, closing, return_exceptions=True)
        await eventually_async(lambda: not open_below(tmp_path), what="no file open")
    async with opened(tmp_path, room_for(64), engine=engine, exclusive=True) as rig:
        await rig.scanned()
        await rig.has_all(await rig.put_new(2))


def open_below(root: Path) -> list[str]:
    """Return the open files of this process in a directory."""
    names = []
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # Threads close files meanwhile.
            names.append(os.readlink(file))
    return [name for name in names if name.startswith(str(root))]
