"""How long a tier takes from ``open_tier`` to its first sure answer, with many blocks in its snapshot."""

from __future__ import annotations

import asyncio
import mmap
import os
import shutil
import statistics
import time
from pathlib import Path

import numpy as np

from bench.common import Row
from kvstore import LookupResult, Namespace, open_tier
from kvstore.backends.base import RecordGeometry
from kvstore.backends.disk import NvmeBackend, NvmeConfig
from kvstore.backends.disk.layout import PAGE
from kvstore.codec.record import HEADER_BYTES
from kvstore.config import Capacity

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
    # Segments are of whole slots, so that not all of a capacity becomes slots.
    return count * (PAGE + _SLOT_BYTES) * 21 // 20


def _make(path: Path, count: int) -> list[bytes]:
    """Make a directory as a clean close leaves it, without the bytes of its blocks; return some of its keys."""
    random = np.random.default_rng(1)
    keys = random.integers(0, 256, (count, 36), dtype=np.uint8).view("V36").ravel().tolist()
    asyncio.run(_fill(path, keys))
    return [keys[i] for i in random.integers(0, count, _ASKED).tolist()]


async def _fill(path: Path, keys: list[bytes]) -> None:
    backend = NvmeBackend(NvmeConfig(path=str(path), capacity=Capacity(_capacity(len(keys))), reserve=Capacity(0)))
    await backend.open(_NAMESPACE, RecordGeometry(backend.alignment, _SLOT_BYTES))
    assert backend._open is not None
    index = backend._open.session.index
    slots = index.take(len(keys))
    index.add(keys, slots, [HEADER_BYTES + _SLOT_BYTES] * len(keys))
    for slot in slots:
        index.unpin(slot)
    await backend.close()


def _measure(path: Path, count: int, keys: list[bytes], host: str, runs: int) -> Row:
    starts, lookups, misses = [], [], []
    fd = os.memfd_create("bench-start")
    os.ftruncate(fd, 16 * _SLOT_BYTES)
    memory = mmap.mmap(fd, 16 * _SLOT_BYTES)
    config = {"backend": "nvme", "path": str(path), "capacity": _capacity(count), "reserve": 0, "io": host}
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
