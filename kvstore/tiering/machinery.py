"""What turns in the manager: its parts, the step, the way in and out."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from kvstore.errors import ConfigError
from kvstore.primary.tier import PrimaryTier
from kvstore.tiering.cascades import Cascades
from kvstore.tiering.config import TieringConfig
from kvstore.tiering.copies import Copies, CopyReports, NoReports
from kvstore.tiering.events import PRIMARY_NAME, BlockEvent, EventLog
from kvstore.tiering.expiry import Expiry
from kvstore.tiering.jobs import JobTable
from kvstore.tiering.link import TierLink
from kvstore.tiering.pins import Pins
from kvstore.tiering.policy import PolicyParser
from kvstore.tiering.prefetch import Prefetch
from kvstore.tiering.promotions import Promotions
from kvstore.tiering.request import RequestState
from kvstore.tiering.requests import Requests
from kvstore.tiering.stats import LookupCounts, TieringStats, flow_of
from kvstore.tiering.tally import TIMED_EVERY, Tally
from kvstore.tiers.base import SecondaryTierManager
from kvstore.tiers.stats import TierStats
from kvstore.types import BlockKey, LookupResult, RemovalCause, RequestContext

__all__ = ["Machinery"]


class Machinery:
    """The parts of a manager and what is done with them once per step, at a reset and at the end.

    Not for use by itself: :class:`kvstore.tiering.TieringManager` adds what an engine calls for a request.
    """

    def __init__(
        self,
        primary: PrimaryTier,
        tiers: Sequence[SecondaryTierManager] = (),
        config: TieringConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        reports: CopyReports | None = None,
    ) -> None:
        config = config or TieringConfig()
        names = [tier.name for tier in tiers]
        if len({*names, PRIMARY_NAME}) <= len(names):
            raise ConfigError(
                f"The tiers are named {names}. Expected different names, none of them {PRIMARY_NAME!r}: give each its "
                f"own label."
            )
        self.primary = primary
        self._config = config
        self._clock = clock
        self._links = tuple(TierLink(tier, index) for index, tier in enumerate(tiers))
        self._parser = PolicyParser(names, config.policy, config.allow)
        self._requests = Requests(self._links, self._parser, config.tokens_per_block)
        self._refusing = self._requests.refusing
        self._jobs = JobTable()
        self._log = EventLog(config.events)
        self._copies = Copies(primary, reports or NoReports(), clock)
        self._promotions = Promotions(primary, self._jobs, config, clock)
        self._cascades = Cascades(primary, self._jobs, self._links, config, self._on_dropped)
        self._expiry = Expiry(primary, self._links, self._cascades, self._log, clock)
        self._prefetch = Prefetch(self._look_ahead, self._promotions.is_full)
        self._counts = LookupCounts()
        self.tally = Tally(self._links, clock)
        fills = len(self._links) > 1 and (config.backfill_uses or 0) > 1
        self._counts_sightings = fills or self._parser.default.min_uses > 1
        self._pins = Pins(primary, int(primary.slots * config.pin_share), config.pin_lease_s, clock)
        self._touched: list[BlockKey] = []
        self._polled = False
        self._closed = False
        self._refused_stores = 0

    @property
    def tiers(self) -> tuple[SecondaryTierManager, ...]:
        """The tiers below the primary one."""
        return tuple(link.tier for link in self._links)

    @property
    def copy_lane(self) -> int:
        """What the engine's side that copies reports the end of a copy under, if it was prepared just now."""
        return self._copies.lane

    @property
    def has_pending_work(self) -> bool:
        """Whether :meth:`on_step_end` should go on being called though no request runs: I/O is under way, or due."""
        return bool(self._jobs) or self._promotions.pending or bool(self._prefetch) or self._cascades.waits

    def on_step_end(self, scheduled: Collection[str] = ()) -> None:
        """Hand the I/O of this step to the tiers; once per step, also when nothing was scheduled.

        Args:
            scheduled: Ids of requests that compute from this step on: they load nothing more, and what was promoted
                for them and not loaded need not be kept for them.
        """
        if not self._polled:
            self._poll()
        for request_id in scheduled:
            state = self._requests.by_id.get(request_id)
            if state is not None:
                self._promotions.release_claims(state)
        if self._prefetch:
            self._prefetch.run()
        self._cascades.end_transit(self.primary.end_promises())
        self._promotions.flush()
        self._cascades.resume()
        self._cascades.write_back()
        if self._expiry.active:
            self._expiry.sweep()
        if self._pins:
            self._pins.sweep()
        if self._touched:
            touched, self._touched = tuple(dict.fromkeys(self._touched)), []
            for link in self._links:
                link.touch(touched)
        for link in self._links:
            link.flush()
        self._polled = False

    def take_events(self) -> list[BlockEvent]:
        """Return the events of all tiers since the last call (none unless ``events`` is configured)."""
        return self._log.take(self._links)

    def stats(self) -> TieringStats:
        """Return a moment's view; cheap."""
        return TieringStats(
            primary=self.primary.stats(),
            tiers=tuple(flow_of(link, self._jobs) for link in self._links),
            lookups=self._counts,
            requests=len(self._requests),
            jobs=len(self._jobs),
            promoting=self._promotions.blocks,
            throttled=self._promotions.throttled,
            refused_stores=self._refused_stores,
            refused_pins=self._pins.refused_blocks,
            lost=self._cascades.lost_blocks,
            expired=self._expiry.expired,
            policy_mistakes=self._parser.mistakes,
            policy_refused=self._parser.refused,
        )

    def tier_stats(self) -> list[TierStats]:
        """Return what the tiers tell of themselves."""
        return [link.stats() for link in self._links]

    def reset(self, timeout_s: float | None = None) -> bool:
        """Drop every block of the primary tier, once no tier's I/O touches it, and begin a new epoch in every tier.

        The one call besides :meth:`close` that waits. What :meth:`prepare_load` and :meth:`prepare_store` gave out is
        void: the engine does not complete it. If it is being copied, or will be, its slots stay out of use until that
        has ended, by the reports of the side that copies or by :meth:`on_copies_ended`. Blocks with ``lazy`` that were
        not written back are dropped too.

        Args:
            timeout_s: How long to wait for each tier; None for as long as it takes.

        Returns:
            Whether all I/O of the tiers ended in time. If not, its slots stay out of use until it does.
        """
        ended = all([link.drain(timeout_s) for link in self._links])
        self._poll()
        self._polled = False
        copied: list[int] = []
        for state in self._requests:
            copied += state.open.values()
            copied += [slot for key in state.loading if (slot := self.primary.slot_of(key)) is not None]
            state.void()
            self._end_if_idle(state)
        self._prefetch.clear()
        self._promotions.forget_all()
        self._cascades.forget_all()
        self._pins.clear()
        still_touched = [slot for job in self._jobs for slot in job.transfer.slots if not job.abandoned]
        still_touched += self._copies.leave_behind(copied)
        for job in self._jobs:
            job.abandoned = True
        self._log.primary(self.primary.clear(still_touched), RemovalCause.REMOVED)
        for link in self._links:
            link.revive()
            link.begin_epoch()
        return ended and not self._jobs

    def on_copies_ended(self) -> None:
        """Note that every copy which was unfinished at a reset has ended: its slots may be used again."""
        self._copies.all_ended()

    def close(self, timeout_s: float = 5.0) -> bool:
        """Write back what is owed, end all I/O within a deadline, close the tiers. Idempotent.

        Returns:
            Whether no I/O touches the primary tier's memory any more: only then may it be freed.
        """
        if self._closed:
            return not self._jobs
        self._closed = True
        deadline = self._clock() + timeout_s
        self._prefetch.clear()
        for state in self._requests:
            self._promotions.drop_request(state)
        while self._cascades.owes and self._clock() < deadline:
            before = len(self._jobs)
            self._cascades.write_all()
            if not self._drain(deadline) or (len(self._jobs) >= before > 0):
                break
        self._drain(deadline)
        closed = all([link.close(max(0.1, deadline - self._clock())) for link in self._links])
        self._poll()
        return closed and not self._jobs

    def _begin(self, ctx: RequestContext) -> RequestState:
        before = self._requests.by_id.get(ctx.request_id)
        if before is not None:
            self._prefetch.drop(before)
            self._promotions.drop_request(before)
        state = self._requests.begin(ctx)
        self._counts_sightings |= state.policy.min_uses > 1
        return state

    def _poll(self) -> None:
        """Take in what the tiers have finished."""
        self._polled = True
        if self._copies:
            self._copies.reclaim()
        for link in self._links:
            for result in link.get_finished():
                job = self._jobs.report(link, result)
                if job is None:
                    continue
                self.tally.note_job(job, result)
                if job.is_load:
                    arrived = self._promotions.finish(job, result)
                    self._cascades.promoted(arrived, link)
                    self._log.primary(arrived)
                else:
                    self._cascades.finish(job, result)
                    if self._expiry.active:
                        self._expiry.arrived(link, job.transfer.keys)
                if job.state is not None:
                    self._end_if_idle(job.state)
        for job in self._jobs.take_overdue_loads(self._clock()):
            self._promotions.abandon(job)

    def _bring(self, link: TierLink, key: BlockKey, state: RequestState) -> LookupResult:
        """Begin to promote a block that a tier has, for a request that asks for it."""
        if self._promote(link, key, state):
            return LookupResult.HIT_PENDING
        if not self._promotions.is_full(state) and self._cascades.making_room:
            return self._promotions.wait(state)
        return self._promotions.no_room(state)

    def _look_ahead(self, key: BlockKey, state: RequestState) -> LookupResult:
        """Do the same before the request asks, without using up its patience."""
        if self._expiry.active and self._expiry.forbids(key):
            return LookupResult.MISS
        if key in self.primary:
            return LookupResult.HIT
        found, unknown = self._find(key, state)
        if found is None:
            return LookupResult.RETRY if unknown else LookupResult.MISS
        return LookupResult.HIT_PENDING if self._promote(found, key, state) else LookupResult.RETRY

    def _find(self, key: BlockKey, state: RequestState) -> tuple[TierLink | None, bool]:
        """Return the first tier that has a block for a request, and else whether one does not know yet."""
        failed = state.failed.get(key, 0) if state.failed else 0
        unknown = False
        for link in () if self._closed else state.load_links:
            if failed & link.bit:
                continue
            started = 0.0 if self.tally.by_link[link].queries % TIMED_EVERY else time.perf_counter()
            result = link.lookup(key, state.ctx)
            self.tally.note_answer(state, key, link, result, started)
            if result is LookupResult.HIT:
                return link, False
            unknown |= result is LookupResult.RETRY
        return None, unknown

    def _promote(self, link: TierLink, key: BlockKey, state: RequestState) -> bool:
        if not self.primary.free_slots:
            # A promotion must not push out the start of the prefix whose end it brings, in the next steps either.
            self.primary.pin_promised(touch=True)
        started = self._promotions.start(link, key, state)
        if self.primary.has_evicted:
            self._take_evicted()
        return started

    def _take_evicted(self) -> list[BlockKey]:
        evicted = self.primary.take_evicted()
        if evicted:
            self._cascades.evicted(evicted)
            self._log.primary(evicted, RemovalCause.EVICTED)
        return evicted

    def _end_if_idle(self, state: RequestState) -> None:
        """Forget a request that has ended, once the tiers will hear no more of it."""
        if state.finished and state.idle and self._requests.end(state):
            for link in self._links:
                link.on_request_finished(state.ctx)

    def _drain(self, deadline: float) -> bool:
        """Wait for the tiers' I/O; return whether it ended."""
        for link in self._links:
            link.flush()
        ended = all([link.drain(max(0.0, deadline - self._clock())) for link in self._links])
        self._poll()
        return ended

    def _on_dropped(self, keys: list[BlockKey]) -> None:
        self._log.primary(keys, RemovalCause.REMOVED)
