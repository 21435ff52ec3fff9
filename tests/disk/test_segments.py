"""Open segments: bounded, least recently used closed first; a removed segment is closed after its last use."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.backends.disk import segments as segments_module
from kvstore.backends.disk.layout import segment_name
from kvstore.backends.disk.segments import SegmentFiles
from kvstore.diskio import OsDisk, TransferEngine
from tests.disk.model import ModelDisk
from tests.disk.rig import opened, room_for

SEGMENTS = 20
LIMIT = 8
"""Minimum number of descriptors that a tier keeps open, however few the process may have."""


@pytest.fixture
async def segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SegmentFiles]:
    """Segments of this engine with one slot each, in a process with a low descriptor limit."""
    monkeypatch.setattr("resource.getrlimit", lambda _: (LIMIT, LIMIT))
    for number in range(SEGMENTS):
        path = tmp_path / segment_name(number)
        path.write_bytes(b"%d" % number)
        path.chmod(0o600)
    engine = TransferEngine(OsDisk(), "threads", threads=1)
    directory = os.open(tmp_path, os.O_RDONLY)
    files = SegmentFiles(engine, direct=False)
    files.add_owner(0, lambda: contextlib.nullcontext([directory]), segment_slots=1)
    yield files
    files.close()
    os.close(directory)
    assert await engine.close()


def descriptors(tmp_path: Path) -> list[int]:
    """Return the numbers of the segments that this process has open, in order."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.append(Path(os.readlink(f"/proc/self/fd/{fd}")))
        except FileNotFoundError:
            continue  # The descriptor that the directory was read with.
    return sorted(int(name.stem) for name in names if name.parent == tmp_path and name.suffix == ".seg")


async def test_blocks_are_loaded_from_a_disk_that_became_read_only(tmp_path: Path) -> None:
    """Segments that are not open yet are read on a read-only disk, and written again once it is writable."""
    disk = ModelDisk()
    async with opened(tmp_path, room_for(16), disk=disk, engine="threads") as rig:
        rig.session.segments._open_max = 1
        values = await rig.put_new(8)
        disk.state = "read-only"
        await rig.has_all(values)
        disk.state = "ok"
        await rig.has_all(values | await rig.put_new(8))


async def test_many_blocks_are_few_files(tmp_path: Path) -> None:
    """The number of files depends on the bytes, not on the number of blocks (sglang#28653)."""
    async with opened(tmp_path, "64MiB") as rig:
        values: dict[bytes, bytes] = {}
        for _ in range(20):
            values |= await rig.put_new(200)
        assert len(values) == 4000
        assert sum(path.is_file() for path in tmp_path.rglob("*")) < 40
        await rig.has_all(values)


async def test_an_open_segment_is_used_without_a_thread(
    segments: SegmentFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch whose segments are all open makes no call that could queue behind others."""

    async def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a call")

    async with segments.files_of([3]):
        pass
    with monkeypatch.context() as patched:
        patched.setattr(TransferEngine, "call", refuse)
        async with segments.files_of([3]) as (fd,):
            assert fd >= 0


async def test_those_used_last_stay_open(segments: SegmentFiles, tmp_path: Path) -> None:
    """Above the limit, unused segments are closed, the least recently used first."""
    for number in range(LIMIT):
        async with segments.files_of([number]):
            pass
    async with segments.files_of([0]):
        pass
    async with segments.files_of([LIMIT]):
        pass
    assert descriptors(tmp_path) == [0, *range(2, LIMIT + 1)]


async def test_those_in_use_stay_open_above_the_limit(segments: SegmentFiles, tmp_path: Path) -> None:
    """Calls that use more segments than the limit get all of them; afterwards the limit holds again."""
    places = list(range(SEGMENTS))
    async with segments.files_of(places) as fds:
        async with segments.files_of(places[:3]):
            pass
        # Further calls share the files in use.
        async with segments.files_of(places):
            assert descriptors(tmp_path) == places
        assert [os.pread(fd, 9, 0) for fd in fds] == [b"%d" % number for number in places]
        assert descriptors(tmp_path) == places
    assert len(descriptors(tmp_path)) == LIMIT


async def test_a_segment_that_is_gone_is_closed_by_its_last_user(segments: SegmentFiles, tmp_path: Path) -> None:
    """When a segment is removed during two reads, both succeed, and the second to end closes it."""
    async with segments.files_of([1, 2, 2]) as fds:
        async with segments.files_of([1]):
            segments.forget(0, 1)
            assert descriptors(tmp_path) == [1, 2]
        assert os.pread(fds[0], 9, 0) == b"1"
    assert descriptors(tmp_path) == [2]
    segments.forget(0, 2)
    assert descriptors(tmp_path) == []


async def test_a_segment_that_is_used_again_afterwards_stays_open(segments: SegmentFiles, tmp_path: Path) -> None:
    """A pending close of a segment does not apply to a file opened later under its number."""
    async with segments.files_of([1]):
        segments.forget(0, 1)
    for _ in range(2):
        async with segments.files_of([1]):
            assert descriptors(tmp_path) == [1]
        assert descriptors(tmp_path) == [1]


async def test_a_segment_that_goes_while_it_is_opened_is_not_kept(
    tmp_path: Path, segments: SegmentFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next call opens the file that then has the name."""
    opening, may_go_on = threading.Event(), threading.Event()
    open_regular = segments_module.open_regular

    def slow(*args: Any) -> tuple[int, int]:
        opened = open_regular(*args)
        opening.set()
        may_go_on.wait(30)
        return opened

    monkeypatch.setattr(segments_module, "open_regular", slow)

    async def use() -> bytes:
        async with segments.files_of([1]) as fds:
            return os.pread(fds[0], 9, 0)

    early = asyncio.create_task(use())
    await asyncio.to_thread(opening.wait, 30)
    path = tmp_path / segment_name(1)
    path.unlink()
    path.write_bytes(b"new")
    path.chmod(0o600)
    segments.forget(0, 1)
    may_go_on.set()
    assert await early == b"1"
    assert await use() == b"new"


async def test_two_calls_that_open_a_segment_at_once_leave_it_open_once(segments: SegmentFiles, tmp_path: Path) -> None:
    """The file stays open once, even if the first call ends before the second one has opened it."""

    async def use() -> None:
        async with segments.files_of([1]):
            pass

    await asyncio.gather(use(), use())
    assert descriptors(tmp_path) == [1]


async def test_an_owner_that_is_gone_has_no_segments(segments: SegmentFiles, tmp_path: Path) -> None:
    """Its segments are closed, and no further one is opened."""
    async with segments.files_of([3, 4]):
        segments.forget_owner(0)
    assert descriptors(tmp_path) == []
    async with segments.files_of([5]) as fds:
        assert fds == [-errno.ENOENT]


async def test_one_that_cannot_be_opened_spoils_no_other(segments: SegmentFiles, tmp_path: Path) -> None:
    """A missing file, and one that another user could write through a second name, fail alone."""
    (tmp_path / segment_name(6)).unlink()
    os.link(tmp_path / segment_name(7), tmp_path / "second-name")
    async with segments.files_of([6, 7, 8]) as fds:
        assert fds[:2] == [-errno.ENOENT, -errno.EPERM]
        assert os.pread(fds[2], 9, 0) == b"8"
    assert descriptors(tmp_path) == [8]
