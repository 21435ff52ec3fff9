"""The rate of a tier over a medium that takes no time: what its loop and its threads could feed.

    python bench/data_plane.py [--quick] [--runs N] [--sizes 128 2048 8192] [--json FILE]

The backend keeps headers and transfers no payload; all slots hold the same bytes. Everything else is as in an
engine: jobs of 64 blocks, eight at a time, from the caller to a process of its own, in huge pages; each payload is
hashed when stored and verified when loaded. ``loop`` and ``workers`` are CPU seconds of the process's threads per 1e9
bytes. Where ``loop`` and ``workers`` together exceed one core, only more cores show the rate.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import ClassVar

# The repository replaces this directory, whose modules have the names of packages.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.common import Row, arguments, reporting, runs_of
from bench.disk import BLOCKS_PER_JOB, JOBS_AT_ONCE, KIB, OPS, primary_tier
from kvstore import Namespace
from kvstore.backends.base import Backend, RecordGeometry, RecordRead, RecordWrite
from kvstore.cli.bench.systems import Op, TierSystem, cpu_seconds
from kvstore.cli.report import median_row
from kvstore.config import TierConfig
from kvstore.types import BlockInfo, BlockKey, Outcome

COLUMNS = ["op", "block_bytes", "gb_per_s", "loop", "workers", "runs"]


class HeadersConfig(TierConfig, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """No options."""


class HeadersBackend(Backend):
    """Keeps the headers of records and the lengths of their payloads."""

    name: ClassVar[str] = "headers"
    config_type: ClassVar[type[TierConfig]] = HeadersConfig
    alignment: ClassVar[int] = 4096
    authoritative = True

    def __init__(self, config: HeadersConfig) -> None:
        super().__init__(config)
        self._held: dict[BlockKey, tuple[bytes, int]] = {}

    async def open(self, namespace: Namespace, geometry: RecordGeometry) -> None:
        pass

    async def close(self) -> None:
        pass

    async def exists(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        return [key in self._held for key in keys]

    async def put(self, writes: Sequence[RecordWrite]) -> Sequence[Outcome]:
        for write in writes:
            header, payload = write.buffers
            self._held[write.key] = bytes(header), payload.nbytes
        return [Outcome.OK] * len(writes)

    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:
        for read in reads:
            header, payload_bytes = self._held[read.key]
            read.buffers[0][:] = header
            read.filled_bytes = len(header) + payload_bytes
        return [Outcome.OK] * len(reads)

    async def delete(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        return [self._held.pop(key, None) is not None for key in keys]

    async def scan(self) -> AsyncIterator[BlockInfo]:
        for key, (header, payload_bytes) in self._held.items():
            yield BlockInfo(key, len(header) + payload_bytes)


def run(system: TierSystem, op: Op, first: int, jobs: int) -> None:
    """Move ``jobs`` jobs, numbered from ``first``, a fixed number at a time; each has its own slots while it runs."""
    free, running = list(range(JOBS_AT_ONCE)), dict[int, int]()
    waiting = iter(range(first, first + jobs))
    while True:
        while free and (job := next(waiting, None)) is not None:
            running[job] = free.pop()
            blocks = range(job * BLOCKS_PER_JOB, (job + 1) * BLOCKS_PER_JOB)
            slot = running[job] * BLOCKS_PER_JOB
            system.submit(op, job, [b"%032d" % block for block in blocks], range(slot, slot + BLOCKS_PER_JOB))
        if not running:
            return
        system.wait(1.0)
        for done in system.finished():
            free.append(running.pop(done.job_id))
            if set(done.outcomes) != {Outcome.OK}:
                raise RuntimeError(f"a job ended with {set(done.outcomes)} {system.last_error()}")


def main() -> int:
    """Measure and print; returns 0."""
    parser = arguments(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[128, 2048, 8192], help="KiB of a block")
    options = parser.parse_args()
    runs = runs_of(options, 5)
    with reporting(options, COLUMNS) as rows:
        for size in (kib * KIB for kib in options.sizes):
            jobs = max(JOBS_AT_ONCE, (1 << (30 if options.quick else 33)) // (size * BLOCKS_PER_JOB))
            gb = jobs * BLOCKS_PER_JOB * size / 1e9
            config = {"backend": "bench.data_plane:HeadersBackend", "load_timeout": 60, "store_timeout": 60,
                      "store_backlog_bytes": "16GiB", "inflight_bytes": "2GiB"}  # fmt: skip
            with primary_tier(size) as region, contextlib.closing(
                TierSystem(config, region.view(), size, Namespace({"bench": "data_plane"}), name="headers")
            ) as system:  # fmt: skip
                found: dict[Op, list[Row]] = {op: [] for op in OPS}
                for number in range(runs + 1):
                    for op in OPS:
                        before, began = cpu_seconds(), time.perf_counter()
                        run(system, op, number * jobs, jobs)
                        seconds, after = time.perf_counter() - began, cpu_seconds()
                        row = {part: (after[part] - before[part]) / gb for part in ("loop", "workers")}
                        if number:
                            found[op].append(
                                {"bench": "data_plane", "op": op, "block_bytes": size, "gb_per_s": gb / seconds, **row}
                            )
            rows += [median_row(of_op) for of_op in found.values()]
    return 0


if __name__ == "__main__":
    sys.exit(main())
