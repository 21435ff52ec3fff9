"""What two samples of an engine's metrics say: states, rates, latencies and queues, as rows of tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from kvstore.cli.reporting.quantities import rounded_size
from kvstore.cli.reporting.tables import latency_text
from kvstore.cli.reporting.terminal import Column
from kvstore.cli.watching.scrape import Engine, Sample

__all__ = ["ENGINE_COLUMNS", "METRICS", "ROOM_COLUMNS", "TRAFFIC_COLUMNS", "engine_row", "tier_rows"]

ENGINE_COLUMNS: Final = (
    Column("engine", "engine", left=True, style="bold"),
    Column("requests", "requests", rank=2),
    Column("lookups", "lookups/s", rank=3),
    Column("found", "found"),
    Column("slots", "slots", rank=1),
    Column("full", "in use"),
    Column("evicted", "evicted/s"),
)
TRAFFIC_COLUMNS: Final = (
    Column("engine", "engine", left=True),
    Column("tier", "tier", left=True, style="bold"),
    Column("state", "state", left=True),
    Column("hits", "hits"),
    Column("loaded", "load/s"),
    Column("load_p50", "p50", rank=2),
    Column("load_p99", "p99"),
    Column("stored", "store/s"),
    Column("store_p99", "p99", rank=1),
)
ROOM_COLUMNS: Final = (
    Column("engine", "engine", left=True),
    Column("tier", "tier", left=True, style="bold"),
    Column("breakers", "breakers", left=True),
    Column("jobs", "jobs"),
    Column("in_flight", "in flight", rank=3),
    Column("waiting", "waiting", rank=1),
    Column("used", "used"),
    Column("full", "of"),
    Column("blocks", "blocks", rank=4),
    Column("evicted", "evicted/s"),
    Column("failed", "failed/s"),
)

METRICS: Final = {
    "requests", "primary_slots", "primary_evicted_blocks_total", "manager_lookups_total",
    "ready", "recovering", "tier_dead", "load_breaker_state", "store_breaker_state",
    "lookups_total", "loaded_bytes_total", "stored_bytes_total", "load_seconds_bucket", "store_seconds_bucket",
    "jobs_in_flight", "bytes_in_flight", "waiting_blocks", "blocks", "used_bytes", "capacity_bytes",
    "removed_blocks_total", "load_blocks_total", "store_blocks_total",
}  # fmt: skip
"""All metrics that are read here, for the check against the list of those that there are."""

_BREAKERS: Final = ("closed", "half open", "open")
_DONE: Final = ("ok", "exists")


def engine_row(engine: Engine) -> dict[str, Any]:
    """Return what an engine's manager says; under vLLM's own manager only the name."""
    now, before = _newest(engine), _oldest(engine)
    slots = [now.total("primary_slots", state=state) or 0 for state in ("free", "writing", "ready", "abandoned")]
    hits, pending, misses = (
        _added(now, before, "manager_lookups_total", result=result) for result in ("hit", "pending", "miss")
    )
    answered = _sum(hits, pending, misses)
    return {
        "engine": engine.name,
        "requests": _count(now.total("requests")),
        "lookups": _count(_per_second(now, before, answered)),
        "found": _percent(_sum(hits, pending), answered),
        "slots": _count(sum(slots) or None),
        "full": _percent(sum(slots[1:]), sum(slots)),
        "evicted": _count(_rate(now, before, "primary_evicted_blocks_total")),
    }


def tier_rows(engines: Sequence[Engine]) -> list[dict[str, Any]]:
    """Return a row for each tier of engines; it names its engine if there are several."""
    rows = []
    for engine in engines:
        now, before = _newest(engine), _oldest(engine)
        named = {"engine": engine.name} if len(engines) > 1 else {}
        rows += [named | _tier_row(now, before, tier) for tier in now.label_values("blocks", "tier")]
    return rows


def _tier_row(now: Sample, before: Sample | None, tier: str) -> dict[str, Any]:
    hits, misses = (_added(now, before, "lookups_total", tier=tier, result=result) for result in ("hit", "miss"))
    used, capacity = (now.total(name, tier=tier) for name in ("used_bytes", "capacity_bytes"))
    return {
        "tier": tier,
        "state": _state(now, tier),
        "hits": _percent(hits, _sum(hits, misses)),
        "loaded": _size(_rate(now, before, "loaded_bytes_total", tier=tier)),
        "load_p50": latency_text(_quantile(now, before, "load_seconds_bucket", tier, 0.5)),
        "load_p99": latency_text(_quantile(now, before, "load_seconds_bucket", tier, 0.99)),
        "stored": _size(_rate(now, before, "stored_bytes_total", tier=tier)),
        "store_p99": latency_text(_quantile(now, before, "store_seconds_bucket", tier, 0.99)),
        "breakers": _breakers(now, tier),
        "jobs": _count(now.total("jobs_in_flight", tier=tier)),
        "in_flight": _size(now.total("bytes_in_flight", tier=tier)),
        "waiting": _count(now.total("waiting_blocks", tier=tier)),
        "used": _size(used),
        "full": _percent(used, capacity),
        "blocks": _count(now.total("blocks", tier=tier)),
        "evicted": _count(_rate(now, before, "removed_blocks_total", tier=tier, cause="evicted")),
        "failed": _count(_per_second(now, before, _failed(now, before, tier))),
    }


def _state(now: Sample, tier: str) -> str:
    if now.total("tier_dead", tier=tier):
        return "dead"
    if now.total("ready", tier=tier) == 0:
        return "not ready"
    return "recovering" if now.total("recovering", tier=tier) else "ready"


def _breakers(now: Sample, tier: str) -> str:
    states = {kind: int(now.total(f"{kind}_breaker_state", tier=tier) or 0) for kind in ("load", "store")}
    return ", ".join(f"{kind}s {_BREAKERS[min(state, 2)]}" for kind, state in states.items() if state) or "closed"


def _failed(now: Sample, before: Sample | None, tier: str) -> float | None:
    """Return the blocks that were not loaded or not stored; a block that is not there is no failure."""
    return _sum(
        *(
            _added(now, before, f"{kind}_blocks_total", tier=tier, outcome=outcome)
            for kind, harmless in (("load", (*_DONE, "miss")), ("store", _DONE))
            for outcome in now.label_values(f"{kind}_blocks_total", "outcome")
            if outcome not in harmless
        )
    )


def _newest(engine: Engine) -> Sample:
    return engine.samples[-1]


def _oldest(engine: Engine) -> Sample | None:
    """Return the sample that rates begin at; None if there is only one."""
    return engine.samples[0] if len(engine.samples) > 1 else None


def _added(now: Sample, before: Sample | None, name: str, **labels: str) -> float | None:
    """Return what was added to a counter; of one that began anew, as its engine did, all of it."""
    value, earlier = now.total(name, **labels), before.total(name, **labels) if before else None
    if value is None or before is None:
        return None
    return value - earlier if earlier is not None and earlier <= value else value


def _rate(now: Sample, before: Sample | None, name: str, **labels: str) -> float | None:
    return _per_second(now, before, _added(now, before, name, **labels))


def _per_second(now: Sample, before: Sample | None, added: float | None) -> float | None:
    if added is None or before is None or now.at <= before.at:
        return None
    return added / (now.at - before.at)


def _quantile(now: Sample, before: Sample | None, name: str, tier: str, share: float) -> float | None:
    """Return a quantile of what was added to a histogram, as Prometheus estimates it; None if nothing was."""
    bounds = sorted({float(bound) for bound in now.label_values(name, "le")})
    texts = {float(bound): bound for bound in now.label_values(name, "le")}
    counts = [_added(now, before, name, tier=tier, le=texts[bound]) or 0 for bound in bounds]
    if not counts or not counts[-1]:
        return None
    rank, lower, below = share * counts[-1], 0.0, 0.0
    for bound, count in zip(bounds, counts, strict=True):
        if count >= rank:
            return lower if math.isinf(bound) else lower + (bound - lower) * (rank - below) / max(1e-9, count - below)
        lower, below = bound, count
    return lower


def _sum(*values: float | None) -> float | None:
    found = [value for value in values if value is not None]
    return sum(found) if found else None


def _percent(part: float | None, whole: float | None) -> str | None:
    return None if part is None or not whole else f"{100 * part / whole:.0f} %"


def _size(size: float | None) -> str | None:
    return None if size is None else rounded_size(round(size))


def _count(count: float | None) -> str | None:
    if count is None:
        return None
    return f"{count:,.0f}" if count >= 10 or count == int(count) else f"{count:.1f}"
