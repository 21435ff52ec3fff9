"""The manager of all tiers: what an engine's scheduler calls."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvstore.primary.tier import SlotState
from kvstore.tiering.machinery import Machinery
from kvstore.tiering.policy import OffloadPolicy
from kvstore.tiering.request import RequestState
from kvstore.tiering.tally import TIMED_EVERY
from kvstore.tiers.base import SecondaryTierManager
from kvstore.types import BlockKey, LookupResult, RemovalCause, RequestContext

__all__ = ["StorePlan", "TieringManager"]


@dataclass(frozen=True, slots=True)
class StorePlan:
    """Where the blocks that are to be stored go.

    Attributes:
        keys: Blocks to write, in the order they were offered; the others are there already, or not to be stored.
        slots: Their slots, parallel to ``keys``.
        evicted: Blocks that left the primary tier for them.
    """

    keys: Sequence[BlockKey]
    slots: Sequence[int]
    evicted: Sequence[BlockKey]


_NOTHING = StorePlan((), (), ())


class TieringManager(Machinery):
    """Keeps blocks in the primary tier and below it, and brings them back.

    Every method but :meth:`reset` and :meth:`close` returns in microseconds per block, does no I/O and never waits. No
    exception leaves a method for anything that a tier does. Used by one thread at a time.

    An engine calls, per request, :meth:`on_new_request`, :meth:`lookup` in each step until no answer is HIT_PENDING
    or RETRY, :meth:`prepare_load` and :meth:`complete_load` around its copies out of the primary tier,
    :meth:`prepare_store` and :meth:`complete_store` around its copies into it, and :meth:`on_request_finished`; and
    once per step :meth:`on_step_end`, which hands the I/O of the step to the tiers.

    Args:
        primary: The primary tier; from now on it belongs to the manager.
        tiers: The tiers below, the fastest first.
        config: Numbers and switches.
        clock: Monotonic seconds.
        reports: What the side that makes the engine's copies reports of them (:class:`kvstore.tiering.copies`); without
            any, slots that were being copied at a reset stay out of use until :meth:`on_copies_ended`.

    Raises:
        ConfigError: Two tiers have the same name, one is called ``"cpu"``, or the default policy can't be used.
    """

    def on_new_request(
        self,
        ctx: RequestContext,
        keys: Sequence[BlockKey] = (),
        *,
        ends: Sequence[int] | None = None,
        prompt_tokens: int | None = None,
    ) -> OffloadPolicy:
        """Note a request, and begin to promote its blocks.

        Args:
            ctx: The request; ``ctx.params`` is its offload policy.
            keys: Its prompt's blocks in prefix order, group after group, if they are known now (see :meth:`set_keys`).
            ends: Where each block ends, in tokens from the start of the prompt.
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
    ) -> None:
        """Tell a request's blocks, as for :meth:`on_new_request`, when they become known."""
        state = self._requests.by_id.get(ctx.request_id) or self._begin(ctx)
        self._requests.locate(state, tuple(keys), ends, prompt_tokens)
        if self._config.prefetch and state.load_links and not self._closed:
            self._prefetch.add(state)

    def lookup(self, key: BlockKey, ctx: RequestContext) -> LookupResult:
        """Tell whether a block can be loaded, and begin to promote it if a tier has it.

        Returns:
            HIT: it can be loaded now, and stays until the step ends. HIT_PENDING: it is on its way into the primary
            tier; ask again in the next step. RETRY: a tier does not know yet, or there is no room yet; ask again in
            the next step (bounded by ``wait_s_max``). MISS: compute it.
        """
        if not self._polled:
            self._poll()
        if (self._refusing and ctx.request_id in self._refusing) or (self._expiry.active and self._expiry.forbids(key)):
            self._counts.misses += 1
            return LookupResult.MISS
        state = self._requests.by_id.get(ctx.request_id)
        started = 0.0 if self.tally.primary.queries % TIMED_EVERY else time.perf_counter()
        found = self.primary.lookup(key)
        if found is SlotState.READY:
            if state is not None:
                self.tally.note_primary(state, key, True, started)
            self._counts.hits += 1
            self.primary.promise(key)
            return LookupResult.HIT
        if found is not None:
            self._counts.pending += 1
            return LookupResult.HIT_PENDING
        state = state or self._begin(ctx)
        self.tally.note_primary(state, key, False, started)
        link, unknown = self._find(key, state)
        if link is None and not unknown:
            self._counts.misses += 1
            return LookupResult.MISS
        result = self._promotions.wait(state) if link is None else self._bring(link, key, state)
        if result is LookupResult.MISS:
            self._counts.misses += 1
        elif result is LookupResult.RETRY:
            self._counts.retries += 1
        else:
            self._counts.pending += 1
        return result

    def source_of(self, key: BlockKey, ctx: RequestContext) -> SecondaryTierManager | None:
        """Return the tier that a block was promoted from for a request; None if the primary tier had it."""
        state = self._requests.by_id.get(ctx.request_id)
        link = None if state is None else state.sources.get(key)
        return None if link is None else link.tier

    def prepare_load(self, keys: Sequence[BlockKey], ctx: RequestContext) -> list[int] | None:
        """Pin blocks that a lookup of this step answered HIT, to copy them out of the primary tier.

        Returns:
            Their slots, parallel to ``keys``; None, and nothing is pinned, if one can't be read (any more).
        """
        primary = self.primary
        if any(primary.lookup(key) is not SlotState.READY for key in keys):
            return None
        state = self._requests.by_id.get(ctx.request_id) or self._begin(ctx)
        slots = primary.pin(keys)
        loading = state.loading
        for key in keys:
            loading[key] = loading.get(key, 0) + 1
        self._promotions.release_claims(state)
        primary.touch(keys)
        self._use(keys, state)
        self._copies.begin(is_load=True)
        return slots

    def complete_load(self, keys: Collection[BlockKey], ctx: RequestContext) -> None:
        """End :meth:`prepare_load`: nobody reads the slots for this request any more."""
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
        """Find room for blocks that are to be stored.

        Args:
            keys: The blocks offered, in prefix order.
            ctx: The request.

        Returns:
            What is to be copied where; :meth:`complete_store` has to follow for those blocks. None if there is no room
            now for all of them together (offer them again in a later step).
        """
        if not self._polled:
            self._poll()
        state = self._requests.by_id.get(ctx.request_id) or self._begin(ctx)
        # Only a request that computes offers blocks: what was promoted for it and not loaded it needs no longer.
        self._promotions.release_claims(state)
        if self._closed or not state.policy.store or not (state.policy.cpu or state.store_links):
            return _NOTHING
        keys = [key for key in keys if state.may_store(key)] if state.tokens_max is not None else tuple(keys)
        if self._expiry.active:
            self._expiry.make_way(keys)
        new, here, slots = self._allocate(keys)
        if slots is None and len(self._jobs):
            # What has ended since this step began may have unpinned enough.
            self._poll()
            new, here, slots = self._allocate(keys)
        if new:
            self.tally.allocations.append(len(new))
        if here or self._counts_sightings:
            self._use(here, state, new)
        if slots is None:
            self._refused_stores += len(new)
            self._cascades.write_wanted()
            return None
        state.open.update(zip(new, slots, strict=True))
        plan = StorePlan(new, slots, self._take_evicted())
        if new:
            self._copies.begin(is_load=False)
        return plan

    def complete_store(self, keys: Collection[BlockKey], ctx: RequestContext, success: bool = True) -> None:
        """End :meth:`prepare_store`: the blocks are whole in their slots, or (``success`` false) given up.

        They are sent on to every tier that the request's policy allows.
        """
        state = self._requests.by_id.get(ctx.request_id)
        if state is None:
            return
        if state.open and not isinstance(keys, list | tuple):
            keys = [key for key in state.open if key in keys]
        done, slots = [], []
        for key in keys:
            slot = state.open.pop(key, None)
            if slot is not None:
                done.append(key)
                slots.append(slot)
        if not success:
            self.primary.abort(done)
        elif done:
            self._cascades.stored(done, slots, state)
            self._expiry.begin(done, state.policy.ttl_s)
            if state.policy.pin:
                self._pins.hold(done, state.policy.pin_s)
            self._log.primary(done)
        self._end_if_idle(state)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Note a use of blocks, in every tier."""
        self.primary.touch(keys)
        self._touched += keys

    def remove(self, keys: Sequence[BlockKey], cause: RemovalCause = RemovalCause.REMOVED) -> None:
        """Drop blocks from every tier: they are a MISS until they are stored anew."""
        self._expiry.remove(keys, cause)

    def release(self, keys: Sequence[BlockKey]) -> None:
        """End the effect of the policy ``pin`` on blocks."""
        self._pins.release(keys)

    def on_request_finished(self, ctx: RequestContext) -> None:
        """Note that a request has ended, whatever of it is still under way."""
        state = self._requests.by_id.get(ctx.request_id)
        if state is None or state.finished:
            return
        state.finished = True
        self._prefetch.drop(state)
        self._promotions.drop_request(state)
        if state.keys:
            self.primary.touch(state.keys, anew=False)
        self._end_if_idle(state)

    def _allocate(self, keys: Sequence[BlockKey]) -> tuple[list[BlockKey], list[BlockKey], list[int] | None]:
        """Return the blocks that have no slot, the READY ones of the others, and slots for the former if there are."""
        primary = self.primary
        new = primary.missing(keys)
        if len(new) == len(keys):
            return new, [], primary.allocate(new)
        here = [key for key in keys if primary.lookup(key) is SlotState.READY]
        primary.touch(here)
        if len(new) <= primary.free_slots:
            return new, here, primary.allocate(new)
        primary.pin(here)  # What is offered again must not be evicted for what is offered with it.
        slots = primary.allocate(new)
        primary.unpin(reversed(here))
        return new, here, slots

    def _use(self, keys: Sequence[BlockKey], state: RequestState, new: Sequence[BlockKey] = ()) -> None:
        """Note that a request uses blocks that are in the primary tier (and sees new ones)."""
        if self._counts_sightings:
            unseen = [key for key in (*keys, *new) if key not in state.seen]
            state.seen.update(unseen)
            self._cascades.sightings.add(unseen)
        if self._cascades.notes:
            self._cascades.use(keys, state)
        self._expiry.extend(keys, state.policy.ttl_s)
        if state.policy.unpin:
            self._pins.release(keys)
        elif state.policy.pin:
            self._pins.hold(keys, state.policy.pin_s)
        if self._pins:
            self._pins.use(keys)
        self._touched += keys
