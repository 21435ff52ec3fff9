"""Our own metrics under vLLM: their declarations, and the step from a tier's statistics to vLLM's.

vLLM already counts bytes and jobs per tier as its manager sees them. These count what really happened: bytes that
moved, blocks by outcome, why a block was missed, what the medium holds. All have the label ``tier``, because two tiers
of one class share their declarations. The names start with ``vllm:``, as vLLM clears only those when an engine is made
anew.
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

from kvstore.tiers import JobSample, TierStats

__all__ = ["TierMetrics", "metric_definitions"]

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
}
_LABELLED_GAUGES = {"backend_gauge": ("The backend's own gauges, by name.", ("gauge",))}
_HISTOGRAMS = {
    "load_seconds": "Time of a load job on the I/O side.",
    "store_seconds": "Time of a store job on the I/O side.",
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


class TierMetrics:
    """Turns a tier's monotonic counts into what vLLM wants: what came on top since the last report.

    Args:
        tier: Value of the label ``tier``.
    """

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._told: dict[tuple[str, str], float] = {}

    def report(self, stats: TierStats, samples: Sequence[JobSample], internal_errors: int) -> OffloadingConnectorStats:
        """Return everything that changed since the last call, and all gauges."""
        out = OffloadingConnectorStats()
        for name, value in self._gauges(stats).items():
            out.set_gauge(_PREFIX + name, value, (self._tier,))
        for gauge, number in stats.backend_gauges.items():
            out.set_gauge(_PREFIX + "backend_gauge", number, (self._tier, gauge))
        self._count(out, "stored_bytes", {"": stats.bytes_stored})
        self._count(out, "loaded_bytes", {"": stats.bytes_loaded})
        self._count(out, "shed_blocks", {"": stats.shed_blocks})
        self._count(out, "internal_errors", {"": internal_errors})
        self._count(out, "lookups", stats.lookups)
        self._count(out, "store_blocks", _of_kind(stats.outcomes, "store."))
        self._count(out, "load_blocks", _of_kind(stats.outcomes, "load."))
        self._count(out, "record_faults", stats.faults)
        self._count(out, "removed_blocks", stats.removals)
        self._count(out, "backend_events", stats.backend_counters)
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

    def _count(self, out: OffloadingConnectorStats, name: str, counts: Mapping[str, float]) -> None:
        """Report what was added to a family of counts; a label value that never counted anything is left out."""
        for label, value in counts.items():
            added = value - self._told.get((name, label), 0)
            if added <= 0:
                continue
            self._told[name, label] = value
            out.increase_counter(_PREFIX + name, added, (self._tier, label) if label else (self._tier,))


def _of_kind(outcomes: Mapping[str, int], prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): count for name, count in outcomes.items() if name.startswith(prefix)}
