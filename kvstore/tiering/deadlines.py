"""Keys with deadlines on their owner's clock."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final, Generic, TypeVar

_SLACK: Final = 64
"""Outdated entries tolerated before the heap is rebuilt."""

_K = TypeVar("_K", bytes, int)


class Deadlines(Generic[_K]):
    """One deadline per key; O(log n) per change. A key stays until it is removed or taken as due."""

    def __init__(self) -> None:
        self._ends: dict[_K, float] = {}
        self._heap: list[tuple[float, _K]] = []
        """Each key has an entry no later than its deadline; other entries are outdated."""

    def __repr__(self) -> str:
        """Show the number of keys, and of entries in memory, some of them outdated."""
        return f"Deadlines({len(self._ends)} keys, {len(self._heap)} entries)"

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[_K]:
        return iter(self._ends)

    def get(self, key: _K, default: float) -> float:
        """Return the deadline of a key, or ``default`` if it has none."""
        return self._ends.get(key, default)

    def set(self, key: _K, end: float) -> None:
        """Set or replace the deadline of a key."""
        known = self._ends.get(key)
        self._ends[key] = end
        if known is None or end < known:
            heapq.heappush(self._heap, (end, key))
            if len(self._heap) > 2 * len(self._ends) + _SLACK:
                self._heap = [(end, key) for key, end in self._ends.items()]
                heapq.heapify(self._heap)

    def remove(self, key: _K) -> bool:
        """Remove a key; return whether it had a deadline."""
        return self._ends.pop(key, None) is not None

    def take_due(self, now: float, limit: int | None = None, *, keep: int | None = None) -> list[_K]:
        """Remove and return the keys whose deadlines have passed, the earliest first.

        Args:
            now: The time; a deadline equal to ``now`` has passed.
            limit: Maximum number of keys returned.
            keep: Maximum number of keys left; the earliest of the excess count as due.
        """
        due: list[_K] = []
        while self._heap and (limit is None or len(due) < limit):
            end, key = self._heap[0]
            if end > now and (keep is None or len(self._ends) <= keep):
                break
            heapq.heappop(self._heap)
            actual = self._ends.get(key, end)
            if actual > end:
                heapq.heappush(self._heap, (actual, key))
            elif self.remove(key):
                due.append(key)
        return due

    def clear(self) -> None:
        """Remove all keys."""
        self._ends.clear()
        self._heap.clear()
