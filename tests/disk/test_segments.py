"""Open segments: bounded, the ones used last stay open, and one that is gone is closed when its last user is done."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvstore.backends.disk.layout import segment_name
from kvstore.backends.disk.segments import SegmentFiles
from kvstore.diskio import OsDisk, TransferEngine

SEGMENTS = 20
LIMIT = 8
"""Descriptors that a tier keeps open at least, however few the process may have."""


@pytest.fixture
async def segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SegmentFiles]:
    """Segments of this engine with one slot each, in a process that may have few descriptors."""
    monkeypatch.setattr("resource.getrlimit", lambda _: (LIMIT, LIMIT))
    for number in range(SEGMENTS):
        path = tmp_path / segment_name(number)
        path.write_bytes(b"%d" % number)
        path.chmod(0o600)
    engine = TransferEngine(OsDisk(), "threads", threads=1)
    directory = os.open(tmp_path, os.O_RDONLY)
    files = SegmentFiles(engine, direct=False)
    files.add_owner(0, [directory], segment_slots=1)
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
            continue  # The descriptor by which the directory was read.
    return sorted(int(name.stem) for name in names if name.parent == tmp_path and name.suffix == ".seg")


async def test_those_used_last_stay_open(segments: SegmentFiles, tmp_path: Path) -> None:
    """Segments that nothing uses are closed above the limit, the one used longest ago first."""
    for number in range(LIMIT):
        async with segments.files_of([number]):
            pass
    async with segments.files_of([0]):
        pass
    async with segments.files_of([LIMIT]):
        pass
    assert descriptors(tmp_path) == [0, *range(2, LIMIT + 1)]


async def test_those_in_use_stay_open_above_the_limit(segments: SegmentFiles, tmp_path: Path) -> None:
    """Calls that use more segments than the limit get them all; afterwards the limit holds again."""
    places = list(range(SEGMENTS))
    async with segments.files_of(places) as fds:
        async with segments.files_of(places[:3]):
            pass
        assert [os.pread(fd, 9, 0) for fd in fds] == [b"%d" % number for number in places]
        assert descriptors(tmp_path) == places
    assert len(descriptors(tmp_path)) == LIMIT


async def test_a_segment_that_is_gone_is_closed_by_its_last_user(segments: SegmentFiles, tmp_path: Path) -> None:
    """Two calls read a segment while it goes: both can, and the second to end closes it."""
    async with segments.files_of([1, 2, 2]) as fds:
        async with segments.files_of([1]):
            segments.forget(0, 1)
            assert descriptors(tmp_path) == [1, 2]
        assert os.pread(fds[0], 9, 0) == b"1"
    assert descriptors(tmp_path) == [2]
    segments.forget(0, 2)
    assert descriptors(tmp_path) == []


async def test_a_segment_that_is_used_again_afterwards_stays_open(segments: SegmentFiles, tmp_path: Path) -> None:
    """That a segment was to be closed once says nothing of the file that is opened under its number later."""
    async with segments.files_of([1]):
        segments.forget(0, 1)
    for _ in range(2):
        async with segments.files_of([1]):
            assert descriptors(tmp_path) == [1]
        assert descriptors(tmp_path) == [1]


async def test_an_owner_that_is_gone_has_no_segments(segments: SegmentFiles, tmp_path: Path) -> None:
    """Its segments are closed, and no further one is opened."""
    async with segments.files_of([3, 4]):
        segments.forget_owner(0)
    assert descriptors(tmp_path) == []
    async with segments.files_of([5]) as fds:
        assert fds == [-errno.ENOENT]


async def test_one_that_cannot_be_opened_spoils_no_other(segments: SegmentFiles, tmp_path: Path) -> None:
    """A missing file, and one that another user could write through a second name, are errors of their own."""
    (tmp_path / segment_name(6)).unlink()
    os.link(tmp_path / segment_name(7), tmp_path / "second-name")
    async with segments.files_of([6, 7, 8]) as fds:
        assert fds[:2] == [-errno.ENOENT, -errno.EPERM]
        assert os.pread(fds[2], 9, 0) == b"8"
    assert descriptors(tmp_path) == [8]
