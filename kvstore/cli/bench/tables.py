"""The tables of a measurement, for the terminal: numbers, and costs at services that charge for requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from kvstore.cli.report import Row
from kvstore.cli.terminal import Column, latency_text, print_line, print_table, size_text
from kvstore.tiers.base import TierStats

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

_COST: Final = "cost_usd_"
_COST_BYTES: Final = {"put": "sent_bytes", "get": "received_bytes"}
_COST_COLUMNS: Final = (
    Column("system", "system", left=True, style="bold"),
    Column("block_bytes", "block bytes"),
    Column("what", "what", left=True),
    Column("requests", "requests"),
    Column("size_bytes", "bytes"),
    Column("dollars", "dollars", style="bold"),
)


def print_measurement(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows of a measurement, without columns that have the same uninteresting value in all rows."""
    shown = [_shown(row) for row in rows]
    print_table(shown, _informative_columns(shown, _COLUMNS))


def _informative_columns(rows: Sequence[dict[str, Any]], columns: Sequence[Column]) -> list[Column]:
    """Return the columns, with rank 0 for those that distinguish rows, so that a narrow terminal keeps them.

    ``host``, ``mix`` and ``jobs`` are removed from the rows if they are equal in all of them.
    """
    distinguishing = {"spin"}
    for name in ("host", "mix", "jobs"):
        # fio always has a greater queue depth; that alone does not need a column.
        values = {row.get(name) for row in rows if row["system"] != "fio"}
        # The operation distinguishes pure stores from pure loads.
        if len(values) > 1 and not (name == "mix" and values <= {"store", "load"}):
            distinguishing.add(name)
        else:
            for row in rows:
                row.pop(name, None)
    return [replace(column, rank=0) if column.key in distinguishing else column for column in columns]


def environment_line(environment: Mapping[str, Any], target: Mapping[str, Any]) -> str:
    """Return one line about the environment of a measurement."""
    place = [f"{environment['system']}", f"{environment['cores_usable']} of {environment['cores']} cores"]
    if target:
        known = {True: "direct I/O", False: "no direct I/O: through the page cache", None: "in memory"}
        direct = known[target.get("direct_io")]
        place += [f"{target.get('filesystem')} on {target.get('device', 'an unknown device')}", direct]
    return f"kvstore {environment['kvstore']}, " + ", ".join(place)


def cost_rows(system: str, block_bytes: int, stats: TierStats) -> list[Row]:
    """Return one row per kind of request, and the total; empty for a tier without costs per request.

    The tier's gauges ``cost_usd_<kind>`` are the costs since it was opened.
    """
    counters = stats.backend_counters
    costs = {name[len(_COST) :]: value for name, value in stats.backend_gauges.items() if name.startswith(_COST)}
    requests = {what: counters.get(f"requests_{what}") for what in costs}
    sizes = {what: counters.get(_COST_BYTES.get(what, "")) for what in costs}
    if "total" in costs:
        requests["total"] = sum(count or 0 for count in requests.values())
        sizes["total"] = sum(size or 0 for size in sizes.values())
    return [
        {
            "system": system,
            "block_bytes": block_bytes,
            "what": what,
            "requests": requests[what],
            "size_bytes": sizes[what],
            "dollars": dollars,
        }
        for what, dollars in costs.items()
    ]


def print_costs(rows: Sequence[Row]) -> None:
    """Print the table of costs, if there are any."""
    if rows:
        print_line("Costs, of filling and clearing as well:")
        print_table([{**row, "dollars": f"{row['dollars']:.6f}"} for row in rows], _COST_COLUMNS)


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
