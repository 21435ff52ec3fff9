"""Lifetimes: which blocks expire when, and which have."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from kvstore.bounded import BoundedDict
from kvstore.types import BlockKey

__all__ = ["Lifetimes"]

_BLOCKS_MAX = 1 << 18
"""Blocks with a lifetime that are remembered; over it, the ones that end first are expired early."""


class Lifetimes:
    """Ends of the lifetimes of blocks, on the owner's clock.

    A block that expired stays known as such until it is stored anew, as a tier may go on holding it for a while.

    Args:
        blocks_max: Blocks remembered, expired ones included.
    """

    def __init__(self, blocks_max: int = _BLOCKS_MAX) -> None:
        self._blocks_max = blocks_max
        self._ends: dict[BlockKey, float] = {}
        self._heap: list[tuple[float, BlockKey]] = []
        self._gone: BoundedDict[BlockKey, None] = BoundedDict(blocks_max)

    def __bool__(self) -> bool:
        return bool(self._ends or self._gone)

    def __len__(self) -> int:
        return len(self._ends) + len(self._gone)

    def begin(self, keys: Sequence[BlockKey], end: float | None) -> None:
        """Note blocks that are stored now, to live until ``end`` (None: for ever)."""
        for key in keys:
            self._gone.pop(key, None)
            self._ends.pop(key, None)
            if end is not None:
                self._set(key, end)

    def extend(self, keys: Sequence[BlockKey], end: float | None) -> None:
        """Note that another request wants blocks to live until ``end`` (None: for ever); the longest wish counts."""
        for key in keys:
            if key in self._ends:
                if end is None:
                    del self._ends[key]
                elif end > self._ends[key]:
                    self._set(key, end)

    def condemn(self, keys: Sequence[BlockKey]) -> None:
        """Declare blocks expired, whether they had a lifetime or not."""
        for key in keys:
            self._ends.pop(key, None)
            self._gone[key] = None

    def expired(self, key: BlockKey, now: float) -> bool:
        """Tell whether a block must not be used any more."""
        return key in self._gone or self._ends.get(key, math.inf) <= now

    def take_expired(self, now: float, count_max: int) -> list[BlockKey]:
        """Return blocks whose lifetime has ended since the last call, at most so many."""
        taken: list[BlockKey] = []
        while self._heap and len(taken) < count_max:
            end, key = self._heap[0]
            too_many = len(self._ends) > self._blocks_max
            if end > now and not too_many:
                break
            heapq.heappop(self._heap)
            # A lifetime that was extended or ended otherwise leaves its old entry behind.
            if self._ends.get(key) == end:
                del self._ends[key]
                self._gone[key] = None
                taken.append(key)
        return taken

    def _set(self, key: BlockKey, end: float) -> None:
        self._ends[key] = end
        heapq.heappush(self._heap, (end, key))
        if len(self._heap) > 2 * len(self._ends) + 64:
            self._heap = [(end, key) for key, end in self._ends.items()]
            heapq.heapify(self._heap)
