"""The JSON format of all reports: schema, environment, rows.

The programs in ``bench/`` also use it. It needs only the standard library.
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import io
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import kvstore
from kvstore.errors import ConfigError

Row = dict[str, Any]
"""One line of a table; docs/kvstore-bench.md lists the keys, which end with their units."""

SCHEMA: Final = 1

_PACKAGES: Final = (
    "numpy", "msgspec", "xxhash", "uvloop", "vllm", "torch", "redis", "aioboto3", "httptools", "zstandard",
)  # fmt: skip


@dataclass(slots=True)
class Report:
    """Results of a command."""

    command: str
    rows: list[Row] = field(default_factory=list)
    parameters: dict[str, Any] = field(default_factory=dict)  # Without secrets.
    environment: dict[str, Any] = field(default_factory=dict)
    """Facts about the machine, in addition to those of :func:`environment`."""
    notes: list[str] = field(default_factory=list)
    """Remarks, such as reasons for missing measurements."""
    complete: bool = True  # False after an interruption.

    def as_dict(self, **more: Any) -> dict[str, Any]:
        """Return the report as plain JSON values, with additional fields."""
        return {
            "schema": SCHEMA,
            "tool": "kvstore-bench",
            "command": self.command,
            "complete": self.complete,
            "parameters": self.parameters,
            "environment": environment(**self.environment),
            "notes": self.notes,
            "rows": self.rows,
            **more,
        }

    def as_csv(self) -> str:
        """Return the rows as CSV with a header line, without histograms; lists and objects are JSON."""
        names = [name for name in dict.fromkeys(name for row in self.rows for name in row) if name != "latency_hdr"]
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(names)
        for row in self.rows:
            values = (row.get(name) for name in names)
            writer.writerow([json.dumps(value) if isinstance(value, dict | list) else value for value in values])
        return out.getvalue()

    def as_json(self, **more: Any) -> str:
        """Return the report as JSON text, with additional fields."""
        return json.dumps(self.as_dict(**more), indent=1, ensure_ascii=False, allow_nan=False)


def read_report(path: Path) -> dict[str, Any]:
    """Read a report back. ``ConfigError``: the file can't be read, or is not a report of this schema."""
    try:
        value: Any = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{str(path)!r} can't be read: {error.strerror}. Give a report that exists.") from error
    except ValueError:
        raise ConfigError(
            f"{str(path)!r} is not valid JSON. Give a report that kvstore-bench wrote with --json."
        ) from None
    value = value if isinstance(value, dict) else {}
    rows = value.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{str(path)!r} has no rows. Give a report that kvstore-bench wrote with --json.")
    if value.get("schema") != SCHEMA:
        raise ConfigError(
            f"{str(path)!r} has schema {value.get('schema')!r}. Expected {SCHEMA}. "
            "Read it with the release that wrote it."
        )
    return dict(value)


def environment(**more: object) -> dict[str, Any]:
    """Return the facts about the machine that affect measurements, and the given ones."""
    return {
        "kvstore": kvstore.__version__,
        "git": _git_commit(),
        "python": platform.python_version(),
        "packages": _versions(),
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **more,
    }


def device_of(path: Path) -> dict[str, Any]:
    """Return file system, device and mount options of an existing path, and the model of its drive if known."""
    number = path.stat().st_dev
    wanted = f"{os.major(number)}:{os.minor(number)}"
    found: dict[str, Any] = {"filesystem": "unknown"}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[2] == wanted:
            kind, source, *_ = line.partition(" - ")[2].split()
            found = {"filesystem": kind, "device": source, "mount_options": fields[5]}
    drive = Path(f"/sys/dev/block/{wanted}")
    if (drive / "partition").exists():
        drive = drive.resolve().parent
    model, rotational = drive / "device/model", drive / "queue/rotational"
    if model.exists():
        found["model"] = model.read_text().strip()
    if rotational.exists():
        found["rotational"] = rotational.read_text().strip() == "1"
    return found


def probe_direct(directory: Path) -> bool:
    """Return whether files in a directory can be opened for direct I/O."""
    path = directory / f".kvstore-bench-probe-{os.getpid()}"
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o600))
    except OSError:
        return False
    finally:
        # A failed open may have created the file; on a read-only file system, even its removal fails.
        with contextlib.suppress(OSError):
            path.unlink()
    return True


def median_row(rows: Sequence[Mapping[str, Any]]) -> Row:
    """Merge the rows of repeated runs: the median of each measured number, and the number of runs."""
    merged = dict(rows[0])
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if isinstance(row.get(name), float)]
        if values:
            merged[name] = statistics.median(values)
    return {**merged, "runs": len(rows)}


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if "model name" in line), "unknown")


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _git_commit() -> str | None:
    """Return the commit of kvstore's checkout, with "-dirty" if it has changes; None outside a checkout."""
    root = Path(kvstore.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
