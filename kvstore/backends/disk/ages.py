"""Order of eviction: 64 ages of last use, one byte for each slot, also among tenants. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.backends.disk.segment import EMPTY, SLOT_BITS, SLOT_MASK, Segment
from kvstore.tenants import Account, Accounts, Tenants
from kvstore.types import BlockKey

_AGES: Final = 64
"""Number of ages that pass while every slot is used once."""

_CANDIDATES: Final = 1 << 13
"""Most slots found by one search; a list of all slots of an age takes long to create."""


class Ages:
    """Age of the last use of each slot. A new age begins once a 64th of the slots have been used in the current one."""

    def __init__(self, segments: dict[int, Segment]) -> None:
        self.segments = segments
        self.slots = 0  # Number of slots in the segments that this engine holds.
        self.now = 0  # The current age.
        self._used = 0
        self._lines: list[Line] = []

    def use(self, segment: Segment, slot: int) -> None:
        """Record a use of a block, or its arrival."""
        if segment.age_view[slot] == self.now:
            return
        segment.age_view[slot] = self.now
        self._used += 1
        if self._used > self.slots // _AGES:
            self._begin_age()

    def line(self, ages_of: Callable[[Segment], npt.NDArray[np.uint8]]) -> Line:
        """Return an eviction queue over the slots to which ``ages_of`` gives an age other than ``EMPTY``."""
        self._lines.append(Line(self, ages_of))
        return self._lines[-1]

    def _begin_age(self) -> None:
        self._used = 0
        self.now += 1
        if self.now == EMPTY:
            # Halving merges each pair of neighbouring ages.
            for segment in self.segments.values():
                segment.age[segment.age != EMPTY] >>= 1
            self.now >>= 1
            for line in self._lines:
                line.candidates = []


class Line:
    """An eviction queue: blocks ordered by the age of their last use, and within one age by place."""

    def __init__(self, ages: Ages, ages_of: Callable[[Segment], npt.NDArray[np.uint8]]) -> None:
        self._ages = ages
        self._ages_of = ages_of
        self._oldest = 0
        self._slot_bytes = 0
        # Places of the oldest age, or the first of them; the next victim is the last entry.
        self.candidates: list[int] = []

    def victim(self, is_pinned: Callable[[int], bool], slot_bytes: int) -> int | None:
        """Return the place of the next block to evict, or None. The caller marks the slot ``EMPTY``.

        A pinned block counts as used now. ``slot_bytes``: Shortest slot that is of use.
        """
        if slot_bytes != self._slot_bytes:
            self._slot_bytes, self.candidates = slot_bytes, []
        while True:
            while self.candidates:
                place = self.candidates.pop()
                segment = self._ages.segments.get(place >> SLOT_BITS)
                if segment is None or segment.rests_until or segment.age_view[place & SLOT_MASK] != self._oldest:
                    continue
                if not is_pinned(place):
                    return place
                segment.age_view[place & SLOT_MASK] = self._ages.now
            self._oldest, holders = self._find_oldest(slot_bytes)
            is_last = self._oldest == self._ages.now
            found: list[int] = []
            for segment, ages in holders:
                here = ((ages == self._oldest).nonzero()[0] + segment.first).tolist()
                # Pinned blocks keep the current age, and would be found again.
                found += [place for place in here if not is_pinned(place)] if is_last else here
                if len(found) >= _CANDIDATES:
                    break
            if not found:
                return None
            self.candidates = found[:_CANDIDATES][::-1]

    def _find_oldest(self, slot_bytes: int) -> tuple[int, list[tuple[Segment, npt.NDArray[np.uint8]]]]:
        """Return the oldest age in slots of at least this length, and the segments with blocks of that age."""
        oldest = EMPTY
        holders: list[tuple[Segment, npt.NDArray[np.uint8]]] = []
        for segment in self._ages.segments.values():
            if segment.head.slot_bytes < slot_bytes or segment.rests_until:
                continue
            ages = self._ages_of(segment)
            age = int(ages.min())
            if age < oldest:
                oldest, holders = age, []
            if age == oldest < EMPTY:
                holders.append((segment, ages))
        return oldest, holders


class Shares:
    """Eviction among tenants that share the slots: accounts choose the tenant, the last use chooses the block."""

    def __init__(self, tenants: Tenants, ages: Ages) -> None:
        self._ages = ages
        self._accounts = Accounts(tenants)
        self._numbers: dict[Account, int] = {}
        self._known: list[tuple[Account, Line]] = []
        """Accounts by number, each with its eviction queue."""

    def open_segment(self, segment: Segment) -> None:
        """Count the blocks of a new segment."""
        segment.account = np.zeros(segment.head.slots, np.uint16)
        for slot in segment.held().tolist():
            self.enter(segment, slot, segment.key(slot))

    def enter(self, segment: Segment, slot: int, key: BlockKey) -> None:
        """Count the block in a slot for its account."""
        number = self._number_of(key)
        segment.account[slot] = number
        self._known[number][0].blocks += 1

    def leave(self, segment: Segment, slot: int) -> None:
        """Remove the block in a slot from its account."""
        self._known[segment.account[slot]][0].blocks -= 1

    def collect(self, count: int, take: Callable[[Line, int], int]) -> None:
        """Call ``take`` for the accounts that must give up blocks, at most ``count`` in total."""
        self._accounts.capacity = self._ages.slots
        self._accounts.collect(count, lambda account, size: take(self._known[self._numbers[account]][1], size))

    def _number_of(self, key: BlockKey) -> int:
        account = self._accounts.of(key)
        number = self._numbers.get(account)
        if number is None:
            number = self._numbers[account] = len(self._known)
            self._known.append((account, self._ages.line(lambda each: self._ages_of(each, number))))
        return number

    @staticmethod
    def _ages_of(segment: Segment, number: int) -> npt.NDArray[np.uint8]:
        return np.where(segment.account == number, segment.age, np.uint8(EMPTY))
