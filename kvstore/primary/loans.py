"""Loans: slots that another thread reads, including slots kept only for that reason."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from kvstore.types import BlockKey


class Loans:
    """Counts loans by slot. The borrower's thread calls ``begin`` and ``end``; the owner's thread calls the rest.

    A slot *outlives* its block if the block leaves during a loan: the slot is not reused before its loans have ended.
    """

    def __init__(self) -> None:
        self._lent: dict[int, int] = {}
        """Loans of each lent slot; changed only by the borrower."""
        self.outlived: set[int] = set()
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
        self.outlived.add(slot)
        return True

    def outlive_all(self) -> list[int]:
        """Note that all blocks left; return the slots that newly outlive their blocks."""
        # Copied in one operation, because the borrower keeps running.
        lent = [slot for slot in list(self._lent) if slot not in self.outlived]
        self.outlived.update(lent)
        return lent

    def take_ended(self) -> list[int]:
        """Return the slots that outlived their blocks and are no longer lent, each once."""
        ended = [slot for slot in self.outlived if slot not in self._lent]
        self.outlived.difference_update(ended)
        return ended


_SENT_MAX: Final = 1 << 16
"""Maximum sent blocks not yet processed by the scheduler; the priorities of further ones end by expiry."""


class HandOvers:
    """Blocks that handed-over requests will compute, and blocks that have been sent.

    The scheduler's thread calls :meth:`begin`, :meth:`expect`, :meth:`end` and :meth:`take_sent`; the serving thread
    calls :meth:`is_coming`, :meth:`is_waiting` and :meth:`note_sent`. Each step is one operation on a container, which
    Python makes atomic, so no lock is needed.
    """

    def __init__(self) -> None:
        self._names: dict[str, bytes] = {}
        """Name of the hand-over, for requests whose blocks are not known yet."""
        self._keys: dict[str, Sequence[BlockKey]] = {}
        """Blocks of the other requests."""
        self._waiting: dict[bytes, int] = {}
        self._coming: dict[BlockKey, int] = {}
        self.sent: deque[BlockKey] = deque(maxlen=_SENT_MAX)
        """Sent blocks not yet taken."""

    def begin(self, request_id: str, name: bytes) -> None:
        """Add a handed-over request whose blocks are not known yet.

        ``name``: name of the hand-over, which several requests may share; empty if it has none.
        """
        self._names[request_id] = name
        _count(self._waiting, name, 1)

    def expect(self, request_id: str, keys: Sequence[BlockKey]) -> None:
        """Set the blocks that a request will compute, if it is handed over."""
        if request_id not in self._names:
            return
        self._keys[request_id] = keys
        for key in keys:
            _count(self._coming, key, 1)
        # Removed only now, so that either the name or the blocks are found at any time.
        _count(self._waiting, self._names.pop(request_id), -1)

    def end(self, request_id: str) -> None:
        """Remove a request that has computed all its blocks and whose copies have ended."""
        if request_id in self._names:
            _count(self._waiting, self._names.pop(request_id), -1)
        for key in self._keys.pop(request_id, ()):
            _count(self._coming, key, -1)

    def is_coming(self, key: BlockKey) -> bool:
        """Whether a handed-over request is known to compute a block."""
        return key in self._coming

    def is_waiting(self, name: bytes) -> bool:
        """Whether the blocks of a hand-over are not known yet, so that any block may belong to it."""
        return name in self._waiting

    def note_sent(self, key: BlockKey) -> None:
        """Note that a block was sent to another engine."""
        self.sent.append(key)

    def take_sent(self) -> list[BlockKey]:
        """Return the blocks sent since the last call, once per transmission."""
        return [self.sent.popleft() for _ in range(len(self.sent))]


def _count(counts: dict[bytes, int], name: bytes, change: int) -> None:
    """Change the count of a name; names with count 0 have no entry."""
    count = counts.get(name, 0) + change
    if count:
        counts[name] = count
    else:
        del counts[name]
