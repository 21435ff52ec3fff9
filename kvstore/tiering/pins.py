"""Pins: blocks that requests hold in the primary tier, each for a lease, together within a share."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Final

from kvstore.primary.tier import PrimaryTier, SlotState
from kvstore.types import BlockKey

__all__ = ["Pins"]


_SLACK: Final = 64
"""Outdated entries tolerated before the heap is rebuilt."""


class Pins:
    """Holds blocks against eviction until their leases end. A use of a block renews its lease.

    A block held only for other engines is released as soon as each of them has fetched it.

    Args:
        primary: The primary tier.
        blocks_max: Most blocks that may be held.
        lease_s_max: Longest lease, and the default.
        clock: Monotonic seconds.

    Attributes:
        refused_blocks: Blocks not held because the share was used up.
    """

    def __init__(self, primary: PrimaryTier, blocks_max: int, lease_s_max: float, clock: Callable[[], float]) -> None:
        self._primary = primary
        self._blocks_max = blocks_max
        self._lease_s_max = lease_s_max
        self._clock = clock
        self._leases: dict[BlockKey, tuple[float, float]] = {}
        """End and length of each lease."""
        self._line: list[tuple[float, BlockKey]] = []
        """A heap of ends. Entries may be outdated by a use, and entries without a lease are skipped."""
        self._fetches: dict[BlockKey, int] = {}
        """Outstanding fetches of each block that is held only for fetches."""
        self.refused_blocks = 0

    def __bool__(self) -> bool:
        return bool(self._leases)

    def hold(self, keys: Iterable[BlockKey], lease_s: float | None) -> None:
        """Hold those of the blocks that are READY; None: for the longest lease."""
        for key in self._hold(keys, lease_s):
            self._fetches.pop(key, None)

    def hold_for_fetch(self, keys: Iterable[BlockKey], lease_s: float) -> None:
        """Hold those of the blocks that are READY until an engine has fetched them; each call adds one engine."""
        keys = tuple(keys)
        free = {key for key in keys if key not in self._primary.held}
        for key in self._hold(keys, lease_s):
            if key in free:
                self._fetches[key] = 1
            elif key in self._fetches:
                self._fetches[key] += 1

    def fetched(self, keys: Iterable[BlockKey]) -> None:
        """Note that another engine has fetched blocks."""
        for key in keys:
            due = self._fetches.get(key, 0)
            if due > 1:
                self._fetches[key] = due - 1
            elif due:
                self.release((key,))

    def _hold(self, keys: Iterable[BlockKey], lease_s: float | None) -> list[BlockKey]:
        self.sweep()
        held: list[BlockKey] = []
        length = self._lease_s_max if lease_s is None else min(lease_s, self._lease_s_max)
        end = self._clock() + length
        for key in keys:
            if self._primary.lookup(key) is not SlotState.READY:
                continue
            if key not in self._primary.held:
                if len(self._primary.held) >= self._blocks_max:
                    self.refused_blocks += 1
                    continue
                self._primary.hold(key)
            held.append(key)
            known = self._leases.get(key)
            if known is None:
                heapq.heappush(self._line, (end, key))
                self._leases[key] = (end, length)
            else:
                self._leases[key] = (max(end, known[0]), max(length, known[1]))
        return held

    def use(self, keys: Iterable[BlockKey]) -> None:
        """Renew the leases of held blocks."""
        now = self._clock()
        for key in keys:
            known = self._leases.get(key)
            if known is not None:
                self._leases[key] = (max(known[0], now + known[1]), known[1])

    def release(self, keys: Iterable[BlockKey]) -> None:
        """End leases."""
        for key in keys:
            self._leases.pop(key, None)
            self._fetches.pop(key, None)
            self._primary.release(key)

    def sweep(self) -> None:
        """Release the blocks whose leases have ended."""
        now = self._clock()
        while self._line and self._line[0][0] <= now:
            _, key = heapq.heappop(self._line)
            end, _ = self._leases.get(key, (0.0, 0.0))
            if end > now:
                heapq.heappush(self._line, (end, key))
            elif key in self._leases:
                self.release((key,))
        if len(self._line) > 2 * len(self._primary.held) + _SLACK:
            # Too many entries of blocks that were released or removed before the end of their leases.
            self._leases = {key: self._leases[key] for key in self._primary.held if key in self._leases}
            self._fetches = {key: due for key, due in self._fetches.items() if key in self._leases}
            self._line = [(end, key) for key, (end, _) in self._leases.items()]
            heapq.heapify(self._line)

    def clear(self) -> None:
        """Forget everything, because the primary tier is cleared."""
        self._leases.clear()
        self._fetches.clear()
        self._line.clear()
