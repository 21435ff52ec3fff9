"""Our own metrics under vLLM: their declarations, and the step from statistics of tiers and manager to vLLM's.

vLLM already counts bytes and jobs per tier as its manager sees them. These count what really happened: bytes that
moved, blocks by outcome, why a block was missed, what the medium holds. Those of tiers have the label ``tier``, because
two tiers of one class share their declarations. The names start with ``vllm:``, as vLLM clears only those when an
engine is made anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from kvstore.tiering import TieringStats
from kvstore.tiers import JobSample, TierStats

__all__ = ["ManagerMetrics", "TierMetrics", "manager_metric_definitions", "metric_definitions"]

_PREFIX = "vllm:kvstore_"

_LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""From a cached block on local NVMe to the longest deadline of a store."""

_SAMPLES_MAX = 64
"""Latency samples per report; they cross to the front end one by one."""

_BREAKER_STATES = {"closed": 0, "half_open": 1, "open": 2}

_GAUGES = {
    "blocks": "Blocks that the tier holds, as far as known.",
    "used_bytes": "Bytes that the tier's blocks take on the medium.",
    "capacity_bytes": "Limit for the used bytes; 0 if there is none.",
    "jobs_in_flight": "Jobs submitted and not reported.",
    "bytes_in_flight": "Payload bytes of the jobs submitted and not reported.",
    "recovering": "1 while the scan of what earlier runs left goes on.",
    "load_breaker_state": "Breaker of loads and lookups: 0 closed, 1 half open, 2 open (lookups answer MISS).",
    "store_breaker_state": "Breaker of stores: 0 closed, 1 half open, 2 open (stores are dropped).",
}
_COUNTERS = {
    "stored_bytes": ("Payload bytes written to the medium.", ()),
    "loaded_bytes": ("Payload bytes read from the medium.", ()),
    "shed_blocks": ("Blocks not stored because too much was in flight or the breaker was open.", ()),
    "internal_errors": ("Errors of kvstore's own that were caught at its edge; please report them.", ()),
    "lookups": ("Lookups by answer: hit, miss, retry.", ("result",)),
    "store_blocks": ("Blocks of stores by outcome.", ("outcome",)),
    "load_blocks": ("Blocks of loads by outcome; what is not ok is a miss with its cause.", ("outcome",)),
    "record_faults": ("Records that failed verification, by cause.", ("cause",)),
    "removed_blocks": ("Blocks that left the tier, by cause (evicted, corrupt, …).", ("cause",)),
    "backend_events": ("The backend's own counts, by name.", ("event",)),
    "codec_blocks": ("Blocks that the codecs encoded, stored raw as they got no shorter, or decoded.", ("kind",)),
    "codec_bytes": ("Bytes into and out of the codecs.", ("stage",)),
    "codec_seconds": ("Time that worker threads spent encoding and decoding, seals included.", ("op",)),
}
_LABELLED_GAUGES = {
    "backend_gauge": ("The backend's own gauges, by name.", ("gauge",)),
    "codec_gauge": ("Bytes stored by bytes of the blocks (ratio), and what the codec auto goes by.", ("gauge",)),
}
_CODEC_BLOCKS = ("encoded", "raw", "decoded")
_CODEC_STAGES = ("encode_in", "encode_out", "decode_in", "decode_out")
_HISTOGRAMS = {
    "load_seconds": "Time of a load job on the I/O side.",
    "store_seconds": "Time of a store job on the I/O side.",
}

_MANAGER_GAUGES = {
    "primary_slots": ("Slots of the primary tier by state; pinned, held and dirty ones are ready too.", ("state",)),
    "requests": ("Requests that kvstore's manager knows.", ()),
    "promoting_blocks": ("Blocks that promotions hold in the primary tier: on their way, or not yet loaded.", ()),
    "waiting_blocks": ("Blocks that wait for room in a tier's share of the primary tier.", ("tier",)),
    "tier_dead": ("1 for a tier that gets no work, as it raised or reported nonsense.", ("tier",)),
}
_MANAGER_COUNTERS = {
    "manager_lookups": ("Lookups of the manager by answer: hit, pending, retry, miss.", ("result",)),
    "primary_evicted_blocks": ("Blocks that the primary tier evicted.", ()),
    "throttled_lookups": ("Lookups that found no room for a promotion.", ()),
    "refused_store_blocks": ("Blocks for which the primary tier had no room.", ()),
    "refused_pin_blocks": ("Blocks not pinned on request, as the share for that was used up.", ()),
    "lost_blocks": ("Blocks of lazy stores that a tier did not take when they were evicted.", ()),
    "expired_blocks": ("Blocks whose lifetime (ttl) ended.", ()),
    "policy_refused": ("Parameters of requests' offload policies that are not allowed.", ()),
    "policy_mistakes": ("Values of requests' offload policies that could not be used.", ()),
    "dropped_blocks": ("Blocks evicted while they waited for room in a tier's share.", ("tier",)),
    "tier_errors": ("Exceptions out of a tier, and results that made no sense.", ("tier",)),
}


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Return the declaration of every metric that :class:`TierMetrics` fills."""
    definitions: dict[str, OffloadingMetricMetadata] = {}
    labels: tuple[str, ...]
    for name, text in _GAUGES.items():
        definitions[_PREFIX + name] = OffloadingGaugeMetadata(documentation=text, labelnames=("tier",))
    for name, (text, labels) in _LABELLED_GAUGES.items():
        definitions[_PREFIX + name] = OffloadingGaugeMetadata(documentation=text, labelnames=("tier", *labels))
    for name, (text, labels) in _COUNTERS.items():
        definitions[_PREFIX + name] = OffloadingCounterMetadata(documentation=text, labelnames=("tier", *labels))
    for name, text in _HISTOGRAMS.items():
        definitions[_PREFIX + name] = OffloadingHistogramMetadata(
            documentation=text, labelnames=("tier",), buckets=_LATENCY_BUCKETS_S
        )
    return definitions


def manager_metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Return the declaration of every metric that :class:`ManagerMetrics` fills."""
    definitions: dict[str, OffloadingMetricMetadata] = {}
    for name, (text, labels) in _MANAGER_GAUGES.items():
        definitions[_PREFIX + name] = OffloadingGaugeMetadata(documentation=text, labelnames=labels)
    for name, (text, labels) in _MANAGER_COUNTERS.items():
        definitions[_PREFIX + name] = OffloadingCounterMetadata(documentation=text, labelnames=labels)
    return definitions


class _Increments:
    """What came on top of monotonic counts since they were last told.

    Args:
        labels: Values of the labels that all of them have.
    """

    def __init__(self, labels: tuple[str, ...] = ()) -> None:
        self._labels = labels
        self._told: dict[tuple[str, str], float] = {}

    def tell(self, out: OffloadingConnectorStats, name: str, counts: Mapping[str, float]) -> None:
        """Report what was added to a family of counts; a label value that never counted anything is left out."""
        for label, value in counts.items():
            told = self._told.get((name, label), 0)
            # A backend that was opened again, for a new epoch or in a new process, counts from zero.
            added = value - told if value >= told else value
            self._told[name, label] = value
            if added > 0:
                out.increase_counter(_PREFIX + name, added, (*self._labels, label) if label else self._labels)


class ManagerMetrics:
    """Turns the statistics of kvstore's manager into vLLM's."""

    def __init__(self) -> None:
        self._counts = _Increments()

    def report(self, stats: TieringStats, internal_errors: int) -> OffloadingConnectorStats:
        """Return everything that changed since the last call, and all gauges."""
        out = OffloadingConnectorStats()
        primary, lookups = stats.primary, stats.lookups
        for state in ("free", "writing", "ready", "pinned", "held", "dirty", "abandoned"):
            out.set_gauge(_PREFIX + "primary_slots", getattr(primary, state), (state,))
        out.set_gauge(_PREFIX + "requests", stats.requests)
        out.set_gauge(_PREFIX + "promoting_blocks", stats.promoting)
        for flow in stats.tiers:
            out.set_gauge(_PREFIX + "waiting_blocks", flow.waiting, (flow.name,))
            out.set_gauge(_PREFIX + "tier_dead", int(flow.dead), (flow.name,))
        answers = {"hit": lookups.hits, "pending": lookups.pending, "retry": lookups.retries, "miss": lookups.misses}
        self._counts.tell(out, "manager_lookups", answers)
        self._counts.tell(out, "dropped_blocks", {flow.name: flow.dropped for flow in stats.tiers})
        self._counts.tell(out, "internal_errors", {"manager": internal_errors})
        self._counts.tell(out, "tier_errors", {flow.name: flow.errors for flow in stats.tiers})
        for name, count in (
            ("primary_evicted_blocks", primary.evicted),
            ("throttled_lookups", stats.throttled),
            ("refused_store_blocks", stats.refused_stores),
            ("refused_pin_blocks", stats.refused_pins),
            ("lost_blocks", stats.lost),
            ("expired_blocks", stats.expired),
            ("policy_mistakes", stats.policy_mistakes),
            ("policy_refused", stats.policy_refused),
        ):
            self._counts.tell(out, name, {"": count})
        return out


class TierMetrics:
    """Turns a tier's monotonic counts into what vLLM wants: what came on top since the last report.

    Args:
        tier: Value of the label ``tier``.
    """

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._counts = _Increments((tier,))

    def report(self, stats: TierStats, samples: Sequence[JobSample], internal_errors: int) -> OffloadingConnectorStats:
        """Return everything that changed since the last call, and all gauges."""
        out = OffloadingConnectorStats()
        for name, value in self._gauges(stats).items():
            out.set_gauge(_PREFIX + name, value, (self._tier,))
        for gauge, number in stats.backend_gauges.items():
            out.set_gauge(_PREFIX + "backend_gauge", number, (self._tier, gauge))
        for gauge, number in stats.codec.items():
            if gauge == "ratio" or gauge.startswith("auto_"):
                out.set_gauge(_PREFIX + "codec_gauge", number, (self._tier, gauge))
        self._counts.tell(out, "stored_bytes", {"": stats.bytes_stored})
        self._counts.tell(out, "loaded_bytes", {"": stats.bytes_loaded})
        self._counts.tell(out, "shed_blocks", {"": stats.shed_blocks})
        self._counts.tell(out, "internal_errors", {"": internal_errors})
        self._counts.tell(out, "lookups", stats.lookups)
        self._counts.tell(out, "store_blocks", _of_kind(stats.outcomes, "store."))
        self._counts.tell(out, "load_blocks", _of_kind(stats.outcomes, "load."))
        self._counts.tell(out, "record_faults", stats.faults)
        self._counts.tell(out, "removed_blocks", stats.removals)
        self._counts.tell(out, "backend_events", stats.backend_counters)
        if codec := stats.codec:
            self._counts.tell(out, "codec_blocks", {kind: codec[f"{kind}_blocks"] for kind in _CODEC_BLOCKS})
            self._counts.tell(out, "codec_bytes", {stage: codec[f"{stage}_bytes"] for stage in _CODEC_STAGES})
            self._counts.tell(out, "codec_seconds", {op: codec[f"{op}_seconds"] for op in ("encode", "decode")})
        for sample in samples[-_SAMPLES_MAX:]:
            out.observe_histogram(f"{_PREFIX}{sample.kind}_seconds", sample.seconds, (self._tier,))
        return out

    @staticmethod
    def _gauges(stats: TierStats) -> dict[str, float]:
        return {
            "blocks": stats.blocks,
            "used_bytes": stats.used_bytes,
            "capacity_bytes": stats.capacity_bytes,
            "jobs_in_flight": stats.jobs_in_flight,
            "bytes_in_flight": stats.bytes_in_flight,
            "recovering": int(stats.recovering),
            "load_breaker_state": _BREAKER_STATES.get(stats.load_breaker, 2),
            "store_breaker_state": _BREAKER_STATES.get(stats.store_breaker, 2),
        }


def _of_kind(outcomes: Mapping[str, int], prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): count for name, count in outcomes.items() if name.startswith(prefix)}
