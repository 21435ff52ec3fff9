"""The disk tier beside vLLM's ``fs`` tier and fio, with one engine and with four that share a root.

    python bench/disk.py [--quick] [--json FILE] [--directory DIR]

What ``bench/nvme.py`` says of jobs, fio, ``of_fio`` and CPU seconds holds here, as its measurement is the one used.
``fio-huge`` is fio with its memory in huge pages, where the kernel has some, as the primary tier is.

With ``engines`` above 1 each engine is a process with a primary tier of its own, all over one directory. They start
together; the rate is the bytes of all over the time from the first start to the last end, latencies are of all jobs.
Stores are of blocks that nobody has. Each engine loads what the next one has stored.

``over_fs`` is the rate over that of vLLM's ``fs`` in the same row of the same run, or the median of such ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# In place of this directory, where modules have the names of packages: the repository.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.common import Row, arguments, median_row, percentile, print_table, write_json
from bench.nvme import (
    BLOCKS_PER_JOB,
    KIB,
    MIB,
    RUN_MIB,
    STEP_S,
    Scheduler,
    check,
    fill,
    fill_fio,
    fio,
    measure,
    run_jobs,
)
from bench.tiers import FsSystem, KVStoreSystem, Op, Region, System
from kvstore.cli.measuring.systems import cpu_seconds

_OPS: tuple[Op, Op] = ("store", "load")
JOBS_AT_ONCE = 8
ENGINES = 4
VISIBLE_S = 2.0
COLUMNS = [
    "system", "host", "op", "block_bytes", "jobs", "engines", "spin", "gb_per_s", "of_fio", "over_fs", "cpu_s_per_gb",
    "latency_s_p50", "latency_s_p99", "spin_rate", "verified", "runs",
]  # fmt: skip
_ENGINE_RUN_MIB = 512
"""MiB per run of each of several engines."""


def make_system(name: str, directory: Path, region: Region, capacity: int, *, fresh: bool = True) -> System:
    """Open a system over a directory."""
    if name == "vllm-fs":
        return FsSystem(directory, region, capacity, fresh=fresh)
    io = "process" if name.endswith("-process") else "thread"
    return KVStoreSystem(directory, region, capacity, backend="file", io=io, fresh=fresh)


def capacity_for(size: int, engines: int = 1) -> int:
    """Return room for about two runs of the longest kind, and not for all of them: stores replace older blocks.

    Several engines get more, as each gives whole segments up until all have the same share.
    """
    run_bytes = RUN_MIB[JOBS_AT_ONCE][size // KIB] * MIB
    return (2 if engines == 1 else 3) * engines * max(run_bytes, JOBS_AT_ONCE * BLOCKS_PER_JOB * size) + 256 * MIB


class Engine:
    """One of several engines: a process of this program, told by lines what to do.

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

    def tell(self, line: str) -> None:
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
    system = make_system(what["system"], Path(what["directory"]), region, capacity_for(size, ENGINES), fresh=False)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        op, run, jobs = line.split()
        # Loads are of what the next engine has stored.
        owner = number if op == "store" else (number + 1) % ENGINES
        base = (int(run) * ENGINES + owner) << 24
        count = max(int(jobs), _ENGINE_RUN_MIB * MIB // (size * BLOCKS_PER_JOB))
        numbers = [range(base + i * BLOCKS_PER_JOB, base + (i + 1) * BLOCKS_PER_JOB) for i in range(count)]
        cpu, started = cpu_seconds(), time.monotonic()
        latencies, _ = run_jobs(
            system, "store" if op == "store" else "load", numbers, int(jobs),
            lambda lane: range(lane * BLOCKS_PER_JOB, (lane + 1) * BLOCKS_PER_JOB), lambda: time.sleep(STEP_S),
        )  # fmt: skip
        result = {
            "started": started, "ended": time.monotonic(), "cpu": cpu_seconds() - cpu, "latencies": latencies,
            "bytes": count * BLOCKS_PER_JOB * size,
        }  # fmt: skip
        print(json.dumps(result), flush=True)
    system.close()


def measure_engines(engines: list[Engine], name: str, op: Op, jobs: int, run: int, size: int) -> Row:
    """Measure one run of several engines at once."""
    # What others have stored is known to each within some ten milliseconds, on a machine that is not busy.
    time.sleep(VISIBLE_S)
    for engine in engines:
        engine.tell(f"{op} {run} {jobs}")
    found = [engine.answer() for engine in engines]
    gigabytes = sum(each["bytes"] for each in found) / 1e9
    seconds = max(each["ended"] for each in found) - min(each["started"] for each in found)
    latencies = [latency for each in found for latency in each["latencies"]]
    return {
        "bench": "disk", "system": name, "host": "thread", "op": op, "block_bytes": size, "jobs": jobs,
        "engines": len(engines), "spin": "no", "blocks_per_job": BLOCKS_PER_JOB, "gb_per_s": gigabytes / seconds,
        "cpu_s_per_gb": sum(each["cpu"] for each in found) / gigabytes, "latency_s_p50": percentile(latencies, 0.5),
        "latency_s_p99": percentile(latencies, 0.99), "verified": name != "vllm-fs",
    }  # fmt: skip


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
        row |= {"bench": "disk", "of_fio": row["gb_per_s"] / ceiling["gb_per_s"]}
        row.setdefault("engines", 1)
        if counts:
            self._add({**ceiling, "engines": 1})
            self._add(row)

    def note_fio_huge(self, op: Op, size: int) -> None:
        """Measure fio in huge pages beside fio."""
        plain = fio(self._directory, op, size)["gb_per_s"]
        ceiling = fio(self._directory, op, size, "fio-huge")
        self._add({**ceiling, "engines": 1, "of_fio": ceiling["gb_per_s"] / plain})

    def medians(self) -> list[Row]:
        """Return the median row of each kind."""
        found = []
        for key, rows in self._rows.items():
            medians = {"of_fio": statistics.median(row["of_fio"] for row in rows)}
            beside = self._rows.get(("vllm-fs", "thread", *key[2:5], "no"))
            if beside and key[0].startswith("kvstore") and key[5] == "no":
                pairs = zip(rows, beside, strict=False)
                medians["over_fs"] = statistics.median(row["gb_per_s"] / fs["gb_per_s"] for row, fs in pairs)
            found.append({**median_row(rows), "bench": "disk", **medians})
        return found

    def _add(self, row: Row) -> None:
        key = tuple(row[name] for name in ("system", "host", "op", "jobs", "engines", "spin"))
        self._rows.setdefault(key, []).append(row)


def measure_named(name: str, system: System, *what: Any) -> Row:
    """Measure one run of one engine, under the name that the system has here."""
    return {**measure(system, *what), "system": name}


def measure_one(options: argparse.Namespace, size: int, scheduler: Scheduler, rows: Rows) -> None:
    """Measure one engine of each system."""
    region = Region(JOBS_AT_ONCE * BLOCKS_PER_JOB, size)
    systems = {n: make_system(n, options.directory / n, region, capacity_for(size)) for n in options.systems}
    for system in systems.values():
        check(system, region)
        if isinstance(system, KVStoreSystem):
            fill(system)
    base = 0
    for run in range(options.runs + 1):
        for op in _OPS if run else ():
            rows.note_fio_huge(op, size)
        for jobs, spin in [(jobs, spin) for jobs in (1, JOBS_AT_ONCE) for spin in options.spins]:
            for name, system in systems.items():
                for op in _OPS:
                    make = partial(measure_named, name, system, op, jobs, base, spin, scheduler)
                    rows.note(make, op, size, counts=run > 0)
                system.forget()
                os.sync()
            base += 1 << 24
    for system in systems.values():
        system.close()


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
                    for path in directory.rglob("*.bin"):
                        path.unlink()
                os.sync()
        for engine in engines:
            engine.close()
        subprocess.run(["rm", "-rf", str(directory)], check=True)


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--directory", type=Path, default=Path("bench-disk.tmp"), help="on the drive to measure")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="*", help="KiB per block")
    parser.add_argument("--spins", nargs="*", default=["no", "yes"], help="no, yes, apart")
    parser.add_argument("--systems", nargs="*", default=["kvstore-file", "kvstore-file-process", "vllm-fs"])
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
    scheduler = Scheduler()
    found: list[Row] = []
    for size in sizes:
        rows = Rows(options.directory)
        fill_fio(options.directory)
        if 1 in options.engines:
            measure_one(options, size, scheduler, rows)
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
