"""An interrupted system call."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.diskio.faulty_disk import FaultyDisk


def test_a_close_is_never_repeated(tmp_path: Path) -> None:
    """The descriptor is released by the first try, whatever close returns."""
    disk = FaultyDisk()
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    disk.fail("close", errno.EINTR)
    with pytest.raises(InterruptedError):
        disk.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
