"""Loans: slots that another thread reads, including slots kept only for that reason."""

from __future__ import annotations


class Loans:
    """Counts loans by slot. The borrower's thread calls ``begin`` and ``end``; the owner's thread calls the rest.

    A slot *outlives* its block if the block leaves during a loan: the slot is not reused before its loans have ended.
    """

    def __init__(self) -> None:
        self._lent: dict[int, int] = {}
        """Loans of each lent slot; changed only by the borrower."""
        self._outlived: set[int] = set()
        """Slots that outlive their blocks; changed only by the owner."""

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
        """Note that the block of a slot left; return whether the slot is lent and outlives the block."""
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
