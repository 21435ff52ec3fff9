"""How long a tier takes from ``open_tier`` to its first answers, with many blocks, and what memory they take.

    python bench/start.py [--quick] [--json FILE] [--directory DIR] [--blocks N ...]

The directory is that of an engine that was closed. Its segments are sparse files: such a start does not read the
headers of blocks. Each start is that of a new process; the files that it reads are in the page cache. ``open_s`` is
``open_tier``, which waits for a moment for recovery; ``answer_s`` is when lookups of a stored and an absent block were
answered (``answer_cpu_s``: CPU seconds of this process until then); ``known_s`` when the scheduler side knew all, so
that each lookup is answered in its step. Memory is what the scheduler's process, and the I/O process, have more of than
at a start with 1,000 blocks.
"""

from __future__ import annotations

import asyncio
import errno
import json
import mmap
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

# In place of this directory, where modules have the names of packages: the repository.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.common import Row, arguments, print_table, write_json
from kvstore import AsyncTier, LookupResult, Namespace, open_tier
from kvstore.backends.base import RecordGeometry
from kvstore.backends.disk import DiskBackend, DiskConfig
from kvstore.backends.disk.layout import PAGE, Kind, digest_of
from kvstore.backends.disk.layout import Row as Record
from kvstore.codec.record import HEADER_BYTES
from kvstore.config import Capacity
from kvstore.diskio import OsDisk
from kvstore.runtime.process import ProcessChannel

__all__ = ["start_rows"]

_SLOT_BYTES = 4096
_NAMESPACE = Namespace({"bench": "start"})
_ASKED = 20_000
_FRAME_BLOCKS = 16384
_COLUMNS = [
    "system", "host", "blocks", "open_s", "answer_s", "known_s", "answer_cpu_s", "lookup_us", "miss_us",
    "scheduler_bytes_per_block", "io_bytes_per_block", "runs",
]  # fmt: skip
_BASE = 1000


class _SparseDisk(OsDisk):
    """Makes segments without taking room for them."""

    def syscall(self, op: str, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if op == "fallocate":
            raise OSError(errno.EOPNOTSUPP, "sparse")
        return super().syscall(op, function, *args, **kwargs)


def start_rows(directory: Path, counts: list[int], runs: int) -> list[Row]:
    """Return a row per number of blocks and host."""
    rows: list[Row] = []
    base: dict[str, Row] = {}
    for count in [_BASE, *counts]:
        path = directory / "start"
        asyncio.run(_fill(path, count))
        for host in ("thread", "process"):
            found = [_run_apart(path, count, host) for _ in range(runs if count != _BASE else 1)]
            row = {name: statistics.median(each[name] for each in found) for name in found[0]}
            if count == _BASE:
                base[host] = row
                continue
            for side in ("scheduler", "io"):
                row[f"{side}_bytes_per_block"] = (row.pop(f"{side}_bytes") - base[host][f"{side}_bytes"]) / count
            system: Row = {"bench": "start", "system": "kvstore-file", "host": host, "op": "start", "blocks": count}
            rows.append({**system, **row, "runs": runs})
        shutil.rmtree(path)
    return rows


def _capacity(count: int) -> int:
    # Segments are of whole slots, so that not all of a capacity becomes slots.
    return max(count, 100_000) * (PAGE + _SLOT_BYTES) * 21 // 20


def _keys(count: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).integers(0, 256, (count, 36), dtype=np.uint8)


async def _fill(path: Path, count: int) -> None:
    """Make a directory as a clean close leaves it, without the bytes of its blocks."""
    config = DiskConfig(path=str(path), capacity=Capacity(_capacity(count)), reserve=Capacity(0))
    backend = DiskBackend(config, disk=_SparseDisk())
    await backend.open(_NAMESPACE, RecordGeometry(backend.alignment, _SLOT_BYTES))
    assert backend._open is not None
    session = backend._open.session
    keys: list[bytes] = _keys(count).view("V36").ravel().tolist()
    size = HEADER_BYTES + _SLOT_BYTES
    done = 0
    while done < count:
        slots = await session.space.take(min(_FRAME_BLOCKS, count - done))
        assert slots
        rows: list[Record] = [
            (Kind.ADD, slot, size, digest_of(key), key)
            for slot, key in zip(slots, keys[done : done + len(slots)], strict=True)
        ]
        await session.journal.append(rows, partial(session.index.add, rows))
        session.index.unpin(slots)
        done += len(slots)
    session.recovered.set()
    async with asyncio.timeout(600):
        await session._write_snapshot()
    await backend.close()


def _run_apart(path: Path, count: int, host: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, __file__, "--measure", json.dumps([str(path), count, host])],
        check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _measure(path: str, count: int, host: str) -> dict[str, float]:
    keys: list[bytes] = _keys(count)[-_ASKED:].copy().view("V36").ravel().tolist()
    absent = [key[::-1] for key in keys]
    fd = os.memfd_create("bench-start")
    os.ftruncate(fd, 16 * _SLOT_BYTES)
    memory = mmap.mmap(fd, 16 * _SLOT_BYTES)
    config = {"backend": "file", "path": path, "capacity": _capacity(count), "reserve": 0, "io": host}
    started, cpu_started = time.perf_counter(), time.process_time()
    tier = open_tier(config, primary=memoryview(memory), slot_bytes=_SLOT_BYTES, namespace=_NAMESPACE)
    opened = time.perf_counter()
    for key, expected in ((keys[0], LookupResult.HIT), (absent[0], LookupResult.MISS)):
        while (found := tier.lookup(key)) is LookupResult.RETRY:
            tier.flush()
            tier._channel.wait(0.01)
            tier.get_finished()
        assert found is expected
    answered, cpu_answered = time.perf_counter(), time.process_time()
    assert tier.wait_recovered(600)
    known = time.perf_counter()
    row = {
        "open_s": opened - started,
        "answer_s": answered - started,
        "known_s": known - started,
        "answer_cpu_s": cpu_answered - cpu_started,
        "lookup_us": _per_key(tier, keys),
        "miss_us": _per_key(tier, absent),
        "scheduler_bytes": _rss("self"),
        "io_bytes": _rss(tier._channel.pid) if isinstance(tier._channel, ProcessChannel) else 0,
    }
    tier.close()
    return row


def _rss(pid: object) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) * 1024


def _per_key(tier: AsyncTier, keys: list[bytes]) -> float:
    started = time.perf_counter()
    for key in keys:
        tier.lookup(key)
    return (time.perf_counter() - started) / len(keys) * 1e6


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--directory", type=Path, default=Path("bench-start.tmp"), help="on the drive to measure")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--blocks", type=int, nargs="*", default=[1_000_000])
    parser.add_argument("--measure", help="one start, of a directory that is there")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(_measure(*json.loads(options.measure))))
        return
    if options.quick:
        options.blocks, options.runs = [100_000], 1
    options.directory.mkdir(parents=True, exist_ok=True)
    rows = start_rows(options.directory, options.blocks, options.runs)
    options.directory.rmdir()
    print_table(rows, _COLUMNS)
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
