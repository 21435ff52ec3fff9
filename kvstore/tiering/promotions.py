"""Promotions: loads of blocks from a tier into the primary tier."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.primary.tier import PrimaryTier
from kvstore.tiering.config import TieringConfig
from kvstore.tiering.gate import SLACK_S_MAX, Gate
from kvstore.tiering.hedges import Hedges
from kvstore.tiering.jobs import JobTable, OpenJob
from kvstore.tiering.link import TierLink
from kvstore.tiering.requests import RequestState
from kvstore.tiering.stats import TIMED_EVERY, Tally
from kvstore.types import BlockKey, JobResult, LookupResult, TransferJob

__all__ = ["Promotions"]

_MEASURED_SHARE: Final = 1 / 32
"""Most slots of a load that only measures: it may evict blocks."""


class Promotions:
    """Finds blocks in the tiers and promotes them, as one load job per tier, request and step.

    A promoted block is pinned for the request it was promoted for (its *claim*) until that request loads its blocks,
    begins to store, or ends. Blocks being promoted and claims together stay within a share of the primary tier, so that
    waiting requests can't displace each other's blocks; the only request with promotions may use the whole tier.
    A request without room waits for it up to ``wait_s_max``. A request that already has promotions or claims goes
    without the rest, because two such requests could wait for each other for ever.

    Args:
        primary: The primary tier.
        jobs: The table of all jobs.
        tally: Counts the tiers' answers.
        config: Shares and times.
        clock: Monotonic seconds.
        on_evicted: Called when blocks may have been evicted for a promotion.
        gate: Learns from loads, and limits how long they may take; None for no gate.
        hedges: Begins slow loads in a second tier, too; None for no hedges.

    Attributes:
        blocks: Blocks being promoted, and claims.
        throttled: Lookups without room.
    """

    def __init__(
        self,
        primary: PrimaryTier,
        jobs: JobTable,
        tally: Tally,
        config: TieringConfig,
        clock: Callable[[], float],
        on_evicted: Callable[[], object],
        gate: Gate | None = None,
        hedges: Hedges | None = None,
    ) -> None:
        self._primary = primary
        self._jobs = jobs
        self._tally = tally
        self._clock = clock
        self._on_evicted = on_evicted
        self._gate = gate
        self._hedges = hedges
        self._measurements: list[tuple[TierLink, Sequence[BlockKey], RequestState]] = []
        self._wait_s_max = config.wait_s_max
        self._load_s_max = config.load_s_max
        self._blocks_max = max(1, int(primary.slots * config.promotion_share))
        self._pending: dict[tuple[TierLink, RequestState], tuple[list[BlockKey], list[int]]] = {}
        self.blocks = 0
        self.throttled = 0
        self._polled_at = clock()
        """Time of the last call of :meth:`abandon_overdue`."""
        self._refused: dict[RequestState, None] = {}
        """Requests that wait for room."""

    def find(self, key: BlockKey, state: RequestState) -> tuple[TierLink | None, TierLink | None]:
        """Return the first tier that has a block for a request; if none, the first one that doesn't know yet."""
        failed = state.failed.get(key, 0) if state.failed else 0
        tally = self._tally
        unknown = None
        for link in state.load_links:
            if failed & link.bit:
                continue
            started = 0.0 if tally.by_link[link].queries % TIMED_EVERY else time.perf_counter()
            result = link.lookup(key, state.ctx)
            tally.note_answer(state, key, link, result, started)
            if result is LookupResult.HIT:
                return link, None
            if result is LookupResult.RETRY and unknown is None:
                unknown = link
        return None, unknown

    def is_full(self, state: RequestState) -> bool:
        """Whether a request must wait for room in the share; the only request may use the whole primary tier."""
        if self.blocks < self._blocks_max:
            return False
        mine = state.promoting + len(state.claims)
        return mine < self.blocks or any(other is not state for other in self._refused)

    @property
    def pending(self) -> bool:
        """Whether :meth:`flush` has something to submit."""
        return bool(self._pending)

    def start(self, link: TierLink, key: BlockKey, state: RequestState) -> bool:
        """Begin to promote a block that a tier holds; False if there is no room."""
        primary = self._primary
        if not primary.free_slots:
            # A promotion must not evict the start of the prefix whose end it brings, in this step or the next.
            primary.pin_promised(touch=True)
        slots = None if self.is_full(state) else primary.allocate((key,))
        if primary.has_evicted:
            self._on_evicted()
        if slots is None:
            self.throttled += 1
            if not state.finished:
                self._refused[state] = None
            return False
        self._refused.pop(state, None)
        group = self._pending.get((link, state))
        if group is None:
            group = self._pending[link, state] = ([], [])
        group[0].append(key)
        group[1].append(slots[0])
        state.promoting += 1
        state.sources[key] = link
        state.wait_until = None
        self.blocks += 1
        return True

    def no_room(self, state: RequestState) -> LookupResult:
        """Return the answer to a request without room for its block."""
        if state.promoting or state.claims:
            self._refused.pop(state, None)
            return LookupResult.MISS
        return self.wait(state)

    def wait(self, state: RequestState, patience_s: float = 0.0) -> LookupResult:
        """Return RETRY until the request has waited long enough, then MISS."""
        now = self._clock()
        if state.wait_until is None:
            longest = state.gated.patience_s
            state.wait_until = now + (
                max(self._wait_s_max, patience_s) if longest is None else min(self._wait_s_max, longest)
            )
        if now < state.wait_until:
            return LookupResult.RETRY
        self._refused.pop(state, None)
        return LookupResult.MISS

    def measure(self, link: TierLink, keys: Sequence[BlockKey], state: RequestState) -> None:
        """Load blocks only to measure a tier, from the end of this step on; no request waits, and they are dropped."""
        self._measurements.append((link, keys[: max(1, int(self._primary.slots * _MEASURED_SHARE))], state))

    def flush(self) -> None:
        """Submit the promotions started since the last call."""
        pending, self._pending = self._pending, {}
        for (link, state), (keys, slots) in pending.items():
            size = len(keys)
            if self._gate is not None and state.gated.recompute_s:
                size = self._gate.piece_blocks(link.index, len(keys))
            for first in range(0, len(keys), size):
                self._submit(link, state, keys[first : first + size], slots[first : first + size])
        measurements, self._measurements = self._measurements, []
        for link, measured, state in measurements:
            self._submit_measurement(link, self._primary.missing(measured), state)

    def _submit(self, link: TierLink, state: RequestState, keys: list[BlockKey], slots: list[int]) -> None:
        now, limit_s, under_way = self._clock(), self._load_s_max, link.loading + len(keys)
        decision = state.gated
        gate = self._gate if decision.recompute_s else None
        if gate is not None:
            limit_s = min(limit_s, gate.deadline_s(link.index, under_way, decision.recompute_s))
            decision.since = now if decision.since is None else decision.since
        transfer = TransferJob(self._jobs.new_id(), keys, slots, state.ctx)
        job = OpenJob(transfer, link, True, state, now, now + limit_s, gated=gate is not None, under_way=under_way)
        self._jobs.add(job)
        if self._hedges is not None:
            self._hedges.note_load(job)
        if not link.submit_load(transfer):
            self.abandon(job)

    def _submit_measurement(self, link: TierLink, keys: list[BlockKey], state: RequestState) -> None:
        slots = self._primary.allocate(keys) if keys else None
        if self._primary.has_evicted:
            self._on_evicted()
        if self._gate is None or slots is None:
            return
        for key in keys:
            # The bytes may arrive at any time, and nothing waits for them.
            self._primary.abandon(key)
        now, under_way = self._clock(), link.loading + len(keys)
        transfer = TransferJob(self._jobs.new_id(), keys, slots, state.ctx)
        self._jobs.add(
            OpenJob(transfer, link, True, None, now, math.inf, abandoned=True, measures=True, under_way=under_way)
        )
        self._gate.note_exploring(link.index, len(keys))
        if not link.submit_load(transfer):
            # It may never be reported; another one may measure the tier.
            self._gate.note_explored(link.index)

    def finish(self, job: OpenJob, result: JobResult) -> list[BlockKey]:
        """Process the result of a load; return the blocks that arrived, which are READY."""
        keys, link, state = job.transfer.keys, job.link, job.state
        link.loading -= len(keys)
        link.loaded_at = self._clock()
        if self._gate is not None:
            self._learn(self._gate, job, result)
        if self._hedges is not None and job.first is not None:
            self._hedges.finish(job, result)
            state = job.state
        if job.abandoned:
            for slot in job.transfer.slots:
                self._primary.reclaim(slot)
            return []
        if result.success:
            good, bad = list(keys), []
        else:
            loaded = set(result.successful_keys)
            good = [key for key in keys if key in loaded]
            bad = [key for key in keys if key not in loaded]
            self._primary.abort(bad)
        link.loaded_blocks += len(good)
        if self._gate is not None and job.gated:
            self._gate.counts.loaded += len(good)
        alive = state is not None and not state.finished
        self._primary.commit(good, pins=1 if alive else 0)
        if state is not None:
            state.promoting -= len(keys)
            if alive:
                state.claims.update(dict.fromkeys(good))
            self._note_failed(job, bad)
        self.blocks -= len(bad) if alive else len(keys)
        return good

    def abandon(self, job: OpenJob) -> None:
        """Give up an unreported load: no request waits for its blocks; its slots stay ABANDONED until its report."""
        keys = job.transfer.keys
        job.abandoned = True
        for key in keys:
            self._primary.abandon(key)
        self.blocks -= len(keys)
        if job.state is not None:
            job.state.promoting -= len(keys)
            self._note_failed(job, keys)

    def abandon_overdue(self) -> None:
        """Abandon the loads past their deadline.

        If a tier has reported nothing for the slack by then, it stalls: all its loads on which the gate decided end.
        """
        now = self._clock()
        stalled: set[TierLink] = set()
        for job in self._jobs.take_overdue_loads(now):
            self._abandon_late(job)
            if job.late and now - job.link.loaded_at >= SLACK_S_MAX:
                stalled.add(job.link)
        if stalled:
            for job in self._jobs:
                if job.link in stalled and job.gated and not job.abandoned:
                    self._abandon_late(job)
        self._polled_at = now

    def _abandon_late(self, job: OpenJob) -> None:
        self.abandon(job)
        if job.gated and self._gate is not None and job.state is not None:
            job.late = True
            self._gate.note_late(job.link.index, len(job.transfer.keys))
            # The request computes the rest, and tries no other tier: it has waited long enough.
            decision = job.state.gated
            limit = min(job.state.ends.get(key, 0) for key in job.transfer.keys) - 1
            decision.limit = limit if decision.limit is None else min(limit, decision.limit)

    def release_claims(self, state: RequestState) -> None:
        """Unpin the blocks promoted for a request and not loaded; it no longer waits for room."""
        self._refused.pop(state, None)
        if state.claims:
            self._primary.unpin(reversed(state.claims))
            self.blocks -= len(state.claims)
            state.claims.clear()

    def drop_request(self, state: RequestState) -> None:
        """End a request: its promotions that were not submitted yet are dropped."""
        self.release_claims(state)
        if state.promoting:
            for group in [group for group in self._pending if group[1] is state]:
                keys, _ = self._pending.pop(group)
                self._primary.abort(keys)
                state.promoting -= len(keys)
                self.blocks -= len(keys)

    def forget_all(self) -> None:
        """Forget everything, because the primary tier is cleared."""
        self._pending.clear()
        self._measurements.clear()
        self._refused.clear()
        self.blocks = 0

    def _learn(self, gate: Gate, job: OpenJob, result: JobResult) -> None:
        """Let the gate learn from a reported load.

        The report may have waited for the engine's step. The load ended after the previous poll at the earliest.
        """
        index, waited_s = job.link.index, self._clock() - job.since
        seconds = min(waited_s, max(result.seconds, self._polled_at - job.since, 0.0))
        if job.measures:
            gate.note_explored(index, job.under_way, seconds if result.success else math.nan)
        elif job.late:
            gate.note_late_end(index, job.under_way, job.since, job.since + seconds)
        elif result.success and not job.is_void:
            gate.note_load(index, job.under_way, seconds)

    def _note_failed(self, job: OpenJob, keys: Sequence[BlockKey]) -> None:
        job.link.failed_loads += len(keys)
        if job.state is not None:
            failed = job.state.failed
            for key in keys:
                failed[key] = failed.get(key, 0) | job.link.bit
                job.state.sources.pop(key, None)
