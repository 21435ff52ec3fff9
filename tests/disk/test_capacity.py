"""Eight engines on filesystems that are too small: capacity and reserve hold, and stores continue by evicting."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.seeds import fresh_seed
from tests.disk.mounts import ext4, mounted
from tests.torture.plan import run_plan

pytestmark = [pytest.mark.torture, pytest.mark.root, pytest.mark.timeout(120)]

SECONDS = 6
BOOKKEEPING = 1 << 20
"""Tables, notes and files of eight engines, which do not count against the capacity."""


@pytest.fixture
def small_ext4(tmp_path: Path) -> Iterator[Path]:
    """A mounted ext4 of 64 MiB."""
    with ext4(tmp_path) as point:
        yield point


@pytest.fixture
def few_inodes(tmp_path: Path) -> Iterator[Path]:
    """A mounted tmpfs of 32 MiB with enough inodes for eight engines; :func:`take_inodes` takes the others."""
    with mounted(tmp_path / "mnt", "-t", "tmpfs", "-o", "size=32m,nr_inodes=200", "kvstore-test") as point:
        yield point


def take_inodes(point: Path) -> None:
    """Use up all free inodes of a filesystem, as another user's files would."""
    with contextlib.suppress(OSError):
        for number in itertools.count():
            (point / f"somebody-elses-{number}").touch()
    assert os.statvfs(point).f_ffree == 0


def run_eight(root: Path, capacity: int | str, **options: Any) -> dict[str, Any]:
    """Run eight writers for a while; they keep storing, and none reads a wrong byte."""
    seed = fresh_seed()
    config = {"backend": "file", "path": str(root), "capacity": capacity, "reserve": 0, **options}
    at_least = {"started": 8, "samples": 20, "stored": 20, "hits": 1}
    report = run_plan(config=config, writers=8, universe=2000, seconds=SECONDS, seed=seed, at_least=at_least)
    assert report["wrong"] == 0, (seed, report)
    assert report["errors"] == 0, (seed, report["stderr"], report)
    assert all(report[name] >= count for name, count in at_least.items()), (seed, report)
    return report


def test_capacity_holds_under_8_writers_on_a_small_ext4(small_ext4: Path) -> None:
    """On a 64 MiB disk, the segments of eight processes with a capacity of 16 MiB never exceed it."""
    report = run_eight(small_ext4 / "kv", 16 << 20)
    assert 0 < report["peak_bytes"] <= 16 << 20, report


def test_a_capacity_beyond_the_disk_fills_no_disk(small_ext4: Path) -> None:
    """With a capacity larger than the disk, the reserve stays free and stores continue by evicting."""
    run_eight(small_ext4 / "kv", "128MiB", reserve="16MiB")
    filesystem = os.statvfs(small_ext4)
    assert filesystem.f_bavail * filesystem.f_frsize >= (16 << 20) - BOOKKEEPING


def test_capacity_holds_under_8_writers_without_inodes(few_inodes: Path) -> None:
    """If inodes have run out long before bytes, engines start, and stores continue by evicting."""
    run_eight(few_inodes / "kv", 24 << 20)
    # Not during the first run: how many engines would start before the last inode is gone is a matter of timing.
    take_inodes(few_inodes)
    report = run_eight(few_inodes / "kv", 24 << 20)
    assert 0 < report["peak_bytes"] <= 24 << 20, report
