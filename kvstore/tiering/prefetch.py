"""Prefetch: promotes the blocks of a request as soon as they are known, or a time after its end for the next one."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from typing import Final

from kvstore.primary.tier import PrimaryTier
from kvstore.tiering.expiry import Expiry
from kvstore.tiering.lookups import Lookups
from kvstore.tiering.promotions import Promotions
from kvstore.tiering.requests import RequestState
from kvstore.tiering.tenants import TenantTable
from kvstore.types import BlockKey, LookupResult

__all__ = ["Prefetch"]

_BLOCKS_PER_CALL: Final = 4096
"""Blocks looked up per call: some milliseconds at most."""

_LATER_MAX: Final = 1 << 12
_LATER_BLOCKS_MAX: Final = 1 << 18
"""Ended requests, and their blocks, that are remembered until they are prefetched; further ones are not."""


class Prefetch:
    """Looks up the blocks of requests ahead of the scheduler, each request up to its first miss.

    It pauses while promotions are full, and uses up no request's waiting time.

    Args:
        primary: The primary tier.
        promotions: Load the blocks.
        lookups: Find them.
        expiry: Knows which have expired.
        limits: Rates of loads by tenant; None if there are none.
        wait_s_max: Longest wait for the tiers' answers and for room on behalf of a request that has ended.
        clock: Monotonic seconds.
        on_begun: Called with a request that has ended, before the first of its blocks is looked up.
        on_ended: Called with it after the last one.
    """

    def __init__(
        self,
        primary: PrimaryTier,
        promotions: Promotions,
        lookups: Lookups,
        expiry: Expiry,
        limits: TenantTable | None,
        wait_s_max: float,
        clock: Callable[[], float],
        on_begun: Callable[[RequestState], object],
        on_ended: Callable[[RequestState], object],
    ) -> None:
        self._primary = primary
        self._promotions = promotions
        self._lookups = lookups
        self._expiry = expiry
        self._limits = limits
        self._wait_s_max = wait_s_max
        self._clock = clock
        self._on_begun = on_begun
        self._on_ended = on_ended
        self._states: dict[RequestState, float] = {}
        """Requests under way, and when each is given up."""
        self._later: list[tuple[float, int, RequestState]] = []
        """Heap by time."""
        self._later_blocks = 0
        self._numbers = itertools.count()

    def __bool__(self) -> bool:
        """Whether there is something to look up now."""
        return bool(self._states)

    def __contains__(self, state: RequestState) -> bool:
        return state in self._states

    def add(self, state: RequestState) -> None:
        """Start with a request whose keys are known; :meth:`run` continues."""
        state.prefetched = 0
        self._states[state] = self._clock() + self._wait_s_max if state.finished else math.inf
        self._run_one(state, _BLOCKS_PER_CALL)

    def add_later(self, state: RequestState, seconds: float) -> None:
        """Start in so many seconds with a request that has ended, at the first step of the engine from then on."""
        is_room = len(self._later) < _LATER_MAX and self._later_blocks + len(state.keys) <= _LATER_BLOCKS_MAX
        if state.keys and is_room:
            self._later_blocks += len(state.keys)
            heapq.heappush(self._later, (self._clock() + seconds, next(self._numbers), state))

    def drop(self, state: RequestState) -> None:
        """Forget a request."""
        self._states.pop(state, None)

    def clear(self) -> None:
        """Forget all requests."""
        self._states.clear()
        self._later.clear()
        self._later_blocks = 0

    def run(self) -> None:
        """Continue with all requests, the oldest first; once per step."""
        if self._later and self._later[0][0] <= self._clock():
            state = heapq.heappop(self._later)[2]  # One per step: the others are due in the next ones.
            self._later_blocks -= len(state.keys)
            self._on_begun(state)
            self.add(state)
        if not self._states:
            return
        budget, now = _BLOCKS_PER_CALL, self._clock()
        for state, give_up_at in list(self._states.items()):
            if now > give_up_at:
                self._end(state)
                continue
            budget = self._run_one(state, budget)
            if budget <= 0:
                return

    def _run_one(self, state: RequestState, budget: int) -> int:
        """Look up a request's next blocks; return the remaining budget."""
        keys = state.keys
        unknown: int | None = None
        for index in range(state.prefetched, len(keys)):
            if self._promotions.is_full(state) or budget <= 0:
                state.prefetched = index if unknown is None else unknown
                return budget
            budget -= 1
            result = self._lookup(keys[index], state)
            if result is LookupResult.MISS:
                break
            if result is LookupResult.RETRY and unknown is None:
                unknown = index
        if unknown is None:
            self._end(state)
        else:
            state.prefetched = unknown
        return budget

    def _end(self, state: RequestState) -> None:
        del self._states[state]
        if state.finished:
            self._on_ended(state)

    def _lookup(self, key: BlockKey, state: RequestState) -> LookupResult:
        if self._expiry.active and self._expiry.forbids(key):
            return LookupResult.MISS
        if key in self._primary:
            return LookupResult.HIT
        link, unknown = self._lookups.find(key, state)
        if link is None:
            return LookupResult.RETRY if unknown else LookupResult.MISS
        if self._limits is not None and not self._limits.may_load(key):
            return LookupResult.MISS
        if not self._promotions.start(link, key, state):
            return LookupResult.RETRY
        if self._limits is not None:
            self._limits.note_load(key)
        return LookupResult.HIT_PENDING
