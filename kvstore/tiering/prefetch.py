"""Prefetch: blocks are promoted as soon as they are known, not when the scheduler gets to their request."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.tiering.request import RequestState
from kvstore.types import BlockKey, LookupResult

__all__ = ["Prefetch"]

_BLOCKS_PER_CALL = 4096
"""Blocks looked up per call: some milliseconds at most."""


class Prefetch:
    """Looks up the blocks of requests ahead of them, each up to its first miss.

    Args:
        lookup: Looks up one block for a request, which begins its promotion.
        is_full: Tells whether promotions have no room for a request; then prefetch waits, so that it takes no request's
            patience.
    """

    def __init__(
        self, lookup: Callable[[BlockKey, RequestState], LookupResult], is_full: Callable[[RequestState], bool]
    ) -> None:
        self._lookup = lookup
        self._is_full = is_full
        self._states: dict[RequestState, None] = {}

    def __bool__(self) -> bool:
        return bool(self._states)

    def add(self, state: RequestState) -> None:
        """Begin with a request, whose keys are known; :meth:`run` goes on with it."""
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
        """Go on with all requests, the oldest first; once per step."""
        budget = _BLOCKS_PER_CALL
        for state in list(self._states):
            budget = self._run_one(state, budget)
            if budget <= 0:
                return

    def _run_one(self, state: RequestState, budget: int) -> int:
        """Look up the request's blocks from where it stands; return what is left of the budget."""
        keys = state.keys
        unknown: int | None = None
        for index in range(state.prefetched, len(keys)):
            if self._is_full(state) or budget <= 0:
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
