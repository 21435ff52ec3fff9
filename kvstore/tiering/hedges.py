"""Hedged reads: a load that takes unusually long is begun in a second tier, too, and the first complete answer wins."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvstore.primary.tier import PrimaryTier
from kvstore.tiering.gate import Gate
from kvstore.tiering.jobs import JobTable, OpenJob
from kvstore.tiering.link import TierLink
from kvstore.types import JobResult, LookupResult, TransferJob

__all__ = ["HedgeCounts", "Hedges"]

_BUDGET: Final = 0.05
"""Most hedges, as a share of all loads in blocks."""

_SLOTS_SHARE: Final = 1 / 32
"""Most slots of hedges under way, which may evict blocks; and the longest load that is hedged."""


@dataclass(slots=True)
class HedgeCounts:
    """Hedges since the start.

    Attributes:
        hedged: Blocks that a second tier was asked for.
        won: Blocks that the second tier delivered first.
        extra_bytes: Bytes that second tiers read for hedges.
    """

    hedged: int = 0
    won: int = 0
    extra_bytes: int = 0


class Hedges:
    """Begins loads that exceed the 95th percentile of their tier in a later tier with the same blocks.

    A *hedge* is a load into slots of its own. These have no key: they are ABANDONED from the start. If the hedge
    succeeds before the first load is reported, its slots become those of the blocks, and the slots of the first load
    become ABANDONED. So nothing else uses a slot that a load may still write to, whichever load wins and however late
    the other one ends.

    Args:
        primary: The primary tier.
        jobs: The table of all jobs.
        gate: Knows how long loads take.
        clock: Monotonic seconds.
        on_evicted: Called when blocks may have been evicted for a hedge.

    Attributes:
        counts: What it did.
    """

    def __init__(
        self,
        primary: PrimaryTier,
        jobs: JobTable,
        gate: Gate,
        clock: Callable[[], float],
        on_evicted: Callable[[], object],
    ) -> None:
        self.counts = HedgeCounts()
        self._primary = primary
        self._jobs = jobs
        self._gate = gate
        self._clock = clock
        self._on_evicted = on_evicted
        self._blocks_max = max(1, int(primary.slots * _SLOTS_SHARE))
        self._budget = 0.0
        """Blocks that may be hedged now."""
        self._under_way = 0
        """Blocks of unreported hedges."""
        self._due: list[tuple[float, int, OpenJob]] = []
        """Heap of loads by the time from which they take unusually long. Reported ones stay in it until then."""

    def note_load(self, job: OpenJob) -> None:
        """Note a load that a request waits for."""
        self._budget = min(self._blocks_max, self._budget + _BUDGET * len(job.transfer.keys))
        usual_s = self._gate.p95_s(job.link.index, job.under_way)
        if usual_s is not None:
            heapq.heappush(self._due, (job.since + usual_s, job.transfer.job_id, job))

    def start_due(self) -> None:
        """Begin the hedges that are due and affordable, the oldest first; once per step."""
        now, unknown = self._clock(), []
        while self._due and self._due[0][0] <= now:
            job = self._due[0][2]
            size = len(job.transfer.keys)
            is_waited_for = job.state is not None and not job.state.finished
            if is_waited_for and size <= self._blocks_max and self._jobs.is_open(job) and not job.abandoned:
                if size > min(self._budget, self._blocks_max - self._under_way):
                    break
                link, may_follow = self._second_tier(job)
                if link is not None:
                    self._start(job, link, now)
                elif may_follow:
                    unknown.append(self._due[0])
            heapq.heappop(self._due)
        for entry in unknown:
            heapq.heappush(self._due, entry)

    def finish(self, hedge: OpenJob, result: JobResult) -> None:
        """Process the report of a hedge: if it wins, it takes the place of the first load, which is abandoned."""
        keys, first = hedge.transfer.keys, hedge.first
        self._under_way -= len(keys)
        self.counts.extra_bytes += result.size_bytes
        if not result.success or first is None or first.abandoned or not self._jobs.is_open(first):
            return
        for key, slot in zip(keys, hedge.transfer.slots, strict=True):
            self._primary.exchange(key, slot)
        first.abandoned, first.outrun, hedge.abandoned = True, True, False
        hedge.state, hedge.gated = first.state, first.gated
        if hedge.state is not None:
            hedge.state.sources.update(dict.fromkeys(keys, hedge.link))
        self.counts.won += len(keys)

    def clear(self) -> None:
        """Begin no hedge of the present loads. After a reset none is begun anyway, because all are abandoned."""
        self._due.clear()

    def _second_tier(self, job: OpenJob) -> tuple[TierLink | None, bool]:
        """Return a later tier that holds all blocks of a load; if none, whether one may still say so."""
        keys, state = job.transfer.keys, job.state
        may_follow = False
        if state is None:
            return None, False
        for link in state.load_links[state.load_links.index(job.link) + 1 :]:
            if any(state.failed.get(key, 0) & link.bit for key in keys):
                continue
            answers = {link.lookup(key, state.ctx) for key in keys}
            if answers == {LookupResult.HIT}:
                return link, False
            may_follow |= LookupResult.MISS not in answers
        return None, may_follow

    def _start(self, job: OpenJob, link: TierLink, now: float) -> None:
        keys = job.transfer.keys
        slots = self._primary.allocate_spare(len(keys))
        if self._primary.has_evicted:
            self._on_evicted()
        if slots is None:
            return
        transfer = TransferJob(self._jobs.new_id(), keys, slots, job.transfer.ctx)
        hedge = OpenJob(transfer, link, True, None, now, math.inf, abandoned=True, first=job)
        hedge.under_way = link.loading + len(keys)
        self._jobs.add(hedge)
        self._budget -= len(keys)
        self._under_way += len(keys)
        self.counts.hedged += len(keys)
        link.submit_load(transfer)
