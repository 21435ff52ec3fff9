"""What a tier's I/O costs a thread that runs a model: many short operations, each of which releases the GIL.

With one GPU `vllm serve` runs the model in the scheduler's process. Here steps of 500 numpy operations, a microsecond
each, replace it, while a disk tier stores and loads, in the memory that it has in an engine. ``step_mean`` and
``step_p99`` are durations over those of steps alone; ``lost_s_per_gb`` is the time that the steps took longer, for 1e9
bytes.

    python bench/engine_thread.py [--quick] [--runs N] [--sizes 128 2048] [--systems …] [--json FILE] [--directory DIR]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

# The repository replaces this directory, whose modules have the names of packages.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np

from bench.common import Row, arguments, percentile, reporting, runs_of, scratch
from bench.disk import BLOCKS_PER_JOB, JOBS_AT_ONCE, KIB, OPS, in_huge_pages, opened, primary_tier
from kvstore.cli.bench.systems import Op, System
from kvstore.primary import Region
from kvstore.types import Outcome

SYSTEMS = ["kvstore-file", "kvstore-file-thread", "vllm-fs"]
COLUMNS = ["system", "op", "block_bytes", "gb_per_s", "step_mean", "step_p99", "lost_s_per_gb", "runs"]
OPERATIONS = 500
RUN_BYTES = 512 << 20


def steps_until(is_over: Callable[[], bool]) -> list[float]:
    """Make steps; return their durations."""
    values, other, durations = np.zeros(4096), np.ones(4096), []
    while not is_over():
        started = time.perf_counter()
        for _ in range(OPERATIONS):
            np.add(values, other, out=values)
        durations.append(time.perf_counter() - started)
    return durations


def steps_beside(system: System, op: Op, first: int, count: int, slots: int) -> list[float]:
    """Make steps until jobs for ``count`` blocks, numbered from ``first`` on, have ended; return their durations."""
    waiting = [range(at, at + BLOCKS_PER_JOB) for at in range(first, first + count, BLOCKS_PER_JOB)]
    running: set[int] = set()

    def is_over() -> bool:
        for done in system.finished():
            running.discard(done.job_id)
            if failed := [outcome for outcome in done.outcomes if outcome not in (Outcome.OK, Outcome.EXISTS)]:
                raise RuntimeError(f"{system.name}: {failed[0].name} {system.last_error()}")
        while waiting and len(running) < JOBS_AT_ONCE:
            blocks = waiting.pop(0)
            job = 2 * blocks.start + (op == "load")
            running.add(job)
            system.submit(op, job, [b"%032d" % number for number in blocks], [number % slots for number in blocks])
        return not running

    return steps_until(is_over)


def measure(name: str, directory: Path, region: Region, size: int, runs: int, run_bytes: int) -> Iterator[Row]:
    """Store and load in each run; yield a row for each."""
    count = max(BLOCKS_PER_JOB, run_bytes // size)
    with opened(name, directory, region, size, 1) as system:
        sys.setswitchinterval(system.switch_s)
        end = time.perf_counter() + 0.5
        alone = statistics.mean(steps_until(lambda: time.perf_counter() > end))
        found: dict[Op, list[list[float]]] = {op: [] for op in OPS}
        for run in range(runs):
            for op in OPS:
                found[op].append(steps_beside(system, op, run * count, count, region.slots))
    for op, durations in found.items():
        seconds = statistics.median(sum(run) for run in durations)
        mean = statistics.median(statistics.mean(run) for run in durations)
        gb = count * size / 1e9
        yield {
            "bench": "engine_thread",
            "system": name,
            "op": op,
            "block_bytes": size,
            "gb_per_s": gb / seconds,
            "step_mean": mean / alone,
            "step_p99": statistics.median(percentile(run, 0.99) for run in durations) / alone,
            "lost_s_per_gb": seconds * (1 - alone / mean) / gb,
            "runs": runs,
        }


def main() -> int:
    """Measure and print; returns 0."""
    parser = arguments(__doc__)
    parser.add_argument("--directory", type=Path, default=Path(), help="where to store (default: here)")
    parser.add_argument("--sizes", type=int, nargs="+", default=[128, 2048], help="KiB of a block")
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, choices=SYSTEMS)
    options = parser.parse_args()
    runs, run_bytes = runs_of(options, 5), RUN_BYTES // (8 if options.quick else 1)
    with reporting(options, COLUMNS) as rows, scratch(options.directory) as directory:
        for size in (kib * KIB for kib in options.sizes):
            for name in options.systems:
                home = directory / f"{name}-{size}"
                home.mkdir()
                with primary_tier(size, huge_pages=in_huge_pages(name, "own")) as region:
                    rows += measure(name, home, region, size, runs, run_bytes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
