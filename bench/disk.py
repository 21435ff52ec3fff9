"""The disk tier compared with vLLM's ``fs`` tier and fio, with one engine and with four that share a root.

    python bench/disk.py [--quick] [--runs N] [--json FILE] [--directory DIR]

The driver of kvstore-bench stores and loads jobs of 64 blocks, one and eight jobs at a time, cold (everything uses
direct I/O). Systems take turns over the same memory, run by run; a row is the median, and the first run does not count.
CPU seconds include all participating processes and the caller, which waits for results; ``caller``, ``loop``,
``workers`` and ``kernel`` (threads of io_uring) are their parts.

Each system has the memory that it has in an engine: kvstore huge pages, vLLM's ``fs`` pages of 4 KiB (a drive transfers
physically adjacent pages in one piece). ``--memory huge`` and ``--memory small`` give both the same. Tiers of kvstore
run in a process of their own, as in an engine, or with ``-thread`` in the caller's. ``kvstore-file`` stores into a full
tier, so it evicts; ``kvstore-file-empty`` has a new directory in each run.

fio uses the same filesystem, direct I/O, the same block size and queue depth 32. ``of_fio`` is the rate divided by
fio's in the same run, or the median of such ratios. fio computes no hashes.

With ``engines`` above 1 each engine is a process with a primary tier of its own, and all share one directory. They
start together. The rate is the bytes of all engines divided by the time from the first start to the last end; latencies
are those of all jobs. Stores are of new blocks. Each engine loads the blocks that the next one stored.

``over_fs`` is the rate divided by that of vLLM's ``fs`` in the same row of the same run, or the median of such ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

# The repository replaces this directory, whose modules have the names of packages.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.common import (
    Row,
    arguments,
    driven_row,
    end_with_parent,
    in_turns,
    median_row,
    needs,
    reporting,
    run_phase,
    runs_of,
    scratch,
)
from kvstore.cli.bench.driver import Driver
from kvstore.cli.bench.histogram import Latencies
from kvstore.cli.bench.payload import BlockRows, Payload
from kvstore.cli.bench.systems import Op, System, TierSystem, VllmFsSystem, fio_rows
from kvstore.cli.bench.workload import Mix, Workload
from kvstore.namespace import Namespace
from kvstore.primary import Region

KIB, MIB = 1024, 1024**2
SYSTEMS = ["kvstore-file", "vllm-fs", "kvstore-file-thread"]
EMPTY: Final = "kvstore-file-empty"
BLOCKS_PER_JOB = 64
JOBS_AT_ONCE = 8
ENGINES = 4
VISIBLE_S = 2.0
"""Wait until each engine finds the blocks of the others; on an idle machine some ten milliseconds suffice."""
COLUMNS = [
    "system", "host", "op", "block_bytes", "jobs", "engines", "spin", "gb_per_s", "of_fio", "over_fs", "cpu_s_per_gb",
    "caller", "loop", "workers", "kernel", "latency_s_p50", "latency_s_p99", "spin_rate", "verified", "runs",
]  # fmt: skip
FIO_S = 0.5
"""Seconds of fio in each run, about the length of a system's run."""
RUN_MIB = {1: {128: 384, 512: 512, 2048: 1024, 8192: 2048}, 8: {128: 768, 512: 1024, 2048: 2048, 8192: 4096}}
"""MiB per run, by concurrent jobs and KiB per block."""
ENGINE_RUN_MIB = 512
"""MiB per run of each of several engines."""
QUICK = 8
"""Divisor of these with ``--quick``."""
OPS: Final[tuple[Op, Op]] = ("store", "load")


def phase(op: Op, size: int, jobs: int, run_bytes: int, *, spin: bool = False) -> Workload:
    """Return the phase of one run."""
    count = max(jobs, 4, run_bytes // (size * BLOCKS_PER_JOB))
    return Workload(
        size, BLOCKS_PER_JOB, jobs, Mix(float(op == "store")), duration_s=600.0, ops_max=count, warmup_s=0.0,
        working_set_bytes=count * BLOCKS_PER_JOB * size, verify="none", spin=spin,
    )  # fmt: skip


def capacity_for(size: int, divisor: int, engines: int = 1) -> int:
    """Return room for about two of the longest runs but not for all runs, so that stores replace older blocks.

    Several engines get more, because each gives up whole segments until all have the same share.
    """
    run_bytes = RUN_MIB[JOBS_AT_ONCE][size // KIB] * MIB // divisor
    return (2 if engines == 1 else 3) * engines * max(run_bytes, JOBS_AT_ONCE * BLOCKS_PER_JOB * size) + 256 * MIB


def primary_tier(size: int, *, huge_pages: bool = True) -> Region:
    """Return the memory of an engine, for as many blocks as are in use at once."""
    slots = JOBS_AT_ONCE * BLOCKS_PER_JOB
    return Region.create(slots, size, name="kvstore-bench", populate=True, huge_pages=huge_pages)


def host_of(system: str) -> str:
    """Return where a system's I/O runs."""
    return "thread" if system == "vllm-fs" or system.endswith("-thread") else "process"


def in_huge_pages(system: str, memory: str) -> bool:
    """Return whether a system's memory is in huge pages; ``memory`` as in ``--memory``."""
    return system != "vllm-fs" if memory == "own" else memory == "huge"


@contextlib.contextmanager
def opened(name: str, directory: Path, region: Region, size: int, divisor: int, engines: int = 1) -> Iterator[System]:
    """Open ``vllm-fs`` or a tier (``-thread``: with I/O on a thread) with a directory over a primary tier."""
    system: System
    if name == "vllm-fs":
        system = VllmFsSystem(directory, region.view(), size)
    else:
        config: dict[str, Any] = {
            "backend": "file", "path": str(directory), "capacity": capacity_for(size, divisor, engines),
            "reserve": 0, "io": host_of(name), "load_timeout": 60, "store_timeout": 60,
            "store_backlog_bytes": "16GiB", "inflight_bytes": "2GiB",
        }  # fmt: skip
        system = TierSystem(config, region.view(), size, Namespace({"bench": "disk", "size": size}), name=name)
    system.looks_up = False  # As with vLLM's tier: the driver tracks its stored blocks.
    with contextlib.closing(system):
        yield system


def measure(driver: Driver, workload: Workload, directory: Path) -> Row:
    """Measure a run. Before loads it stores new blocks, because older ones may have been evicted."""
    driver.held.clear()
    if not workload.mix.store_share:
        driver.fill(workload)
    result = run_phase(driver, workload)
    row = driven_row("disk", driver, workload, result) | {"engines": 1}
    if not workload.spin:
        moved_gb = result.counts(row["op"]).blocks * workload.block_bytes / 1e9
        row |= {part: seconds / moved_gb for part, seconds in result.cpu_s.items()}
    if workload.mix.store_share:
        forget(driver, directory)
    return row


def forget(driver: Driver, directory: Path) -> None:
    """Make room after a run of vLLM's ``fs`` tier, which never removes a file."""
    if driver.system.name == "vllm-fs":
        driver.held.clear()
        for path in directory.rglob("*.bin"):
            path.unlink()


def measure_empty(blocks: BlockRows, region: Region, workload: Workload, directory: Path, divisor: int) -> Row:
    """Measure a run in a new directory."""
    try:
        with opened(EMPTY, directory, region, workload.block_bytes, divisor) as system:
            return measure(Driver(system, blocks), workload, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def fio(directory: Path, op: Op, size: int, divisor: int) -> Row:
    """Return the row of fio."""
    (row,) = fio_rows(
        directory, block_bytes=size, store_share=float(op == "store"), runtime_s=FIO_S,
        room_bytes=1024 * MIB // divisor,
    )  # fmt: skip
    return {"bench": "disk", "engines": 1, **row, "verified": False}


def finished(found: Mapping[str, list[Row]]) -> Iterator[Row]:
    """Yield the median of each system, with its ratios to fio and to vLLM's ``fs`` in the same run."""
    for rows in found.values():
        for number, row in enumerate(rows):
            for name, beside in (("of_fio", "fio"), ("over_fs", "vllm-fs")):
                if beside in found and row["system"] != beside and not (beside == "vllm-fs" and "fio" in row["system"]):
                    row[name] = row["gb_per_s"] / found[beside][number]["gb_per_s"]
        yield median_row(rows)


def measure_one(options: argparse.Namespace, root: Path, size: int, divisor: int, runs: int) -> Iterator[Row]:
    """Measure one engine of each system."""
    with contextlib.ExitStack() as stack:
        measures: dict[str, Callable[[Workload], Row]] = {}
        memories: dict[bool, tuple[Region, BlockRows]] = {}
        for name in options.systems:
            huge_pages = in_huge_pages(name, options.memory)
            if huge_pages not in memories:
                made = stack.enter_context(primary_tier(size, huge_pages=huge_pages))
                memories[huge_pages] = made, Payload("random", size, 1).prepare(made)
                stack.callback(memories[huge_pages][1].release)
            region, blocks = memories[huge_pages]
            directory = root / name
            if name == EMPTY:
                measures[name] = partial(measure_empty, blocks, region, directory=directory, divisor=divisor)
                continue
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
            system = stack.enter_context(opened(name, directory, region, size, divisor))
            driver = Driver(system, blocks)
            measures[name] = partial(measure, driver, directory=directory)
            # More than the tier holds, so that no counted store is the first write to its slot.
            filled = phase("store", size, 1, 0 if name == "vllm-fs" else capacity_for(size, divisor))
            run_phase(driver, filled)
            if driver.verify(filled).wrong:
                raise RuntimeError(f"{name} loads other bytes than it stored")
            forget(driver, directory)
        for op in OPS:
            for jobs in (1, JOBS_AT_ONCE):
                for spin in [False] if options.quick or options.no_spin else [False, True]:
                    workload = phase(op, size, jobs, RUN_MIB[jobs][size // KIB] * MIB // divisor, spin=spin)
                    systems: dict[str, Callable[[], Row]] = {"fio": partial(fio, root, op, size, divisor)}
                    systems |= {name: partial(each, workload) for name, each in measures.items()}
                    yield from finished(in_turns(runs, systems, warm_up=not options.quick))
                    os.sync()


class Engine:
    """One of several engines: a process of this program, controlled by lines on its standard input."""

    def __init__(self, system: str, memory: str, directory: Path, size: int, divisor: int, number: int) -> None:
        what = json.dumps([system, memory, str(directory), size, divisor, number])
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--engine", what], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            process_group=0,  # Ctrl-C ends the program, which then ends its engines.
        )  # fmt: skip

    def order(self, *what: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"an engine ended with status {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def be_engine(name: str, memory: str, directory: str, size: int, divisor: int, number: int) -> None:
    """Execute the commands on standard input: the main program of an :class:`Engine`.

    The blocks of an engine have its number as their seed. It loads the blocks of the next engine.
    """
    end_with_parent()
    with contextlib.ExitStack() as stack:
        region = stack.enter_context(primary_tier(size, huge_pages=in_huge_pages(name, memory)))
        system = stack.enter_context(opened(name, Path(directory), region, size, divisor, ENGINES))
        drivers = []
        for owner in (number, (number + 1) % ENGINES):
            blocks = Payload("random", size, owner).prepare(region)
            stack.callback(blocks.release)
            drivers.append(Driver(system, blocks))
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            op, first, jobs = json.loads(line)
            workload = phase(op, size, jobs, ENGINE_RUN_MIB * MIB // divisor)
            driver = drivers[op == "load"]
            driver.adopt(0 if op == "store" else workload.ops_max, BLOCKS_PER_JOB, first)
            started = time.monotonic()
            result = run_phase(driver, workload)
            print(
                json.dumps({
                    "started": started, "ended": started + result.seconds, "cpu": sum(result.cpu_s.values()),
                    "latencies": result.counts(op).latencies.as_text(),
                    "bytes": result.counts(op).blocks * size,
                }),
                flush=True,
            )  # fmt: skip


def measure_engines(engines: list[Engine], name: str, op: Op, size: int, jobs: int, firsts: Iterator[int]) -> Row:
    """Measure one concurrent run of several engines; loads read blocks stored just before, which is not measured."""
    first = next(firsts)
    for step in ("store",) if op == "store" else ("store", "load"):
        time.sleep(VISIBLE_S)
        for engine in engines:
            engine.order(step, first, jobs)
        found = [engine.answer() for engine in engines]
    moved = sum(each["bytes"] for each in found)
    latencies = Latencies()
    for each in found:
        latencies.merge(Latencies.from_text(each["latencies"]))
    seconds = max(each["ended"] for each in found) - min(each["started"] for each in found)
    return {
        "bench": "disk", "system": name, "host": host_of(name), "op": op, "block_bytes": size, "spin": False,
        "blocks_per_job": BLOCKS_PER_JOB, "jobs": jobs, "engines": len(engines), "gb_per_s": moved / 1e9 / seconds,
        "cpu_s_per_gb": sum(each["cpu"] for each in found) / (moved / 1e9), "verified": False,
        "latency_s_p50": latencies.percentile(50), "latency_s_p99": latencies.percentile(99),
    }  # fmt: skip


def measure_several(options: argparse.Namespace, root: Path, size: int, divisor: int, runs: int) -> Iterator[Row]:
    """Measure four engines of each system over one root."""
    numbers = iter(range(0, 1 << 40, 1 << 24))
    for op in OPS:
        for jobs in (1, JOBS_AT_ONCE):
            with contextlib.ExitStack() as stack:
                systems: dict[str, Callable[[], Row]] = {"fio": partial(fio, root, op, size, divisor)}
                for name in options.systems:
                    directory = root / f"{name}-engines"
                    directory.mkdir(mode=0o700)
                    stack.callback(shutil.rmtree, directory, ignore_errors=True)
                    engines = [
                        Engine(name, options.memory, directory, size, divisor, number) for number in range(ENGINES)
                    ]
                    for engine in engines:
                        stack.callback(engine.close)
                    for engine in engines:
                        engine.answer()
                    systems[name] = partial(measure_engines, engines, name, op, size, jobs, numbers)
                found = in_turns(runs, systems, warm_up=not options.quick)
            yield from (row for row in finished(found) if row["system"] != "fio")


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--directory", type=Path, default=Path(), help="on the drive to measure")
    parser.add_argument("--sizes", type=int, nargs="*", choices=list(RUN_MIB[1]), help="KiB per block")
    parser.add_argument("--no-spin", action="store_true", help="nothing beside a thread that spins in Python")
    parser.add_argument("--systems", nargs="*", default=SYSTEMS, choices=[*SYSTEMS, EMPTY])
    parser.add_argument("--memory", default="own", choices=["own", "huge", "small"], help="pages of the memory")
    parser.add_argument("--engines", nargs="*", type=int, default=[1, ENGINES], choices=[1, ENGINES])
    parser.add_argument("--engine", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        be_engine(*options.engine)
        return
    if EMPTY in options.systems and ENGINES in options.engines:
        parser.error(f"{EMPTY} needs --engines 1")
    needs(*(["vllm"] if "vllm-fs" in options.systems else []), programs=["fio"])
    divisor, runs = QUICK if options.quick else 1, runs_of(options, 5)
    with reporting(options, COLUMNS) as rows, scratch(options.directory) as root:
        for kib in options.sizes or ([128] if options.quick else [128, 2048, 8192]):
            if 1 in options.engines:
                rows += measure_one(options, root, kib * KIB, divisor, runs)
            if ENGINES in options.engines:
                rows += measure_several(options, root, kib * KIB, divisor, runs)


if __name__ == "__main__":
    main()
