"""The inventory of a tier as consumers of its events know it, and the changes to report."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from typing import Final

from kvstore.types import BlockKey, RemovalCause, TierEvent

__all__ = ["Inventory"]

_BULK_KEYS: Final = 128
"""Recovered and repeated blocks per report, and so per step of the engine. A bound for the scheduler's thread; its cost
in a real engine has not been measured."""


class Inventory:
    """The blocks of one tier that consumers of its events know, and the changes since the last report.

    It keeps sets, not a log: nothing is lost for lack of room, and a block that left and came back between two reports
    is no change. Once all reports are taken, the blocks that they state as stored and not as removed are exactly those
    of the tier. Changes are reported at once; blocks found at start, and repetitions, at a bounded rate.

    Args:
        enabled: Whether anything is kept.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._known: dict[BlockKey, None] = {}
        """Held and reported; the first reported in front."""
        self._found: set[BlockKey] = set()
        """Held and not yet reported, as they wait in the queue."""
        self._changes: dict[BlockKey, RemovalCause | None] = {}
        """Stored (None) or removed since the last report; in neither of the two above."""
        self._queue: deque[BlockKey] = deque()
        """Blocks to report at the bounded rate, if they are still found, or known during a repetition."""
        self._repeating = self._asked_again = False

    def __bool__(self) -> bool:
        """Whether something is to be reported."""
        return bool(self._changes or self._queue)

    def stored(self, keys: Iterable[BlockKey]) -> None:
        """Note blocks that entered the tier."""
        changes = self._changes
        for key in keys if self._enabled else ():
            if key in changes:
                if changes[key] is not None:
                    del changes[key]
                    self._known[key] = None
            elif key not in self._known and key not in self._found:
                changes[key] = None

    def found(self, keys: Iterable[BlockKey]) -> None:
        """Note blocks that were in the tier before it was opened."""
        for key in keys if self._enabled else ():
            if key in self._changes:
                self.stored((key,))
            elif key not in self._known and key not in self._found:
                self._found.add(key)
                self._queue.append(key)

    def removed(self, keys: Iterable[BlockKey], cause: RemovalCause) -> None:
        """Note blocks that left the tier; those that consumers never knew are no change."""
        changes = self._changes
        for key in keys:
            if key in self._known:
                del self._known[key]
                changes[key] = cause
            elif key in self._found:
                self._found.discard(key)
            elif key in changes and changes[key] is None:
                del changes[key]

    def clear(self, cause: RemovalCause) -> None:
        """Note that all blocks left the tier."""
        held = [key for key, change in self._changes.items() if change is None]
        self.removed([*self._known, *self._found, *held], cause)
        self._queue.clear()
        self._repeating = self._asked_again = False

    def repeat(self) -> None:
        """Report all blocks once more, at the bounded rate, for consumers that have lost events."""
        if self._queue:
            self._asked_again = True
        else:
            self._queue.extend(self._known)
            self._repeating = bool(self._queue)

    def take(self) -> list[TierEvent]:
        """Return the changes since the last call, and some of the blocks that were found or are repeated."""
        changes, self._changes = self._changes, {}
        self._known.update((key, None) for key, cause in changes.items() if cause is None)
        events = [
            TierEvent(tuple(key for key, _ in run), cause) for cause, run in groupby(changes.items(), itemgetter(1))
        ]
        bulk: list[BlockKey] = []
        for _ in range(min(_BULK_KEYS, len(self._queue))):
            key = self._queue.popleft()
            if key in self._found:
                self._found.discard(key)
                self._known[key] = None
                bulk.append(key)
            elif self._repeating and key in self._known:
                bulk.append(key)
        if bulk:
            events.append(TierEvent(tuple(bulk)))
        if not self._queue:
            self._repeating = False
            if self._asked_again:
                self._asked_again = False
                self.repeat()
        return events
