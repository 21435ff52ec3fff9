"""Prefetch: promotes the blocks of a request as soon as they are known, before the scheduler looks them up."""

from __future__ import annotations

from kvstore.primary.tier import PrimaryTier
from kvstore.tiering.expiry import Expiry
from kvstore.tiering.lookups import Lookups
from kvstore.tiering.promotions import Promotions
from kvstore.tiering.requests import RequestState
from kvstore.types import BlockKey, LookupResult

__all__ = ["Prefetch"]

_BLOCKS_PER_CALL = 4096
"""Blocks looked up per call: some milliseconds at most."""


class Prefetch:
    """Looks up the blocks of requests ahead of the scheduler, each request up to its first miss.

    It pauses while promotions are full, and uses up no request's waiting time.
    """

    def __init__(self, primary: PrimaryTier, promotions: Promotions, lookups: Lookups, expiry: Expiry) -> None:
        self._primary = primary
        self._promotions = promotions
        self._lookups = lookups
        self._expiry = expiry
        self._states: dict[RequestState, None] = {}

    def __bool__(self) -> bool:
        return bool(self._states)

    def add(self, state: RequestState) -> None:
        """Start with a request whose keys are known; :meth:`run` continues."""
        state.prefetched = 0
        self._states[state] = None
        self._run_one(state, _BLOCKS_PER_CALL)

    def drop(self, state: RequestState) -> None:
        """Forget a request."""
        self._states.pop(state, None)

    def clear(self) -> None:
        """Forget all requests."""
        self._states.clear()

    def run(self) -> None:
        """Continue with all requests, the oldest first; once per step."""
        budget = _BLOCKS_PER_CALL
        for state in list(self._states):
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
            del self._states[state]
        else:
            state.prefetched = unknown
        return budget

    def _lookup(self, key: BlockKey, state: RequestState) -> LookupResult:
        if self._expiry.active and self._expiry.forbids(key):
            return LookupResult.MISS
        if key in self._primary:
            return LookupResult.HIT
        link, unknown = self._lookups.find(key, state)
        if link is None:
            return LookupResult.RETRY if unknown else LookupResult.MISS
        return LookupResult.HIT_PENDING if self._promotions.start(link, key, state) else LookupResult.RETRY
