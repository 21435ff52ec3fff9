"""Metrics under vLLM: our own, vLLM's metrics of tiering, and a line of hits a minute in the log.

vLLM counts requested bytes and jobs per tier. Our metrics count results: bytes moved, blocks by outcome, causes of
misses, contents of the medium. Tier metrics have the label ``tier``, because two tiers of one class share their
declarations. Names start with ``vllm:``, because vLLM clears only those when it creates another engine.

Dashboards and routers (such as llm-d's) read vLLM's metrics under the names of vLLM's manager. Only metrics that the
running version declares are reported, with its names, kinds and labels. The label ``tier`` is ``0:primary`` for the
primary tier, otherwise position and name (``1:file``); vLLM uses position and type.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, TypeAlias

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)
from vllm.v1.kv_offload.cpu.common import CPUOffloadingMetrics
from vllm.v1.kv_offload.tiering.base import TieringOffloadingMetrics

from kvstore.codec.record import RecordFault
from kvstore.tiering import TieringStats
from kvstore.tiering.events import ALL_TIERS_NAME
from kvstore.tiering.tally import Tally, TierTally
from kvstore.tiers import JobSample, TierStats
from kvstore.types import MissCause, Outcome, RemovalCause

_PREFIX = "vllm:kvstore_"

_Table: TypeAlias = Mapping[str, tuple[str, tuple[str, ...]]]
"""Documentation and labels of metrics, by name without the prefix."""

UNPROVEN_REQUESTS: Final = _PREFIX + "unproven_requests"

_LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""From a cached block on local NVMe to the longest store deadline."""

_SAMPLES_MAX = 64
"""Maximum latency samples per report; each is sent to the front end."""

_BREAKER_STATES = {"closed": 0, "half_open": 1, "open": 2}

_STATES = {
    "blocks": ("Blocks that the tier holds, as far as known.", ()),
    "used_bytes": ("Bytes that the tier's blocks take on the medium.", ()),
    "capacity_bytes": ("Limit for the used bytes; 0 if there is none.", ()),
    "jobs_in_flight": ("Jobs submitted and not reported.", ()),
    "bytes_in_flight": ("Payload bytes of the jobs submitted and not reported.", ()),
    "ready": ("1 while lookups are answered from the medium: medium open, epoch begun, breaker of loads closed.", ()),
    "recovering": ("1 while the scan of existing blocks runs.", ()),
}
"""Gauges that are attributes of ``TierStats``."""
_GAUGES = {
    **_STATES,
    "load_breaker_state": ("Breaker of loads and lookups: 0 closed, 1 half open, 2 open (lookups answer MISS).", ()),
    "store_breaker_state": ("Breaker of stores: 0 closed, 1 half open, 2 open (stores are dropped).", ()),
    "backend_gauge": ("The backend's own gauges, by name.", ("gauge",)),
    "codec_gauge": ("Stored bytes divided by block bytes (ratio), and the rates used by the codec auto.", ("gauge",)),
}
_COUNTERS = {
    "stored_bytes": ("Payload bytes written to the medium.", ()),
    "loaded_bytes": ("Payload bytes read from the medium.", ()),
    "shed_blocks": ("Blocks not stored because too much was in flight or the breaker was open.", ()),
    "internal_errors": ("Caught errors inside kvstore; please report them.", ()),
    "lookups": ("Lookups by answer: hit, miss, retry.", ("result",)),
    "store_blocks": ("Blocks of stores by outcome.", ("outcome",)),
    "load_blocks": ("Blocks of loads by outcome; every outcome but ok is a miss.", ("outcome",)),
    "record_faults": ("Records that failed verification, by cause.", ("cause",)),
    "removed_blocks": ("Blocks that left the tier, by cause (evicted, corrupt, …).", ("cause",)),
    "backend_events": ("The backend's own counts, by name.", ("event",)),
    "codec_blocks": ("Blocks that the codecs encoded, stored raw as they got no shorter, or decoded.", ("kind",)),
    "codec_bytes": ("Bytes into and out of the codecs.", ("stage",)),
    "codec_seconds": ("Time that worker threads spent encoding and decoding, seals included.", ("op",)),
}
_CODEC_COUNTS = {
    "codec_blocks": ("encoded", "raw", "decoded"),
    "codec_bytes": ("encode_in", "encode_out", "decode_in", "decode_out"),
    "codec_seconds": ("encode", "decode"),
}
_FAULTS = tuple(fault.value for fault in RecordFault)
_REMOVALS = tuple(cause.value for cause in RemovalCause)
_LOAD_ONLY = {Outcome.MISS, Outcome.CORRUPT}
_STORE_ONLY = {Outcome.EXISTS, Outcome.NO_SPACE, Outcome.SHED}
_LOAD_OUTCOMES = tuple(outcome.name.lower() for outcome in Outcome if outcome not in _STORE_ONLY)
_STORE_OUTCOMES = tuple(outcome.name.lower() for outcome in Outcome if outcome not in _LOAD_ONLY)
_HISTOGRAMS = {
    "load_seconds": "Time of a load job on the I/O side.",
    "store_seconds": "Time of a store job on the I/O side.",
}

_ManagerTable: TypeAlias = Mapping[str, tuple[str, tuple[str, ...], str | Mapping[str, str]]]
"""Documentation, labels and source of metrics, by name without the prefix.

A source is the path of an attribute of ``TieringStats``, or such paths by label. ``tiers.x`` is attribute ``x`` of each
tier, and ``tenants.x`` of each tenant.
"""

_MANAGER_GAUGES: _ManagerTable = {
    "primary_slots": (
        "Slots of the primary tier by state; pinned, retained and dirty ones are ready too.",
        ("state",),
        {name: f"primary.{name}" for name in ("free", "writing", "ready", "pinned", "retained", "dirty", "abandoned")},
    ),
    "requests": ("Requests tracked by kvstore's manager.", (), "requests"),
    "promoting_blocks": (
        "Blocks that promotions hold in the primary tier: on their way, or not yet loaded.",
        (),
        "promoting",
    ),
    "waiting_blocks": (
        "Blocks that wait for room in a tier's backlog or share of the primary tier.",
        ("tier",),
        "tiers.waiting",
    ),
    "forgetting_tenants": ("Tenants whose blocks are being removed from every tier.", (), "forgetting"),
    "tenant_primary_blocks": ("Blocks of a tenant in the primary tier.", ("tenant",), "tenants.blocks"),
    "admission_saved_blocks": (
        "Estimate of the blocks that automatic admission did not write.",
        ("tier",),
        "tiers.saved_writes",
    ),
    "admission_lost_hits": (
        "Estimate of the hits that automatic admission lost; below zero: gained.",
        ("tier",),
        "tiers.lost_hits",
    ),
    "tier_dead": (
        "1 for a tier that was disabled because it raised or reported invalid results.",
        ("tier",),
        "tiers.dead",
    ),
}
_MANAGER_COUNTERS: _ManagerTable = {
    "gate_blocks": (
        "Blocks that the gate let load, had computed instead, abandoned, or read to measure.",
        ("decision",),
        {name: f"gate.{name}" for name in ("loaded", "recomputed", "abandoned", "explored")},
    ),
    "gate_seconds": (
        "Estimated seconds of requests that loading saved, or that waiting for loads lost.",
        ("effect",),
        {"saved": "gate.saved_s", "lost": "gate.lost_s"},
    ),
    "hedged_blocks": ("Blocks of slow loads that were also requested from a second tier.", (), "hedges.hedged"),
    "hedges_won_blocks": ("Blocks of those that the second tier delivered first.", (), "hedges.won"),
    "hedge_bytes": ("Payload bytes that second tiers read for this.", (), "hedges.extra_bytes"),
    "manager_lookups": (
        "Lookups of the manager by answer: hit, pending, retry, miss.",
        ("result",),
        {"hit": "lookups.hits", "pending": "lookups.pending", "retry": "lookups.retries", "miss": "lookups.misses"},
    ),
    "repeated_requests": ("Requests that compute their first block again, as an earlier request did.", (), "repeated"),
    "primary_evicted_blocks": ("Blocks that the primary tier evicted.", (), "primary.evicted"),
    "throttled_lookups": ("Lookups that found no room for a promotion.", (), "throttled"),
    "refused_store_blocks": ("Blocks for which the primary tier had no room.", (), "refused_stores"),
    "lost_blocks": ("Blocks of lazy stores that a tier did not take when they were evicted.", (), "lost"),
    "expired_blocks": ("Blocks whose lifetime (ttl) ended.", (), "expired"),
    "policy_refused": ("Parameters of requests' offload policies that are not allowed.", (), "policy_refused"),
    "policy_mistakes": ("Values of requests' offload policies that could not be used.", (), "policy_mistakes"),
    "dropped_blocks": ("Blocks evicted while they waited for room in a tier's share.", ("tier",), "tiers.dropped"),
    "tier_errors": ("Exceptions out of a tier, and results that made no sense.", ("tier",), "tiers.errors"),
}
_TENANT_BLOCKS: Final = (
    "Blocks of a tenant: stored, loaded, evicted from the primary tier; unsaved or declined for its rates.",
    ("tenant", "event"),
)
_MISSED_BLOCKS: Final = (
    "Blocks that requests looked for and computed, by tier (all: every tier) and cause; once per request.",
    ("tier", "cause"),
)
_MISS_CAUSES: Final = tuple(cause.value for cause in MissCause)
_MISS_CAUSES_OF_ALL: Final = tuple(
    cause.value for cause in (MissCause.ABSENT, MissCause.EXPIRED, MissCause.POLICY, MissCause.UNPROVEN)
)
_ROW_BYTES: Final = ("Bytes of a row of the primary tier that a group of layers fills; all: its length.", ("group",))
_TENANT_EVENTS: Final = ("stored", "loaded", "evicted", "unsaved", "declined")
_OF_PARTS: Final = {"tenant_blocks": _TENANT_BLOCKS, "missed_blocks": _MISSED_BLOCKS}
"""Counters with two labels."""


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Return the declaration of every metric that :class:`TierMetrics` fills."""
    definitions = _definitions(_GAUGES, _COUNTERS, ("tier",))
    for name, text in _HISTOGRAMS.items():
        definitions[_PREFIX + name] = OffloadingHistogramMetadata(
            documentation=text, labelnames=("tier",), buckets=_LATENCY_BUCKETS_S
        )
    return definitions


def manager_metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Return the declaration of every metric that :class:`ManagerMetrics` fills."""
    gauges = {name: row[:2] for name, row in _MANAGER_GAUGES.items()}
    counters = {name: row[:2] for name, row in _MANAGER_COUNTERS.items()}
    return _definitions({**gauges, "primary_row_bytes": _ROW_BYTES}, {**counters, **_OF_PARTS})


def engine_metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Return the declaration of every metric that :func:`report_engine` fills."""
    unproven = "Requests of which nothing is stored or loaded, because their blocks may be wrong."
    pages = "Bytes of the primary tier by the kind of its pages: huge (2 MiB) or small."
    return _definitions({"primary_bytes": (pages, ("pages",))}, {"unproven_requests": (unproven, ("cause",))})


def report_engine(doubts: Counter[str], pages: Mapping[str, int]) -> OffloadingConnectorStats:
    """Report the unproven requests since the last report, by cause, and forget them; and bytes by the kind of pages.

    One engine has one counter, whichever tier or manager reports it first.
    """
    stats = OffloadingConnectorStats()
    for cause, count in doubts.items():
        stats.increase_counter(UNPROVEN_REQUESTS, count, (cause,))
    doubts.clear()
    for kind, size_bytes in pages.items():
        stats.set_gauge(_PREFIX + "primary_bytes", size_bytes, (kind,))
    return stats


def _definitions(gauges: _Table, counters: _Table, common: tuple[str, ...] = ()) -> dict[str, OffloadingMetricMetadata]:
    definitions: dict[str, OffloadingMetricMetadata] = {}
    for kind, table in ((OffloadingGaugeMetadata, gauges), (OffloadingCounterMetadata, counters)):
        for name, (text, labels) in table.items():
            definitions[_PREFIX + name] = kind(documentation=text, labelnames=(*common, *labels))
    return definitions


class _Increments:
    """Increments of monotonic counts since their last report."""

    def __init__(self, labels: tuple[str, ...] = ()) -> None:
        self._labels = labels
        self._reported: dict[tuple[str, str], float] = {}

    def report(
        self, out: OffloadingConnectorStats, name: str, counts: Mapping[str, float], known: Sequence[str] = ()
    ) -> None:
        """Report the increments of a family of counts. The first report includes zeros, as a starting point for rates.

        ``counts``: current counts, by the value of the last label.
        """
        for label, value in {**dict.fromkeys(known, 0), **counts}.items():
            before = self._reported.get((name, label))
            # A backend that is reopened for a new epoch or in a new process counts from zero.
            added = value - before if before is not None and value >= before else value
            self._reported[name, label] = value
            if added > 0 or before is None:
                out.increase_counter(_PREFIX + name, added, (*self._labels, label) if label else self._labels)


class ManagerMetrics:
    """Converts the statistics of kvstore's manager into vLLM's.

    Args:
        row_bytes: Length of a row of the primary tier.
        useful: The bytes of a row that a block of each group of layers fills, if known.
    """

    def __init__(self, row_bytes: int, useful: Sequence[int]) -> None:
        self._row_bytes = {"all": row_bytes} | {str(group): filled for group, filled in enumerate(useful)}
        self._counts = _Increments()
        self._tenants: dict[str, _Increments] = {}
        self._misses: dict[str, _Increments] = {}

    def report(
        self, stats: TieringStats, internal_errors: int, callback_errors: Mapping[str, int]
    ) -> OffloadingConnectorStats:
        """Return all gauges and the increments since the last call.

        ``callback_errors``: exceptions of tiers outside the manager's calls, by tier.
        """
        out = OffloadingConnectorStats()
        for name, (_, _, source) in _MANAGER_GAUGES.items():
            for label, value in _values(stats, source).items():
                out.set_gauge(_PREFIX + name, value, (label,) if label else ())
        for group, length in self._row_bytes.items():
            out.set_gauge(_PREFIX + "primary_row_bytes", length, (group,))
        for name, (_, _, source) in _MANAGER_COUNTERS.items():
            counts = _values(stats, source)
            if name == "tier_errors":
                counts = {tier: count + callback_errors.get(tier, 0) for tier, count in counts.items()}
            self._counts.report(out, name, counts)
        self._counts.report(out, "internal_errors", {"manager": internal_errors})
        for tier, missed in stats.missed.items():
            causes = {cause.value: count for cause, count in missed.items()}
            known = _MISS_CAUSES_OF_ALL if tier == ALL_TIERS_NAME else _MISS_CAUSES
            self._misses.setdefault(tier, _Increments((tier,))).report(out, "missed_blocks", causes, known)
        for tenant, each in stats.tenants.items():
            events = {name: getattr(each, name) for name in _TENANT_EVENTS}
            self._tenants.setdefault(tenant, _Increments((tenant,))).report(out, "tenant_blocks", events)
        return out


def _values(stats: TieringStats, source: str | Mapping[str, str]) -> dict[str, float]:
    """Return the values of a metric by its last label."""
    if isinstance(source, Mapping):
        return {label: attrgetter(path)(stats) for label, path in source.items()}
    part, _, name = source.partition(".")
    if part == "tiers":
        return {flow.name: int(getattr(flow, name)) for flow in stats.tiers}
    if part == "tenants":
        return {tenant: getattr(counts, name) for tenant, counts in stats.tenants.items()}
    return {"": attrgetter(source)(stats)}


class TierMetrics:
    """Converts a tier's monotonic counts into vLLM's statistics, which are increments.

    ``tier``: value of the label ``tier``.
    """

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._counts = _Increments((tier,))
        self._has_histograms = False

    def report(self, stats: TierStats, samples: Sequence[JobSample], internal_errors: int) -> OffloadingConnectorStats:
        """Return all gauges and the increments since the last call."""
        out = OffloadingConnectorStats()
        for name in _STATES:
            out.set_gauge(_PREFIX + name, float(getattr(stats, name)), (self._tier,))
        for name in ("load_breaker", "store_breaker"):
            state = _BREAKER_STATES.get(getattr(stats, name), 2)
            out.set_gauge(f"{_PREFIX}{name}_state", state, (self._tier,))
        for gauge, number in stats.backend_gauges.items():
            out.set_gauge(_PREFIX + "backend_gauge", number, (self._tier, gauge))
        for gauge, number in stats.codec.items():
            if gauge == "ratio" or gauge.startswith("auto_"):
                out.set_gauge(_PREFIX + "codec_gauge", number, (self._tier, gauge))
        for name, count in (
            ("stored_bytes", stats.bytes_stored),
            ("loaded_bytes", stats.bytes_loaded),
            ("shed_blocks", stats.shed_blocks),
            ("internal_errors", internal_errors),
        ):
            self._counts.report(out, name, {"": count})
        self._counts.report(out, "lookups", stats.lookups, ("hit", "miss", "retry"))
        self._counts.report(out, "store_blocks", _of_kind(stats.outcomes, "store."), _STORE_OUTCOMES)
        self._counts.report(out, "load_blocks", _of_kind(stats.outcomes, "load."), _LOAD_OUTCOMES)
        self._counts.report(out, "record_faults", stats.faults, _FAULTS)
        self._counts.report(out, "removed_blocks", stats.removals, _REMOVALS)
        self._counts.report(out, "backend_events", stats.backend_counters)
        for family, labels in _CODEC_COUNTS.items():
            unit = family.removeprefix("codec_")
            self._counts.report(out, family, {label: stats.codec.get(f"{label}_{unit}", 0) for label in labels})
        if not self._has_histograms:
            self._has_histograms = True
            # An empty list of samples, because vLLM creates the series of all labels in a report.
            for name in _HISTOGRAMS:
                out.data["types"][_PREFIX + name] = "histogram"
                out.data["data"][_PREFIX + name] = {(self._tier,): []}
        for sample in samples[-_SAMPLES_MAX:]:
            out.observe_histogram(f"{_PREFIX}{sample.kind}_seconds", sample.seconds, (self._tier,))
        return out


def _of_kind(outcomes: Mapping[str, int], prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): count for name, count in outcomes.items() if name.startswith(prefix)}


_PRIMARY_LABEL = ("0:primary",)

_PROMOTION_LATENCY = "vllm:kv_offload_tiering_promotion_latency_seconds"
"""A literal, because the constant came with 0.33."""


class StandardMetrics:
    """Converts the counts of kvstore's manager into vLLM's metrics.

    Args:
        tier_names: Names of the tiers below the primary one, in order.
        slot_bytes: Bytes per row of the primary tier; vLLM counts transfers in whole rows.
    """

    def __init__(self, tier_names: Sequence[str], slot_bytes: int, declared: Collection[str]) -> None:
        self._labels = [(f"{place}:{name}",) for place, name in enumerate(tier_names, 1)]
        self._slot_bytes = slot_bytes
        self._declared = frozenset(declared)
        self._reported: dict[tuple[str, ...], float] = {}

    @property
    def tier_labels(self) -> list[str]:
        """Values of the label ``tier``, the primary tier first."""
        return [label for (label,) in (_PRIMARY_LABEL, *self._labels)]

    def report(self, stats: TieringStats, tally: Tally) -> OffloadingConnectorStats:
        """Return all gauges and the increments since the last call; removes samples from the tally."""
        out = OffloadingConnectorStats()
        names = TieringOffloadingMetrics
        self._report_primary(out, stats, tally)
        self._add(out, names.PROMOTION_ALLOCATION_FAILURES, stats.throttled)
        slots = max(1, stats.primary.slots)
        for label, flow, counts in zip(self._labels, stats.tiers, tally.tiers, strict=True):
            self._report_lookups(out, counts, label)
            self._add(out, names.READ_BYTES, flow.loaded * self._slot_bytes, label)
            self._add(out, names.READ_TIME, counts.load_seconds, label)
            self._add(out, names.WRITE_BYTES, flow.stored * self._slot_bytes, label)
            self._add(out, names.WRITE_TIME, counts.store_seconds, label)
            self._add(out, names.PROMOTION_JOB_FAILURES, counts.failed_load_jobs, label)
            self._add(out, names.CASCADE_JOB_FAILURES, counts.failed_store_jobs, label)
            self._set(out, names.PRIMARY_WRITE_USAGE_PERC, flow.loading / slots, label)
            self._set(out, names.PRIMARY_READ_USAGE_PERC, flow.storing / slots, label)
            self._set(out, names.ACTIVE_PROMOTION_JOBS, flow.load_jobs, label)
            self._set(out, names.ACTIVE_CASCADE_JOBS, flow.store_jobs, label)
            self._observe(out, _PROMOTION_LATENCY, counts.loaded_samples, (*label, "success"))
            self._observe(out, _PROMOTION_LATENCY, counts.failed_samples, (*label, "failure"))
        return out

    def _report_primary(self, out: OffloadingConnectorStats, stats: TieringStats, tally: Tally) -> None:
        names, primary = CPUOffloadingMetrics, stats.primary
        slots = max(1, primary.slots)
        writing = primary.writing + primary.abandoned
        self._set(out, names.CPU_CACHE_USAGE_PERC, (writing + primary.pinned) / slots)
        self._set(out, names.CPU_CACHE_WRITE_USAGE_PERC, writing / slots)
        self._set(out, names.CPU_CACHE_READ_USAGE_PERC, primary.pinned / slots)
        self._observe(out, names.CPU_ALLOCATION_SIZE, tally.allocations)
        self._report_lookups(out, tally.primary, _PRIMARY_LABEL)

    def _report_lookups(self, out: OffloadingConnectorStats, counts: TierTally, label: tuple[str, ...]) -> None:
        self._add(out, TieringOffloadingMetrics.CHUNK_QUERIES, counts.queries, label)
        self._add(out, TieringOffloadingMetrics.CHUNK_HITS, counts.hits, label)
        self._observe(out, TieringOffloadingMetrics.LOOKUP_SYNC_DELAY, counts.lookup_samples, label)
        self._observe(out, TieringOffloadingMetrics.LOOKUP_ASYNC_DELAY, counts.wait_samples, label)

    def _add(self, out: OffloadingConnectorStats, name: str, total: float, labels: tuple[str, ...] = ()) -> None:
        added = total - self._reported.get((name, *labels), 0)
        if added > 0 and name in self._declared:
            self._reported[name, *labels] = total
            out.increase_counter(name, added, labels)

    def _set(self, out: OffloadingConnectorStats, name: str, value: float, labels: tuple[str, ...] = ()) -> None:
        if name in self._declared:
            out.set_gauge(name, value, labels)

    def _observe(self, out: OffloadingConnectorStats, name: str, samples: Any, labels: tuple[str, ...] = ()) -> None:
        if name in self._declared:
            for sample in samples:
                out.observe_histogram(name, sample, labels)
        samples.clear()


logger = logging.getLogger("kvstore.vllm.metrics")

_INTERVAL_S: Final = 60.0


class HitSummary:
    """Logs hits of each tier and bytes moved, at most once a minute and only if blocks were looked up or moved."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._counts: tuple[tuple[int, int], ...] = ()

    def note(self, now: float, stats: TieringStats, tally: Tally, slot_bytes: int) -> None:
        """Log the summary if it is due. ``now``: ``time.monotonic()``."""
        if now - self._since < _INTERVAL_S:
            return
        found = [(each.hits, each.queries) for each in (tally.primary, *tally.tiers)]
        moved = [(sum(flow.loaded for flow in stats.tiers), sum(flow.stored for flow in stats.tiers))]
        counts = tuple(found + moved)
        before = self._counts or ((0, 0),) * len(counts)
        *hits, (loaded, stored) = [(new[0] - old[0], new[1] - old[1]) for new, old in zip(counts, before, strict=True)]
        if counts != before:
            names = ["primary", *(flow.name for flow in stats.tiers)]
            logger.info(
                "Hits of the last %.0f s: %s; %.1f MB loaded, %.1f MB stored",
                now - self._since,
                ", ".join(f"{name} {hit} of {asked} blocks" for name, (hit, asked) in zip(names, hits, strict=True)),
                loaded * slot_bytes / 1e6,
                stored * slot_bytes / 1e6,
            )
        self._since, self._counts = now, counts


_UNREAD_S: Final = 3600.0
_UNREAD_BYTES: Final = 1e9
"""Bytes stored in an hour below which it matters little that nothing is loaded."""

_REPEATED_LEAST: Final = 10
"""Repeated prompts in an hour below which nothing can be expected to be loaded."""


class UnreadWarning:
    """Warns once if in an hour much was stored and nothing loaded, although prompts were computed again."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._counts = (0, 0, 0)
        self._misses: Counter[str] = Counter()
        self._is_logged = False

    def note(self, now: float, stats: TieringStats, slot_bytes: int) -> None:
        """Log the warning if it is due. ``now``: ``time.monotonic()``."""
        if now - self._since < _UNREAD_S:
            return
        counts = sum(flow.loaded for flow in stats.tiers), sum(flow.stored for flow in stats.tiers), stats.repeated
        misses = Counter(
            {f"{tier} {cause.value}": count for tier, causes in stats.missed.items() for cause, count in causes.items()}
        )
        loaded, stored, repeated = (new - old for new, old in zip(counts, self._counts, strict=True))
        is_unread = not loaded and stored * slot_bytes >= _UNREAD_BYTES and repeated >= _REPEATED_LEAST
        if is_unread and not self._is_logged:
            logger.warning(
                "In %.0f minutes %.1f GB were stored to the tiers and nothing was loaded, although %d prompts were "
                "computed again. Computed blocks by tier and cause: %s.",
                (now - self._since) / 60,
                stored * slot_bytes / 1e9,
                repeated,
                ", ".join(f"{name} {count}" for name, count in (misses - self._misses).most_common(5)),
            )
        self._is_logged = (self._is_logged or is_unread) and not loaded
        self._since, self._counts, self._misses = now, counts, misses
