"""Promotions: blocks on their way from a tier into the primary tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore.primary.tier import PrimaryTier
from kvstore.tiering.config import TieringConfig
from kvstore.tiering.jobs import JobTable, OpenJob
from kvstore.tiering.link import TierLink
from kvstore.tiering.request import RequestState
from kvstore.types import BlockKey, JobResult, LookupResult, TransferJob

__all__ = ["Promotions"]


class Promotions:
    """Starts promotions, within their share of the primary tier, as one load job per tier, request and step.

    A promoted block is pinned for the request it was promoted for (its *claim*) until that request loads its blocks,
    begins to store, or ends. Blocks on their way and claims together stay within the share, so that requests which
    wait can't push out each other's blocks; a request that is the only one to want promotions may have the whole tier.
    A request that finds no room waits a while for it; one that has blocks of
    its own on the way, or claimed, goes without the rest, as two such requests could wait for each other for ever.

    Attributes:
        blocks: Blocks on their way, and claims.
        failed_blocks: Promotions that failed.
        throttled: Lookups that found no room.
    """

    def __init__(self, primary: PrimaryTier, jobs: JobTable, config: TieringConfig, clock: Callable[[], float]) -> None:
        self._primary = primary
        self._jobs = jobs
        self._clock = clock
        self._wait_s_max = config.wait_s_max
        self._load_s_max = config.load_s_max
        self._blocks_max = max(1, int(primary.slots * config.promotion_share))
        self._pending: dict[tuple[TierLink, RequestState], tuple[list[BlockKey], list[int]]] = {}
        self.blocks = 0
        self.failed_blocks = 0
        self.throttled = 0
        self._refused: dict[RequestState, None] = {}
        """Requests that found no room, and wait for it."""

    def is_full(self, state: RequestState) -> bool:
        """Tell whether a request has to wait for room in the share; alone it may have the whole primary tier."""
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
        slots = None if self.is_full(state) else self._primary.allocate((key,))
        if slots is None:
            self.throttled += 1
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
        """Return what a request for whose block there is no room is told."""
        if state.promoting or state.claims:
            self._refused.pop(state, None)
            return LookupResult.MISS
        return self.wait(state)

    def wait(self, state: RequestState) -> LookupResult:
        """Return RETRY while a request may be asked to wait, MISS after that."""
        now = self._clock()
        if state.wait_until is None:
            state.wait_until = now + self._wait_s_max
        if now < state.wait_until:
            return LookupResult.RETRY
        self._refused.pop(state, None)
        return LookupResult.MISS

    def flush(self) -> None:
        """Submit what was started since the last call."""
        pending, self._pending = self._pending, {}
        now = self._clock()
        for (link, state), (keys, slots) in pending.items():
            transfer = TransferJob(self._jobs.new_id(), keys, slots, state.ctx)
            job = OpenJob(transfer, link, True, state, since=now, deadline=now + self._load_s_max)
            self._jobs.add(job)
            if not link.submit_load(transfer):
                self.abandon(job)

    def finish(self, job: OpenJob, result: JobResult) -> list[BlockKey]:
        """Take in the end of a load: what arrived can be read from now on; return it."""
        keys, link, state = job.transfer.keys, job.link, job.state
        link.loading -= len(keys)
        if job.abandoned:
            for slot in job.transfer.slots:
                self._primary.reclaim(slot)
            return []
        if result.success:
            good, bad = list(keys), []
        else:
            told = set(result.successful_keys)
            good = [key for key in keys if key in told]
            bad = [key for key in keys if key not in told]
            self._primary.abort(bad)
        link.loaded_blocks += len(good)
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
        """Give up a load that was not reported: nobody waits for its blocks, and its slots for its report only."""
        keys = job.transfer.keys
        job.abandoned = True
        for key in keys:
            self._primary.abandon(key)
        self.blocks -= len(keys)
        if job.state is not None:
            job.state.promoting -= len(keys)
            self._note_failed(job, keys)

    def release_claims(self, state: RequestState) -> None:
        """Let go of what was promoted for a request and not loaded; it waits for nothing more."""
        self._refused.pop(state, None)
        if state.claims:
            self._primary.unpin(reversed(state.claims))
            self.blocks -= len(state.claims)
            state.claims.clear()

    def drop_request(self, state: RequestState) -> None:
        """Let go of a request that has ended: what was not submitted yet will not be."""
        self.release_claims(state)
        if state.promoting:
            for group in [group for group in self._pending if group[1] is state]:
                keys, _ = self._pending.pop(group)
                self._primary.abort(keys)
                state.promoting -= len(keys)
                self.blocks -= len(keys)

    def forget_all(self) -> None:
        """Forget everything, as the primary tier is cleared."""
        self._pending.clear()
        self._refused.clear()
        self.blocks = 0

    def _note_failed(self, job: OpenJob, keys: Sequence[BlockKey]) -> None:
        self.failed_blocks += len(keys)
        job.link.failed_loads += len(keys)
        if job.state is not None:
            failed = job.state.failed
            for key in keys:
                failed[key] = failed.get(key, 0) | job.link.bit
                job.state.sources.pop(key, None)
