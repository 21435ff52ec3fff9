"""Shared parts of the programs here: arguments, runs in turns, rows, tables and JSON.

Reports have the format of kvstore-bench, whose ``compare`` and ``plot`` read them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvstore.cli.measuring.driver import Driver, PhaseResult
from kvstore.cli.measuring.measure import phase_row
from kvstore.cli.measuring.systems import Op
from kvstore.cli.measuring.workload import Workload
from kvstore.cli.reporting.report import SCHEMA, Row, environment, median_row
from kvstore.cli.reporting.terminal import cell

__all__ = [
    "Row",
    "arguments",
    "driven_row",
    "in_turns",
    "median_interval",
    "median_row",
    "percentile",
    "print_table",
    "reporting",
    "run_phase",
    "runs_of",
    "shared_memory",
]  # fmt: skip


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of ``--json``, ``--quick`` and ``--runs``, with the program's docstring as its help.

    After this call SIGTERM interrupts the program like Ctrl-C, so that it stops its servers.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to a file")
    parser.add_argument("--quick", action="store_true", help="a short trial: fewer sizes, fewer and shorter runs")
    parser.add_argument("--runs", type=int, metavar="N", help="runs of each system; a row is their median")
    return parser


def runs_of(options: argparse.Namespace, usual: int, quick: int = 1) -> int:
    """Return the number of runs: the given one, or the program's default."""
    return max(1, options.runs or (quick if options.quick else usual))


@contextlib.contextmanager
def reporting(options: argparse.Namespace, columns: Sequence[str], **more: object) -> Iterator[list[Row]]:
    """Yield a list for rows; at the end, or after an interruption, print it as a table and write ``--json``.

    ``more`` is added to the environment of the report.
    """
    rows: list[Row] = []
    try:
        yield rows
    except KeyboardInterrupt:
        print("interrupted: what follows is what was complete", file=sys.stderr)
    print_table(rows, columns)
    if options.json is not None:
        report = {"schema": SCHEMA, "environment": environment(**more), "rows": rows}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def in_turns(runs: int, systems: Mapping[str, Callable[[], Row]], *, warm_up: bool = False) -> dict[str, list[Row]]:
    """Measure each system once per run; return the rows of each. Each run begins with the next system.

    With ``warm_up`` there is one more run at the start, which does not count.
    """
    names = list(systems)
    found: dict[str, list[Row]] = {name: [] for name in names}
    for run in range(-1 if warm_up else 0, runs):
        first = run % len(names)
        for name in names[first:] + names[:first]:
            row = systems[name]()
            if run >= 0:
                found[name].append(row)
    return found


def run_phase(driver: Driver, workload: Workload) -> PhaseResult:
    """Run a phase.

    Raises:
        RuntimeError: A block was not stored or loaded, or has wrong bytes.
    """
    result = driver.run(workload)
    errors = result.store.errors + result.load.errors
    misses = result.misses + result.lookup.blocks - result.hits
    if errors or misses or result.wrong:
        found = f"{dict(errors)}, {misses} misses, {len(result.wrong)} wrong"
        raise RuntimeError(f"{driver.system.name}: {found} {driver.system.last_error()}")
    return result


def driven_row(bench: str, driver: Driver, workload: Workload, result: PhaseResult) -> Row:
    """Return the row of a phase that only stores or only loads."""
    op: Op = "store" if workload.mix.store_share else "load"
    latencies = result.counts(op).latencies
    row = {"bench": bench, **phase_row(op, result, workload, driver.system)}
    row |= {"latency_s_p50": latencies.percentile(50), "latency_s_p99": latencies.percentile(99)}
    if workload.spin:  # The spinning thread's CPU time can't be separated from the system's.
        del row["cpu_s_per_gb"]
    return row | {"verified": result.verified_blocks > 0}


def percentile(values: Sequence[float], share: float) -> float:
    """Return the percentile for a share (0 to 1) as one of the values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median, by the binomial distribution of ranks; of up to 7, the whole range."""
    ordered = sorted(values)
    out = max(0, int((len(ordered) - 1.96 * len(ordered) ** 0.5) / 2))
    return ordered[out], ordered[-1 - out]


def print_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Print rows as a Markdown table; missing values are empty cells."""
    lines = [list(columns), *([cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    for line in lines:
        print("| " + " | ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) + " |")


def shared_memory(size: int) -> mmap.mmap:
    """Return memory that another process can map."""
    descriptor = os.memfd_create("kvstore-bench")
    os.truncate(descriptor, size)
    memory = mmap.mmap(descriptor, size)
    os.close(descriptor)
    return memory
