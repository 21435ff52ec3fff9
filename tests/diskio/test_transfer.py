"""Interrupted system calls."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.diskio.faulty_disk import FaultyDisk


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    """Return an open file."""
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    yield fd
    os.close(fd)


def test_interruptions_are_repeated_but_not_for_ever(file: int) -> None:
    """EINTR is repeated; a disk that says nothing else is EIO."""
    disk = FaultyDisk()
    disk.fail("fsync", errno.EINTR)
    disk.fsync(file)
    assert disk.count("fsync") == 2
    disk.fail("fsync", errno.EINTR, forever=True)
    with pytest.raises(OSError, match="interrupted") as caught:
        disk.fsync(file)
    assert caught.value.errno == errno.EIO


def test_a_close_is_never_repeated(tmp_path: Path) -> None:
    """The descriptor is gone after the first try, whatever close says."""
    disk = FaultyDisk()
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    disk.fail("close", errno.EINTR)
    with pytest.raises(InterruptedError):
        disk.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
