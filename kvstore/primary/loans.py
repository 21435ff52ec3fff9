"""Loans: slots that another thread reads, and those kept for that reason alone."""

from __future__ import annotations

__all__ = ["Loans"]


class Loans:
    """Counts loans by slot. The borrower's thread calls ``begin`` and ``end``, the owner's thread the rest.

    A slot whose block leaves while it is lent *outlives* the block: it is not reused before its loans have ended.
    """

    def __init__(self) -> None:
        self._lent: dict[int, int] = {}
        """Loans of each lent slot; changed by the borrower alone."""
        self._outlived: set[int] = set()
        """Slots that outlive their blocks; changed by the owner alone."""

    def begin(self, slot: int) -> None:
        """Note a loan."""
        self._lent[slot] = self._lent.get(slot, 0) + 1

    def end(self, slot: int) -> None:
        """Note the end of a loan."""
        loans = self._lent[slot] - 1
        if loans:
            self._lent[slot] = loans
        else:
            del self._lent[slot]

    def outlive(self, slot: int) -> bool:
        """Note that the block of a slot left; return whether the slot is lent, and so outlives the block."""
        if slot not in self._lent:
            return False
        self._outlived.add(slot)
        return True

    def outlive_all(self) -> list[int]:
        """Note that all blocks left; return the slots that newly outlive their blocks."""
        # Copied in one operation, because the borrower keeps running.
        lent = [slot for slot in list(self._lent) if slot not in self._outlived]
        self._outlived.update(lent)
        return lent

    def take_ended(self) -> list[int]:
        """Return the slots that outlived their blocks and are no longer lent, each once."""
        if not self._outlived:
            return []
        ended = [slot for slot in self._outlived if slot not in self._lent]
        self._outlived.difference_update(ended)
        return ended
