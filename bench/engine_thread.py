"""What a tier's I/O costs a thread that runs a model: many short operations, each of which releases the GIL.

With one GPU `vllm serve` runs the model in the scheduler's process. Here steps of 500 numpy operations, a microsecond
each, replace it, while a disk tier stores and loads, in the memory that it has in an engine. ``step_mean`` and
``step_p99`` are durations over those of steps alone, before and after each run; ``lost_s_per_gb`` is the time that the
steps took longer, for 1e9 bytes. fio, a program without Python that neither checks nor copies bytes, shows the share of
the machine: interrupts, memory bandwidth, the host.

    python bench/engine_thread.py [--quick] [--runs N] [--sizes 128 2048] [--systems …] [--json FILE] [--directory DIR]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

# The repository replaces this directory, whose modules have the names of packages.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np

from bench.common import Row, arguments, percentile, reporting, runs_of, scratch
from bench.disk import BLOCKS_PER_JOB, JOBS_AT_ONCE, KIB, OPS, in_huge_pages, opened, primary_tier
from kvstore.cli.bench.systems import Op, System
from kvstore.primary import Region
from kvstore.types import Outcome

FIO = "fio"
SYSTEMS = ["kvstore-file", "kvstore-file-thread", "vllm-fs", FIO]
COLUMNS = ["system", "op", "block_bytes", "gb_per_s", "step_mean", "step_p99", "lost_s_per_gb", "runs"]
OPERATIONS = 500
RUN_BYTES = 1 << 30
ALONE_S = 0.3


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


def fio_beside(directory: Path, op: Op, size: int, run_bytes: int) -> list[float]:
    """Make steps until fio has stored or loaded ``run_bytes``, direct, at queue depth 32; return their durations."""
    fio = subprocess.Popen(
        [
            "fio", "--name=floor", f"--filename={directory / 'fio.dat'}", f"--size={run_bytes}", f"--bs={size}",
            f"--rw=rand{'write' if op == 'store' else 'read'}", "--direct=1", "--ioengine=io_uring", "--iodepth=32",
            "--thread", "--overwrite=1",
        ],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    durations = steps_until(lambda: fio.poll() is not None)
    if fio.returncode:
        raise RuntimeError(f"fio ended with {fio.returncode}")
    return durations


def alone() -> float:
    """Return the mean duration of a step without other work."""
    end = time.perf_counter() + ALONE_S
    return statistics.mean(steps_until(lambda: time.perf_counter() > end))


def measure(name: str, directory: Path, region: Region, size: int, runs: int, run_bytes: int) -> Iterator[Row]:
    """Store and load in each run, between measurements without I/O; yield a row for each."""
    count = max(BLOCKS_PER_JOB, run_bytes // size)
    gb = count * size / 1e9
    found: dict[Op, list[tuple[float, list[float]]]] = {op: [] for op in OPS}
    with nullcontext() if name == FIO else opened(name, directory, region, size, 1) as system:
        if system is None:
            (directory / "fio.dat").write_bytes(bytes(count * size))
        else:
            sys.setswitchinterval(system.switch_s)
        for run in range(runs):
            for op in OPS:
                before = alone()
                if system is None:
                    durations = fio_beside(directory, op, size, count * size)
                else:
                    durations = steps_beside(system, op, run * count, count, region.slots)
                found[op].append(((before + alone()) / 2, durations))
    for op, of_op in found.items():
        yield {
            "bench": "engine_thread",
            "system": name,
            "op": op,
            "block_bytes": size,
            # A run of fio is mostly its start.
            "gb_per_s": None if name == FIO else gb / statistics.median(sum(run) for _, run in of_op),
            "step_mean": statistics.median(statistics.mean(run) / step for step, run in of_op),
            "step_p99": statistics.median(percentile(run, 0.99) / step for step, run in of_op),
            "lost_s_per_gb": statistics.median(sum(run) - step * len(run) for step, run in of_op) / gb,
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
