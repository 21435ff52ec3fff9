"""The region: shared memory that other processes can map, and that leaves no files behind."""

from __future__ import annotations

import errno
import gc
import logging
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore.primary import PAGE_BYTES, Region, rounded_up

ATTACH = """
import sys
from kvstore.primary import Region
where = int(sys.argv[1]) if sys.argv[1].isdigit() else sys.argv[1]
with Region.attach(where, int(sys.argv[2])) as region:
    rows = region.rows()
    print(region.slots, rows[1, 0], flush=True)
    rows[2] = 7
    del rows
"""

CREATE_AND_WAIT = """
import sys
from kvstore.primary import Region
region = Region.create(4, 4096, populate=True)
print(region.path, flush=True)
sys.stdin.read()
"""


def shared_files() -> set[str]:
    """Names in /dev/shm that could be kvstore's; other tests may run beside this one."""
    return {name for name in os.listdir("/dev/shm") if "kvstore" in name and "kvstore-test" not in name}


def run_python(code: str, *arguments: str, pass_fds: tuple[int, ...] = ()) -> str:
    """Run a program in another process and return its output."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        pass_fds=pass_fds,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("populate", [False, True])
def test_rows_are_aligned_zeros(populate: bool) -> None:
    """A new region is all zeros, its rows begin at page boundaries, and views and rows show the same bytes."""
    with Region.create(3, 2 * PAGE_BYTES, populate=populate) as region:
        assert region.address % PAGE_BYTES == 0
        rows, view = region.rows(), region.view()
        assert rows.shape == (3, 2 * PAGE_BYTES)
        assert not rows.any()
        view[2 * PAGE_BYTES] = 5
        assert rows[1, 0] == 5
        assert view.nbytes == region.size_bytes
        del rows


@pytest.mark.parametrize("by", ["path", "fd"])
def test_another_process_sees_the_same_bytes(by: str) -> None:
    """A process that attaches by path or by inherited descriptor reads and writes the same memory."""
    with Region.create(4, PAGE_BYTES) as region:
        rows = region.rows()
        rows[1] = 3
        if by == "path":
            out = run_python(ATTACH, region.path, str(PAGE_BYTES))
        else:
            out = run_python(ATTACH, str(region.fd), str(PAGE_BYTES), pass_fds=(region.fd,))
        assert out.split() == ["4", "3"]
        assert (rows[2] == 7).all()
        del rows


def test_foreign_shared_file_can_be_attached(tmp_path: Path) -> None:
    """A named shared file, such as vLLM's, is mapped like a region, and still belongs to its owner."""
    file = tmp_path / "region.mmap"
    file.write_bytes(bytes(4 * PAGE_BYTES))
    with Region.attach(file, 2 * PAGE_BYTES) as region:
        assert region.slots == 2
        region.view()[-1] = 9
    assert file.read_bytes()[-1] == 9
    with Region.attach(file, PAGE_BYTES, slots=3) as region:
        assert region.size_bytes == 3 * PAGE_BYTES


def test_nothing_is_left_behind_by_a_kill() -> None:
    """A process killed with a region open leaves no file, and its memory can't be attached any more."""
    before = shared_files()
    with subprocess.Popen(
        [sys.executable, "-c", CREATE_AND_WAIT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as owner:
        assert owner.stdout is not None
        path = owner.stdout.readline().strip()
        Region.attach(path, 4096).close()
        assert shared_files() <= before
        owner.send_signal(signal.SIGKILL)
        owner.wait(30)
    assert shared_files() <= before
    with pytest.raises(ConfigError, match="Its owner must be alive"):
        Region.attach(path, 4096)


def test_memory_outlives_its_maker_while_attached() -> None:
    """An attached process keeps the bytes after the creator has closed."""
    maker = Region.create(2, PAGE_BYTES)
    other = Region.attach(maker.path, PAGE_BYTES)
    maker.view()[0] = 4
    maker.close()
    assert other.view()[0] == 4
    other.close()


def test_length_of_a_region_is_sealed() -> None:
    """The length of a region is sealed, because truncation would kill all other users with a bus error."""
    with Region.create(2, PAGE_BYTES) as region:
        for size in (PAGE_BYTES, 3 * PAGE_BYTES):
            with pytest.raises(PermissionError):
                os.ftruncate(region.fd, size)


def test_close_releases_views_first_and_is_idempotent() -> None:
    """Close releases all views, a second close does nothing, and later use is an error."""
    region = Region.create(2, PAGE_BYTES)
    fd, views = region.fd, [region.view() for _ in range(3)]
    views[1].release()
    region.close()
    region.close()
    assert region.closed
    for view in views:
        with pytest.raises(ValueError, match="released"):
            view[0]
    for use in (region.view, region.rows, lambda: region.address):
        with pytest.raises(ValueError, match="after close"):
            use()
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(fd)
    assert region.path == ""


def test_close_with_users_left_warns_and_keeps_their_memory(caplog: pytest.LogCaptureFixture) -> None:
    """An array in use stays valid, with one warning, and its memory is freed with it."""
    region = Region.create(2, PAGE_BYTES)
    rows = region.rows()
    rows[1] = 8
    part = region.view()[:10]
    with caplog.at_level(logging.WARNING):
        region.close()
    assert "are in use; they keep its memory" in caplog.text
    assert (rows[1] == 8).all()
    assert part[0] == 0
    part.release()
    del rows
    gc.collect()


def test_a_closed_region_keeps_no_memory() -> None:
    """Memory in use at the close is freed with its last user, although the region object still exists."""
    region = Region.create(2, PAGE_BYTES, name="kvstore-test-kept")
    rows = np.frombuffer(region.view(), np.uint8)
    region.close()
    assert "kvstore-test-kept" in Path("/proc/self/maps").read_text()
    del rows
    gc.collect()
    assert "kvstore-test-kept" not in Path("/proc/self/maps").read_text()
    assert region.closed


def test_memory_that_can_not_be_allocated_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """If memory runs out at start, none of it stays mapped, even while the error is kept."""

    def run_out(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", run_out)
    with pytest.raises(ConfigError, match="Make it smaller") as error:
        Region.create(2, PAGE_BYTES, name="kvstore-test-full", populate=True)
    assert "kvstore-test-full" not in Path("/proc/self/maps").read_text(), error.value


def test_views_given_back_are_forgotten() -> None:
    """A region keeps no references to released views."""
    with Region.create(1, PAGE_BYTES) as region:
        for _ in range(100):
            region.view().release()
        assert len(region._views) <= 1


def test_wrapped_memory_is_used_as_it_is() -> None:
    """Foreign memory of any shape is used without a copy and released by close."""
    mapping = mmap.mmap(-1, 4 * PAGE_BYTES)
    array = np.frombuffer(mapping, np.float32).reshape(4, -1)
    region = Region.wrap(memoryview(array), PAGE_BYTES)
    assert (region.slots, region.fd, region.path) == (4, -1, "")
    region.rows()[3] = 1
    assert array.view(np.uint8)[3, 0] == 1
    assert region.address == array.ctypes.data
    del array
    region.close()
    mapping.close()


def test_foreign_memory_may_have_slots_of_any_length(tmp_path: Path) -> None:
    """Only memory created here has page-sized slots: a file may have slots of an odd length."""
    file = tmp_path / "odd"
    file.write_bytes(b"abc" * 5)
    with Region.attach(file, 3) as region:
        assert region.slots == 5
        assert bytes(region.rows()[4]) == b"abc"


def test_shapes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Sizes are checked before anything is created, and the error states a valid size."""
    file = tmp_path / "short"
    file.write_bytes(bytes(PAGE_BYTES + 1))
    available = 2**60
    for make, match in (
        (lambda: Region.create(1, PAGE_BYTES + 1), str(2 * PAGE_BYTES)),
        (lambda: Region.create(0, PAGE_BYTES), "at least 1"),
        (lambda: Region.create(1, 0), "at least 1"),
        (lambda: Region.create(1, -PAGE_BYTES), "at least 1"),
        (lambda: Region.create(available // PAGE_BYTES, PAGE_BYTES), "available"),
        (lambda: Region.attach(file, PAGE_BYTES), "slot_bytes that it was made with"),
        (lambda: Region.attach(file, PAGE_BYTES, slots=2), "slot_bytes that it was made with"),
        (lambda: Region.attach(tmp_path / "none", PAGE_BYTES), "No region"),
        (lambda: Region.attach(file, 0), "at least 1"),
        (lambda: Region.wrap(b"read-only", 9), "writable"),
        (lambda: Region.wrap(memoryview(bytearray(10))[::2], 5), "contiguous"),
        (lambda: Region.wrap(bytearray(10), 3), "does not divide"),
        (lambda: Region.wrap(bytearray(), 3), "does not divide"),
        (lambda: Region.wrap(bytearray(10), 0), "does not divide"),
        (lambda: Region.wrap(bytearray(10), -5), "does not divide"),
    ):
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(ConfigError, match=match):
            make()
        # Garbage of earlier tests may be collected meanwhile.
        assert len(os.listdir("/proc/self/fd")) <= before


def test_rounding_up() -> None:
    """Rounding gives the next multiple, and keeps a multiple."""
    assert [rounded_up(n, 8) for n in (0, 1, 8, 9)] == [0, 8, 8, 16]
