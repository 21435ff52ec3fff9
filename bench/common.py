"""Shared parts of the programs here: arguments, runs in turns, rows, tables, JSON and exit statuses.

Reports have the format of kvstore-bench, whose ``plot`` reads them. Exit statuses are those of
kvstore-bench, too.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import importlib.util
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final


def needs(*packages: str, programs: Sequence[str] = ()) -> None:
    """End the program with status 2 if packages (by the names of their modules) or programs are not installed.

    Modules call this before they import the packages.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    missing += [name for name in programs if shutil.which(name) is None]
    if missing:
        print(f"{_NAME} needs {', '.join(missing)}: not installed. See bench/README.md.", file=sys.stderr)
        sys.exit(_UNUSABLE)


_NAME: Final = Path(sys.argv[0]).name
_FAILED, _UNUSABLE, _INTERRUPTED = 1, 2, 130
_SET_DEATH_SIGNAL: Final = 1
"""PR_SET_PDEATHSIG."""

needs("hdrh", "rich", "typer")

from kvstore.cli.bench.driver import Driver, PhaseResult
from kvstore.cli.bench.measure import phase_row
from kvstore.cli.bench.systems import Op
from kvstore.cli.bench.workload import Workload
from kvstore.cli.report import SCHEMA, Row, environment, median_row
from kvstore.cli.terminal import cell
from kvstore.errors import ConfigError, KVStoreError

__all__ = [
    "Row",
    "arguments",
    "bytes_of",
    "driven_row",
    "end_with_parent",
    "in_turns",
    "leave_page_cache",
    "median_interval",
    "median_row",
    "needs",
    "percentile",
    "print_table",
    "reporting",
    "run_phase",
    "runs_of",
    "scratch",
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


def bytes_of(options: argparse.Namespace, usual_mib: int, quick_mib: int) -> int:
    """Return the bytes of a run: those given with ``--mib``, or the program's default."""
    return (options.mib or (quick_mib if options.quick else usual_mib)) * 1024**2


@contextlib.contextmanager
def reporting(options: argparse.Namespace, columns: Sequence[str], **more: object) -> Iterator[list[Row]]:
    """Yield a list for rows; at the end, also after a failure, print it as a table and write ``--json``.

    Failures of a medium, a server or another program become one line and an exit status, as do interruptions. ``more``
    is added to the environment of the report.
    """
    rows: list[Row] = []
    status: int | None = None
    try:
        yield rows
        status = 0
    except KeyboardInterrupt:
        status = _INTERRUPTED
        print("interrupted: what follows is what was complete", file=sys.stderr)
    except (KVStoreError, RuntimeError, OSError, subprocess.SubprocessError) as error:
        status = _UNUSABLE if isinstance(error, ConfigError) else _FAILED
        print(f"{_NAME}: {error}", file=sys.stderr)
    finally:
        print_table(rows, columns)
        if options.json is not None:
            report = {"schema": SCHEMA, "complete": status == 0, "environment": environment(**more), "rows": rows}
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    if status:
        sys.exit(status)


@contextlib.contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """Yield an empty directory below ``parent``, named for the program; remove it at the end.

    A run that was killed leaves its directory, which the next run empties.

    Raises:
        ConfigError: Another run uses the directory.
    """
    directory = parent / f"bench-{_NAME.removesuffix('.py')}.tmp"
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"Another run uses {directory}. Wait for its end, or use another --directory.") from None
        for path in directory.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(descriptor)


def leave_page_cache(directory: Path) -> None:
    """Write all files of a directory to the disk, and drop their pages."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def end_with_parent() -> None:
    """Make the kernel kill this process when its parent ends, so that a killed program leaves no process behind."""
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


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
