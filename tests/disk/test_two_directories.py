"""One of two directories fails: it costs its own room only, and is used again once it works."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvstore.backends.disk import index as index_module
from kvstore.diskio import OsDisk
from kvstore.types import BlockKey, Outcome
from tests.disk.rig import Rig, opened, room_for, stores

BLOCKS = 128


class HalfDisk(OsDisk):
    """A disk that fails calls of one kind below one directory."""

    op = ""
    bad = ""

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        self._fail("pwritev", fd)
        return super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        self._fail("fdatasync", fd)
        super().fdatasync(fd)

    def open_file(self, name: str, flags: int, dir_fd: int) -> int:
        if name.endswith(".seg") and flags & os.O_CREAT:
            self._fail("create", dir_fd)
        return super().open_file(name, flags, dir_fd)

    def _fail(self, op: str, fd: int) -> None:
        if op == self.op and os.readlink(f"/proc/self/fd/{fd}").startswith(self.bad):
            raise OSError(errno.EIO, "bad for the test")


def held_in(rig: Rig, directory: int) -> list[BlockKey]:
    """Return the blocks in a directory."""
    columns = rig.session.index.columns
    held = columns.held()
    return columns.keys_in(held[held // columns.segment_slots % 2 == directory])


@pytest.mark.parametrize("op", ["pwritev", "fdatasync"])
async def test_a_failing_directory_costs_itself_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    """Few stores fail, the other directory takes all further ones, and loads from both go on."""
    now, disk = 1000.0, HalfDisk()
    monkeypatch.setattr(index_module, "time", SimpleNamespace(monotonic=lambda: now))
    paths = [tmp_path / "a", tmp_path / "b"]
    async with opened(paths, room_for(BLOCKS), disk=disk, engine="threads", durability="data") as rig:
        values = await rig.put_new(BLOCKS)
        await rig.session.space.close()
        disk.op, disk.bad = op, str(paths[1])
        found = await stores(rig, 200)
        assert found[Outcome.IO_ERROR] <= 4, found
        assert await stores(rig, 300) == {Outcome.OK: 300}
        kept = held_in(rig, 1)
        assert len(kept) >= BLOCKS // 2 - 8
        await rig.has_all({key: values[key] for key in kept if key in values})
        for _ in range(3):
            now += index_module._REST_S
            found = await stores(rig, 100)
            assert found[Outcome.IO_ERROR] <= 1, found
        disk.op = ""
        now += index_module._REST_S
        assert await stores(rig, 2 * BLOCKS) == {Outcome.OK: 2 * BLOCKS}
        assert not set(held_in(rig, 1)) & set(kept)
        assert not rig.session.index._resting


async def test_a_directory_that_takes_no_segments(tmp_path: Path) -> None:
    """All segments are created in the other directory; once it is full, blocks are evicted there."""
    disk = HalfDisk()
    paths = [tmp_path / "a", tmp_path / "b"]
    async with opened(paths, room_for(BLOCKS), disk=disk, engine="threads") as rig:
        disk.op, disk.bad = "create", str(paths[1])
        assert await stores(rig, 2 * BLOCKS) == {Outcome.OK: 2 * BLOCKS}
        assert len(held_in(rig, 0)) >= BLOCKS // 2 - 8
        disk.op = ""
        rig.session.space._full_until = 0.0
        assert await stores(rig, BLOCKS) == {Outcome.OK: BLOCKS}
        assert held_in(rig, 1)


async def test_both_directories_fail(tmp_path: Path) -> None:
    """Blocks are not evicted for stores that fail, too."""
    disk = HalfDisk()
    async with opened([tmp_path / "a", tmp_path / "b"], room_for(BLOCKS), disk=disk, engine="threads") as rig:
        await rig.put_new(BLOCKS)
        disk.op, disk.bad = "pwritev", str(tmp_path)
        assert Outcome.OK not in await stores(rig, 300)
        assert len(rig.removed) <= BLOCKS // 8 + 8
