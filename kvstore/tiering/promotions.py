"""Promotions: loads of blocks from a tier into the primary tier."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.tiering.core import Core, Part
from kvstore.tiering.gate import SLACK_S_MAX, Gate
from kvstore.tiering.hedges import Hedges
from kvstore.tiering.jobs import OpenJob
from kvstore.tiering.link import TierLink
from kvstore.tiering.requests import HandOverWait, RequestState
from kvstore.types import BlockKey, JobResult, LookupResult, MissCause, Outcome, TransferJob

_CAUSES: Final = {
    Outcome.MISS: MissCause.LOST,
    Outcome.CORRUPT: MissCause.CORRUPT,
    Outcome.TIMEOUT: MissCause.TIMEOUT,
}
"""Causes of failed loads; that of all others is :attr:`MissCause.FAILED`."""

_HEARD_SHARE: Final = 0.5
"""Share of the computing time for which the other engine may not know of the request yet."""


_MEASURED_SHARE: Final = 1 / 32
"""Maximum slots of a load that only measures a tier, because it may evict blocks."""


class Promotions(Part):
    """Promotes blocks, as one load job per tier, request and step.

    A promoted block is pinned for its request (a *claim*) until the request loads its blocks, begins to store, or ends.
    Blocks being promoted and claims together stay within a share of the primary tier, so that waiting requests can't
    displace each other's blocks. A single request with promotions may use the whole tier. A request without room waits
    up to ``wait_s_max``. A request that already has promotions or claims does not wait for more room, because two such
    requests could wait for each other forever.

    Args:
        hedges: Repeats slow loads from a second tier; None for no hedges.
        on_abandoned: Called with the request of an abandoned load.
    """

    def __init__(self, core: Core, hedges: Hedges | None, on_abandoned: Callable[[RequestState], None]) -> None:
        self._core = core
        self._primary = core.primary
        self._jobs = core.jobs
        self._clock = core.clock
        self._gate = core.gate
        self._rates = None if core.tenants is None else core.tenants.loads
        self._hedges = hedges
        self._on_abandoned = on_abandoned
        self._measurements: list[tuple[TierLink, Sequence[BlockKey], RequestState]] = []
        self._wait_s_max = core.config.wait_s_max
        self._load_s_max = core.config.load_s_max
        self._blocks_max = max(1, int(core.primary.slots * core.config.promotion_share))
        self._pending: dict[tuple[int, RequestState], tuple[list[BlockKey], list[int]]] = {}
        """Promotions of this step, by index of the tier."""
        self.blocks = 0  # Blocks being promoted, and claims.
        self.throttled = 0  # Lookups that found no room.
        self._polled_at = core.clock()
        """Time of the last call of :meth:`abandon_overdue`."""
        self._refused: dict[RequestState, None] = {}
        """Requests that wait for room."""

    def is_full(self, state: RequestState) -> bool:
        """Whether a request must wait for room in the share. A single request may use the whole primary tier."""
        if self.blocks < self._blocks_max:
            return False
        mine = state.promoting + len(state.claims)
        return mine < self.blocks or any(other is not state for other in self._refused)

    def start(self, link: TierLink, key: BlockKey, state: RequestState) -> LookupResult:
        """Begin to promote a block that a tier holds.

        Returns:
            HIT_PENDING; RETRY if there is no room; MISS if its tenant's rate does not allow it now.
        """
        primary = self._primary
        if self._rates is not None and not self._rates.allows(key):
            return LookupResult.MISS
        if not primary.free:
            # Promoting the end of a prefix must not evict its start, in this step or the next.
            primary.pin_promised(touch=True)
        is_full = self.blocks >= self._blocks_max and self.is_full(state)
        slots = None if is_full else primary.allocate((key,))
        if primary.evicted:
            self._core.take_evicted()
        if slots is None:
            self.throttled += 1
            if not state.finished:
                self._refused[state] = None
            return LookupResult.RETRY
        if self._refused:
            self._refused.pop(state, None)
        pending_keys, pending_slots = self._pending.setdefault((link.index, state), ([], []))
        self.active = True
        pending_keys.append(key)
        pending_slots.append(slots[0])
        state.promoting += 1
        state.sources[key] = link
        state.wait_until = None
        self.blocks += 1
        if self._rates is not None:
            self._rates.take((key,))
        return LookupResult.HIT_PENDING

    def no_room(self, state: RequestState) -> LookupResult:
        """Return the answer to a request without room for its block."""
        if state.promoting or state.claims:
            self._refused.pop(state, None)
            return LookupResult.MISS
        return self.wait(state)

    def wait(self, state: RequestState, key: BlockKey | None = None) -> LookupResult:
        """Return RETRY until the request has waited long enough, then MISS.

        ``key``: block whose tier has not answered; None for a request that waits for room.
        """
        now = self._clock()
        end = None if key is None else self._end_of_patience(key, state, now)
        if end is None:
            if state.wait_until is None:
                longest = state.gated.patience_s
                patience_s = 0.0 if key is None else state.ctx.patience_s
                state.wait_until = now + (
                    max(self._wait_s_max, patience_s) if longest is None else min(self._wait_s_max, longest)
                )
            end = state.wait_until
        if now < end:
            return LookupResult.RETRY
        self._refused.pop(state, None)
        return LookupResult.MISS

    def _end_of_patience(self, key: BlockKey, state: RequestState, now: float) -> float | None:
        """Return the time at which a request stops waiting for its first missing block.

        Without a block, it waits for as long as it takes to compute the rest of its prompt here; each block that
        arrives extends the wait by the time to compute that block. So it keeps waiting while blocks arrive faster than
        they are computed here, and the wait at most doubles the time of computing everything.

        Returns:
            The time; None for requests that wait for no other engine, or while the computing speed is unknown.
        """
        gate, ctx = self._gate, state.ctx
        if gate is None or not gate.is_ready or not ctx.patience_s or key not in state.ends:
            return None
        before = state.ends[key] - state.ends[state.keys[0]]
        if state.handed_over is None:
            total_s = gate.recompute_s(before, max(state.ends.values()))
            state.handed_over = HandOverWait(now, before, total_s)
            ctx.unheard_s = min(ctx.patience_s, max(ctx.unheard_s, now - ctx.since + _HEARD_SHARE * total_s))
        wait = state.handed_over
        extra_s = gate.recompute_s(wait.start, before)
        return wait.since + max(gate.slack_s(wait.total_s), wait.total_s) + extra_s

    def measure(self, link: TierLink, keys: Sequence[BlockKey], state: RequestState) -> None:
        """Schedule a load for the end of this step that only measures a tier; its blocks are dropped."""
        self.active = True
        self._measurements.append((link, keys[: max(1, int(self._primary.slots * _MEASURED_SHARE))], state))

    def step(self) -> bool:
        """Submit the promotions started since the last step."""
        pending, self._pending = self._pending, {}
        for (index, state), (keys, slots) in pending.items():
            size = len(keys)
            if self._gate is not None and state.gated.recompute_s:
                size = self._gate.piece_blocks(index, len(keys))
            for first in range(0, len(keys), size):
                self._submit(self._core.links[index], state, keys[first : first + size], slots[first : first + size])
        measurements, self._measurements = self._measurements, []
        for link, measured, state in measurements:
            self._submit_measurement(link, self._primary.missing(measured), state)
        return False

    def _submit(self, link: TierLink, state: RequestState, keys: list[BlockKey], slots: list[int]) -> None:
        decision = state.gated
        job = self._load(link, keys, slots, state)
        if self._gate is not None and decision.recompute_s:
            job.gated, job.guessed = True, self._gate.load_s(link.index, 1) is None
            limit_s = self._gate.deadline_s(link.index, job.under_way, decision.recompute_s)
            job.deadline = min(job.deadline, job.since + limit_s)
            decision.since = job.since if decision.since is None else decision.since
            decision.under_way = job.under_way
        elif (end := self._end_of_patience(keys[0], state, job.since)) is not None:
            job.deadline = min(job.deadline, max(end, job.since + SLACK_S_MAX))
        if self._hedges is not None:
            self._hedges.note_load(job)
        if not self._jobs.submit(job):
            self.abandon(job)

    def _load(self, link: TierLink, keys: Sequence[BlockKey], slots: Sequence[int], state: RequestState) -> OpenJob:
        now = self._clock()
        job = OpenJob(TransferJob(self._jobs.new_id(), keys, slots, state.ctx), link, True, state)
        job.since, job.deadline, job.under_way = now, now + self._load_s_max, link.loading + len(keys)
        return job

    def _submit_measurement(self, link: TierLink, keys: list[BlockKey], state: RequestState) -> None:
        slots = self._primary.allocate(keys) if keys else None
        self._core.take_evicted()
        if self._gate is None or slots is None:
            return
        for key in keys:
            # The bytes may arrive at any time, and no request waits for them.
            self._primary.abandon(key)
        job = self._load(link, keys, slots, state)
        job.state, job.abandoned, job.measures = None, True, True
        self._gate.note_exploring(link.index, len(keys))
        if not self._jobs.submit(job):
            # Its report may never arrive. End the probe, so that another one can measure the tier.
            self._gate.note_explored(link.index)

    def finish(self, job: OpenJob, result: JobResult) -> list[BlockKey]:
        """Process the result of a load; return the loaded blocks, which are READY."""
        keys, link, state = job.transfer.keys, job.link, job.state
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
        link.loaded += len(good)
        if self._gate is not None and job.gated:
            self._gate.counts.loaded += len(good)
        alive = state is not None and not state.finished
        self._primary.commit(good, pins=1 if alive else 0)
        if state is not None:
            state.promoting -= len(keys)
            first, _ = state.load_times.get(link.index, (job.since, 0.0))
            state.load_times[link.index] = min(first, job.since), link.loaded_at
            if alive:
                state.claims.update(dict.fromkeys(good))
            if bad:
                # The first one decides where the request begins to compute.
                outcome = dict(zip(keys, result.outcomes, strict=False)).get(bad[0], Outcome.IO_ERROR)
                self._note_failed(job, bad, _CAUSES.get(outcome, MissCause.FAILED))
        self.blocks -= len(bad) if alive else len(keys)
        return good

    def abandon(self, job: OpenJob) -> None:
        """Abandon an unreported load. No request waits for it any more; its slots stay ABANDONED until its report."""
        keys = job.transfer.keys
        job.abandoned = True
        for key in keys:
            self._primary.abandon(key)
        self.blocks -= len(keys)
        if job.state is not None:
            job.state.promoting -= len(keys)
            self._note_failed(job, keys, MissCause.TIMEOUT)
            self._on_abandoned(job.state)

    def abandon_overdue(self) -> None:
        """Abandon the loads past their deadline.

        If the tier of such a load has reported no load for ``SLACK_S_MAX``, it counts as stalled, and all its gated
        loads are abandoned.
        """
        now = self._clock()
        stalled: set[TierLink] = set()
        for job in self._jobs.take_overdue_loads(now):
            if job.since + self._load_s_max <= now:
                self._lose(job)
            elif self._may_go_on(job, now):
                continue
            else:
                self._jobs.set_deadline(job, job.since + self._load_s_max)
            if job.abandoned:
                continue
            self._abandon_late(job)
            if job.late and now - job.link.loaded_at >= SLACK_S_MAX:
                stalled.add(job.link)
        for job in self._jobs if stalled else ():
            if job.link in stalled and job.gated and not job.abandoned:
                self._abandon_late(job)
        self._polled_at = now

    def _may_go_on(self, job: OpenJob, now: float) -> bool:
        """Extend the deadline of a load from a tier that was unmeasured at submission, if new measurements justify it.

        Returns:
            Whether the deadline was extended.
        """
        if self._gate is None or job.state is None or job.abandoned or not job.guessed:
            return False
        decision, index = job.state.gated, job.link.index
        whole_s = self._gate.load_s(index, decision.under_way, samples_min=1)
        if whole_s is None or whole_s > decision.recompute_s:
            return False
        expected_s = self._gate.load_s(index, job.under_way, samples_min=1) or 0.0
        deadline = job.since + expected_s + self._gate.slack_s(decision.recompute_s)
        if deadline <= now:
            return False
        self._jobs.set_deadline(job, min(deadline, job.since + self._load_s_max))
        return True

    def _lose(self, job: OpenJob) -> None:
        """Stop waiting for the report of a load, which may be lost. The load no longer counts as load on the tier."""
        self._jobs.lose(job)
        if job.measures and self._gate is not None:
            self._gate.note_explored(job.link.index)
        if job.first is not None and self._hedges is not None:
            self._hedges.lose(job)

    def _abandon_late(self, job: OpenJob) -> None:
        self.abandon(job)
        if job.gated and self._gate is not None and job.state is not None:
            job.late = True
            self._gate.note_late(job.link.index, len(job.transfer.keys))
            # The request computes the remaining blocks and tries no other tier, because it has waited long enough.
            decision = job.state.gated
            limit = min(job.state.ends.get(key, 0) for key in job.transfer.keys) - 1
            decision.limit = limit if decision.limit is None else min(limit, decision.limit)
            decision.declined = job.link.index, MissCause.LATE

    def release_claims(self, state: RequestState) -> None:
        """Unpin the blocks promoted for a request but not loaded. The request no longer waits for room."""
        self._refused.pop(state, None)
        if state.claims:
            self._primary.unpin(reversed(state.claims))
            self.blocks -= len(state.claims)
            state.claims.clear()

    def drop_request(self, state: RequestState) -> None:
        """End a request, and drop its promotions that were not submitted yet."""
        self.release_claims(state)
        if state.promoting:
            for group in [group for group in self._pending if group[1] is state]:
                keys, _ = self._pending.pop(group)
                self._primary.abort(keys)
                state.promoting -= len(keys)
                self.blocks -= len(keys)

    def reset(self) -> None:
        """Drop all state, because the primary tier is cleared."""
        self.active = False
        self._pending.clear()
        self._measurements.clear()
        self._refused.clear()
        self.blocks = 0

    def _learn(self, gate: Gate, job: OpenJob, result: JobResult) -> None:
        """Pass the measurement of a reported load to the gate.

        A report is only seen at the engine's next step. The load ended after the previous poll at the earliest.
        """
        index, waited_s = job.link.index, self._clock() - job.since
        seconds = min(waited_s, max(result.seconds, self._polled_at - job.since, 0.0))
        if job.measures:
            gate.note_explored(index, job.under_way, seconds if result.success else math.nan)
        elif job.late:
            gate.note_late_end(index, job.under_way, job.since, job.since + seconds)
        elif result.success and not job.is_void:
            gate.note_load(index, job.under_way, seconds)

    def _note_failed(self, job: OpenJob, keys: Sequence[BlockKey], cause: MissCause) -> None:
        job.link.failed_loads += len(keys)
        if job.state is not None:
            job.state.failures[job.link.index] = cause
            failed = job.state.failed
            for key in keys:
                failed[key] = failed.get(key, 0) | job.link.bit
                job.state.sources.pop(key, None)
