"""Segments of ended owners that others remove: whenever the remover is killed, no block is promised for ever."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.diskio import OsDisk
from kvstore.types import BlockKey, RemovalCause
from tests.disk.rig import Rig, clone, opened, room_for


class Watched(OsDisk):
    """A disk that calls ``before`` for each change below one directory."""

    def __init__(self) -> None:
        self.directory = ""
        self.before: Callable[[], object] = lambda: None
        self._lock = threading.Lock()

    def pwritev(self, fd: int, *args: Any) -> int:
        self._note(fd)
        return super().pwritev(fd, *args)

    def ftruncate(self, fd: int, size: int) -> None:
        self._note(fd)
        super().ftruncate(fd, size)

    def unlink(self, name: str, dir_fd: int) -> None:
        self._note(dir_fd)
        super().unlink(name, dir_fd)

    def _note(self, fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if self.directory and self.directory in path and not path.endswith("uses"):
            with self._lock:
                self.before()


async def broken_promises(rig: Rig, values: dict[BlockKey, bytes]) -> int:
    """Check that no block found is wrong, or promised and missing twice; return the number of those missing once."""
    await rig.session.recovered.wait()
    rig.removed.clear()
    keys = list(values)
    got = await rig.get(keys)
    assert all(back in (None, values[key]) for key, back in zip(keys, got, strict=True))
    missing = [key for key, back in zip(keys, got, strict=True) if back is None]
    assert not any(await rig.backend.exists(missing))
    # Engines that run make room for each other meanwhile, which they report as evictions.
    return sum(cause is RemovalCause.LOST for _, cause in rig.removed)


@pytest.mark.parametrize("journal", ["whole", "torn"])
async def test_a_kill_while_segments_of_an_ended_owner_are_removed(tmp_path: Path, journal: str) -> None:
    """At each step, an engine that follows the directory and one that adopts it promise only what is there."""
    root, disk = tmp_path / "kv", Watched()
    copies: list[Path] = []

    def copy_now() -> None:
        copies.append(tmp_path / f"copy-{len(copies)}")
        # Requests for space come and go at any moment.
        shutil.copytree(root, copies[-1], ignore=shutil.ignore_patterns("want.*"))

    async with opened(root, room_for(64), disk=disk, engine="threads") as rig:
        async with opened(root, room_for(64)) as other:
            values = await other.put_new(32)
            ended = root / next(root.glob(f"*/{other.session.owner.name}"))
        if journal == "torn":
            with max(ended.glob("journal.*")).open("ab") as file:
                file.write(b"torn")
        await rig.session.followers.refresh()
        await rig.has_all(values)
        disk.directory, disk.before = ended.name, copy_now
        values |= await rig.put_new(32)
        values |= await rig.put_new(12)
        disk.before()
        disk.directory = ""
        # Without a record, an engine that follows the directory finds out when it loads a block.
        broken = await broken_promises(rig, values)
        assert broken == 0 or journal == "torn"
        await rig.has_all(await rig.put_new(4))
    assert len(copies) >= 6
    for copy in copies:
        # An engine with segments of another length follows all directories, and adopts none.
        async with opened(clone(copy, copy.with_name(f"{copy.name}-followed")), room_for(256)) as rig:
            assert await broken_promises(rig, values) == 0, copy.name
        async with opened(copy, room_for(64)) as first, opened(copy, room_for(64)) as second:
            for rig in (first, second):
                await rig.session.followers.refresh()
                # A kill between the record and the file leaves no promise; one before it leaves the block.
                assert await broken_promises(rig, values) == 0, copy.name
            await first.has_all(await first.put_new(4))


class RemovedDuringRead(OsDisk):
    """A disk where a segment is removed between the first page of a read and the rest."""

    segment: Path | None = None

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        done = super().preadv(fd, buffers[:1], offset)
        if self.segment is not None and os.readlink(f"/proc/self/fd/{fd}") == str(self.segment):
            os.truncate(self.segment, 0)
            self.segment.unlink()
            self.segment = None
        return done + (super().preadv(fd, buffers[1:], offset + done) if buffers[1:] else 0)


async def test_a_segment_that_is_removed_during_a_read(tmp_path: Path) -> None:
    """A block of another owner, of which only a part could be read, is lost, not damaged."""
    root, disk = tmp_path / "kv", RemovedDuringRead()
    async with (
        opened(root, room_for(16)) as owner,
        opened(root, room_for(16), disk=disk, engine="threads") as reader,
    ):
        values = await owner.put_new(1)
        await reader.session.followers.refresh()
        (disk.segment,) = root.rglob("*.seg")
        assert await reader.get(list(values)) == [None]
        assert disk.segment is None
        assert [cause for _, cause in reader.removed] == [RemovalCause.LOST]
