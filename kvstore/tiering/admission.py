"""Admission: whether a tier stores blocks at their first use or at their second."""

from __future__ import annotations

from typing import Final

from kvstore.eviction import LRU, ROOM_MAX, SampledCaches
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
        # By the first rule, by the second, as chosen, and in the primary tier.
        self._all, self._again, self._chosen, self._above = LRU(), LRU(), LRU(), LRU()
        super().__init__(self._all, self._again, self._chosen, self._above)
        self._link = link
        self._slots = slots
        self.min_uses = 1  # Use from which a block is stored.
        self._room = ROOM_MAX
        self._lost = 0.0
        self._accesses = 0.0
        self._uses = 0

    def use(self, key: BlockKey, uses: int, needed: float) -> None:
        """Record a use of a simulated block, which has had so many uses. O(1) amortised.

        ``needed``: Uses from which it is stored whatever the choice, infinite if never; 0 if the tier chooses.
        """
        in_all, in_again, in_chosen = key in self._all, key in self._again, key in self._chosen
        if key not in self._above:
            self._lost += in_all - in_again
            self._link.lost_hits += (in_all - in_chosen) * (self.mask + 1)
        first, chosen = needed or 1, needed or self.min_uses
        written = (not in_all and uses >= first) - (not in_chosen and uses >= chosen)
        self._link.saved_writes += written * (self.mask + 1)
        for cache, least in (self._all, first), (self._again, needed or 2), (self._chosen, chosen), (self._above, 0):
            if uses >= least:
                cache.insert(key)
        self._accesses += 1
        self._uses += 1
        if self._uses % (1 + self._room // 64) == 0:
            self._trim()
        if self._uses % (1 + self._room // 4) == 0:
            self._choose()

    def _trim(self) -> None:
        for cache in self._all, self._again, self._chosen:
            cache.victims(len(cache) - self._room)
        self._above.victims(len(self._above) - min(self._room, self._slots // (self.mask + 1)))

    def _choose(self) -> None:
        stats = self._link.stats()
        # Without these figures, which also a tier that fails lacks, the room is unknown.
        known = stats.used_bytes and stats.capacity_bytes
        blocks = stats.capacity_bytes * stats.blocks // stats.used_bytes if known else 0
        room = self._resize(blocks)
        self._room = room or ROOM_MAX
        if not room or len(self._all) < 0.9 * room:
            # While the tier is filling, every block has room.
            self.min_uses, self._lost, self._accesses = 1, 0.0, 0.0
            return
        self.min_uses = 2 if self._lost <= _LOSS_MAX * self._accesses else 1
        self._lost *= _KEPT
        self._accesses *= _KEPT
