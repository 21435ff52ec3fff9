"""Retention: temporary priorities of blocks in the primary tier, set by requests.

Of blocks with equal priority, those with the latest end are evicted first: the end approximates the next use, and the
best block to evict is the one used farthest in the future (Belady, 1966).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvstore.primary.tier import SlotState
from kvstore.tiering.core import Core
from kvstore.tiering.deadlines import Deadlines
from kvstore.types import BlockKey

_SLACK: Final = 64
"""Deadlines of removed blocks tolerated before a cleanup."""


class Retention:
    """Gives blocks a priority until its deadline. Another request can replace or end it earlier."""

    def __init__(self, core: Core) -> None:
        self._primary = core.primary
        self._seconds_max = core.config.pin_lease_s
        self._clock = core.clock
        self._ends: Deadlines[BlockKey] = Deadlines()

    def __bool__(self) -> bool:
        return bool(self._ends)

    def begin(self, keys: Iterable[BlockKey], priority: int, seconds: float | None) -> None:
        """Give the READY blocks a priority for a time; None: the longest time. Priority 0 ends the priority."""
        if not priority:
            self.end(keys)
            return
        end = self._clock() + (self._seconds_max if seconds is None else min(seconds, self._seconds_max))
        rank = priority, -int(end)
        for key in reversed(tuple(keys)):  # The end of a prefix is evicted first.
            if self._primary.lookup(key) is SlotState.READY:
                self._primary.retain(key, rank)
                self._ends.set(key, end)

    def end(self, keys: Iterable[BlockKey]) -> None:
        """End the priority of blocks."""
        for key in keys:
            self._primary.end_retention(key)

    def sweep(self) -> None:
        """End the priorities past their deadline."""
        self.end(self._ends.take_due(self._clock()))
        retained = self._primary.marks.ranks
        if len(self._ends) > 2 * len(retained) + _SLACK:
            for key in [key for key in self._ends if key not in retained]:
                self._ends.remove(key)

    def clear(self) -> None:
        """Drop all state, because the primary tier is cleared."""
        self._ends.clear()
