"""Rooms of simulated tiers: the blocks that they keep, as keys, evicted by the code of the real tiers. No I/O."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, cast

import numpy as np

from kvstore.backends.slots.ages import Ages, Line, Shares
from kvstore.backends.slots.layout import Head, slot_lengths
from kvstore.backends.slots.segment import EMPTY, SLOT_BITS, SLOT_MASK, Segment
from kvstore.backends.slots.session import segment_slots
from kvstore.backends.slots.space import slots_ahead
from kvstore.eviction import make_policy
from kvstore.tenants import Tenants
from kvstore.types import BlockKey, Outcome

AGES: Final = "ages"
"""Name of the disk tier's eviction, used in place of an eviction policy."""


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

    Ages and shares of tenants are the tier's own code. The order in which slots are taken, freed and evicted ahead of
    need is that of its index and its space, for stores one after the other; a test compares both.
    """

    def __init__(self, capacity_bytes: int, block_bytes: int, tenants: Tenants | None = None) -> None:
        slot_bytes = slot_lengths(block_bytes)[0]
        self._segment_slots = segment_slots(capacity_bytes, slot_bytes)
        self._segments_max = capacity_bytes // (self._segment_slots * slot_bytes)
        self._segments: dict[int, Segment] = {}
        self._places: dict[BlockKey, int] = {}
        self._keys: dict[int, BlockKey] = {}
        self._ages = Ages(self._segments)
        self._line = self._ages.line(lambda segment: segment.age)
        self._shares = None if tenants is None else Shares(tenants, self._ages)

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def touch(self, key: BlockKey) -> None:
        if (place := self._places.get(key)) is not None:
            self._ages.use(*self._at(place))

    def remove(self, key: BlockKey) -> None:
        if (place := self._places.get(key)) is not None:
            self._depart(place)
            self._leave(place)

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
            self._places[key], self._keys[place] = place, key
            segment, slot = self._at(place)
            self._ages.use(segment, slot)
            if self._shares is not None:
                self._shares.enter(segment, slot, key)
            outcomes[key] = Outcome.OK
        return outcomes

    def _at(self, place: int) -> tuple[Segment, int]:
        return self._segments[place >> SLOT_BITS], place & SLOT_MASK

    def _take(self, count: int) -> list[int]:
        taken: list[int] = []
        for segment in self._segments.values():
            if len(taken) == count:
                break
            if segment.free:
                slots = segment.free[len(taken) - count :]
                del segment.free[-len(slots) :]
                taken += [segment.first + slot for slot in sorted(slots)]
        return taken

    def _grow(self) -> bool:
        """Make a segment; False if there is no room for one."""
        number = len(self._segments)
        if number == self._segments_max:
            return False
        self._segments[number] = cast("Segment", _Segment(number << SLOT_BITS, self._segment_slots))
        self._ages.slots += self._segment_slots
        return True

    def _get_ahead(self) -> None:
        ahead = slots_ahead(self._ages.slots)
        free = sum([len(segment.free) for segment in self._segments.values()])
        if free < ahead and not self._grow():
            self._evict(2 * ahead - free)

    def _evict(self, count: int) -> bool:
        """Evict at most ``count`` blocks; return whether there were any."""
        places: list[int] = []

        def take(line: Line, size: int) -> int:
            before = len(places)
            while len(places) < before + size and (place := line.victim(lambda place: False, 0)) is not None:
                self._depart(place)
                places.append(place)
            return len(places) - before

        if self._shares is None:
            take(self._line, count)
        else:
            self._shares.collect(count, take)
        for place in places:
            self._leave(place)
        self.evicted_blocks += len(places)
        return bool(places)

    def _depart(self, place: int) -> None:
        segment, slot = self._at(place)
        segment.age_view[slot] = EMPTY
        if self._shares is not None:
            self._shares.leave(segment, slot)

    def _leave(self, place: int) -> None:
        del self._places[self._keys.pop(place)]
        segment, slot = self._at(place)
        segment.free.append(slot)


class _Segment:
    """Slots without a file, with those attributes of a segment that ages and shares use."""

    rests_until = 0.0  # No write fails here.

    def __init__(self, first: int, slots: int) -> None:
        self.head = Head(0, slots, 0, b"")
        self.first = first
        self.free = list(range(slots))[::-1]
        self.age = np.full(slots, EMPTY, np.uint8)
        self.age_view = self.age.data
        self.account = np.zeros(slots, np.uint16)
