"""Retention: blocks that requests give a priority in the primary tier, each for a time.

Of blocks with equal priority, those whose time ends last are evicted first: the time is about that of the next use, and
what is used last in the future is the best to evict (Belady, 1966).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from kvstore.primary.tier import PrimaryTier, SlotState
from kvstore.tiering.deadlines import Deadlines
from kvstore.types import BlockKey

__all__ = ["Retention"]

_SLACK: Final = 64
"""Deadlines of blocks that are gone, tolerated before they are dropped."""


class Retention:
    """Gives blocks a priority until it is overdue. Another request can replace or end it.

    Args:
        primary: The primary tier.
        seconds_max: Longest time, and the default.
        clock: Monotonic seconds.
    """

    def __init__(self, primary: PrimaryTier, seconds_max: float, clock: Callable[[], float]) -> None:
        self._primary = primary
        self._seconds_max = seconds_max
        self._clock = clock
        self._ends = Deadlines()

    def __bool__(self) -> bool:
        return bool(self._ends)

    def begin(self, keys: Iterable[BlockKey], priority: int, seconds: float | None) -> None:
        """Give those of the blocks that are READY a priority for a time from now; a priority of 0 ends theirs.

        Args:
            keys: The blocks.
            priority: The priority.
            seconds: The time; None for the longest.
        """
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
        """End what is overdue."""
        self.end(self._ends.take_due(self._clock()))
        retained = self._primary.marks.ranks
        if len(self._ends) > 2 * len(retained) + _SLACK:
            for key in [key for key in self._ends if key not in retained]:
                self._ends.remove(key)

    def clear(self) -> None:
        """Forget everything, because the primary tier is cleared."""
        self._ends.clear()
