"""Rooms of simulated tiers: the blocks that they keep, as keys, evicted by the code of the real tiers. No I/O."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

import numpy as np

from kvstore.backends.disk.index import Index
from kvstore.backends.disk.layout import ROW, Head, digest_of, slot_lengths
from kvstore.backends.disk.segment import OpenFile, Segment, Table
from kvstore.backends.disk.session import segment_slots
from kvstore.backends.disk.space import slots_ahead
from kvstore.backends.disk.table import NOWHERE
from kvstore.diskio import OsDisk
from kvstore.eviction import make_policy
from kvstore.tenants import Tenants
from kvstore.types import BlockKey, Outcome

AGES: Final = "ages"
"""Name of the disk tier's eviction, used in place of an eviction policy."""


_NO_FILE: Final = OpenFile(OsDisk(), -1)


class Room(ABC):
    """The blocks of a tier."""

    evicted_blocks = 0

    @abstractmethod
    def __contains__(self, key: object) -> bool:
        """Return whether a block is there."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of blocks."""

    @abstractmethod
    def touch(self, key: BlockKey) -> None:
        """Record a use of a block; unknown keys are ignored."""

    @abstractmethod
    def remove(self, key: BlockKey) -> None:
        """Remove a block if it is there."""

    @abstractmethod
    def store(self, keys: Sequence[BlockKey]) -> dict[BlockKey, Outcome]:
        """Add blocks, evicting others if necessary; return the outcome of each."""


class PolicyRoom(Room):
    """Room for so many blocks, evicted by an eviction policy; ``capacity_blocks`` None: no limit."""

    def __init__(self, policy: str, capacity_blocks: int | None, tenants: Tenants | None = None) -> None:
        self._capacity_blocks = capacity_blocks
        self._policy = make_policy(policy, capacity_blocks or 0, tenants)

    def __contains__(self, key: object) -> bool:
        return key in self._policy

    def __len__(self) -> int:
        return len(self._policy)

    def touch(self, key: BlockKey) -> None:
        self._policy.touch(key)

    def remove(self, key: BlockKey) -> None:
        self._policy.remove(key)

    def store(self, keys: Sequence[BlockKey]) -> dict[BlockKey, Outcome]:
        new = [key for key in keys if key not in self._policy]
        kept = new
        if self._capacity_blocks is not None:
            self.evicted_blocks += len(self._policy.victims(len(self._policy) + len(new) - self._capacity_blocks))
            kept = new[: self._capacity_blocks - len(self._policy)]
        for key in kept:
            self._policy.insert(key)
        return (
            dict.fromkeys(keys, Outcome.EXISTS) | dict.fromkeys(new, Outcome.NO_SPACE) | dict.fromkeys(kept, Outcome.OK)
        )


class SlotsRoom(Room):
    """The slots of a disk tier in one directory: segments that are made as needed, and evicted by age.

    The index is the tier's own. Only the order of making segments, evicting, and evicting ahead of need is that of the
    tier's space, for stores one after the other; a test compares both.
    """

    def __init__(self, capacity_bytes: int, block_bytes: int, tenants: Tenants | None = None) -> None:
        self._slot_bytes = slot_lengths(block_bytes)[0]
        slots = segment_slots(capacity_bytes, self._slot_bytes)
        self._segments_max = capacity_bytes // (slots * self._slot_bytes)
        self._head = Head(0, slots, self._slot_bytes, b"")
        self._index = Index(self._segments_max * slots, tenants)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and self._index.place(key) != NOWHERE

    def __len__(self) -> int:
        return len(self._index)

    def touch(self, key: BlockKey) -> None:
        self._index.touch((self._index.place(key),))

    def remove(self, key: BlockKey) -> None:
        if (place := self._index.place(key)) != NOWHERE:
            self._index.leave(self._index.depart((place,)))

    def store(self, keys: Sequence[BlockKey]) -> dict[BlockKey, Outcome]:
        outcomes = dict.fromkeys(keys, Outcome.EXISTS)
        new = [key for key in keys if key not in self]
        for key in keys:
            self.touch(key)
        if not new:
            return outcomes
        places = self._take(len(new))
        while len(places) < len(new) and (self._grow() or self._evict(len(new) - len(places))):
            places += self._take(len(new) - len(places))
        self._get_ahead()
        outcomes.update(dict.fromkeys(new, Outcome.NO_SPACE))
        for key, place in zip(new, places, strict=False):
            self._index.add(place, self._slot_bytes, 0, digest_of(key), key)
            outcomes[key] = Outcome.OK
        return outcomes

    def _take(self, count: int) -> list[int]:
        return self._index.take(count, self._slot_bytes)

    def _grow(self) -> bool:
        """Make a segment; False if there is no room for one."""
        number = len(self._index.segments)
        if number == self._segments_max:
            return False
        rows, intact = np.zeros(self._head.slots, ROW), np.zeros(self._head.slots, np.bool_)
        content = Table(self._head, np.zeros(self._head.groups, np.uint32), rows, intact)
        self._index.open_segment(Segment(0, number, _NO_FILE, _NO_FILE, content), rows["digest"])
        return True

    def _get_ahead(self) -> None:
        ahead, free = slots_ahead(self._index.slots), self._index.free_slots()
        if free < ahead and not self._grow():
            self._evict(2 * ahead - free)

    def _evict(self, count: int) -> bool:
        """Evict at most ``count`` blocks; return whether there were any."""
        places = self._index.evict(count, self._slot_bytes)
        self._index.leave(places)
        self.evicted_blocks += len(places)
        return bool(places)
