"""Admission: whether a tier stores blocks at their first use or at their second."""

from __future__ import annotations

from typing import Final

from kvstore.eviction import LRU, ROOM_MAX, ROOM_MIN, SampledCaches
from kvstore.tiering.link import TierLink
from kvstore.types import BlockKey

_LOSS_MAX: Final = 0.01
"""Most lost hits, as a share of the accesses, with which blocks are stored at their second use."""

_KEPT: Final = 2 ** (-1 / 8)
"""Weight of former hits after each choice, which is made after accesses of a quarter of the capacity."""


class Admission(SampledCaches):
    """The choice of one tier between storing blocks at their first use and at their second.

    Both rules are simulated by LRU for an eighth of the keys, or fewer, in as small a part of the capacity. Once the
    tier is full, blocks are stored at their second use while that loses few hits. A lost hit counts half after accesses
    of twice the capacity.

    Args:
        link: The tier.
        slots: Slots of the primary tier, where blocks of both rules are found.
    """

    def __init__(self, link: TierLink, slots: int) -> None:
        self._all, self._again, self._above = LRU(), LRU(), LRU()
        super().__init__(self._all, self._again, self._above)
        self._link = link
        self._slots = slots
        self.min_uses = 1  # Use from which a block is stored.
        self._room = ROOM_MAX
        self._lost = 0.0
        self._accesses = 0.0
        self._uses = 0

    def use(self, key: BlockKey, uses: int) -> None:
        """Record a use of a simulated block, which has had so many uses. O(1) amortised."""
        in_all, in_again = key in self._all, key in self._again
        lost = in_all - (in_again or key in self._above)
        if self.min_uses > 1:
            written = uses > 1 and not in_again
            self._link.saved_writes += ((not in_all) - written) * (self.mask + 1)
            self._link.lost_hits += lost * (self.mask + 1)
        self._lost += lost
        self._accesses += 1
        self._all.insert(key)
        self._above.insert(key)
        if uses > 1:
            self._again.insert(key)
        self._uses += 1
        if self._uses % (1 + self._room // 64) == 0:
            self._trim()
        if self._uses % (1 + self._room // 4) == 0:
            self._choose()

    def _trim(self) -> None:
        for cache in self._all, self._again:
            cache.victims(len(cache) - self._room)
        self._above.victims(len(self._above) - min(self._room, self._slots // (self.mask + 1)))

    def _choose(self) -> None:
        stats = self._link.stats()
        if not stats.used_bytes or not stats.capacity_bytes:
            return
        blocks = stats.capacity_bytes * stats.blocks // stats.used_bytes
        while blocks // (self.mask + 1) > ROOM_MAX:
            self._simulate_fewer()
        self._room = blocks // (self.mask + 1)
        if self._room < ROOM_MIN or len(self._all) < 0.9 * self._room:
            # While the tier is filling, every block has room.
            self.min_uses, self._lost, self._accesses = 1, 0.0, 0.0
            return
        self.min_uses = 2 if self._lost <= _LOSS_MAX * self._accesses else 1
        self._lost *= _KEPT
        self._accesses *= _KEPT
