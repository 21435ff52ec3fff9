"""Retention: blocks that requests give a priority in the primary tier, each for a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from kvstore.primary.tier import PrimaryTier, SlotState
from kvstore.tiering.deadlines import Deadlines
from kvstore.types import BlockKey

__all__ = ["Retention"]

_SLACK: Final = 64
"""Deadlines of blocks that are gone, tolerated before the earliest are dropped."""


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
        for key in keys:
            if self._primary.lookup(key) is SlotState.READY:
                self._primary.retain(key, priority)
                self._ends.set(key, end)

    def end(self, keys: Iterable[BlockKey]) -> None:
        """End the priority of blocks."""
        for key in keys:
            self._ends.remove(key)
            self._primary.end_retention(key)

    def sweep(self) -> None:
        """End what is overdue."""
        self.end(self._ends.take_due(self._clock(), keep=self._primary.slots + _SLACK))

    def clear(self) -> None:
        """Forget everything, because the primary tier is cleared."""
        self._ends.clear()
