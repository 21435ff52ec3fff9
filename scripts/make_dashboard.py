#!/usr/bin/env python3
"""Writes deploy/grafana/dashboards/kvstore.json from the list of metrics in kvstore.vllm.metrics.

.venv/bin/python scripts/make_dashboard.py

Metrics without a panel below get one in the last row, so that the dashboard shows all metrics.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from promql import DECLARED, check_labels, series
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingHistogramMetadata

DASHBOARD_FILE = Path(__file__).parents[1] / "deploy/grafana/dashboards/kvstore.json"

_SOURCE = {"type": "prometheus", "uid": "prometheus"}
_CHOSEN = "=~'$instance'"
"""Selector of the instances chosen at the top of the dashboard."""
_WIDTH, _HEIGHT = 12, 8
"""Size of a panel; the dashboard is 24 wide."""


@dataclass(frozen=True)
class Panel:
    """One panel."""

    title: str
    queries: tuple[tuple[str, str], ...]  # PromQL and legend of each of its series.
    unit: str = "short"  # Grafana's name of the unit.
    about: str = ""  # Description; by default that of the list of metrics.
    states: tuple[tuple[str, str], ...] = ()  # Names and colours of the values of a state; such a panel is a timeline.


def _legend(by: tuple[str, ...]) -> str:
    return " ".join(f"{{{{{label}}}}}" for label in by)


def total(name: str, *by: str, how: str = "sum") -> tuple[str, str]:
    """Return the query of a gauge over the selected instances, and its legend."""
    check_labels(name, set(by))
    return f"{how} by ({', '.join(by)}) ({series(name, instance=_CHOSEN)})", _legend(by) or name


def rate(name: str, *by: str, **labels: str) -> tuple[str, str]:
    """Return the query of a counter's increase per second, and its legend."""
    check_labels(name, set(by))
    chosen = series(name, instance=_CHOSEN, **labels)
    return f"sum by ({', '.join(by)}) (rate({chosen}[$__rate_interval]))", _legend(by) or name


def quantile(name: str, share: float) -> tuple[str, str]:
    """Return the query of a quantile of a histogram by tier, and its legend."""
    chosen = series(name, instance=_CHOSEN)
    query = f"histogram_quantile({share}, sum by (tier, le) (rate({chosen}[$__rate_interval])))"
    return query, f"{{{{tier}}}} {100 * share:g} %"


def named(query: tuple[str, str], suffix: str) -> tuple[str, str]:
    """Return a query with a suffix in its legend."""
    return query[0], f"{query[1]} {suffix}"


def _share(part: tuple[str, str], whole: tuple[str, str]) -> tuple[str, str]:
    return f"{part[0]} / {whole[0]}", part[1]


_BREAKERS = (("closed", "green"), ("half open", "yellow"), ("open", "red"))

ROWS: dict[str, tuple[Panel, ...]] = {
    "Overview": (
        Panel(
            "Tiers that are ready",
            (total("ready", "instance", "tier", how="min"),),
            states=(("not ready", "red"), ("ready", "green")),
        ),
        Panel(
            "Prompt tokens not computed",
            (
                (
                    f"sum by (source) (rate(vllm:prompt_tokens_cached_by_source_total"
                    f"{{instance{_CHOSEN}}}[$__rate_interval]))",
                    "{{source}}",
                ),
            ),
            about="By where they came from: the device's own cache, host memory, disk, or a remote tier.",
        ),
        Panel(
            "Lookups answered by a tier",
            (
                _share(
                    rate("lookups", "tier", result="='hit'"),
                    rate("lookups", "tier", result="=~'hit|miss'"),
                ),
            ),
            "percentunit",
            "Share of lookups that were hits. A tier is asked only for what those above it lack.",
        ),
        Panel("Lookups of the manager by answer", (rate("manager_lookups", "result"),), "ops"),
        Panel(
            "Decisions of the gate",
            (rate("gate_blocks", "decision"),),
            "ops",
            "Blocks loaded; computed because that is estimated to be faster; abandoned because their load fell behind; "
            "read only to measure a tier.",
        ),
        Panel(
            "Time saved and lost by loading",
            (rate("gate_seconds", "effect"),),
            "s",
            "Estimated seconds of requests per second, against computing everything.",
        ),
        Panel(
            "Hedged reads",
            (rate("hedged_blocks"), rate("hedges_won_blocks")),
            "ops",
            "Blocks of slow loads also requested from a second tier, and those that it delivered first.",
        ),
    ),
    "Throughput and latency": (
        Panel("Bytes loaded", (rate("loaded_bytes", "tier"),), "Bps"),
        Panel("Bytes stored", (rate("stored_bytes", "tier"),), "Bps"),
        Panel("Time of a load", (quantile("load_seconds", 0.5), quantile("load_seconds", 0.99)), "s"),
        Panel("Time of a store", (quantile("store_seconds", 0.5), quantile("store_seconds", 0.99)), "s"),
    ),
    "Queues": (
        Panel("Jobs in flight", (total("jobs_in_flight", "tier"),)),
        Panel("Bytes in flight", (total("bytes_in_flight", "tier"),), "bytes"),
        Panel(
            "Stores that wait, or were given up waiting",
            (named(total("waiting_blocks", "tier"), "waiting"), named(rate("dropped_blocks", "tier"), "dropped/s")),
        ),
        Panel("Requests", (total("requests"), total("promoting_blocks"))),
        Panel(
            "Automatic admission",
            (
                named(total("admission_saved_blocks", "tier"), "writes saved"),
                named(total("admission_lost_hits", "tier"), "hits lost"),
            ),
        ),
    ),
    "Room": (
        Panel(
            "Room on the medium",
            (named(total("used_bytes", "tier"), "used"), named(total("capacity_bytes", "tier"), "capacity")),
            "bytes",
        ),
        Panel("Blocks of a tier", (total("blocks", "tier"),)),
        Panel("Blocks that left a tier, by cause", (rate("removed_blocks", "tier", "cause"),), "ops"),
        Panel("Slots of the primary tier", (total("primary_slots", "state"), rate("primary_evicted_blocks"))),
        Panel("Bytes of a row, by group of layers", (total("primary_row_bytes", "group"),), "bytes"),
    ),
    "Faults": (
        Panel(
            "Loads that failed, by cause",
            (rate("load_blocks", "tier", "outcome", outcome="!='ok'"),),
            "ops",
            "Each is a miss: the engine computes the block. corrupt: the record did not verify.",
        ),
        Panel(
            "Stores that were left out, by cause",
            (
                rate("store_blocks", "tier", "outcome", outcome="!~'ok|exists'"),
                named(rate("shed_blocks", "tier"), "shed"),
            ),
            "ops",
            "shed: too much was in flight, or the breaker is open. no_space: nothing more may be evicted.",
        ),
        Panel(
            "Breakers",
            (
                named(total("load_breaker_state", "instance", "tier", how="max"), "loads"),
                named(total("store_breaker_state", "instance", "tier", how="max"), "stores"),
            ),
            about="Open: the medium failed several times in a row and is left alone for a while.",
            states=_BREAKERS,
        ),
        Panel(
            "Errors of kvstore's own",
            (
                named(rate("internal_errors", "tier"), "internal"),
                named(rate("tier_errors", "tier"), "of the tier"),
                named(total("tier_dead", "tier", how="max"), "dead"),
            ),
            about="Should be 0; please report others.",
        ),
    ),
}
"""The panels, by row."""

UNITS = {"bytes": "bytes", "seconds": "s"}
"""Grafana's units by the last word of a metric's name."""


def rows() -> dict[str, tuple[Panel, ...]]:
    """Return all panels by row: those above, and one for each remaining metric."""
    shown = set(re.findall(r"vllm:kvstore_\w+", json.dumps([[p.queries for p in row] for row in ROWS.values()])))
    names = [full.removeprefix("vllm:kvstore_") for full in DECLARED]
    rest = [name for name in names if series(name) not in shown]
    return ROWS | {"All other metrics": tuple(_panel_of(name) for name in rest)}


def _panel_of(name: str) -> Panel:
    metadata = DECLARED[f"vllm:kvstore_{name}"]
    labels = tuple(metadata.labelnames)
    unit = UNITS.get(name.rpartition("_")[2], "short")
    if isinstance(metadata, OffloadingHistogramMetadata):
        return Panel(name, (quantile(name, 0.5), quantile(name, 0.99)), unit)
    if isinstance(metadata, OffloadingCounterMetadata):
        return Panel(f"{name}, a second", (rate(name, *labels),), unit)
    return Panel(name, (total(name, "instance", *labels),), unit)


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana's JSON."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in rows().items():
        if not row:
            continue
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False,
             "gridPos": {"x": 0, "y": top, "w": 24, "h": 1}, "panels": []}
        )  # fmt: skip
        top += 1
        for place, panel in enumerate(row):
            left, down = place % 2 * _WIDTH, place // 2 * _HEIGHT
            panels.append(_panel(len(panels) + 1, panel, {"x": left, "y": top + down, "w": _WIDTH, "h": _HEIGHT}))
        top += -(-len(row) // 2) * _HEIGHT
    instances = {
        "name": "instance",
        "label": "Engine",
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": f"label_values({series('ready')}, instance)", "refId": "instances"},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "current": {"text": ["All"], "value": ["$__all"]},
    }
    return {
        "uid": "kvstore",
        "title": "kvstore",
        "description": "Made by scripts/make_dashboard.py from kvstore's list of metrics.",
        "tags": ["vllm", "kv-cache"],
        "timezone": "browser",
        "schemaVersion": 41,
        "version": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [instances]},
        "panels": panels,
    }


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    """Return one panel as Grafana's JSON."""
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.states:
        options = {str(value): {"text": text, "color": colour} for value, (text, colour) in enumerate(panel.states)}
        defaults["mappings"] = [{"type": "value", "options": options}]
    else:
        defaults["min"] = 0
    return {
        "id": number,
        "title": panel.title,
        "description": panel.about or _documentation(panel),
        "type": "state-timeline" if panel.states else "timeseries",
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {},
        "targets": [
            {"refId": chr(ord("A") + at), "expr": query, "legendFormat": legend, "datasource": _SOURCE}
            for at, (query, legend) in enumerate(panel.queries)
        ],
    }


def _documentation(panel: Panel) -> str:
    """Return the descriptions of a panel's metrics from the list of metrics."""
    names = [name for name in DECLARED if any(re.search(rf"{name}(_total|_bucket)?\b", q) for q, _ in panel.queries)]
    return " ".join(DECLARED[name].documentation for name in names)


def text() -> str:
    """Return the text of the dashboard file."""
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    DASHBOARD_FILE.write_text(text())
