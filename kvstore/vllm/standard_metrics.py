"""vLLM's own metrics of tiering and of the primary tier, filled by kvstore's manager.

Dashboards and routers (such as llm-d's) read these metrics under the names of vLLM's manager. Only metrics that the
running version declares are reported, with its names, kinds and labels. The label ``tier`` is ``0:primary`` for the
primary tier, otherwise position and name (``1:nvme``); vLLM uses position and type.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.cpu.common import CPUOffloadingMetrics
from vllm.v1.kv_offload.tiering.base import TieringOffloadingMetrics

from kvstore.tiering import TieringStats
from kvstore.tiering.tally import Tally, TierTally

_PRIMARY_LABEL = ("0:primary",)

_PROMOTION_LATENCY = "vllm:kv_offload_tiering_promotion_latency_seconds"
"""A literal, because the constant came with 0.33."""


class StandardMetrics:
    """Converts the counts of kvstore's manager into vLLM's metrics.

    Args:
        tier_names: Names of the tiers below the primary one, in order.
        slot_bytes: Bytes per row of the primary tier; vLLM counts transfers in whole rows.
        declared: Metric names declared by vLLM.
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
            self._add(out, names.PROMOTION_JOB_FAILURES, counts.failed_loads, label)
            self._add(out, names.CASCADE_JOB_FAILURES, counts.failed_stores, label)
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
