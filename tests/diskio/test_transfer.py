"""Whole transfers over a disk that cuts them short, interrupts them, or fails."""

from __future__ import annotations

import errno
import mmap
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.diskio import ALIGNMENT, flat, is_aligned, read_into
from kvstore.testing import DiskFault, FaultyDisk
from kvstore.testing.seeds import fresh_seed


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    """Return an open file."""
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    yield fd
    os.close(fd)


class CuttingDisk(FaultyDisk):
    """A disk that transfers as many bytes as chance says, each time."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng

    def syscall(self, op, function, /, *args, **kwargs):  # type: ignore[no-untyped-def]
        """Cut transfers, and interrupt some calls."""
        if self.rng.random() < 0.2:
            raise InterruptedError(errno.EINTR, "interrupted")
        if op in ("preadv", "pwritev"):
            left = self.rng.randrange(1, 1 + sum(memoryview(b).nbytes for b in args[1]))
            kept = []
            for buffer in args[1]:
                if left:
                    kept.append(memoryview(buffer)[:left])
                    left -= kept[-1].nbytes
            args = (args[0], kept, *args[2:])
        return function(*args, **kwargs)


@pytest.mark.parametrize("unit", [1, ALIGNMENT])
def test_random_cuts_lose_nothing(file: int, unit: int) -> None:
    """A file arrives whole in buffers of any lengths."""
    seed = fresh_seed()
    rng = random.Random(seed)
    disk = CuttingDisk(rng)
    for _ in range(50):
        content = rng.randbytes(rng.randrange(1, 60_000) if unit == 1 else ALIGNMENT * rng.randrange(1, 12))
        os.ftruncate(file, 0)
        os.pwrite(file, content, 0)
        target = bytearray(len(content) + ALIGNMENT)
        middle = rng.randrange(len(target))
        views = [memoryview(target)[:middle], memoryview(target)[middle:]]
        try:
            assert read_into(disk, file, views, len(content), unit=unit) == len(content), f"seed {seed}"
        except OSError as error:
            # A disk that never gets past a unit is given up.
            assert (unit, error.errno) == (ALIGNMENT, errno.EIO), f"seed {seed}"
            continue
        assert target[: len(content)] == content, f"seed {seed}"


def test_a_file_that_ends_early_is_read_as_far_as_it_goes(file: int) -> None:
    """The end of the file ends the read, not an error."""
    os.pwrite(file, b"x" * 100, 0)
    target = bytearray(200)
    assert read_into(FaultyDisk(), file, [memoryview(target)], 200) == 100
    assert target == b"x" * 100 + bytes(100)


def test_a_disk_that_never_gets_on_is_given_up(file: int) -> None:
    """A read that is cut within the same unit for ever is EIO, soon."""
    os.pwrite(file, bytes(ALIGNMENT), 0)
    disk = FaultyDisk()
    disk.add(DiskFault("preadv", short=True, forever=True))
    with pytest.raises(OSError, match="stay short") as caught:
        read_into(disk, file, [memoryview(bytearray(ALIGNMENT))], ALIGNMENT, unit=ALIGNMENT)
    assert caught.value.errno == errno.EIO
    assert disk.count("preadv") < 100


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


def test_alignment_is_of_address_and_length() -> None:
    """Direct I/O needs both; empty buffers don't matter."""
    page = memoryview(mmap.mmap(-1, 4 * ALIGNMENT))
    assert is_aligned([page, page[ALIGNMENT:], page[:0]])
    assert is_aligned([memoryview(page).toreadonly()])
    assert not is_aligned([page[1 : ALIGNMENT + 1]])
    assert not is_aligned([page[: ALIGNMENT - 1]])


def test_flat_views_share_the_memory() -> None:
    """Buffers of other shapes and formats become bytes without a copy."""
    memory = bytearray(64)
    shaped = memoryview(memory).cast("I", (4, 4))
    flattened = flat([shaped, memoryview(memory)])
    assert [view.nbytes for view in flattened] == [64, 64]
    flattened[0][0] = 7
    assert memory[0] == 7
