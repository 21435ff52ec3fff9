"""Tiers side by side over slots of one region: a loop that keeps jobs under way, as a scheduler does."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvstore import Namespace, primary
from kvstore.cli.measuring.baselines import VllmFsSystem
from kvstore.cli.measuring.systems import Op, System, TierSystem

__all__ = ["JobTimes", "Region", "key_of", "open_disk_system", "run_jobs"]


def key_of(number: int) -> bytes:
    """Return a key as vLLM makes them: a hash of 32 bytes and the group's number in 4."""
    return hashlib.sha256(b"%d" % number).digest() + b"\0\0\0\0"


class Region:
    """A primary tier (in huge pages where there are any), with different bytes in every slot."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.slots, self.slot_bytes = slots, slot_bytes
        self._region = primary.Region.create(slots, slot_bytes, name="kvstore-bench", populate=True)
        self.view = self._region.view()
        self.array = self._region.rows().view(np.uint64)
        tile = np.random.default_rng(1).integers(0, 1 << 63, slot_bytes // 8, dtype=np.uint64)
        for slot in range(slots):
            self.array[slot] = tile + np.uint64(slot)

    def checksum(self, slots: Sequence[int]) -> list[int]:
        """Return a number per slot that any changed byte changes."""
        return [int(np.bitwise_xor.reduce(self.array[slot] * np.uint64(0x9E3779B97F4A7C15))) for slot in slots]


def open_disk_system(name: str, directory: Path, region: Region, capacity_bytes: int) -> System:
    """Open ``vllm-fs``, ``kvstore-file`` or ``kvstore-nvme`` over a directory; ``-process`` after it: of the I/O."""
    if name == "vllm-fs":
        return VllmFsSystem(directory, region.view, region.slot_bytes)
    backend, _, io = name.removeprefix("kvstore-").partition("-")
    config: dict[str, Any] = {
        "backend": backend, "path": str(directory), "capacity": capacity_bytes, "reserve": 0, "io": io or "thread",
        "load_timeout": 60, "store_timeout": 60, "store_backlog_bytes": "16GiB", "inflight_bytes": "2GiB",
    }  # fmt: skip
    return TierSystem(config, region.view, region.slot_bytes, Namespace({"bench": "tiers"}), name=name)


class JobTimes(NamedTuple):
    """Times of jobs.

    Attributes:
        latencies: Seconds of each, in the order in which they ended.
        seconds: From the start of the first to the end of the last.
        last: The number of the last job in each lane, whose blocks lie in that lane's slots.
    """

    latencies: list[float]
    seconds: float
    last: list[int]


def run_jobs(
    system: System, op: Op, jobs: Sequence[Sequence[bytes]], lanes: int, pause: Callable[[], object]
) -> JobTimes:
    """Run jobs of equal length, so many at once, each in the slots of a lane.

    Args:
        system: The system.
        op: What the jobs do.
        jobs: The keys of each.
        lanes: Jobs under way at once.
        pause: Called between two looks at the system.

    Raises:
        RuntimeError: A block was not stored or loaded.
    """
    size = len(jobs[0])
    free = list(range(lanes))
    running: dict[int, tuple[int, float]] = {}
    latencies: list[float] = []
    last = [0] * lanes
    begun = 0
    started = time.perf_counter()
    while len(latencies) < len(jobs):
        while begun < len(jobs) and free:
            lane = free.pop()
            running[begun] = (lane, time.perf_counter())
            system.submit(op, begun, jobs[begun], range(lane * size, (lane + 1) * size))
            begun += 1
        pause()
        for job, outcomes in system.finished():
            if not all(outcome.ok for outcome in outcomes):
                raise RuntimeError(f"{system.name}: a {op} failed: {set(outcomes)} {system.last_error()}")
            lane, at = running.pop(job)
            latencies.append(time.perf_counter() - at)
            free.append(lane)
            last[lane] = job
    return JobTimes(latencies, time.perf_counter() - started, last)
