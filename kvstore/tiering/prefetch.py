"""Prefetch: promotes a request's blocks as soon as they are known, or a delay after its end for the next request."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.tiering.core import Core
from kvstore.tiering.leases import Expiry
from kvstore.tiering.lookups import Lookups
from kvstore.tiering.promotions import Promotions
from kvstore.tiering.requests import Requests, RequestState
from kvstore.types import BlockKey, LookupResult

_BLOCKS_PER_CALL: Final = 4096
"""Maximum blocks looked up per call, which takes a few milliseconds at most."""

_LATER_MAX: Final = 1 << 12
_LATER_BLOCKS_MAX: Final = 1 << 18
"""Maximum finished requests queued for a later prefetch, and blocks of these; further ones are ignored."""


class Prefetch:
    """Looks up the blocks of requests ahead of the scheduler, each request up to its first miss.

    It pauses while promotions are full, and does not count as waiting time of requests.

    Args:
        on_ended: Called with a finished request after its last lookup.
    """

    def __init__(
        self,
        core: Core,
        promotions: Promotions,
        lookups: Lookups,
        expiry: Expiry,
        requests: Requests,
        on_ended: Callable[[RequestState], object],
    ) -> None:
        self._primary = core.primary
        self._promotions = promotions
        self._lookups = lookups
        self._expiry = expiry
        self._wait_s_max = core.config.wait_s_max
        self._clock = core.clock
        self._requests = requests
        self._on_ended = on_ended
        self._states: dict[RequestState, float] = {}
        """Requests in progress, with the time at which each is abandoned."""
        self._later: list[tuple[float, int, RequestState]] = []
        """Heap by time."""
        self._later_blocks = 0
        self._numbers = itertools.count()
        self._closed = False

    def __bool__(self) -> bool:
        """Whether there are blocks to look up now."""
        return bool(self._states)

    def __contains__(self, state: RequestState) -> bool:
        return state in self._states

    def add(self, state: RequestState) -> None:
        """Start the prefetch of a request whose keys are known; :meth:`run` continues it."""
        if self._closed or not state.load_links:
            return
        state.prefetched = 0
        self._states[state] = self._clock() + self._wait_s_max if state.finished else math.inf
        self._run_one(state, _BLOCKS_PER_CALL)

    def end_request(self, keys: Sequence[BlockKey], state: RequestState) -> None:
        """Schedule a prefetch of a finished request's blocks, for the engine's first step after the policy's delay."""
        seconds = state.policy.prefetch_s
        is_room = len(self._later) < _LATER_MAX and self._later_blocks + len(keys) <= _LATER_BLOCKS_MAX
        if seconds is not None and keys and is_room and state.load_links and not self._closed:
            self._later_blocks += len(keys)
            returning = self._requests.returning(state, keys)
            heapq.heappush(self._later, (self._clock() + seconds, next(self._numbers), returning))

    def drop(self, state: RequestState) -> None:
        """Remove a request."""
        self._states.pop(state, None)

    def clear(self) -> None:
        """Remove all requests."""
        self._states.clear()
        self._later.clear()
        self._later_blocks = 0

    def close(self) -> None:
        """Remove all requests, and add no more."""
        self._closed = True
        self.clear()

    def run(self) -> None:
        """Continue with all requests, oldest first; once per step."""
        if self._later and self._later[0][0] <= self._clock():
            state = heapq.heappop(self._later)[2]  # At most one per step.
            self._later_blocks -= len(state.keys)
            self._requests.add(state)
            self.add(state)
        if not self._states:
            return
        budget, now = _BLOCKS_PER_CALL, self._clock()
        for state, abandon_at in list(self._states.items()):
            if now > abandon_at:
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
        return self._promotions.start(link, key, state)
