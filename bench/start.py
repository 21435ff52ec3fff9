"""How long a tier takes from ``open_tier`` to its first sure answer, with many blocks in its snapshot."""

from __future__ import annotations

import mmap
import os
import shutil
import statistics
import time
from pathlib import Path

import numpy as np

from bench.common import Row
from kvstore import LookupResult, Namespace, open_tier
from kvstore.backends.nvme.layout import DATA_OFFSET, slot_bytes_for
from kvstore.backends.nvme.slab import Slab
from kvstore.backends.nvme.snapshot import Snapshot, write_snapshot
from kvstore.backends.nvme.table import row_type
from kvstore.config import Capacity
from kvstore.diskio import OsDisk

__all__ = ["start_rows"]

_SLOT_BYTES = 4096
_NAMESPACE = Namespace({"bench": "start"})
_ASKED = 20_000


def start_rows(directory: Path, counts: list[int], runs: int) -> list[Row]:
    """Return a row per number of blocks and host."""
    rows = []
    for count in counts:
        path = directory / "start"
        keys = _make(path, count)
        for host in ("thread", "process"):
            rows.append(_measure(path, count, keys, host, runs))
        shutil.rmtree(path)
    return rows


def _capacity(count: int) -> int:
    return DATA_OFFSET + count * slot_bytes_for(_SLOT_BYTES)


def _make(path: Path, count: int) -> list[bytes]:
    """Make a slab as a clean close leaves it; return some of its keys."""
    disk = OsDisk()
    slab = Slab(disk, str(path))
    slab.open(1.0)
    slab.enter(slot_bytes_for(_SLOT_BYTES), Capacity(_capacity(count)), 1, "refuse")
    random = np.random.default_rng(1)
    keys = random.integers(0, 256, (count, 36), dtype=np.uint8).view("V36").ravel()
    rows = np.zeros(count, row_type(36))
    rows["key"], rows["size"], rows["key_length"], rows["used"] = keys, _SLOT_BYTES, 36, np.arange(count)
    block = slab.superblock
    slots = np.arange(count, dtype=np.uint32)
    write_snapshot(disk, slab.dir_fd, Snapshot(block.slab_id, block.epoch, [_NAMESPACE.digest], slots, rows))
    slab.write_superblock(clean=True)
    slab.close()
    return [bytes(key) for key in keys[random.integers(0, count, _ASKED)].tolist()]


def _measure(path: Path, count: int, keys: list[bytes], host: str, runs: int) -> Row:
    starts, lookups, misses = [], [], []
    fd = os.memfd_create("bench-start")
    os.ftruncate(fd, 16 * _SLOT_BYTES)
    memory = mmap.mmap(fd, 16 * _SLOT_BYTES)
    config = {"backend": "nvme", "path": str(path), "capacity": _capacity(count), "io": host}
    absent = [key[::-1] for key in keys]
    for _ in range(runs):
        started = time.perf_counter()
        tier = open_tier(config, primary=memoryview(memory), slot_bytes=_SLOT_BYTES, namespace=_NAMESPACE)
        assert tier.wait_recovered(60)
        assert tier.lookup(keys[0]) is LookupResult.HIT
        assert tier.lookup(absent[0]) is LookupResult.MISS
        starts.append(time.perf_counter() - started)
        lookups.append(_per_key(tier.lookup, keys))
        misses.append(_per_key(tier.lookup, absent))
        tier.close()
    return {
        "bench": "nvme-start", "system": "kvstore-nvme", "host": host, "op": "start", "blocks": count,
        "start_s": statistics.median(starts), "lookup_us": statistics.median(lookups),
        "miss_us": statistics.median(misses), "runs": runs,
    }  # fmt: skip


def _per_key(lookup: object, keys: list[bytes]) -> float:
    started = time.perf_counter()
    for key in keys:
        lookup(key)  # type: ignore[operator]
    return (time.perf_counter() - started) / len(keys) * 1e6
