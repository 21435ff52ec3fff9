"""``kvstore-bench compare``: two reports side by side, with parameters, environment and numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

from kvstore.cli.bench.measure import BASELINES
from kvstore.cli.bench.tables import informative_columns
from kvstore.cli.command_line import Argument, Exit, ExitCode, JsonFlag, Option
from kvstore.cli.report import Report, Row, read_report
from kvstore.cli.terminal import (
    Column,
    latency_text,
    print_json_text,
    print_line,
    print_table,
    rounded_size,
    say,
    size_text,
)
from kvstore.errors import ConfigError
from kvstore.secret import shown

_IDENTITY: Final = (
    "bench", "system", "host", "op", "block_bytes", "blocks_per_job", "jobs", "mix", "spin", "rate", "policy",
    "capacity_bytes",
)  # fmt: skip
"""Fields that identify a row; rows with the same values are compared."""

_IRRELEVANT: Final = frozenset({"date", "free_bytes", "path", "paths"})
"""Fields that differ in every run and are not compared."""

_BETTER_HIGH: Final = {"gb_per_s": True, "ops_per_s": True, "latency_s_p50": False, "latency_s_p99": False,
                       "cpu_s_per_gb": False, "hit_rate": True}  # fmt: skip
_METRICS: Final = "gb_per_s,latency_s_p99"

_COLUMNS: Final = (
    Column("system", "system", left=True, style="bold"),
    Column("host", "I/O in", rank=4, left=True),
    Column("op", "op", left=True),
    Column("block", "block"),
    Column("jobs", "jobs", rank=2),
    Column("mix", "mix", rank=3, left=True),
    Column("policy", "policy", left=True),
    Column("capacity", "capacity"),
    Column("hits_a", "hits A"),
    Column("hits_b", "B"),
    Column("hits", "+/- hits", style="bold"),
    Column("gb_a", "GB/s A"),
    Column("gb_b", "B"),
    Column("gb", "+/- GB/s", style="bold"),
    Column("p99_a", "p99 A", rank=1),
    Column("p99_b", "B", rank=1),
    Column("p99", "+/- p99", style="bold"),
    Column("worse", "", left=True),
)

A = Annotated[Path, Argument(metavar="A.json", help="The report to compare with.")]
B = Annotated[Path, Argument(metavar="B.json", help="The report to check.")]
FailOver = Annotated[
    str | None,
    Option("--fail-over", metavar="PERCENT", help="Exit with status 1 if B is worse by more than this share."),
]
Metrics = Annotated[
    str, Option("--metric", metavar="NAMES", help=f"Metrics that --fail-over checks: {', '.join(_BETTER_HIGH)}.")
]


def compare(a: A, b: B, fail_over: FailOver = None, metric: Metrics = _METRICS, json: JsonFlag = False) -> None:
    """Compare two reports: parameters, machines and numbers."""
    limit = None if fail_over is None else _share(fail_over)
    metrics = [name.strip() for name in metric.split(",") if name.strip()]
    for name in metrics:
        if name not in _BETTER_HIGH:
            raise ConfigError(f"--metric has {shown(name)}. Expected names of: {', '.join(_BETTER_HIGH)}.")
    first, second = read_report(a), read_report(b)
    rows = compared(first["rows"], second["rows"], metrics, limit)
    changed = {part: differences(first.get(part, {}), second.get(part, {})) for part in ("parameters", "environment")}
    missing = {"a": _unmatched(first["rows"], second["rows"]), "b": _unmatched(second["rows"], first["rows"])}
    if not rows:
        raise ConfigError(f"{str(a)!r} and {str(b)!r} have no row in common. Compare reports of the same measurement.")
    worse = [row for row in rows if row["worse"]]
    if json:
        only = {side: [_identified(row) for row in unmatched] for side, unmatched in missing.items()}
        print_json_text(Report("compare", rows=rows).as_json(differences=changed, only_in=only, worse=len(worse)))
    else:
        _print(rows, changed, missing)
    for row in worse:
        say(f"WORSE: {_description(row)}: {'; '.join(row['worse'])}.")
    if any(row["verified_b"] is False and row["verified_a"] for row in rows):
        say("Note: B was not verified where A was.")
    if worse:
        raise Exit(ExitCode.FAILED)


def compared(first: list[Row], second: list[Row], metrics: Sequence[str] = (), limit: float | None = None) -> list[Row]:
    """Return one row per row in both reports, with the relative change of each number.

    Except for baselines, ``worse`` lists those of the ``metrics`` that got worse by more than the limit.
    """
    by_identity = {_identity(row): row for row in second}
    rows = []
    for row in first:
        other = by_identity.get(_identity(row))
        if other is None:
            continue
        found: Row = {name: row.get(name) for name in _IDENTITY if row.get(name) is not None}
        found |= {"verified_a": row.get("verified"), "verified_b": other.get("verified"), "worse": []}
        for name, better_high in _BETTER_HIGH.items():
            a, b = row.get(name), other.get(name)
            if a is None or b is None:
                continue
            change = (b - a) / a if a else 0.0
            found |= {f"{name}_a": a, f"{name}_b": b, f"{name}_change": change}
            loss = -change if better_high else change
            if limit is not None and name in metrics and loss > limit and row.get("system") not in BASELINES:
                found["worse"].append(f"{name} {_signed_percent(change)}, allowed {100 * limit:.15g}%")
        rows.append(found)
    return rows


def differences(first: Mapping[str, Any], second: Mapping[str, Any], prefix: str = "") -> dict[str, list[Any]]:
    """Return the differences of two objects as dotted names with both values, without fields that always differ."""
    found: dict[str, list[Any]] = {}
    for name in sorted({*first, *second}):
        a, b = first.get(name), second.get(name)
        if name in _IRRELEVANT or a == b:
            continue
        if isinstance(a, list) and isinstance(b, list) and len(a) == len(b) and all(
            isinstance(item, dict) for item in (*a, *b)
        ):  # fmt: skip
            for i, (one, two) in enumerate(zip(a, b, strict=True)):
                found |= differences(one, two, f"{prefix}{name}[{i}].")
        elif isinstance(a, dict) and isinstance(b, dict):
            found |= differences(a, b, f"{prefix}{name}.")
        else:
            found[prefix + name] = [a, b]
    return found


def _print(rows: list[Row], changed: Mapping[str, Mapping[str, list[Any]]], missing: Mapping[str, list[Row]]) -> None:
    for part, found in changed.items():
        print_line(f"{part.capitalize()}: {'the same' if not found else ''}".rstrip())
        for name, (a, b) in found.items():
            print_line(f"  {name}: {a} -> {b}")
    views = [_shown(row) for row in rows]
    print_table(views, informative_columns(views, _COLUMNS))
    for side, unmatched in missing.items():
        for name in dict.fromkeys(_description(row) for row in unmatched):
            print_line(f"Only in {side.upper()}: {name}")


def _shown(row: Row) -> dict[str, Any]:
    view: dict[str, Any] = {name: row.get(name) for name in ("system", "host", "op", "jobs", "mix")}
    if row.get("block_bytes"):
        view["block"] = size_text(row["block_bytes"])
    for side in "ab":
        rate = row.get(f"gb_per_s_{side}")
        view[f"gb_{side}"] = None if rate is None else f"{rate:.2f}"
        view[f"p99_{side}"] = latency_text(row.get(f"latency_s_p99_{side}"))
    if row.get("bench") == "replay":
        view["policy"] = row.get("policy")
        view["capacity"] = rounded_size(row["capacity_bytes"]) if row.get("capacity_bytes") else None
        view["hits_a"], view["hits_b"] = (f"{100 * row[f'hit_rate_{side}']:.2f}%" for side in "ab")
        view["hits"] = _signed_percent(row["hit_rate_change"])
    view["gb"] = _signed_percent(row.get("gb_per_s_change"))
    view["p99"] = _signed_percent(row.get("latency_s_p99_change"))
    view["worse"] = "worse" if row["worse"] else None
    return view


def _signed_percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:+.1f}%"


def _identity(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in _IDENTITY)


def _unmatched(rows: list[Row], others: list[Row]) -> list[Row]:
    known = {_identity(row) for row in others}
    return [row for row in rows if _identity(row) not in known]


def _identified(row: Row) -> str:
    """Return the fields that identify a row."""
    return ", ".join(f"{name} {row[name]}" for name in _IDENTITY if row.get(name) is not None and name != "bench")


def _description(row: Row) -> str:
    """Return a description of a row for a message."""
    words = [row.get("system"), row.get("op"), size_text(row["block_bytes"]) if row.get("block_bytes") else None]
    words += [row.get("policy"), rounded_size(row["capacity_bytes"]) if row.get("capacity_bytes") else None]
    more = [f"{row['jobs']} jobs of {row.get('blocks_per_job')}" if row.get("jobs") else None, row.get("mix")]
    more += [f"{row['rate']:g}/s" if row.get("rate") else None, row.get("host"), "spin" if row.get("spin") else None]
    return ", ".join([" ".join(str(word) for word in words if word is not None), *(item for item in more if item)])


def _share(text: str) -> float:
    """Parse ``"10%"`` or ``"10"``: percent."""
    try:
        value = float(text.strip().removesuffix("%"))
        if not 0 <= value <= 1e6:
            raise ValueError
    except ValueError:
        raise ConfigError(f"--fail-over is {shown(text)}. Expected a percentage such as 10%.") from None
    return value / 100
