"""The table of a measurement, for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from kvstore.cli.reporting.terminal import Column, print_table
from kvstore.quantity import ByteSize

__all__ = ["environment_line", "keep_telling", "latency_text", "print_measurement", "size_text"]

_COLUMNS: Final = (
    Column("system", "system", left=True, style="bold"),
    Column("host", "I/O in", rank=9, left=True),
    Column("op", "op", left=True),
    Column("block", "block"),
    Column("jobs", "jobs", rank=3),
    Column("mix", "mix", rank=8, left=True),
    Column("spin", "spin", rank=1),
    Column("gb", "GB/s", style="bold"),
    Column("ops", "blocks/s", rank=7),
    Column("p50", "p50", rank=1),
    Column("p90", "p90", rank=8),
    Column("p99", "p99"),
    Column("p99_9", "p99.9", rank=2),
    Column("max", "max", rank=5),
    Column("cpu", "CPUs/GB", rank=4),
    Column("device", "of device", rank=1),
    Column("spin_rate", "py left", rank=1),
    Column("hits", "hits", rank=3),
    Column("errors", "errors", left=True),
    Column("verified", "verified"),
)


def print_measurement(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows of a measurement, without columns that have the same uninteresting value in all rows."""
    shown = [_shown(row) for row in rows]
    print_table(shown, keep_telling(shown, _COLUMNS))


def keep_telling(rows: Sequence[dict[str, Any]], columns: Sequence[Column]) -> list[Column]:
    """Return columns such that those that distinguish rows stay in a narrow terminal.

    Args:
        rows: The shown rows; ``host``, ``mix`` and ``jobs`` are removed if they are equal in all rows.
        columns: Columns.
    """
    telling = {"spin"}
    for name in ("host", "mix", "jobs"):
        # fio always has a greater queue depth; that alone does not need a column.
        values = {row.get(name) for row in rows if row["system"] != "fio"}
        # The operation distinguishes pure stores from pure loads.
        if len(values) > 1 and not (name == "mix" and values <= {"store", "load"}):
            telling.add(name)
        else:
            for row in rows:
                row.pop(name, None)
    return [replace(column, rank=0) if column.key in telling else column for column in columns]


def environment_line(environment: Mapping[str, Any], target: Mapping[str, Any]) -> str:
    """Return one line about the environment of a measurement."""
    place = [f"{environment['system']}", f"{environment['cores_usable']} of {environment['cores']} cores"]
    if target:
        known = {True: "direct I/O", False: "no direct I/O: through the page cache", None: "in memory"}
        direct = known[target.get("direct_io")]
        place += [f"{target.get('filesystem')} on {target.get('device', 'an unknown device')}", direct]
    return f"kvstore {environment['kvstore']}, " + ", ".join(place)


def latency_text(seconds: float | None) -> str | None:
    """Return a latency with the unit that suits it: ``"85 us"``, ``"1.24 ms"``, ``"2.1 s"``."""
    if seconds is None:
        return None
    for unit, scale in (("us", 1e6), ("ms", 1e3), ("s", 1.0)):
        value = seconds * scale
        if value < 999.5 or unit == "s":
            return f"{value:.0f} {unit}" if value >= 99.5 else f"{value:.3g} {unit}"
    return None


def size_text(size_bytes: int) -> str:
    """Return a size with its unit: ``"128KiB"``."""
    return ByteSize(size_bytes).text


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    errors = ", ".join(f"{count} {name}" for name, count in row.get("errors", {}).items())
    rate = row.get("gb_per_s")
    shown = {
        "system": row["system"],
        "host": row.get("host"),
        "op": row["op"],
        "block": size_text(row["block_bytes"]),
        "jobs": row.get("jobs"),
        "mix": row.get("mix"),
        "spin": True if row.get("spin") else None,
        "gb": None if rate is None else f"{rate:.2f}" if rate < 100 else f"{rate:.0f}",
        "ops": None if row.get("ops_per_s") is None else f"{row['ops_per_s']:,.0f}",
        "cpu": None if row.get("cpu_s_per_gb") is None else f"{row['cpu_s_per_gb']:.2f}",
        "device": _percent(row.get("of_device")),
        "spin_rate": _percent(row.get("spin_rate")),
        "hits": _percent(row.get("hit_rate")),
        "errors": errors or None,
        "verified": row.get("verified") if row["op"] == "load" else None,
    }
    for name in ("p50", "p90", "p99", "p99_9", "max"):
        shown[name] = latency_text(row.get(f"latency_s_{name}"))
    return shown


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.0f}%"
