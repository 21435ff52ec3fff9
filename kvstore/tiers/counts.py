"""What the scheduler half of a tier counts."""

from __future__ import annotations

from collections import Counter

from kvstore.runtime.messages import JobKind, StatsReport
from kvstore.tiers.health import TierHealth
from kvstore.tiers.jobs import Jobs
from kvstore.tiers.presence import Presence
from kvstore.tiers.stats import TierStats

__all__ = ["TierCounts"]


class TierCounts:
    """Counts since the tier was opened, and the last report of the I/O half.

    Attributes:
        lookups: Lookup answers by result.
        faults: Records that failed verification, by cause.
        removals: Blocks that left, by cause.
        shed_blocks: Blocks not stored because too much was in flight or the store breaker open.
        last_error: Text of the last failure.
        report: What the I/O half said last.
    """

    def __init__(self) -> None:
        self.lookups: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.removals: Counter[str] = Counter()
        self.shed_blocks = 0
        self.last_error = ""
        self.report: StatsReport | None = None

    def snapshot(self, name: str, jobs: Jobs, health: TierHealth, presence: Presence, epoch: str | None) -> TierStats:
        """Return all of it, with what the other parts of the tier count."""
        report = self.report or StatsReport(len(presence), 0, 0, {}, {})
        return TierStats(
            name=name,
            epoch=epoch,
            recovering=not presence.complete,
            blocks=report.blocks,
            used_bytes=report.used_bytes,
            capacity_bytes=report.capacity_bytes,
            lookups=dict(self.lookups),
            outcomes=dict(jobs.outcomes),
            faults=dict(self.faults),
            removals=dict(self.removals),
            bytes_stored=jobs.moved_bytes[JobKind.STORE],
            bytes_loaded=jobs.moved_bytes[JobKind.LOAD],
            jobs_in_flight=len(jobs),
            bytes_in_flight=jobs.running_bytes,
            shed_blocks=self.shed_blocks,
            load_breaker=health.state(JobKind.LOAD),
            store_breaker=health.state(JobKind.STORE),
            last_error=self.last_error,
            backend_counters=dict(report.counters),
            backend_gauges=dict(report.gauges),
            codec=dict(report.codec),
        )
