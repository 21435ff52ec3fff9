"""Hedged reads: an unusually slow load is also started from a second tier, and the first complete result is used."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Final

from kvstore.tiering.core import Core
from kvstore.tiering.gate import Gate
from kvstore.tiering.jobs import OpenJob
from kvstore.tiering.link import TierLink
from kvstore.types import JobResult, LookupResult, TransferJob

_BUDGET: Final = 0.05
"""Maximum hedged blocks, as a share of all loaded blocks."""

_SLOTS_SHARE: Final = 1 / 32
"""Maximum slots of hedges in progress (they may evict blocks), and maximum size of a load that is hedged."""


@dataclass(slots=True)
class HedgeCounts:
    """Hedges since the start."""

    hedged: int = 0  # Blocks requested from a second tier.
    won: int = 0  # Blocks that the second tier delivered first.
    extra_bytes: int = 0  # Bytes that second tiers read for hedges.


class Hedges:
    """Repeats loads that exceed the 95th percentile of their tier from a later tier with the same blocks.

    A *hedge* is a load into slots of its own. These have no key: they are ABANDONED from the start. If the hedge
    succeeds before the first load is reported, its slots become those of the blocks, and the slots of the first load
    become ABANDONED. So a slot that a load may still write to is never reused, regardless of which load wins and when
    the other one ends.
    """

    def __init__(self, core: Core, gate: Gate) -> None:
        self.counts = HedgeCounts()
        self._core = core
        self._primary = core.primary
        self._jobs = core.jobs
        self._gate = gate
        self._clock = core.clock
        self.blocks_max = max(1, int(core.primary.slots * _SLOTS_SHARE))
        """Most blocks of unreported hedges."""
        self.budget = 0.0
        """Blocks that may be hedged now."""
        self.under_way = 0
        """Blocks of unreported hedges."""
        self.due: list[tuple[float, int, OpenJob]] = []
        """Heap of loads by the time at which they become unusually slow. Reported loads stay in it until then."""

    def note_load(self, job: OpenJob) -> None:
        """Note a load that a request waits for."""
        self.budget = min(self.blocks_max, self.budget + _BUDGET * len(job.transfer.keys))
        usual_s = self._gate.p95_s(job.link.index, job.under_way)
        if usual_s is not None:
            heapq.heappush(self.due, (job.since + usual_s, job.transfer.job_id, job))

    def start_due(self) -> None:
        """Begin the hedges that are due and affordable, the oldest first; once per step."""
        now, unknown = self._clock(), []
        while self.due and self.due[0][0] <= now:
            job = self.due[0][2]
            size = len(job.transfer.keys)
            is_waited_for = job.state is not None and not job.state.finished
            if is_waited_for and size <= self.blocks_max and self._jobs.is_open(job) and not job.abandoned:
                if size > min(self.budget, self.blocks_max - self.under_way):
                    break
                link, may_follow = self._second_tier(job)
                if link is not None:
                    self._start(job, link, now)
                elif may_follow:
                    unknown.append(self.due[0])
            heapq.heappop(self.due)
        for entry in unknown:
            heapq.heappush(self.due, entry)

    def finish(self, hedge: OpenJob, result: JobResult) -> None:
        """Process the report of a hedge. If it wins, it replaces the first load, which is abandoned."""
        keys, first = hedge.transfer.keys, hedge.first
        if not hedge.lost:
            self.under_way -= len(keys)
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

    def lose(self, hedge: OpenJob) -> None:
        """Release the capacity of a hedge whose report may never arrive."""
        self.under_way -= len(hedge.transfer.keys)

    def clear(self) -> None:
        """Start no hedges for the current loads. Not needed at a reset, which abandons all loads."""
        self.due.clear()

    def _second_tier(self, job: OpenJob) -> tuple[TierLink | None, bool]:
        """Return a later tier that holds all blocks of a load; if none, whether an answer is still outstanding."""
        keys, state = job.transfer.keys, job.state
        if state is None:
            return None, False
        may_follow = False
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
        self._core.take_evicted()
        if slots is None:
            return
        hedge = OpenJob(TransferJob(self._jobs.new_id(), keys, slots, job.transfer.ctx), link, True, None, since=now)
        hedge.abandoned, hedge.first, hedge.under_way = True, job, link.loading + len(keys)
        hedge.deadline = now + self._core.config.load_s_max
        self.budget -= len(keys)
        self.under_way += len(keys)
        self.counts.hedged += len(keys)
        self._jobs.submit(hedge)
