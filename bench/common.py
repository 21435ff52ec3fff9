"""Shared by the benchmarks: arguments, rows, tables and JSON."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import mmap
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# The form of a report is that of kvstore-bench, so that its compare and plot read what the programs here write.
from kvstore.cli.measuring.spinner import Spinner
from kvstore.cli.reporting.report import SCHEMA, Row, environment, median_row
from kvstore.cli.reporting.terminal import cell

__all__ = [
    "Row", "arguments", "at_once", "beside_spinner", "environment", "median_interval", "median_row", "percentile",
    "print_table", "shared_memory", "write_json",
]  # fmt: skip


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that knows ``--json`` and ``--quick``, which every benchmark has.

    From here on SIGTERM ends the program as Ctrl-C does: the servers that it started are stopped.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to a file, too")
    parser.add_argument(
        "--quick", action="store_true", help="fewer sizes, fewer and shorter runs: to see that it works"
    )
    return parser


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which a share of the values lies; the nearest one there is."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median, by the binomial distribution of ranks; of five or fewer, all of them."""
    ordered = sorted(values)
    out = max(0, int((len(ordered) - 1.96 * len(ordered) ** 0.5) / 2))
    return ordered[out], ordered[-1 - out]


def print_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Print rows as a Markdown table; a column that a row lacks is empty."""
    cells = [[cell(row.get(column)) for column in columns] for row in rows]
    widths = [
        max(len(column), *(len(line[i]) for line in cells)) if cells else len(column)
        for i, column in enumerate(columns)
    ]
    for line in [list(columns), ["-" * width for width in widths], *cells]:
        print("| " + " | ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) + " |")


def write_json(path: Path | None, rows: Sequence[Row], **more: object) -> None:
    """Write ``{"schema": 1, "environment": …, "rows": […]}``, if there is a path."""
    if path is not None:
        text = json.dumps({"schema": SCHEMA, "environment": environment(**more), "rows": list(rows)}, indent=1)
        path.write_text(text + "\n")


def shared_memory(size: int) -> mmap.mmap:
    """Return memory that another process can map."""
    descriptor = os.memfd_create("kvstore-bench")
    os.truncate(descriptor, size)
    memory = mmap.mmap(descriptor, size)
    os.close(descriptor)
    return memory


@contextlib.contextmanager
def beside_spinner(wanted: bool) -> Iterator[Row]:
    """Run beside a thread that spins in Python, if wanted; the row yielded has its ``spin_rate`` afterwards."""
    row: Row = {}
    if not wanted:
        yield row
        return
    spinner = _spinner()
    with spinner:
        steps, started = spinner.steps, time.perf_counter()
        yield row
        row["spin_rate"] = spinner.share_of(spinner.steps - steps, time.perf_counter() - started)


@functools.cache
def _spinner() -> Spinner:
    """Return the one of this program; its rate alone is measured once."""
    return Spinner()


async def at_once(
    inflight: int, numbers: range, work: Callable[[int], Awaitable[None]]
) -> tuple[float, float, list[float]]:
    """Do the work for all numbers, so many at once; return seconds, CPU seconds, and how long each took."""
    latencies: list[float] = []
    waiting = iter(numbers)

    async def worker() -> None:
        for number in waiting:
            begun = time.perf_counter()
            await work(number)
            latencies.append(time.perf_counter() - begun)

    started, cpu = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        for _ in range(inflight):
            group.create_task(worker())
    return time.perf_counter() - started, time.process_time() - cpu, latencies
