"""Lending: reads of primary-tier rows by another thread, without a lock and without the scheduler."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvstore.primary.loans import Loans
from kvstore.primary.tier import PrimaryTier, SlotState
from kvstore.types import BlockKey, Found


class Loan(NamedTuple):
    """A row on loan, which is not written until :meth:`Lender.give_back`."""

    slot: int
    row: memoryview


class Lender:
    """Lends READY rows of a primary tier to one other thread.

    The scheduler never waits for a loan. If a block is evicted while its row is lent, its slot stays ABANDONED until
    the loan ends.

    No lock is needed. The borrower records the loan, then looks up the block again. The scheduler removes a dropped
    block from the index, then checks for loans. So at least one of them notices the other. Each step is one operation
    on a dict or list, which Python makes atomic.

    ``backends``: storage of this engine whose records may also be sent, on the borrower's event loop. Several lenders
    may share the list, and it may grow.
    """

    def __init__(self, primary: PrimaryTier, backends: list[Any] | None = None) -> None:
        self._primary = primary
        self._loans: Loans = primary.loans
        # Whether rows are lent. At a change of namespace the scheduler sets it to False before a row of the new
        # namespace can be READY.
        self.is_open = True
        self.backends: list[Any] = [] if backends is None else backends  # That list.

    @property
    def slots(self) -> int:
        """Slots of the primary tier."""
        return self._primary.slots

    def keys(self) -> list[BlockKey]:
        """Return all blocks, including blocks being filled."""
        return self._primary.keys() if self.is_open else []

    def find(self, key: BlockKey) -> Found:
        """Return THERE if a block can be lent now, COMING if a handed-over request computes it, or ABSENT."""
        if not self.is_open:
            return Found.ABSENT
        if self._primary.lookup(key) is SlotState.READY:
            return Found.THERE
        if self._primary.hand_overs.is_coming(key):
            return Found.COMING
        # The request may have computed this block and ended between the two lookups.
        return Found.THERE if self._primary.lookup(key) is SlotState.READY else Found.ABSENT

    def is_waiting(self, hand_over: bytes) -> bool:
        """Whether a hand-over has begun here and its blocks are not known yet."""
        return self.is_open and self._primary.hand_overs.is_waiting(hand_over)

    def lend(self, key: BlockKey) -> Loan | None:
        """Return the row of a block, unchanged until :meth:`give_back`; None if the block is not READY."""
        slot = self._ready_slot(key)
        if slot is None:
            return None
        self._loans.begin(slot)
        # is_open is read last: a row of another namespace becomes READY only after it was set to False.
        if self._ready_slot(key) == slot and self.is_open:
            return Loan(slot, self._primary.row(slot))
        self._loans.end(slot)
        return None

    def note_sent(self, key: BlockKey) -> None:
        """Note that a block was sent to another engine, so it need not be kept for that engine."""
        self._primary.hand_overs.note_sent(key)

    def give_back(self, loan: Loan) -> None:
        loan.row.release()
        self._loans.end(loan.slot)

    def _ready_slot(self, key: BlockKey) -> int | None:
        slot = self._primary.slot_of(key)
        return slot if slot is not None and self._primary.state_of(slot) is SlotState.READY else None
