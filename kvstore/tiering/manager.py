"""The manager of all tiers: the interface for an engine's scheduler, and the step that drives the parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvstore.errors import ConfigError
from kvstore.primary.tier import PrimaryTier, SlotState
from kvstore.tiering.cascades import Cascades
from kvstore.tiering.config import TieringConfig
from kvstore.tiering.copies import Copies, CopyReports
from kvstore.tiering.core import Core
from kvstore.tiering.events import BlockEvent, EventLog
from kvstore.tiering.gate import Gate, GateCounts
from kvstore.tiering.hedges import HedgeCounts, Hedges
from kvstore.tiering.jobs import JobTable
from kvstore.tiering.link import RAISED, TierLink
from kvstore.tiering.lookups import Lookups
from kvstore.tiering.misses import Misses, account_of
from kvstore.tiering.policy import OffloadPolicy, PolicyParser
from kvstore.tiering.promotions import Promotions
from kvstore.tiering.recording import RequestFeed
from kvstore.tiering.requests import ALL_TIERS, Requests, RequestState
from kvstore.tiering.retention import Expiry, Retention
from kvstore.tiering.stats import LookupCounts, TieringStats
from kvstore.tiering.tally import TIMED_EVERY, Tally
from kvstore.tiering.tenants import TenantTable
from kvstore.tiers.base import SecondaryTierManager, TierStats
from kvstore.types import BlockKey, LookupResult, MissCause, RemovalCause, RequestContext, TransferJob


@dataclass(frozen=True, slots=True)
class StorePlan:
    """The copies into the primary tier for a store.

    Attributes:
        keys: Blocks to copy, in the order of the offer. The other blocks are present, or must not be stored.
        slots: Their slots, parallel to ``keys``.
        evicted: Blocks evicted to make room.
    """

    keys: Sequence[BlockKey]
    slots: Sequence[int]
    evicted: Sequence[BlockKey]


_NOTHING = StorePlan((), (), ())


_DRAIN_ROUND_S: Final = 0.05
"""Longest wait for the stores of a roomful of blocks, while more have to be stored before the tiers are closed."""
_FORGETTING_PAUSE_S: Final = 0.005


class TieringManager:
    """Stores blocks in the primary tier and the tiers below it, and promotes them again.

    Every method except :meth:`reset` and :meth:`close` returns in microseconds per block, does no I/O and never waits.
    Failures of tiers never raise. Used by one thread at a time.

    An engine calls, per request, :meth:`on_new_request`, :meth:`lookup` in each step until no answer is HIT_PENDING
    or RETRY, :meth:`prepare_load` and :meth:`complete_load` around its copies out of the primary tier,
    :meth:`prepare_store` and :meth:`complete_store` around its copies into it, and :meth:`on_request_finished`; and
    once per step :meth:`on_step_end`, which hands the I/O of the step to the tiers.

    Args:
        primary: The primary tier; the manager takes ownership.
        tiers: The tiers below, fastest first.
        config: Options.
        clock: Monotonic seconds.
        reports: Reports on the engine's copies (:mod:`kvstore.tiering.copies`); without them, slots being copied at a
            reset stay out of use until :meth:`on_copies_ended`.

    Raises:
        ConfigError: Two tiers have the same name, one is called ``"cpu"``, the default policy is not valid, or tenants
            are configured and the primary tier is not empty.
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
        for tier in tiers:
            if not isinstance(tier, SecondaryTierManager):
                raise ConfigError(
                    f"A tier is a {type(tier).__name__}. Expected a SecondaryTierManager: derive its class from that "
                    "one, which has a default for every method that not all tiers need."
                )
        names = [tier.name for tier in tiers]
        self.primary = primary
        self._clock = clock
        self._links = tuple(TierLink(tier, index) for index, tier in enumerate(tiers))
        self._parser = PolicyParser(names, config.policy, config.allow)
        feed = RequestFeed(config.trace_socket) if config.trace_socket else None
        self._requests = Requests(self._links, self._parser, config.tokens_per_block, feed)
        self._jobs = JobTable()
        self._log = EventLog(config.events, config.access_events)
        self._copies = Copies(primary, reports, clock)
        self._counts = LookupCounts()
        self.tally = Tally([link.tally for link in self._links])
        self._gate = Gate(len(tiers)) if config.gate else None
        self._tenants = None if config.tenants is None else TenantTable(config.tenants, primary, clock)
        core = Core(primary, self._links, config, clock, self._jobs, self._log, self._gate, self._tenants)
        self._core = core
        self._hedges = Hedges(core, self._gate) if config.hedge and self._gate is not None and len(tiers) > 1 else None
        self._promotions = Promotions(core, self._hedges, self._end_if_idle)
        self._lookups = Lookups(core, self._requests.waiting, self._promotions.measure)
        self._expiry = Expiry(core)
        self._cascades = Cascades(core, self._expiry)
        self._misses = Misses(self._links, core.absent)
        backfills = len(self._links) > 1 and (config.backfill_uses or 0) > 1
        self._counts_sightings = backfills
        self._note_uses(self._parser.default)
        primary.marks.retained_max = int(primary.slots * config.retain_share)
        self._retention = Retention(core)
        core.parts = self._copies, self._promotions, self._cascades, self._expiry, self._retention
        # The actions of policies on blocks that a request has stored, uses, or leaves at its end.
        self._on_stored = self._expiry.store, self._retention.use
        self._on_use = self._expiry.use, self._retention.use
        self._on_end = self._retention.end_request, self._expiry.end_request
        self._touched: list[BlockKey] = []
        self._polled = False
        self._closed = False
        self._refused_stores = 0

    def on_new_request(
        self,
        ctx: RequestContext,
        keys: Sequence[BlockKey] = (),
        *,
        ends: Sequence[int] | None = None,
        prompt_tokens: int | None = None,
    ) -> OffloadPolicy:
        """Add a request.

        Args:
            ctx: The request; ``ctx.params`` is its offload policy.
            keys: Blocks of its prompt in prefix order, group by group, if already known (see :meth:`set_keys`).
            ends: End of each block, in tokens from the start of the prompt.
            prompt_tokens: Length of the prompt in tokens.

        Returns:
            Its policy.
        """
        state = self._begin(ctx)
        if keys:
            self.set_keys(ctx, keys, ends=ends, prompt_tokens=prompt_tokens)
        return state.policy

    def set_keys(
        self,
        ctx: RequestContext,
        keys: Sequence[BlockKey],
        *,
        ends: Sequence[int] | None = None,
        prompt_tokens: int | None = None,
        weighed: Collection[BlockKey] | None = None,
    ) -> None:
        """Set a request's blocks, as for :meth:`on_new_request`, once they are known.

        Args:
            weighed: Blocks of layers that need every block of the prefix; by default all. Only these are subject to the
                gate and count as misses. The other blocks are loaded up to the same position.
        """
        state = self._requests.by_id.get(ctx.request_id) or self._begin(ctx)
        self._requests.locate(state, tuple(keys), ends, prompt_tokens)
        state.weighed = state.ends if weighed is None else weighed
        if state.hands_over:
            self.primary.hand_overs.expect(
                ctx.request_id, [key for key in keys if state.policy.store and state.may_store(key)]
            )
            self._retention.hand_over(keys, state)

    def lookup(self, key: BlockKey, ctx: RequestContext) -> LookupResult:
        """Return whether a block can be loaded, and begin to promote it if a tier has it.

        Returns:
            HIT: the block can be loaded now, and stays until the step ends. HIT_PENDING: it is being promoted; repeat
            the call in the next step. RETRY: a tier has no answer yet, or there is no room yet; repeat the call in the
            next step (bounded by ``wait_s_max``). MISS: compute the block.
        """
        if not self._polled:
            self._poll()
        state = self._requests.by_id.get(ctx.request_id) or self._begin(ctx)
        if not state.policy.load or (self._expiry.active and self._expiry.forbids(key)):
            self._counts.misses += 1
            state.asked.setdefault(key, 0)
            state.missed[ALL_TIERS] = self._expiry.cause_of(key) if state.policy.load else MissCause.POLICY
            return LookupResult.MISS
        primary, tally = self.primary, self.tally.primary
        started = 0.0 if tally.queries % TIMED_EVERY else time.perf_counter()
        # Inlined from the primary tier's lookup(), because this runs for each block of each prompt.
        slot = primary.slot_of(key)
        is_ready = slot is not None and primary.pins[slot] >= 0
        if (slot is None or is_ready) and key not in state.asked:
            state.asked[key] = 0
            tally.note_answer(is_ready, started)
        if is_ready:
            self._counts.hits += 1
            primary.promise(key)
            return LookupResult.HIT
        result = LookupResult.HIT_PENDING if slot is not None else self._promote(key, state)
        if result is LookupResult.HIT_PENDING:
            self._counts.pending += 1
        elif result is LookupResult.MISS:
            self._counts.misses += 1
        else:
            self._counts.retries += 1
        return result

    def _promote(self, key: BlockKey, state: RequestState) -> LookupResult:
        """Return the answer to a lookup of a block that the primary tier lacks."""
        if self._closed:
            return LookupResult.MISS
        promotions = self._promotions
        link, unknown = self._lookups.find(key, state)
        if link is not None:
            result, cause = promotions.start(link, key, state), MissCause.RATE
            if result is LookupResult.RETRY:
                waits_for_write_back = self._cascades.making_room and not promotions.is_full(state)
                result = promotions.wait(state) if waits_for_write_back else promotions.no_room(state)
                cause = MissCause.NO_ROOM
            if result is LookupResult.MISS:
                state.missed[link.index] = cause
            return result
        if unknown is None:
            return LookupResult.MISS
        result = promotions.wait(state, key)
        if result is LookupResult.MISS:
            state.missed[unknown.index] = MissCause.TIMEOUT
            self._lookups.stop_waiting(key, state)
        return result

    def source_of(self, key: BlockKey, ctx: RequestContext) -> SecondaryTierManager | None:
        """Return the tier from which a request's block was promoted; None if the primary tier had it."""
        state = self._requests.by_id.get(ctx.request_id)
        link = None if state is None else state.sources.get(key)
        return None if link is None else link.tier

    def account(self, ctx: RequestContext) -> dict[str, Any] | None:
        """Return where a request's blocks came from, and why others are computed, until :meth:`on_request_finished`.

        Returns:
            A JSON object: ``blocks``, the number of its whole blocks (:meth:`set_keys`); ``computed``, the number of
            those that it looked for and computes; and for each of ``tiers`` the number of ``blocks`` that it delivered,
            the ``seconds`` from the begin of their first load to the end of the last, and the cause for which it
            ``missed`` the computed blocks (a :class:`MissCause`). ``missed`` beside ``tiers`` is a cause that concerns
            all. None for a request that did not ask for it (``explain``).
        """
        state = self._requests.by_id.get(ctx.request_id)
        return account_of(state, self._links) if state is not None and state.policy.explain else None

    def exclude(self, ctx: RequestContext, blocks: int) -> None:
        """Note that nothing is looked up for a request, because its blocks are not proven to belong to their keys.

        Args:
            ctx: The request.
            blocks: Number of blocks that it computes.
        """
        self._misses.exclude(self._requests.by_id.get(ctx.request_id) or self._begin(ctx), blocks)

    def prepare_load(self, keys: Sequence[BlockKey], ctx: RequestContext) -> list[int] | None:
        """Pin blocks that were a HIT in this step, to copy them out of the primary tier.

        Returns:
            Their slots, parallel to ``keys``; None, with nothing pinned, if any block is not READY.
        """
        primary = self.primary
        if any(primary.lookup(key) is not SlotState.READY for key in keys):
            return None
        state = self._requests.by_id.get(ctx.request_id) or self._begin(ctx)
        slots = primary.pin(keys)
        if self._tenants is not None and keys:
            self._tenants.of(keys[0]).loaded += len(keys)
        loading = state.loading
        for key in keys:
            loading[key] = loading.get(key, 0) + 1
        self._lookups.end_gated_wait(state, keys)
        self._misses.count_served(state, keys)
        self._promotions.release_claims(state)
        primary.touch(keys)
        self._use(keys, state)
        self._copies.begin(is_load=True)
        self._log.accessed(keys)
        return slots

    def complete_load(self, keys: Collection[BlockKey], ctx: RequestContext) -> None:
        """End :meth:`prepare_load`: the request no longer reads the slots."""
        state = self._requests.by_id.get(ctx.request_id)
        if state is None:
            return
        loading = state.loading
        done = []
        for key in keys:
            count = loading.pop(key, 0)
            if count:
                done.append(key)
                if count > 1:
                    loading[key] = count - 1
        self.primary.unpin(reversed(done))
        self._cascades.end_transit(done)
        self._end_if_idle(state)

    def prepare_store(self, keys: Collection[BlockKey], ctx: RequestContext) -> StorePlan | None:
        """Allocate slots for blocks to store.

        Args:
            keys: The blocks offered, in prefix order.
            ctx: The request.

        Returns:
            The copies to make; :meth:`complete_store` must follow for those blocks. None if there is no room for all
            blocks now (offer them again in a later step).
        """
        if not self._polled:
            self._poll()
        state = self._requests.by_id.get(ctx.request_id) or self._begin(ctx)
        # A request that offers blocks is computing, and no longer needs its claims.
        self._requests.waiting.discard(ctx.request_id)
        self._lookups.end_gated_wait(state)
        self._misses.settle(state)
        self._promotions.release_claims(state)
        if self._closed:
            return _NOTHING
        keys = tuple(keys)
        if not state.policy.store or not (state.policy.cpu or state.store_links):
            self._cascades.exclude(keys)
            return _NOTHING
        if state.tokens_max is not None:
            self._cascades.exclude([key for key in keys if not state.may_store(key)])
            keys = tuple(key for key in keys if state.may_store(key))
        if self._expiry.active:
            if keys and self._expiry.forgets(keys[0]):
                return _NOTHING
            self._expiry.make_way(keys)
        new, here, slots = self._allocate(keys)
        if slots is None and len(self._jobs):
            # Jobs that ended since the start of this step may have unpinned enough slots.
            self._poll()
            new, here, slots = self._allocate(keys)
        if new:
            self.tally.allocations.append(len(new))
        if here or self._counts_sightings:
            self._use(here, state, new)
        if slots is None:
            # Blocks may have been evicted in vain, if their slots are on loan.
            self._core.take_evicted()
            self._refused_stores += len(new)
            self._core.note_unstored(state.store_links, new, MissCause.NO_ROOM)
            self._cascades.write_wanted()
            return None
        state.open.update(zip(new, slots, strict=True))
        plan = StorePlan(new, slots, self._core.take_evicted() if self.primary.evicted else ())
        if new:
            if self._tenants is not None:
                self._tenants.of(new[0]).stored += len(new)
            self._copies.begin(is_load=False)
        return plan

    def complete_store(self, keys: Collection[BlockKey], ctx: RequestContext, success: bool = True) -> None:
        """End :meth:`prepare_store`: the blocks are complete in their slots, or discarded (``success`` false).

        Complete blocks are stored to every tier that the request's policy allows.
        """
        state = self._requests.by_id.get(ctx.request_id)
        if state is None:
            return
        if state.open and not isinstance(keys, list | tuple):
            keys = [key for key in state.open if key in keys]
        done, slots = [], []
        for key in state.by_position(keys):
            slot = state.open.pop(key, None)
            if slot is not None:
                done.append(key)
                slots.append(slot)
        if not success or (done and self._expiry.active and self._expiry.forgets(done[0])):
            self.primary.abort(done)
        elif done:
            # Logged before the cascade, which may drop the blocks immediately.
            self._log.primary(done)
            self._cascades.stored(done, slots, state)
            for act in self._on_stored:
                act(done, state)
            if state.policy.acts_at_end:
                state.stored += done
        self._end_if_idle(state)

    def offer(self, tier: SecondaryTierManager, keys: Sequence[BlockKey], ctx: RequestContext) -> list[BlockKey]:
        """Store blocks of the primary tier to one tier, even if they were offered to it before.

        Returns:
            The blocks that are still being written; offer these again in the next step.
        """
        state, link = self._requests.by_id.get(ctx.request_id), self._link_of(tier)
        if state is None or link not in state.store_links or self._closed:
            return []
        found = {key: self.primary.lookup(key) for key in keys if state.may_store(key)}
        self._cascades.send(link, [key for key, it in found.items() if it is SlotState.READY], state)
        return [key for key, it in found.items() if it is SlotState.WRITING]

    def has_room(self, tier: SecondaryTierManager, blocks: int) -> bool:
        """Return whether a tier's share of the primary tier has room for :meth:`lend` of ``blocks`` blocks."""
        return not self._closed and blocks <= self._cascades.room(self._link_of(tier))

    def lend(self, tier: SecondaryTierManager, keys: Sequence[BlockKey], ctx: RequestContext) -> TransferJob | None:
        """Pin blocks for a store that a tier requested, until it reports the job.

        Returns:
            The job, which is not submitted to the tier; None, with nothing pinned, if any block is not READY.
        """
        if self._closed or any(self.primary.lookup(key) is not SlotState.READY for key in keys):
            return None
        state = self._requests.by_id.get(ctx.request_id) or self._begin(ctx)
        return self._cascades.lend(self._link_of(tier), keys, state)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Record a use of blocks in every tier."""
        self.primary.touch(keys)
        self._touched += keys

    def remove(self, keys: Sequence[BlockKey], cause: RemovalCause = RemovalCause.REMOVED) -> None:
        """Drop blocks from every tier. They are a MISS until stored again."""
        self._expiry.remove(keys, cause)

    def forget_tenant(self, tag: bytes) -> None:
        """Remove all blocks of a tenant from every tier. Until they are gone, its requests find and store nothing.

        Args:
            tag: Common prefix of the tenant's keys (:class:`kvstore.tenants.Tags`).
        """
        self._expiry.forget_tenant(tag)

    def on_request_finished(self, ctx: RequestContext) -> None:
        """End a request, whose jobs and copies may still be running."""
        state = self._requests.by_id.get(ctx.request_id)
        if state is None or state.finished:
            return
        state.finished = True
        self._requests.waiting.discard(ctx.request_id)
        self._promotions.drop_request(state)
        if state.keys:
            self.primary.touch(state.by_position(state.keys), anew=False)
        self._end_if_idle(state)

    @property
    def tiers(self) -> tuple[SecondaryTierManager, ...]:
        """The tiers below the primary one."""
        return tuple(link.tier for link in self._links)

    @property
    def copy_lane(self) -> int:
        """Lane of copies prepared now, for the reports of the copying side."""
        return self._copies.lane

    @property
    def has_pending_work(self) -> bool:
        """Whether :meth:`on_step_end` must still be called while no request runs, because I/O is running or due."""
        if self._jobs.by_id or self._promotions.active:
            return True
        return (self._cascades.active and self._cascades.waits) or (self._expiry.active and self._expiry.pending)

    @property
    def has_requests(self) -> bool:
        """Whether a request has looked for blocks or stored some, and has not ended."""
        return bool(self._requests.by_id)

    def on_step_end(self, scheduled: Collection[str] = ()) -> None:
        """Submit the I/O of this step to the tiers. Call this once per step, even if nothing was scheduled.

        Args:
            scheduled: Ids of requests that compute from this step on. They load nothing more, so their claims end.
        """
        if not self._polled:
            self._poll()
        for request_id in scheduled:
            state = self._requests.by_id.get(request_id)
            if state is not None:
                self._requests.waiting.discard(request_id)
                self._lookups.end_gated_wait(state)
                self._misses.settle(state)
                self._promotions.release_claims(state)
        if self._hedges is not None:
            self._hedges.start_due()  # Before the promises end: a hedge must not evict a block found in this step.
        if ended := self.primary.end_promises():
            self._cascades.end_transit(ended)
        for part in self._core.parts:
            if part.active:
                part.active = part.step()
        if self._touched:
            touched, self._touched = tuple(dict.fromkeys(self._touched)), []
            for link in self._links:
                link.call(link.tier.touch, touched, otherwise=None)
        for link in self._links:
            link.call(link.tier.flush, otherwise=None)
        self._lookups.step += 1
        self._polled = False

    @property
    def is_gated(self) -> bool:
        """Whether there is a gate, which needs the measurements of :meth:`note_step`."""
        return self._gate is not None

    def note_step(self, prefills: Sequence[tuple[int, int]], seconds: float) -> None:
        """Record a finished step of the engine, for the gate's estimate of computing time.

        Args:
            prefills: Tokens computed and tokens before them, per request that computed part of its prompt. A request
                with few tokens counts as decoding.
            seconds: Duration of the step.
        """
        if self._gate is not None:
            self._gate.note_step(prefills, seconds)

    def take_events(self) -> list[BlockEvent]:
        """Return the events of all tiers since the last call (none unless ``events`` is configured)."""
        return self._log.take(self._links)

    def take_unfilled(self) -> list[BlockKey]:
        """Return the blocks that lost a slot before it was filled, since the last call, and that have none now.

        The first call begins to record them.
        """
        found, self.primary.unfilled = self.primary.unfilled or [], []
        return [key for key in dict.fromkeys(found) if key not in self.primary]

    @property
    def has_unreported(self) -> bool:
        """Whether :meth:`take_events` has an event of the primary tier to return."""
        return self._log.has_unreported

    def restate_events(self) -> None:
        """Report all blocks again by :meth:`take_events`, because its consumers have dropped them."""
        self._log.restate(self._links)

    def stats(self) -> TieringStats:
        """Return a snapshot; cheap."""
        return TieringStats(
            primary=self.primary.stats(),
            tiers=tuple(link.flow() for link in self._links),
            lookups=self._counts,
            missed=self._misses.blocks,
            repeated=self._misses.repeated,
            requests=len(self._requests),
            jobs=len(self._jobs),
            promoting=self._promotions.blocks,
            throttled=self._promotions.throttled,
            refused_stores=self._refused_stores,
            lost=self._cascades.lost_blocks,
            expired=self._expiry.expired,
            policy_mistakes=self._parser.mistakes,
            policy_refused=self._parser.refused,
            gate=GateCounts() if self._gate is None else replace(self._gate.counts),
            forgetting=self._expiry.tenants_forgotten,
            hedges=HedgeCounts() if self._hedges is None else replace(self._hedges.counts),
            tenants={} if self._tenants is None else self._tenants.stats(),
        )

    def tier_stats(self) -> list[TierStats]:
        """Return the tiers' own statistics."""
        return [link.stats() for link in self._links]

    def reset(self, timeout_s: float | None = None) -> bool:
        """Wait for the tiers' I/O, drop every block of the primary tier, and begin a new epoch in every tier.

        Besides :meth:`close`, this is the only call that waits. Open :meth:`prepare_load` and :meth:`prepare_store`
        become void: the engine does not complete them. Their slots stay out of use until the copying side reports the
        end of the copies, or :meth:`on_copies_ended` is called. Blocks with ``lazy`` that were not written back are
        dropped.

        Args:
            timeout_s: Longest wait per tier; None for no limit.

        Returns:
            Whether all I/O of the tiers ended in time. If not, the slots of unfinished I/O stay out of use until it
            ends.
        """
        ended = all([link.call(link.tier.drain, timeout_s, otherwise=False) for link in self._links])
        self._poll()
        self._polled = False
        copied: list[int] = []
        for state in self._requests:
            copied += state.open.values()
            copied += [slot for key in state.loading if (slot := self.primary.slot_of(key)) is not None]
            state.void()
            self._end_if_idle(state)
        for part in self._core.parts:
            part.reset()
        still_touched = [slot for job in self._jobs for slot in job.transfer.slots if not job.abandoned]
        still_touched += self._copies.leave_behind(copied)
        for job in self._jobs:
            job.abandoned = True
        self._core.left(self.primary.clear(still_touched), RemovalCause.REMOVED)
        for link in self._links:
            link.reset()
        return ended and not self._jobs

    def on_copies_ended(self) -> None:
        """Note that every copy unfinished at a reset has ended, so its slots may be reused."""
        self._copies.all_ended()

    def close(self, timeout_s: float = 5.0) -> bool:
        """Make pending stores, end all I/O within a deadline, and close the tiers. Idempotent.

        Returns:
            Whether all I/O on the primary tier's memory has ended. The memory may be freed only if true.
        """
        if self._closed:
            return not self._jobs
        self._closed = True
        if self._hedges is not None:
            self._hedges.clear()
        deadline = self._clock() + timeout_s
        for state in self._requests:
            self._promotions.drop_request(state)
            self._end_if_idle(state)
        # In short rounds, so that a tier that hangs leaves the others time for more than one roomful.
        forgets_until = time.monotonic() + timeout_s / 2  # Some tiers can't forget, and the others need time to close.
        while (self._cascades.unsent or self._expiry.removing) and (began := self._clock()) < deadline:
            before = self._cascades.unsent, len(self._jobs)
            self._cascades.write_all()
            self._expiry.step()
            self._drain(min(deadline, began + _DRAIN_ROUND_S))
            if self._clock() - began < _DRAIN_ROUND_S and (self._cascades.unsent, len(self._jobs)) == before:
                # No tier stores anything; some may still have to forget a tenant.
                if not self._expiry.removing or time.monotonic() >= forgets_until:
                    break
                time.sleep(_FORGETTING_PAUSE_S)
        self._drain(deadline)
        if self._expiry.active:
            self._drain(deadline)  # Blocks became forbidden while they were stored, and are removed now.
        closed = True
        for link in self._links:
            time_left_s = max(0.1, deadline - self._clock())
            closed &= link.call(link.tier.close, time_left_s, otherwise=RAISED) is not RAISED
        self._poll()
        return closed and not self._jobs

    def _link_of(self, tier: SecondaryTierManager) -> TierLink:
        return next(link for link in self._links if link.tier is tier)

    def _allocate(self, keys: Sequence[BlockKey]) -> tuple[list[BlockKey], list[BlockKey], list[int] | None]:
        """Return the blocks without a slot, the READY blocks, and slots for the first if there is room."""
        primary = self.primary
        new = primary.missing(keys)
        if len(new) == len(keys):
            return new, [], primary.allocate(new)
        here = [key for key in keys if primary.lookup(key) is SlotState.READY]
        primary.touch(here)
        if len(new) <= len(primary.free):
            return new, here, primary.allocate(new)
        primary.pin(here)  # A block of this offer must not be evicted to make room for another one.
        slots = primary.allocate(new)
        primary.unpin(reversed(here))
        return new, here, slots

    def _use(self, keys: Sequence[BlockKey], state: RequestState, new: Sequence[BlockKey] = ()) -> None:
        """Record that a request uses blocks in the primary tier; ``new`` blocks only count as sightings."""
        if self._counts_sightings:
            unseen = [key for key in (*keys, *new) if key not in state.seen]
            state.seen.update(unseen)
            self._cascades.note_sightings(unseen, state)
        if self._cascades.active:
            self._cascades.use(keys, state)
        for act in self._on_use:
            act(keys, state)
        self._touched += keys

    def _begin(self, ctx: RequestContext) -> RequestState:
        before = self._requests.by_id.get(ctx.request_id)
        if before is not None:
            self._promotions.drop_request(before)
            self._act_at_end(before)
        state = self._requests.begin(ctx)
        if state.hands_over:
            self.primary.hand_overs.begin(ctx.request_id, ctx.hand_over)
        self._note_uses(state.policy)
        return state

    def _note_uses(self, policy: OffloadPolicy) -> None:
        self._counts_sightings |= policy.min_uses != 1
        if not policy.min_uses:
            self._cascades.choose_uses()

    def _poll(self) -> None:
        """Process the tiers' finished jobs."""
        self._polled = True
        primary = self.primary
        if primary.loans.outlived:
            for slot in primary.loans.take_ended():
                primary.reclaim(slot)
        if primary.hand_overs.sent:
            self._retention.fetched(primary.hand_overs.take_sent())
        for link in self._links:
            for result in link.get_finished():
                job = self._jobs.report(link, result)
                if job is None:
                    continue
                if not job.measures:
                    link.tally.note_job(
                        job.is_load, result.success and not job.is_void, result.seconds, self._clock() - job.since
                    )
                if job.is_load:
                    arrived = self._promotions.finish(job, result)
                    # Logged before the cascade, which may drop the blocks immediately.
                    self._log.primary(arrived)
                    self._cascades.promoted(arrived, link if job.first is None else job.first.link)
                else:
                    self._cascades.finish(job, result)
                    if self._expiry.active:
                        self._expiry.arrived(link, job.transfer.keys)
                if job.state is not None and job.state.finished:
                    self._end_if_idle(job.state)
        if self._jobs.by_id:
            self._promotions.abandon_overdue()

    def _end_if_idle(self, state: RequestState) -> None:
        """Remove a finished request once its last work has ended."""
        if state.finished and state.idle and self._requests.end(state):
            self._act_at_end(state)
            for link in self._links:
                link.call(link.tier.on_request_finished, state.ctx, otherwise=None)

    def _act_at_end(self, state: RequestState) -> None:
        """Apply the policy of a request whose last work has ended, or whose id starts over."""
        if state.policy.acts_at_end:
            keys = tuple(dict.fromkeys((*state.keys, *state.stored)))
            for act in self._on_end:
                act(keys, state)
        if state.hands_over:
            self.primary.hand_overs.end(state.ctx.request_id)

    def _drain(self, deadline: float) -> bool:
        """Wait for the tiers' I/O; return whether it ended."""
        ended = True
        for link in self._links:
            link.call(link.tier.flush, otherwise=None)
        for link in self._links:
            ended = bool(link.call(link.tier.drain, max(0.0, deadline - self._clock()), otherwise=False)) and ended
        self._poll()
        return ended
