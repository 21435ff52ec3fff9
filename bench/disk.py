"""The disk tier beside vLLM's ``fs`` tier and fio, with one engine and with four that share a root.

    python bench/disk.py [--quick] [--json FILE] [--directory DIR]

Stores and loads of jobs of 64 blocks, one job at a time and eight at a time, cold (all of it is direct I/O). Systems
take turns, run by run; a row is the median. The caller's thread looks for results every half millisecond. CPU seconds
are those of all processes that take part, the caller's included.

fio has the same filesystem, direct I/O, the same block size and queue depth 32, in one file of 2 GiB that has been
written once before, as the tier's segments have: a first write to reserved space costs the filesystem more. ``of_fio``
is a system's rate over fio's just before that run of that system, or the median of such ratios: the rate of a shared
drive changes from minute to minute. fio's memory is in small pages. The primary tier, which all systems share, is in
huge pages where the kernel has some: ``fio-huge`` is fio with huge pages, and ``fio-huge-job`` the same with 64 blocks
at a time and none before all of those have ended, as the drive sees one job at a time. Neither hashes anything.

With ``spin`` "yes" the caller's thread is a busy scheduler: pure Python without a pause, and a look at the tier after
each half millisecond of it. ``spin_rate`` is its rate of Python over its rate alone. With ``spin`` "apart" another
thread spins than the one that calls the tier.

With ``engines`` above 1 each engine is a process with a primary tier of its own, all over one directory. They start
together; the rate is the bytes of all over the time from the first start to the last end, latencies are of all jobs.
Stores are of new blocks. Each engine loads the blocks that the next one stored.

``over_fs`` is the rate over that of vLLM's ``fs`` in the same row of the same run, or the median of such ratios.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

# In place of this directory, where modules have the names of packages: the repository.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.common import Row, arguments, median_row, percentile, print_table, write_json
from bench.tiers import JobTimes, Region, key_of, open_disk_system, run_jobs
from kvstore.cli.measuring.baselines import cpu_s_per_gb, run_fio
from kvstore.cli.measuring.spinner import PythonWork
from kvstore.cli.measuring.systems import Op, System, cpu_seconds

KIB, MIB = 1024, 1024**2
SYSTEMS = ["kvstore-file", "kvstore-file-process", "vllm-fs", "kvstore-nvme", "kvstore-nvme-process"]
_OPS: tuple[Op, Op] = ("store", "load")
BLOCKS_PER_JOB = 64
JOBS_AT_ONCE = 8
ENGINES = 4
VISIBLE_S = 2.0
COLUMNS = [
    "system", "host", "op", "block_bytes", "jobs", "engines", "spin", "gb_per_s", "of_fio", "over_fs", "cpu_s_per_gb",
    "latency_s_p50", "latency_s_p99", "spin_rate", "verified", "runs",
]  # fmt: skip
STEP_S = 0.0005
FIO_S = 0.5
"""Seconds of fio before each run of a system: as long as that run, about."""
RUN_MIB = {1: {128: 384, 512: 512, 2048: 1024, 8192: 2048}, 8: {128: 768, 512: 1024, 2048: 2048, 8192: 4096}}
"""MiB per run, by jobs at once and KiB per block."""
_ENGINE_RUN_MIB = 512
"""MiB per run of each of several engines."""


@functools.cache
def scheduler() -> PythonWork:
    """Return Python work in steps of half a millisecond."""
    loops = 1000
    return PythonWork(int(loops * STEP_S * PythonWork(loops).alone))


def pause() -> None:
    """Wait for the caller's next look at a system."""
    time.sleep(STEP_S)


def jobs_from(base: int, count: int) -> list[list[bytes]]:
    """Return the keys of jobs whose blocks are numbered from ``base`` on."""
    starts = range(base, base + count * BLOCKS_PER_JOB, BLOCKS_PER_JOB)
    return [[key_of(number) for number in range(start, start + BLOCKS_PER_JOB)] for start in starts]


def capacity_for(size: int, engines: int = 1) -> int:
    """Return room for about two runs of the longest kind, and not for all of them: stores replace older blocks.

    Several engines get more, as each gives whole segments up until all have the same share.
    """
    run_bytes = RUN_MIB[JOBS_AT_ONCE][size // KIB] * MIB
    return (2 if engines == 1 else 3) * engines * max(run_bytes, JOBS_AT_ONCE * BLOCKS_PER_JOB * size) + 256 * MIB


def measure(system: System, size: int, op: Op, jobs: int, base: int, spin: str) -> Row:
    """Measure one run."""
    count = max(jobs, 4, RUN_MIB[jobs][size // KIB] * MIB // (size * BLOCKS_PER_JOB))
    keys = jobs_from(base, count)
    steps = 0
    stop = threading.Event()

    def step() -> None:
        nonlocal steps
        scheduler().step()
        steps += 1

    def spin_until_stopped() -> None:
        while not stop.is_set():
            step()

    spinner = threading.Thread(target=spin_until_stopped, daemon=True)
    if spin == "apart":
        spinner.start()
    cpu = cpu_seconds()
    times = run_jobs(system, op, keys, jobs, step if spin == "yes" else pause)
    cpu = cpu_seconds() - cpu
    stop.set()
    if spin == "apart":
        spinner.join()
    row = row_of(system.name, op, size, jobs, count * BLOCKS_PER_JOB * size, times.seconds, times.latencies)
    row |= {"host": system.host, "engines": 1, "spin": spin}
    gigabytes = count * BLOCKS_PER_JOB * size / 1e9
    cost = {"cpu_s_per_gb": cpu / gigabytes}
    return row | (cost if spin == "no" else {"spin_rate": scheduler().share_of(steps, times.seconds)})


def row_of(name: str, op: Op, size: int, jobs: int, moved: int, seconds: float, latencies: list[float]) -> Row:
    """Return the part of a row that runs of one engine and of several have in common."""
    return {
        "bench": "disk", "system": name, "op": op, "block_bytes": size, "blocks_per_job": BLOCKS_PER_JOB, "jobs": jobs,
        "gb_per_s": moved / 1e9 / seconds, "latency_s_p50": percentile(latencies, 0.5),
        "latency_s_p99": percentile(latencies, 0.99), "verified": name != "vllm-fs",
    }  # fmt: skip


def check(system: System, region: Region) -> None:
    """Store a job and load it again, and insist on the same bytes."""
    slots = range(BLOCKS_PER_JOB)
    before = region.checksum(slots)
    kept = region.array[:BLOCKS_PER_JOB].copy()
    run_jobs(system, "store", jobs_from(1 << 40, 1), 1, pause)
    region.array[:BLOCKS_PER_JOB] = 0
    run_jobs(system, "load", jobs_from(1 << 40, 1), 1, pause)
    assert region.checksum(slots) == before, f"{system.name} loads other bytes than it stored"
    region.array[:BLOCKS_PER_JOB] = kept


def fill(system: System, size: int) -> None:
    """Store more than the tier holds, so that no counted store is the first write to its slot."""
    run_jobs(system, "store", jobs_from(1 << 41, -(-capacity_for(size) // (BLOCKS_PER_JOB * size))), 1, pause)


def forget(directory: Path) -> None:
    """Make room after a run of vLLM's ``fs`` tier, which never removes a file."""
    for path in directory.rglob("*.bin"):
        path.unlink()


def fio(directory: Path, op: Op, size: int, name: str = "fio", *, whole_file: bool = False) -> Row:
    """Return fio's row: same filesystem, same block size, direct, queue depth 32 or a job at a time.

    Args:
        directory: Where its file lies.
        op: What it does.
        size: Bytes per block.
        name: ``fio``, ``fio-huge`` or ``fio-huge-job``.
        whole_file: Write or read the file once, instead of for a time.
    """
    options = [
        f"--filename={directory / 'fio.dat'}", "--size=2g", f"--bs={size}", "--direct=1", "--ioengine=io_uring",
        f"--rw={'write' if op == 'store' else 'read'}",
    ]  # fmt: skip
    in_jobs = name.endswith("-job")
    if in_jobs:
        whole = BLOCKS_PER_JOB
        options += [f"--iodepth={whole}", f"--iodepth_batch_submit={whole}", f"--iodepth_batch_complete_min={whole}"]
        options += ["--iodepth_low=0"]
    else:
        options += ["--iodepth=32"]
    if not whole_file:
        options += ["--time_based", f"--runtime={round(1000 * FIO_S)}ms"]
    environment: Mapping[str, str] = {}
    if "-huge" in name:
        # The C library asks for huge pages then, for whatever is as long as fio's buffers; they are made at first use.
        environment = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        options.append(f"--ramp_time={round(1000 * FIO_S)}ms")
    job = run_fio(options, FIO_S, environment=environment)
    return {
        "bench": "disk", "system": name, "host": "process", "op": op, "block_bytes": size, "engines": 1,
        "jobs": 1 if in_jobs else 32, "spin": "no",
        "gb_per_s": job["write" if op == "store" else "read"]["bw_bytes"] / 1e9, "cpu_s_per_gb": cpu_s_per_gb(job),
        "verified": False, "of_fio": 1.0,
    }  # fmt: skip


class Engine:
    """One of several engines: a process of this program, which gets orders by lines.

    Args:
        system: Name of the system.
        directory: The root that all share.
        size: Bytes per block.
        number: Which engine it is.
    """

    def __init__(self, system: str, directory: Path, size: int, number: int) -> None:
        what = json.dumps({"system": system, "directory": str(directory), "size": size, "number": number})
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--engine", what], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.answer()

    def order(self, line: str) -> None:
        """Send a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """Wait for an answer."""
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def be_engine(what: dict[str, Any]) -> None:
    """Do what lines on standard input say: the main program of an :class:`Engine`."""
    size, number = what["size"], what["number"]
    region = Region(BLOCKS_PER_JOB * JOBS_AT_ONCE, size)
    system = open_disk_system(what["system"], Path(what["directory"]), region, capacity_for(size, ENGINES))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        op, run, jobs = line.split()
        # Loads are of the next engine's blocks.
        owner = number if op == "store" else (number + 1) % ENGINES
        base = (int(run) * ENGINES + owner) << 24
        count = max(int(jobs), _ENGINE_RUN_MIB * MIB // (size * BLOCKS_PER_JOB))
        keys = jobs_from(base, count)
        cpu, started = cpu_seconds(), time.monotonic()
        times: JobTimes = run_jobs(system, "store" if op == "store" else "load", keys, int(jobs), pause)
        result = {
            "started": started, "ended": time.monotonic(), "cpu": cpu_seconds() - cpu, "latencies": times.latencies,
            "bytes": count * BLOCKS_PER_JOB * size,
        }  # fmt: skip
        print(json.dumps(result), flush=True)
    system.close()


def measure_engines(engines: list[Engine], name: str, op: Op, jobs: int, run: int, size: int) -> Row:
    """Measure one run of several engines at once."""
    # Each knows the blocks of the others within some ten milliseconds, on a machine that is not busy.
    time.sleep(VISIBLE_S)
    for engine in engines:
        engine.order(f"{op} {run} {jobs}")
    found = [engine.answer() for engine in engines]
    moved = sum(each["bytes"] for each in found)
    seconds = max(each["ended"] for each in found) - min(each["started"] for each in found)
    latencies = [latency for each in found for latency in each["latencies"]]
    row = row_of(name, op, size, jobs, moved, seconds, latencies)
    cost = sum(each["cpu"] for each in found) / (moved / 1e9)
    return row | {"host": "thread", "engines": len(engines), "spin": "no", "cpu_s_per_gb": cost}


class Rows:
    """The rows of all runs, by what they measure.

    Args:
        directory: Where fio measures beside each run.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._rows: dict[tuple[Any, ...], list[Row]] = {}

    def note(self, make: Callable[[], Row], op: Op, size: int, *, counts: bool) -> None:
        """Measure fio and a system, one behind the other; a run that only warms up does not count."""
        ceiling = fio(self._directory, op, size)
        row = make()
        row["of_fio"] = row["gb_per_s"] / ceiling["gb_per_s"]
        if counts:
            self._add(ceiling)
            self._add(row)

    def note_fio_huge(self, op: Op, size: int) -> None:
        """Measure fio in huge pages beside fio."""
        for name in ("fio-huge", "fio-huge-job"):
            plain = fio(self._directory, op, size)["gb_per_s"]
            ceiling = fio(self._directory, op, size, name)
            self._add({**ceiling, "of_fio": ceiling["gb_per_s"] / plain})

    def medians(self) -> list[Row]:
        """Return the median row of each kind."""
        found = []
        for key, rows in self._rows.items():
            medians = {"of_fio": statistics.median(row["of_fio"] for row in rows)}
            beside = self._rows.get(("vllm-fs", "thread", *key[2:5], "no"))
            if beside and key[0].startswith("kvstore") and key[5] == "no":
                pairs = zip(rows, beside, strict=False)
                medians["over_fs"] = statistics.median(row["gb_per_s"] / fs["gb_per_s"] for row, fs in pairs)
            found.append({**median_row(rows), **medians})
        return found

    def _add(self, row: Row) -> None:
        key = tuple(row[name] for name in ("system", "host", "op", "jobs", "engines", "spin"))
        self._rows.setdefault(key, []).append(row)


def measure_one(options: argparse.Namespace, size: int, rows: Rows) -> None:
    """Measure one engine of each system."""
    region = Region(JOBS_AT_ONCE * BLOCKS_PER_JOB, size)
    systems: dict[str, System] = {}
    for name in options.systems:
        shutil.rmtree(options.directory / name, ignore_errors=True)
        systems[name] = open_disk_system(name, options.directory / name, region, capacity_for(size))
    for name, system in systems.items():
        check(system, region)
        if name != "vllm-fs":
            fill(system, size)
    base = 0
    for run in range(options.runs + 1):
        for op in _OPS if run else ():
            rows.note_fio_huge(op, size)
        for jobs, spin in [(jobs, spin) for jobs in (1, JOBS_AT_ONCE) for spin in options.spins]:
            for name, system in systems.items():
                for op in _OPS:
                    # The first run warms up whatever can be warm.
                    rows.note(partial(measure, system, size, op, jobs, base, spin), op, size, counts=run > 0)
                if name == "vllm-fs":
                    forget(options.directory / name)
                os.sync()
            base += 1 << 24
    for name, system in systems.items():
        system.close()
        shutil.rmtree(options.directory / name)


def measure_several(options: argparse.Namespace, size: int, rows: Rows) -> None:
    """Measure four engines over one root, of each system."""
    for name in options.systems:
        if name.endswith("-process"):
            continue
        directory = options.directory / f"{name}-engines"
        directory.mkdir(mode=0o700)
        engines = [Engine(name, directory, size, number) for number in range(ENGINES)]
        for run in range(options.runs + 1):
            for jobs in (1, JOBS_AT_ONCE):
                for op in _OPS:
                    make = partial(measure_engines, engines, name, op, jobs, 2 * run + (jobs > 1), size)
                    rows.note(make, op, size, counts=run > 0)
                if name == "vllm-fs":
                    forget(directory)
                os.sync()
        for engine in engines:
            engine.close()
        shutil.rmtree(directory)


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--directory", type=Path, default=Path("bench-disk.tmp"), help="on the drive to measure")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="*", help="KiB per block")
    parser.add_argument("--spins", nargs="*", default=["no", "yes"], help="no, yes, apart")
    parser.add_argument("--systems", nargs="*", default=SYSTEMS[:3], choices=SYSTEMS)
    parser.add_argument("--engines", nargs="*", type=int, default=[1, ENGINES], choices=[1, ENGINES])
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        be_engine(json.loads(options.engine))
        return
    sizes = [kib * KIB for kib in options.sizes or (128, 512, 2048, 8192)]
    if options.quick:
        sizes, options.runs, options.spins = sizes[:1], 1, ["no"]
    options.directory.mkdir(parents=True, exist_ok=True)
    found: list[Row] = []
    for size in sizes:
        rows = Rows(options.directory)
        fio(options.directory, "store", 4 * MIB, whole_file=True)
        if 1 in options.engines:
            measure_one(options, size, rows)
        if ENGINES in options.engines:
            measure_several(options, size, rows)
        (options.directory / "fio.dat").unlink(missing_ok=True)
        medians = rows.medians()
        print_table(medians, COLUMNS)
        print(flush=True)
        found += medians
    options.directory.rmdir()
    write_json(options.json, found)


if __name__ == "__main__":
    main()
