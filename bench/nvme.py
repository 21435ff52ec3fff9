"""Tiers on a local drive side by side, with what fio gets from the same filesystem beside them.

    python bench/nvme.py [--quick] [--json FILE] [--directory DIR]

Stores and loads of jobs of 64 blocks, one job at a time and eight at a time, cold (all of it is direct I/O). Systems
take turns, run by run; a row is the median.

fio has the same filesystem, direct I/O, the same block size and queue depth 32, in one file of 2 GiB that has been
written once before, as the slabs of the NVMe tier have: a first write to reserved space costs the filesystem more.
``of_fio`` is a system's rate over what fio got just before that run of that system, or the median of such ratios: the
rate of a shared drive changes from minute to minute. Its memory is in small pages, as a program's is that does nothing
about it. The primary tier, which all systems share, is in huge pages where the kernel has some: ``fio-huge`` is fio
with such, and ``fio-huge-job`` the same with 64 blocks at a time and none before all of those have ended, which is what
one job at a time is to the drive. Neither hashes anything.

The caller's thread looks for results every half millisecond. CPU seconds are those of all processes that take part,
the caller's included.

With ``spin`` "yes" that thread is a busy scheduler instead: pure Python without a pause, and a look at the tier after
each half millisecond's worth of it. ``spin_rate`` is the pure Python it gets done over what it gets done alone. With
``spin`` "apart" the spinning is done by another thread than the one that calls the tier.

The last part starts a tier with many blocks in its index.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

# In place of this directory, where modules have the names of packages: the repository.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.common import Row, arguments, median_row, percentile, print_table, write_json
from bench.start import start_rows
from bench.tiers import FsSystem, KVStoreSystem, Op, Region, System, key_of

KIB, MIB, GIB = 1024, 1024**2, 1024**3
BLOCKS_PER_JOB = 64
_OPS: tuple[Op, Op] = ("store", "load")
JOBS_AT_ONCE = 8
COLUMNS = [
    "system", "host", "op", "block_bytes", "jobs", "spin", "gb_per_s", "of_fio", "cpu_s_per_gb", "latency_s_p50",
    "latency_s_p99", "spin_rate", "verified", "runs",
]  # fmt: skip
STEP_S = 0.0005
FIO_S = 0.5
"""Seconds of fio before each run of a system: as long as that run, about."""
RUN_MIB = {1: {128: 384, 512: 512, 2048: 1024, 8192: 2048}, 8: {128: 768, 512: 1024, 2048: 2048, 8192: 4096}}
"""MiB per run, by jobs at once and KiB per block."""


class Scheduler:
    """Pure Python work in steps, and how many steps a second there are when nothing else runs."""

    def __init__(self) -> None:
        self.loops = 1000
        while self._timed() < STEP_S:
            self.loops = int(self.loops * 1.2)
        self.alone = self._rate_alone()

    def step(self) -> None:
        """Do one step."""
        total = 0
        for i in range(self.loops):
            total += i & 3

    def _timed(self) -> float:
        started = time.perf_counter()
        self.step()
        return time.perf_counter() - started

    def _rate_alone(self) -> float:
        steps, started = 0, time.perf_counter()
        while time.perf_counter() - started < 1.0:
            self.step()
            steps += 1
        return steps / (time.perf_counter() - started)


def run_jobs(
    system: System, op: Op, numbers: Iterable[range], jobs: int, slots_of: Callable[[int], Sequence[int]],
    pause: Callable[[], None],
) -> tuple[list[float], float]:  # fmt: skip
    """Run jobs, so many at once; return the latency of each and the seconds of all."""
    waiting = list(numbers)[::-1]
    running: dict[int, float] = {}
    lanes: dict[int, int] = {}
    free = list(range(jobs))
    latencies = []
    job_id = 0
    keys = [[key_of(n) for n in job] for job in waiting]
    started = time.perf_counter()
    while waiting or running:
        while waiting and free:
            waiting.pop()
            job_id += 1
            lanes[job_id] = lane = free.pop()
            running[job_id] = time.perf_counter()
            system.submit(op, job_id, keys.pop(), slots_of(lane))
        pause()
        for ended, success in system.finished():
            assert success, f"{system.name}: a {op} failed"
            latencies.append(time.perf_counter() - running.pop(ended))
            free.append(lanes[ended])
    return latencies, time.perf_counter() - started


def measure(system: System, op: Op, jobs: int, base: int, spin: str, scheduler: Scheduler) -> Row:
    """Measure one run."""
    size = system.region.slot_bytes
    count = max(jobs, 4, RUN_MIB[jobs][size // KIB] * MIB // (size * BLOCKS_PER_JOB))
    numbers = [range(base + i * BLOCKS_PER_JOB, base + (i + 1) * BLOCKS_PER_JOB) for i in range(count)]

    def slots_of(lane: int) -> range:
        return range(lane * BLOCKS_PER_JOB, (lane + 1) * BLOCKS_PER_JOB)

    steps = 0
    stop = threading.Event()

    def spin_once() -> None:
        nonlocal steps
        scheduler.step()
        steps += 1

    def spin_for_ever() -> None:
        while not stop.is_set():
            spin_once()

    spinner = threading.Thread(target=spin_for_ever, daemon=True)
    if spin == "apart":
        spinner.start()
    cpu = system.cpu_seconds()
    pause = spin_once if spin == "yes" else lambda: time.sleep(STEP_S)
    latencies, seconds = run_jobs(system, op, numbers, jobs, slots_of, pause)
    cpu = system.cpu_seconds() - cpu
    stop.set()
    if spin == "apart":
        spinner.join()
    gigabytes = count * BLOCKS_PER_JOB * size / 1e9
    row: Row = {
        "bench": "nvme", "system": system.name, "host": system.host, "op": op, "block_bytes": size,
        "blocks_per_job": BLOCKS_PER_JOB, "jobs": jobs, "spin": spin, "gb_per_s": gigabytes / seconds,
        "latency_s_p50": percentile(latencies, 0.5), "latency_s_p99": percentile(latencies, 0.99),
        "verified": system.verified,
    }  # fmt: skip
    if spin == "no":
        row["cpu_s_per_gb"] = cpu / gigabytes
    else:
        row["spin_rate"] = steps / seconds / scheduler.alone
    return row


def check(system: System, region: Region) -> None:
    """Store a job and load it again, and insist on the same bytes."""
    slots, elsewhere = range(BLOCKS_PER_JOB), range(BLOCKS_PER_JOB)
    before = region.checksum(slots)
    kept = region.array[:BLOCKS_PER_JOB].copy()
    numbers = [range(1 << 40, (1 << 40) + BLOCKS_PER_JOB)]
    run_jobs(system, "store", numbers, 1, lambda lane: slots, lambda: time.sleep(STEP_S))
    region.array[:BLOCKS_PER_JOB] = 0
    run_jobs(system, "load", numbers, 1, lambda lane: elsewhere, lambda: time.sleep(STEP_S))
    assert region.checksum(elsewhere) == before, f"{system.name} loads other bytes than it stored"
    region.array[:BLOCKS_PER_JOB] = kept


def _fio_command(directory: Path, op: Op, size: int) -> list[str]:
    return [
        "fio", "--name=ceiling", f"--filename={directory / 'fio.dat'}", "--size=2g", f"--bs={size}", "--direct=1",
        f"--rw={'write' if op == 'store' else 'read'}", "--ioengine=io_uring",
    ]  # fmt: skip


def fill_fio(directory: Path) -> None:
    """Write all of fio's file once."""
    subprocess.run([*_fio_command(directory, "store", 4 * MIB), "--iodepth=4"], capture_output=True, check=True)


def fill(system: System) -> None:
    """Store more than a slab holds, so that no counted store is the first write to its slot."""
    job_bytes = BLOCKS_PER_JOB * system.region.slot_bytes
    base = 1 << 41
    starts = range(base, base + -(-system.capacity_bytes // job_bytes) * BLOCKS_PER_JOB, BLOCKS_PER_JOB)
    numbers = [range(start, start + BLOCKS_PER_JOB) for start in starts]
    run_jobs(system, "store", numbers, 1, lambda lane: range(BLOCKS_PER_JOB), lambda: time.sleep(STEP_S))


def fio(directory: Path, op: Op, size: int, name: str = "fio") -> Row:
    """Return what fio gets: same filesystem, same block size, direct, queue depth 32 or a job at a time."""
    depth = ["--iodepth=32"]
    if name.endswith("-job"):
        whole = BLOCKS_PER_JOB
        depth = [f"--iodepth={whole}", f"--iodepth_batch_submit={whole}", f"--iodepth_batch_complete_min={whole}"]
        depth += ["--iodepth_low=0"]
    command = [
        *_fio_command(directory, op, size), *depth, "--time_based", f"--runtime={round(1000 * FIO_S)}ms",
        "--output-format=json",
    ]  # fmt: skip
    tunables = {}
    if "-huge" in name:
        # The C library asks for huge pages then, for whatever is as long as fio's buffers; they are made at first use.
        tunables = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        command.append(f"--ramp_time={round(1000 * FIO_S)}ms")
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **tunables})
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    side = job["write" if op == "store" else "read"]
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return {
        "bench": "nvme", "system": name, "host": "process", "op": op, "block_bytes": size,
        "jobs": 1 if name.endswith("-job") else 32, "spin": "no",
        "gb_per_s": side["bw_bytes"] / 1e9, "cpu_s_per_gb": cpu / (side["io_bytes"] / 1e9), "verified": False,
        "of_fio": 1.0,
    }  # fmt: skip


def measure_size(options: argparse.Namespace, size: int, scheduler: Scheduler) -> list[Row]:
    """Measure all systems with blocks of one length."""
    slots = JOBS_AT_ONCE * BLOCKS_PER_JOB
    region = Region(slots, size)
    directory: Path = options.directory
    # Room for about two runs of the longest kind: what is stored in the counted runs replaces older blocks.
    capacity = 2 * max(RUN_MIB[8][size // KIB] * MIB, slots * size) + 256 * MIB
    makers: dict[str, Callable[[Path], System]] = {
        "nvme": lambda path: KVStoreSystem(path, region, capacity, backend="nvme"),
        "nvme-process": lambda path: KVStoreSystem(path, region, capacity, backend="nvme", io="process"),
        "file": lambda path: KVStoreSystem(path, region, capacity, backend="file"),
        "fs": lambda path: FsSystem(path, region, capacity),
    }
    systems = [makers[name](directory / name) for name in options.systems]
    kinds = [(jobs, spin) for jobs in (1, JOBS_AT_ONCE) for spin in options.spins]
    rows: dict[tuple[Any, ...], list[Row]] = {}
    base = 0
    fill_fio(directory)
    for system in systems:
        check(system, region)
        if system.name == "kvstore-nvme":
            fill(system)
    for run in range(options.runs + 1):
        for name, op in itertools.product(("fio-huge", "fio-huge-job"), _OPS if run else ()):
            plain = fio(directory, op, size)["gb_per_s"]
            ceiling = fio(directory, op, size, name)
            rows.setdefault((name, op), []).append({**ceiling, "of_fio": ceiling["gb_per_s"] / plain})
        for jobs, spin in kinds:
            for system in systems:
                for op in _OPS:
                    ceiling = fio(directory, op, size)
                    row = measure(system, op, jobs, base, spin, scheduler)
                    row["of_fio"] = row["gb_per_s"] / ceiling["gb_per_s"]
                    # The first run warms up whatever can be warm.
                    rows.setdefault(("fio", op), []).extend([ceiling] if run else [])
                    rows.setdefault((system.name, system.host, op, jobs, spin), []).extend([row] if run else [])
                system.forget()
                os.sync()
            base += 1 << 24
    for system in systems:
        system.close()
    (directory / "fio.dat").unlink(missing_ok=True)
    return [
        {**median_row(found), "of_fio": statistics.median(row["of_fio"] for row in found)} for found in rows.values()
    ]


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--directory", type=Path, default=Path("bench-nvme.tmp"), help="on the drive to measure")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="*", help="KiB per block")
    parser.add_argument("--spins", nargs="*", default=["no", "yes"], help="no, yes, apart")
    parser.add_argument("--systems", nargs="*", default=["nvme", "nvme-process", "file", "fs"])
    parser.add_argument("--without-start", action="store_true")
    options = parser.parse_args()
    sizes = [kib * KIB for kib in options.sizes or (128, 512, 2048, 8192)]
    if options.quick:
        sizes, options.runs = sizes[:1], 1
    options.directory.mkdir(parents=True, exist_ok=True)
    scheduler = Scheduler()
    rows: list[Row] = []
    for size in sizes:
        found = measure_size(options, size, scheduler)
        print_table(found, COLUMNS)
        print(flush=True)
        rows += found
    if not options.without_start:
        counts = [1000, 100_000] if options.quick else [1000, 100_000, 1_000_000]
        found = start_rows(options.directory, counts, options.runs)
        print_table(found, ["system", "host", "op", "blocks", "start_s", "lookup_us", "miss_us", "runs"])
        rows += found
    options.directory.rmdir()
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
