"""Our own metrics under vLLM: their declarations, and the conversion of tier and manager statistics into vLLM's.

vLLM counts requested bytes and jobs per tier. These metrics count results: bytes moved, blocks by outcome, causes of
misses, contents of the medium. Tier metrics have the label ``tier``, because two tiers of one class share their
declarations. Names start with ``vllm:``, because vLLM clears only those when it creates another engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from kvstore.codec.record import RecordFault
from kvstore.tiering import TieringStats
from kvstore.tiers import JobSample, TierStats
from kvstore.types import Outcome, RemovalCause

_PREFIX = "vllm:kvstore_"

_Table: TypeAlias = Mapping[str, tuple[str, tuple[str, ...]]]
"""Documentation and labels of metrics, by name without the prefix."""

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
    "ready": ("1 while lookups are answered from the medium: I/O side up, epoch begun, breaker of loads closed.", ()),
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

_MANAGER_GAUGES = {
    "primary_slots": ("Slots of the primary tier by state; pinned, held and dirty ones are ready too.", ("state",)),
    "requests": ("Requests tracked by kvstore's manager.", ()),
    "promoting_blocks": ("Blocks that promotions hold in the primary tier: on their way, or not yet loaded.", ()),
    "waiting_blocks": ("Blocks that wait for room in a tier's share of the primary tier.", ("tier",)),
    "forgetting_tenants": ("Tenants whose blocks are being removed from every tier.", ()),
    "tenant_primary_blocks": ("Blocks of a tenant in the primary tier.", ("tenant",)),
    "tier_dead": ("1 for a tier that was disabled because it raised or reported invalid results.", ("tier",)),
}
_MANAGER_COUNTERS = {
    "gate_blocks": (
        "Blocks that the gate let load, had computed instead, abandoned, or read to measure.",
        ("decision",),
    ),
    "gate_seconds": ("Estimated seconds of requests that loading saved, or that waiting for loads lost.", ("effect",)),
    "hedged_blocks": ("Blocks of slow loads that were also requested from a second tier.", ()),
    "hedges_won_blocks": ("Blocks of those that the second tier delivered first.", ()),
    "hedge_bytes": ("Payload bytes that second tiers read for this.", ()),
    "manager_lookups": ("Lookups of the manager by answer: hit, pending, retry, miss.", ("result",)),
    "primary_evicted_blocks": ("Blocks that the primary tier evicted.", ()),
    "throttled_lookups": ("Lookups that found no room for a promotion.", ()),
    "refused_store_blocks": ("Blocks for which the primary tier had no room.", ()),
    "refused_pin_blocks": ("Blocks not pinned on request, as the share for that was used up.", ()),
    "lost_blocks": ("Blocks of lazy stores that a tier did not take when they were evicted.", ()),
    "expired_blocks": ("Blocks whose lifetime (ttl) ended.", ()),
    "policy_refused": ("Parameters of requests' offload policies that are not allowed.", ()),
    "policy_mistakes": ("Values of requests' offload policies that could not be used.", ()),
    "tenant_blocks": (
        "Blocks of a tenant: stored, loaded, evicted from the primary tier; unsaved or declined for its rates.",
        ("tenant", "event"),
    ),
    "dropped_blocks": ("Blocks evicted while they waited for room in a tier's share.", ("tier",)),
    "tier_errors": ("Exceptions out of a tier, and results that made no sense.", ("tier",)),
}


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
    return _definitions(_MANAGER_GAUGES, _MANAGER_COUNTERS)


def _definitions(gauges: _Table, counters: _Table, common: tuple[str, ...] = ()) -> dict[str, OffloadingMetricMetadata]:
    definitions: dict[str, OffloadingMetricMetadata] = {}
    for kind, table in ((OffloadingGaugeMetadata, gauges), (OffloadingCounterMetadata, counters)):
        for name, (text, labels) in table.items():
            definitions[_PREFIX + name] = kind(documentation=text, labelnames=(*common, *labels))
    return definitions


class _Increments:
    """Increments of monotonic counts since their last report.

    Args:
        labels: Values of the common labels.
    """

    def __init__(self, labels: tuple[str, ...] = ()) -> None:
        self._labels = labels
        self._reported: dict[tuple[str, str], float] = {}

    def report(
        self, out: OffloadingConnectorStats, name: str, counts: Mapping[str, float], known: Sequence[str] = ()
    ) -> None:
        """Report the increments of a family of counts. The first report includes zeros, as a starting point for rates.

        Args:
            out: Target of the report.
            name: Name of the family.
            counts: Current counts, by the value of the last label.
            known: Label values to report even without a count.
        """
        for label, value in {**dict.fromkeys(known, 0), **counts}.items():
            before = self._reported.get((name, label))
            # A backend that is reopened for a new epoch or in a new process counts from zero.
            added = value - before if before is not None and value >= before else value
            self._reported[name, label] = value
            if added > 0 or before is None:
                out.increase_counter(_PREFIX + name, added, (*self._labels, label) if label else self._labels)


class ManagerMetrics:
    """Converts the statistics of kvstore's manager into vLLM's."""

    def __init__(self) -> None:
        self._counts = _Increments()
        self._tenants: dict[str, _Increments] = {}

    def report(
        self, stats: TieringStats, internal_errors: int, callback_errors: Mapping[str, int]
    ) -> OffloadingConnectorStats:
        """Return all gauges and the increments since the last call.

        Args:
            stats: The manager's statistics.
            internal_errors: Errors caught in the adapter.
            callback_errors: Exceptions of tiers outside the manager's calls, by tier.
        """
        out = OffloadingConnectorStats()
        primary, lookups = stats.primary, stats.lookups
        for state in ("free", "writing", "ready", "pinned", "held", "dirty", "abandoned"):
            out.set_gauge(_PREFIX + "primary_slots", getattr(primary, state), (state,))
        out.set_gauge(_PREFIX + "requests", stats.requests)
        out.set_gauge(_PREFIX + "promoting_blocks", stats.promoting)
        out.set_gauge(_PREFIX + "forgetting_tenants", stats.forgetting)
        for flow in stats.tiers:
            out.set_gauge(_PREFIX + "waiting_blocks", flow.waiting, (flow.name,))
            out.set_gauge(_PREFIX + "tier_dead", int(flow.dead), (flow.name,))
        answers = {"hit": lookups.hits, "pending": lookups.pending, "retry": lookups.retries, "miss": lookups.misses}
        self._counts.report(out, "manager_lookups", answers)
        gate = stats.gate
        decisions = {name: getattr(gate, name) for name in ("loaded", "recomputed", "abandoned", "explored")}
        self._counts.report(out, "gate_blocks", decisions)
        self._counts.report(out, "gate_seconds", {"saved": gate.saved_s, "lost": gate.lost_s})
        self._counts.report(out, "dropped_blocks", {flow.name: flow.dropped for flow in stats.tiers})
        self._counts.report(out, "internal_errors", {"manager": internal_errors})
        errors = {flow.name: flow.errors + callback_errors.get(flow.name, 0) for flow in stats.tiers}
        self._counts.report(out, "tier_errors", errors)
        for name, count in (
            ("hedged_blocks", stats.hedges.hedged),
            ("hedges_won_blocks", stats.hedges.won),
            ("hedge_bytes", stats.hedges.extra_bytes),
            ("primary_evicted_blocks", primary.evicted),
            ("throttled_lookups", stats.throttled),
            ("refused_store_blocks", stats.refused_stores),
            ("refused_pin_blocks", stats.refused_pins),
            ("lost_blocks", stats.lost),
            ("expired_blocks", stats.expired),
            ("policy_mistakes", stats.policy_mistakes),
            ("policy_refused", stats.policy_refused),
        ):
            self._counts.report(out, name, {"": count})
        for tenant, each in stats.tenants.items():
            out.set_gauge(_PREFIX + "tenant_primary_blocks", each.blocks, (tenant,))
            events = {name: getattr(each, name) for name in ("stored", "loaded", "evicted", "unsaved", "declined")}
            self._tenants.setdefault(tenant, _Increments((tenant,))).report(out, "tenant_blocks", events)
        return out


class TierMetrics:
    """Converts a tier's monotonic counts into vLLM's statistics, which are increments.

    Args:
        tier: Value of the label ``tier``.
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
