"""Eviction order of a disk: least recently used first; with several tenants, their accounts choose one. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.backends.disk.columns import EMPTY, Columns
from kvstore.tenants import TAG_BYTES, Account, Accounts, Tenants
from kvstore.types import BlockKey

__all__ = ["Ages", "Line", "Shares"]

_AGES: Final = 64
"""Number of ages that pass while every slot is used once."""


_CANDIDATES: Final = 1 << 13
"""Most slots found by one search; a list of all slots of an age takes long to create."""


class Ages:
    """Age of the last use of each slot, one byte per slot (``columns.age``).

    A new age begins once a 64th of the slots have been used in the current one.

    Attributes:
        now: The current age.
    """

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        held = columns.held()
        kept = np.minimum(columns.age[held], EMPTY - 1)
        columns.age[:] = EMPTY
        columns.age[held] = kept
        self.now = int(kept.max(initial=0))
        self._used = 0
        self._lines: list[Line] = []

    def use(self, slot: int) -> None:
        """Record a use of a block, or its arrival."""
        if self.columns.age_view[slot] == self.now:
            return
        self.columns.age_view[slot] = self.now
        self._used += 1
        if self._used > len(self.columns.age) // _AGES:
            self._begin_age()

    def line(self, ages: Callable[[], npt.NDArray[np.uint8]] | None = None) -> Line:
        """Return an eviction queue.

        Args:
            ages: Returns the ages of the slots to consider, and ``EMPTY`` for all others. Default: all slots.
        """
        line = Line(self, ages or (lambda: self.columns.age))
        self._lines.append(line)
        return line

    def _begin_age(self) -> None:
        self._used = 0
        self.now += 1
        if self.now == EMPTY:
            # Halving merges each pair of neighbouring ages.
            self.columns.age[self.columns.age != EMPTY] >>= 1
            self.now >>= 1
            for line in self._lines:
                line.candidates = []


class Line:
    """An eviction queue: blocks ordered by the age of their last use, and within one age by slot.

    Attributes:
        candidates: Slots of the oldest age, or the first of them; the next victim is the last entry.
    """

    def __init__(self, ages: Ages, ages_of: Callable[[], npt.NDArray[np.uint8]]) -> None:
        self._ages = ages
        self._ages_of = ages_of
        self._oldest = 0
        self.candidates: list[int] = []

    def victim(self, is_pinned: Callable[[int], bool]) -> int | None:
        """Return the slot of the next block to evict, or None. The caller marks the slot ``EMPTY``.

        A pinned slot counts as used now.
        """
        tried = -1
        columns = self._ages.columns
        while True:
            while self.candidates:
                slot = self.candidates.pop()
                if columns.age_view[slot] != self._oldest:
                    continue
                if not is_pinned(slot):
                    return slot
                columns.age_view[slot] = self._ages.now
            ages = self._ages_of()
            self._oldest = int(ages.min(initial=EMPTY))
            if self._oldest in (EMPTY, tried):
                return None
            tried = self._oldest
            found = np.flatnonzero(ages == self._oldest)
            self.candidates = found[:_CANDIDATES][::-1].tolist()
            start = 0
            while self._oldest == self._ages.now and start < len(found) and all(map(is_pinned, self.candidates)):
                # Pinned slots keep the current age, and would be found again.
                start += _CANDIDATES
                self.candidates = found[start : start + _CANDIDATES][::-1].tolist()


class Shares:
    """Eviction among tenants that share the slots: accounts choose the tenant, the last use chooses the block."""

    def __init__(self, tenants: Tenants, columns: Columns, ages: Ages) -> None:
        self._columns = columns
        self._ages = ages
        self._accounts = Accounts(tenants)
        self._numbers: dict[Account, int] = {}
        self._known: list[tuple[Account, Line]] = []
        """Accounts by number, each with its eviction queue."""
        self._number = np.zeros(0, np.uint16)
        """Account number of each slot; a free slot keeps its last one."""
        held = columns.held()
        self._reserve()
        tags = np.ascontiguousarray(columns.keys[held, :TAG_BYTES]).view("<u8").ravel()
        different, which, counts = np.unique(tags, return_inverse=True, return_counts=True)
        numbers = [self._number_of(int(tag).to_bytes(TAG_BYTES, "little")) for tag in different]
        for number, count in zip(numbers, counts.tolist(), strict=True):
            self._known[number][0].blocks += count
        self._number[held] = np.array(numbers, np.uint16)[which]

    def enter(self, slot: int, key: BlockKey) -> None:
        """Count the block in a slot for its account."""
        if slot >= len(self._number):
            self._reserve()
        number = self._number[slot] = self._number_of(key)
        self._known[number][0].blocks += 1

    def leave(self, slot: int) -> None:
        """Remove the block in a slot from its account."""
        self._known[self._number[slot]][0].blocks -= 1

    def collect(self, count: int, take: Callable[[Line, int], int]) -> None:
        """Call ``take`` for the accounts that must give up blocks, at most ``count`` in total."""
        self._accounts.capacity = len(self._columns.age)
        self._accounts.collect(count, lambda account, size: take(self._known[self._numbers[account]][1], size))

    def _number_of(self, key: BlockKey) -> int:
        account = self._accounts.of(key)
        number = self._numbers.get(account)
        if number is None:
            number = self._numbers[account] = len(self._known)
            self._known.append((account, self._ages.line(lambda: self._ages_of(number))))
        return number

    def _ages_of(self, number: int) -> npt.NDArray[np.uint8]:
        self._reserve()
        return np.where(self._number == number, self._columns.age, np.uint8(EMPTY))

    def _reserve(self) -> None:
        more = len(self._columns.age) - len(self._number)
        if more > 0:
            self._number = np.concatenate([self._number, np.zeros(more, np.uint16)])
