"""Writers that are killed at random: what they leave is right, swept and accounted."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.seeds import fresh_seed
from tests.torture.blocks import Client, key_of
from tests.torture.plan import run_plan
from tests.torture.writers import usage_of

pytestmark = [pytest.mark.torture, pytest.mark.timeout(1000)]

SLOT = 16384
RECORD = SLOT + 4096
REPOSITORY = Path(__file__).parents[2]


def block_files(root: Path) -> list[Path]:
    """Return the files of blocks below a tier's directory."""
    return [path for path in root.rglob("*.kv") if ".kvstore" not in path.parts]


def test_500_kills_of_3_writers_in_one_directory(tmp_path: Path) -> None:
    """After 500 SIGKILLs: no wrong block was ever read, no litter survives the next start, space is accounted."""
    seed = fresh_seed()
    root = tmp_path / "kv"
    config = {"backend": "file", "path": str(root), "capacity": "4MiB", "reserve": 0, "shared": True}
    report = run_plan(config=config, writers=3, universe=400, kills=500, seed=seed)
    assert report["kills"] == 500, (seed, report)
    assert report["wrong"] == 0, (seed, report)
    assert report["errors"] == 0, (seed, report["stderr"], report)
    assert report["stored"] > 2000, (seed, report)
    assert report["hits"] > 2000, (seed, report)

    client = Client({**config, "shared": False, "load_timeout": 60})
    assert client.tier.wait_recovered(30)
    assert client.tier.drain(30)
    client.tier.get_finished()
    litter = [path for path in root.rglob("*") if ".tmp." in path.name]
    assert litter == [], seed
    accounted, found = client.tier.stats().used_bytes, sum(path.stat().st_size for path in block_files(root))
    assert abs(accounted - found) <= 3 * RECORD, (seed, accounted, found)
    held = [n for n in range(400) if key_of(n) in {bytes.fromhex(path.stem) for path in block_files(root)}]
    loaded = 0
    for start in range(0, len(held), 8):
        numbers = held[start : start + 8]
        result = client.load(numbers)
        assert client.wrong(numbers, result) == [], seed
        loaded += len(result.successful_keys)
    assert loaded == len(held), (seed, "a published block that can't be read")
    client.close()


@pytest.fixture
def small_ext4(tmp_path: Path) -> Any:
    """A mounted ext4 of 64 MiB."""
    image, point = tmp_path / "disk.img", tmp_path / "mnt"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    point.mkdir()
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(point)], check=True)
    try:
        yield point
    finally:
        subprocess.run(["umount", "-l", str(point)], check=True)


@pytest.fixture
def few_inodes(tmp_path: Path) -> Any:
    """A mounted tmpfs of 16 MiB and 100 inodes."""
    point = tmp_path / "mnt"
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m,nr_inodes=100", "kvstore-test", str(point)], check=True)
    try:
        yield point
    finally:
        subprocess.run(["umount", "-l", str(point)], check=True)


def check_bounded(root: Path, capacity: int, **plan: Any) -> dict[str, Any]:
    """Run eight writers for a while; they never pass the capacity by more than a block each."""
    seed = fresh_seed()
    config = {"backend": "file", "path": str(root), "capacity": capacity, "reserve": 0, "shared": True}
    at_least = {"started": 8, "samples": 20, "stored": 51, "hits": 1}
    report = run_plan(config=config, writers=8, seed=seed, at_least=at_least, **plan)
    assert report["wrong"] == 0, (seed, report)
    assert report["errors"] == 0, (seed, report["stderr"], report)
    assert all(report[name] >= count for name, count in at_least.items()), (seed, report)
    bookkeeping = 1 << 20  # Ledger, locks, snapshots: no blocks.
    assert report["peak_bytes"] <= capacity + 8 * RECORD + bookkeeping, (seed, report)
    return report


@pytest.mark.root
def test_capacity_holds_under_8_writers_on_a_small_ext4(small_ext4: Path) -> None:
    """On a disk of 64 MiB, eight processes with a capacity of 16 MiB never use more than that and a block each."""
    check_bounded(small_ext4 / "kv", 16 << 20, universe=4000, seconds=12)
    assert usage_of(small_ext4) < 40 << 20


@pytest.mark.root
def test_a_capacity_beyond_the_disk_fills_no_disk(small_ext4: Path) -> None:
    """With a capacity larger than the disk, the reserve keeps its space free and stores go on by evicting."""
    seed = fresh_seed()
    config = {
        "backend": "file",
        "path": str(small_ext4 / "kv"),
        "capacity": "1GiB",
        "reserve": "16MiB",
        "shared": True,
    }
    report = run_plan(config=config, writers=8, universe=4000, seconds=12, seed=seed, at_least={"stored": 51})
    assert report["wrong"] == 0, (seed, report)
    assert report["errors"] == 0, (seed, report["stderr"], report)
    assert report["stored"] > 50, (seed, report)
    stat = os.statvfs(small_ext4)
    assert stat.f_bavail * stat.f_frsize >= (16 << 20) - 9 * RECORD, seed


@pytest.mark.root
def test_capacity_holds_under_8_writers_with_few_inodes(few_inodes: Path) -> None:
    """Where inodes run out long before bytes, stores go on by evicting, and nothing fails but single stores."""
    check_bounded(few_inodes / "kv", 12 << 20, universe=2000, seconds=12)
