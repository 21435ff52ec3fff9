"""Allocation of shared memory at start: huge pages, small ones where the kernel refuses, and shortages."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.primary import PAGE_BYTES, Region
from kvstore.primary.memory import Room, rooms, shortage
from kvstore.primary.pages import HUGE_BYTES, populate

_V1 = Path("/sys/fs/cgroup/memory")

_REFUSED = f"""
import ctypes, os
from kvstore.primary import Region
assert ctypes.CDLL(None).prctl(41, 1, 0, 0, 0) == 0  # PR_SET_THP_DISABLE
with Region.create(5, {HUGE_BYTES // 2}, populate=True) as region:
    print(region.huge_bytes, os.fstat(region.fd).st_blocks * 512, flush=True)
"""
_FULL = """
import os, subprocess, sys
from kvstore.errors import ConfigError
from kvstore.primary.pages import populate
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", sys.argv[1]], check=True)
fd = os.open(sys.argv[1] + "/region", os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, 16 << 20)
try:
    populate(fd, 16 << 20)
except ConfigError as error:
    print(error)
"""
_LIMITED = """
import mmap, os, sys
open(sys.argv[1] + "/below/cgroup.procs", "w").write(str(os.getpid()))
used = mmap.mmap(-1, 96 << 20)
for at in range(0, len(used), 4096):
    used[at] = 1
from kvstore.errors import ConfigError
from kvstore.primary import Region
try:
    Region.create(96, 1 << 20, populate=True)
except ConfigError as error:
    print(error)
"""


def _allocated(region: Region) -> int:
    return os.fstat(region.fd).st_blocks * 512


def test_populated_memory_lies_in_huge_pages() -> None:
    """All of a region is allocated in pages of 2 MiB, so its end takes a whole one, too."""
    with Region.create(5, HUGE_BYTES // 2, populate=True) as region:
        if not region.huge_bytes:
            pytest.skip("this kernel makes no huge pages on request")
        assert (region.huge_bytes, _allocated(region)) == (region.size_bytes, 3 * HUGE_BYTES)
        assert not region.rows().any()


def test_huge_pages_can_be_turned_off() -> None:
    """Without huge pages, exactly the region's length is allocated."""
    with Region.create(5, HUGE_BYTES // 2, populate=True, huge_pages=False) as region:
        assert (region.huge_bytes, _allocated(region)) == (0, region.size_bytes)


def test_memory_in_use_is_allocated_without_loss() -> None:
    """A second allocation keeps the bytes that a process has written, and the huge pages of the first."""
    with Region.create(4, HUGE_BYTES) as region:
        for slot in range(4):
            region.rows()[slot, slot * PAGE_BYTES :] = slot + 1
        before = bytes(region.view())
        huge_bytes = populate(region.fd, region.size_bytes)
        assert populate(region.fd, region.size_bytes) == huge_bytes
        assert bytes(region.view()) == before


def test_a_refusal_leaves_small_pages() -> None:
    """If the kernel makes no huge pages, the region is allocated in small ones, with one warning."""
    ended = subprocess.run([sys.executable, "-c", _REFUSED], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.split() == ["0", str(5 * HUGE_BYTES // 2)]
    assert ended.stderr.count("in small pages") == 1


def test_slow_huge_pages_end_early(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """If huge pages take longer than a start may, the rest is allocated in small ones, with the reason in the log."""
    monkeypatch.setattr("kvstore.primary.pages._HUGE_SECONDS_MAX", -9.0)
    with Region.create(200, HUGE_BYTES, populate=True) as region:
        if "fragmented" not in caplog.text:
            pytest.skip("this kernel makes no huge pages on request")
        assert region.huge_bytes < region.size_bytes == _allocated(region)


@pytest.mark.parametrize("looks", [1, 2])
def test_a_shortage_during_the_allocation_ends_it(monkeypatch: pytest.MonkeyPatch, looks: int) -> None:
    """Memory that another program takes is noticed in time, and the error has the size of the tier."""
    left_bytes = iter([1 << 30] * looks + [1 << 20] * 9)
    monkeypatch.setattr("kvstore.primary.memory.rooms", lambda *_: [Room(next(left_bytes), "little is left", "")])
    with pytest.raises(ConfigError, match=r"tier of 80.0 MiB does not fit: little is left. Make it smaller"):
        Region.create(40, HUGE_BYTES, populate=True)


@pytest.mark.root
def test_a_full_tmpfs_is_an_error(tmp_path: Path) -> None:
    """A file longer than the room of its tmpfs is a ConfigError with the remedy, and never SIGBUS."""
    command = ["unshare", "-m", sys.executable, "-c", _FULL, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "does not fit" in ended.stdout and "--shm-size" in ended.stdout


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """Make a cgroup with a limit of 160 MiB, and one below it without a limit."""
    if not (_V1 / "cgroup.procs").exists():
        pytest.skip("no cgroups of version 1")
    top = _V1 / f"kvstore-test-{os.getpid()}"
    (top / "below").mkdir(parents=True)
    (top / "memory.limit_in_bytes").write_text(str(160 << 20))
    yield top
    for group in (top / "below", top):
        for _ in range(100):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.05)  # The kernel still releases the last process.


@pytest.mark.root
def test_a_limit_of_an_ancestor_is_an_error(cgroup: Path) -> None:
    """What the limit of an ancestor of the process's cgroup leaves is checked, before the kernel kills the process."""
    command = [sys.executable, "-c", _LIMITED, str(cgroup)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "does not fit" in ended.stdout and str(cgroup / "memory.limit_in_bytes") in ended.stdout


def _proc(tmp_path: Path, cgroup: str, mounts: str) -> Path:
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text("MemTotal: 99999999 kB\nMemAvailable: 8388608 kB\n")
    (tmp_path / "self" / "cgroup").write_text(cgroup)
    (tmp_path / "self" / "mountinfo").write_text(mounts)
    return tmp_path


def _limited(directory: Path, limit: str, use: int, stat: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.current").write_text(f"{use}\n")
    (directory / "memory.stat").write_text(stat)


@pytest.mark.parametrize("mounted", ["/", "/kubepods/pod", "/elsewhere"])
def test_limits_of_a_container_count_less_their_use(tmp_path: Path, mounted: str) -> None:
    """With version 2, each limit counts less the use that can't be freed, wherever the container has its cgroup."""
    mount = tmp_path / "cgroup v2"
    own = {"/": mount / "kubepods/pod/engine", "/kubepods/pod": mount / "engine", "/elsewhere": mount}[mounted]
    _limited(own, "max", 3 << 30, "anon 5\n")
    if own != mount:
        _limited(own.parent, str(6 << 30), 5 << 30, f"inactive_file {1 << 30}\nactive_file {1 << 29}\nshmem 77\n")
    else:
        _limited(own, str(6 << 30), 5 << 30, f"inactive_file {1 << 30}\nactive_file {1 << 29}\nshmem 77\n")
    point = str(mount).replace(" ", "\\040")
    line = f"30 23 0:26 {mounted} {point} rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"
    proc = _proc(tmp_path, "0::/kubepods/pod/engine\n", line)
    assert [room.left_bytes for room in rooms(proc=proc)] == [8 << 30, (5 << 29)]
    assert shortage(5 << 29, proc=proc) is None
    text = shortage((5 << 29) + 1, proc=proc)
    assert text is not None and "limit of 6.0 GiB" in text and text.endswith("Raise the limit, or make it smaller.")


def test_the_machines_memory_is_a_limit(tmp_path: Path) -> None:
    """Without a container, the memory available counts, and so does a file system in memory."""
    proc = _proc(tmp_path, "0::/\n", "")
    assert shortage(8 << 30, proc=proc) is None
    text = shortage((8 << 30) + 1, proc=proc)
    assert text is not None and text.endswith("only 8.0 GiB of memory are available. Make it smaller.")
    assert shortage(1 << 60, Path("/dev/shm"), proc) is not None
