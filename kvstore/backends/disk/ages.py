"""Which blocks leave a disk first: those used longest ago; among tenants, of those that are to give some. No I/O."""

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
"""Ages in which all slots are used once."""


class Ages:
    """Ages of the slots' last uses, one byte a slot (``columns.age``).

    A new age begins when a 64th of the slots were used in the last one.

    Attributes:
        now: The age of what is used now.
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
        """Note that a block was used, or entered."""
        if self.columns.age_view[slot] == self.now:
            return
        self.columns.age_view[slot] = self.now
        self._used += 1
        if self._used > len(self.columns.age) // _AGES:
            self._begin_age()

    def line(self, ages: Callable[[], npt.NDArray[np.uint8]] | None = None) -> Line:
        """Return the blocks in the order in which they are to leave.

        Args:
            ages: Returns the ages of some slots, and ``EMPTY`` for the others; by default of all.
        """
        line = Line(self, ages or (lambda: self.columns.age))
        self._lines.append(line)
        return line

    def _begin_age(self) -> None:
        self._used = 0
        self.now += 1
        if self.now == EMPTY:
            # Two neighbouring ages become one.
            self.columns.age[self.columns.age != EMPTY] >>= 1
            self.now >>= 1
            for line in self._lines:
                line.candidates = []


class Line:
    """Least recently used first: blocks of one age in the order of their slots, of different ages in that of their use.

    Attributes:
        candidates: Slots of the oldest age, the next one last.
    """

    def __init__(self, ages: Ages, ages_of: Callable[[], npt.NDArray[np.uint8]]) -> None:
        self._ages = ages
        self._ages_of = ages_of
        self._oldest = 0
        self.candidates: list[int] = []

    def victim(self, is_pinned: Callable[[int], bool]) -> int | None:
        """Return the slot of the block to evict, which the caller marks ``EMPTY``; None if none may be evicted.

        A block whose slot is pinned counts as used.
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
            self.candidates = np.flatnonzero(ages == self._oldest)[::-1].tolist()


class Shares:
    """Whose blocks leave, where tenants share the slots: the accounts say whose, and the last uses which of them."""

    def __init__(self, tenants: Tenants, columns: Columns, ages: Ages) -> None:
        self._columns = columns
        self._ages = ages
        self._accounts = Accounts(tenants)
        self._numbers: dict[Account, int] = {}
        self._known: list[tuple[Account, Line]] = []
        """Accounts by number, each with its line."""
        self._number = np.zeros(0, np.uint16)
        """Of the account of each slot, also of those that are free now."""
        held = columns.held()
        self._reserve()
        tags = np.ascontiguousarray(columns.keys[held, :TAG_BYTES]).view("<u8").ravel()
        different, which, counts = np.unique(tags, return_inverse=True, return_counts=True)
        numbers = [self._number_of(int(tag).to_bytes(TAG_BYTES, "little")) for tag in different]
        for number, count in zip(numbers, counts.tolist(), strict=True):
            self._known[number][0].blocks += count
        self._number[held] = np.array(numbers, np.uint16)[which]

    def enter(self, slot: int, key: BlockKey) -> None:
        """Note a block that got a slot."""
        if slot >= len(self._number):
            self._reserve()
        number = self._number[slot] = self._number_of(key)
        self._known[number][0].blocks += 1

    def leave(self, slot: int) -> None:
        """Note a block that lost its slot."""
        self._known[self._number[slot]][0].blocks -= 1

    def collect(self, count: int, take: Callable[[Line, int], int]) -> None:
        """Let blocks be taken, at most ``count``."""
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
