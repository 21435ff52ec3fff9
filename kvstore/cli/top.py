"""``kvstore top``: the tiers of running engines, live: states, rates, latencies and queues between two scrapes."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Annotated, Any, Final
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from kvstore.cli.command_line import Argument, Exit, ExitCode, Option, duration_option
from kvstore.cli.interruption import Stopping
from kvstore.cli.terminal import (
    Column,
    Frame,
    Screen,
    latency_text,
    line_of,
    print_frame,
    rounded_size,
    stdout_width,
    table_of,
)
from kvstore.errors import ConfigError
from kvstore.secret import shown

_PREFIX: Final = "vllm:kvstore_"
_WINDOW_S: Final = 10.0
"""Period of the rates: engines report a few times per second, and a tier may load only every few seconds."""

_MISSES_S: Final = 300.0
"""Period of the causes of misses: long enough for someone who comes to see why requests are slow."""

_BODY_MAX: Final = 64 << 20
"""Longest page of metrics; all of vLLM's metrics take less than 1 MiB, so a longer page is not from an engine."""

_FETCHES_MAX: Final = 16

_MISSES: Final = "missed_blocks_total"

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Sample:
    """The metrics of one engine at one time."""

    at: float  # Time of the scrape, on the monotonic clock.
    values: dict[str, dict[Labels, float]] = field(default_factory=dict)
    """Values by name without prefix, then by labels without those of vLLM."""

    def total(self, name: str, **labels: str) -> float | None:
        """Return the sum of the series that have these labels; None if there is none."""
        wanted = labels.items()
        found = [value for has, value in self.values.get(name, {}).items() if wanted <= has]
        return sum(found) if found else None

    def label_values(self, name: str, label: str) -> list[str]:
        """Return the values of a label of a metric, in the order of the metrics page."""
        return list(dict.fromkeys(value for has in self.values.get(name, {}) for key, value in has if key == label))


@dataclass(slots=True)
class Engine:
    """One watched engine."""

    name: str  # Its address, with the engine's number if the server has several engines.
    samples: list[Sample] = field(default_factory=list)  # Samples of the last seconds, oldest first.
    misses: deque[Sample] = field(default_factory=deque)  # Misses by cause in the last minutes, oldest first.

    def add(self, sample: Sample) -> None:
        """Add a sample and drop those before the window, except the last of them, with which the rates begin."""
        while len(self.samples) > 1 and self.samples[1].at <= sample.at - _WINDOW_S:
            del self.samples[0]
        self.samples.append(sample)
        while len(self.misses) > 1 and self.misses[1].at <= sample.at - _MISSES_S:
            self.misses.popleft()
        self.misses.append(Sample(sample.at, {_MISSES: sample.values.get(_MISSES, {})}))


class Watch:
    """Scrapes several engines concurrently.

    Args:
        addresses: ``host:port``, or URLs.

    Attributes:
        engines: Engines that answered the last scrape, in the order of the addresses.
        problems: Errors of the last scrape, by address.
    """

    def __init__(self, addresses: Sequence[str], timeout_s: float) -> None:
        self._urls = {address: _url_of(address) for address in addresses}
        self._timeout_s = timeout_s
        self._found: dict[str, dict[str, Engine]] = {address: {} for address in self._urls}
        self.problems: dict[str, str] = {}

    @property
    def engines(self) -> list[Engine]:
        return [engine for found in self._found.values() for engine in found.values()]

    def scrape(self) -> None:
        """Fetch all addresses concurrently. Failures are added to ``problems``, and their engines are dropped."""
        self.problems = {}
        with ThreadPoolExecutor(min(_FETCHES_MAX, len(self._urls))) as pool:
            answers = pool.map(self._fetch, self._urls.values())
        for address, answer in zip(self._urls, answers, strict=True):
            if isinstance(answer, str):
                self.problems[address] = answer
                self._found[address] = {}
                continue
            engines = self._found[address]
            for number, sample in answer.items():
                name = address if len(answer) == 1 else f"{address}#{number}"
                engines.setdefault(number, Engine(name)).add(sample)

    def _fetch(self, url: str) -> dict[str, Sample] | str:
        """Return the samples by engine, or an error text."""
        try:
            with urlopen(url, timeout=self._timeout_s) as response:
                body = response.read(_BODY_MAX + 1)
            if len(body) > _BODY_MAX:
                return f"the answer is longer than {_BODY_MAX >> 20} MiB"
            return parse(body.decode(), time.monotonic()) or "no metrics of kvstore: no vLLM with a kvstore tier"
        except URLError as error:
            if isinstance(error, HTTPError):
                return str(error)
            reason = error.reason
            return (reason.strerror if isinstance(reason, OSError) else None) or str(reason)
        except (OSError, HTTPException, ValueError) as error:
            return str(error) or type(error).__name__


def parse(text: str, at: float) -> dict[str, Sample]:
    """Return kvstore's metrics on a page, by vLLM's number of the engine.

    Raises:
        ValueError: The text is not in that format.
    """
    found: dict[str, Sample] = {}
    for name, labels, value in _series(text):
        engine = labels.pop("engine", "0")
        labels.pop("model_name", None)
        values = found.setdefault(engine, Sample(at)).values
        values.setdefault(name, {})[frozenset(labels.items())] = value
    return found


def _series(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield name, labels and value of each of kvstore's series; the rest of the page is not parsed."""
    lines = (line for line in text.split("\n") if line.startswith(_PREFIX))
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            value = float(sample.value)
            if not math.isfinite(value):
                raise ValueError(f"{sample.name} is {value}")
            float(sample.labels.get("le", 0))  # Raises for an invalid bound of a histogram.
            yield sample.name.removeprefix(_PREFIX), dict(sample.labels), value


def _url_of(address: str) -> str:
    url = address if "://" in address else f"http://{address}"
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(
            f"{shown(address)} is not an address of metrics. Expected HOST:PORT, or http://HOST:PORT/metrics."
        )
    return url if parts.path.strip("/") else f"{url.rstrip('/')}/metrics"


_TIMEOUT_S: Final = 5.0
"""Timeout of one scrape; a slower server is overloaded."""

_POLL_S: Final = 0.1
"""Longest delay of Ctrl-C between scrapes."""

_Addresses = Annotated[
    list[str] | None,
    Argument(metavar="ADDRESS ...", help="Engines: HOST:PORT of vLLM's server, or the URL of its /metrics."),
]
_Interval = Annotated[str, Option("--interval", "-i", metavar="TIME", help="Time between two scrapes.")]

_NONE: Final = "-"
"""Shown for an unknown number, and for a rate without traffic."""

_ENGINE_COLUMNS: Final = (
    Column("engine", "engine", left=True, style="bold"),
    Column("requests", "requests", rank=2),
    Column("lookups", "lookups/s", rank=3),
    Column("found", "found"),
    Column("slots", "slots", rank=1),
    Column("full", "in use"),
    Column("huge", "huge pages", rank=4),
    Column("evicted", "evicted/s"),
)
_TRAFFIC_COLUMNS: Final = (
    Column("engine", "engine", left=True),
    Column("tier", "tier", left=True, style="bold"),
    Column("state", "state", left=True, healthy=("ready", "recovering")),
    Column("hits", "hits"),
    Column("loaded", "load/s"),
    Column("load_p50", "load p50", rank=5),
    Column("load_p99", "load p99", rank=2),
    Column("stored", "store/s", rank=3),
    Column("store_p99", "store p99", rank=4),
)
_ROOM_COLUMNS: Final = (
    Column("engine", "engine", left=True),
    Column("tier", "tier", left=True, style="bold"),
    Column("breakers", "breakers", left=True, healthy=("closed",)),
    Column("jobs", "jobs", rank=2),
    Column("in_flight", "in flight", rank=6),
    Column("waiting", "waiting", rank=4),
    Column("used", "used", rank=3),
    Column("full", "full"),
    Column("blocks", "blocks", rank=7),
    Column("evicted", "evicted/s", rank=2),
    Column("failed", "failed/s", rank=1, healthy=("0", _NONE)),
)

_MISS_COLUMNS: Final = (
    Column("engine", "engine", left=True),
    Column("tier", "tier", left=True, style="bold"),
    Column("cause", "cause of misses", left=True),
    Column("recent", "last 5 min"),
    Column("total", "in all"),
)

METRICS: Final = {
    "requests", "primary_slots", "primary_bytes", "primary_evicted_blocks_total", "manager_lookups_total",
    "ready", "recovering", "tier_dead", "load_breaker_state", "store_breaker_state",
    "lookups_total", "loaded_bytes_total", "stored_bytes_total", "load_seconds_bucket", "store_seconds_bucket",
    "jobs_in_flight", "bytes_in_flight", "waiting_blocks", "blocks", "used_bytes", "capacity_bytes",
    "removed_blocks_total", "load_blocks_total", "store_blocks_total",
    _MISSES,
}  # fmt: skip
"""All metrics read here, for a check against the exported metrics."""

_BREAKERS: Final = ("closed", "half open", "open")
_DONE: Final = ("ok", "exists")


def top(addresses: _Addresses = None, interval: _Interval = "2s") -> None:
    """Show the tiers of running engines. States, hits, rates, latencies, queues, room, misses; Ctrl-C ends it.

    Reads the engines' /metrics (default: 127.0.0.1:8000). Rates and latencies are those of the last ten seconds. If
    stdout is not a terminal, it scrapes twice and prints one table.
    """
    pause_s = float(duration_option(interval, "--interval"))
    if not pause_s > 0:
        raise ConfigError(f"--interval is {interval!r}. Expected more than 0.")
    watch = Watch(addresses or ["127.0.0.1:8000"], _TIMEOUT_S)
    with Stopping() as stopping:
        watch.scrape()
        if not sys.stdout.isatty():
            _sleep(pause_s, stopping)
            watch.scrape()
            print_frame(frame_of(watch.engines, watch.problems, stdout_width()), stdout_width())
            raise Exit(ExitCode.OK if watch.engines else ExitCode.FAILED)
        with Screen() as screen:
            while not stopping():
                clock = time.strftime("%H:%M:%S")
                head = f"kvstore top   {clock}   every {interval}, rates of the last 10 s   Ctrl-C ends it"
                screen.show([line_of(head, "bold"), *frame_of(watch.engines, watch.problems, stdout_width())])
                _sleep(pause_s, stopping)
                if not stopping():
                    watch.scrape()


def frame_of(engines: Sequence[Engine], problems: Mapping[str, str], width: int) -> list[Frame]:
    """Return the contents of the screen. ``width``: most columns."""
    tables = (
        (_ENGINE_COLUMNS, [engine_row(engine) for engine in engines]),
        (_TRAFFIC_COLUMNS, rows := tier_rows(engines)),
        (_ROOM_COLUMNS, rows),
        (_MISS_COLUMNS, miss_rows(engines)),
    )
    # Problems come first, because a short screen cuts off the end.
    parts: list[Frame] = [line_of(f"{address}: {problem}", "red") for address, problem in problems.items()]
    for columns, found in tables:
        if found:
            # Columns without a number stay, so that each number keeps its place.
            names = [column.key for column in columns if column.key != "engine"]
            parts += [
                line_of(""),
                table_of([dict.fromkeys(names, _NONE) | _known(row) for row in found], columns, width),
            ]
    return parts


def _known(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value is not None}


def engine_row(engine: Engine) -> dict[str, Any]:
    """Return the row of an engine's manager; under vLLM's own manager it has only the name."""
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
        "huge": _percent(now.total("primary_bytes", pages="huge"), now.total("primary_bytes")),
        "evicted": _count(_rate(now, before, "primary_evicted_blocks_total")),
    }


def tier_rows(engines: Sequence[Engine]) -> list[dict[str, Any]]:
    """Return a row for each tier, with the engine's name if there are several engines."""
    rows = []
    for engine in engines:
        now, before = _newest(engine), _oldest(engine)
        named = {"engine": engine.name} if len(engines) > 1 else {}
        rows += [named | _tier_row(now, before, tier) for tier in now.label_values("blocks", "tier")]
    return rows


def miss_rows(engines: Sequence[Engine]) -> list[dict[str, Any]]:
    """Return a row for each tier and cause of misses so far, the most frequent of the last minutes first."""
    rows: list[dict[str, Any]] = []
    for engine in engines:
        now, before = engine.misses[-1], engine.misses[0]
        named = {"engine": engine.name} if len(engines) > 1 else {}
        found = [
            (_added(now, before, _MISSES, **dict(labels)) or 0, total, dict(labels))
            for labels, total in now.values[_MISSES].items()
            if total
        ]
        for recent, total, labels in sorted(found, key=lambda row: row[:2], reverse=True):
            rows.append({**named, **labels, "recent": _count(recent), "total": _count(total)})
    return rows


def _sleep(seconds: float, stopping: Stopping) -> None:
    ends_at = time.monotonic() + seconds
    while not stopping() and (left := ends_at - time.monotonic()) > 0:
        time.sleep(min(left, _POLL_S))


def _tier_row(now: Sample, before: Sample | None, tier: str) -> dict[str, Any]:
    hits, misses = (_added(now, before, "lookups_total", tier=tier, result=result) for result in ("hit", "miss"))
    used, capacity, blocks = (now.total(name, tier=tier) for name in ("used_bytes", "capacity_bytes", "blocks"))
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
        # A medium that does not report its contents has zeros.
        "used": _size(used if used or capacity else None),
        "full": _percent(used, capacity),
        "blocks": _count(blocks if blocks or (capacity and not used) else None),
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
    """Return the number of blocks whose load or store failed; a miss is not a failure."""
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
    """Return the sample at the start of the rates' period; None if there is only one sample."""
    return engine.samples[0] if len(engine.samples) > 1 else None


def _added(now: Sample, before: Sample | None, name: str, **labels: str) -> float | None:
    """Return the increase of a counter; if its engine has restarted, the counter's value."""
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
    """Return a quantile of a histogram's increase, estimated like in Prometheus; None without an increase."""
    texts = {float(bound): bound for bound in now.label_values(name, "le")}
    bounds = sorted(texts)
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
