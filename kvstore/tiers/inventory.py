"""The inventory of a tier as consumers of its events know it, and the changes to report."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import groupby
from operator import itemgetter
from typing import Final

from kvstore.types import BlockKey, RemovalCause, TierEvent

__all__ = ["Inventory"]

_FOUND_KEYS: Final = 1024
"""Recovered blocks per report, and so per step of the engine: some milliseconds of its scheduler. An idle engine pauses
for one after each step, so that shorter reports would take longer in all."""

_REPEATED_KEYS: Final = 128
"""Repeated blocks per report. There is no hurry, and the engine may be busy."""

_TURNS: Final = 4
"""Blocks looked at for each that may be reported."""

_ORPHANS_MAX: Final = 1 << 16
"""Blocks remembered as reported before their parents; further ones are right after the next repetition."""


class Inventory:
    """The blocks of one tier that consumers of its events know, and the changes since the last report.

    It keeps sets, not a log: nothing is lost for lack of room, and a block that left and came back between two reports
    is no change. Once all reports are taken, the blocks that they state as stored and not as removed are exactly those
    of the tier. Changes are reported at once; blocks found at start, and repetitions, at a bounded rate.

    Consumers that index prefixes ignore a block whose parent they don't know. Therefore a report states parents first,
    and a block that was reported before its parent is stated once more behind it.

    Args:
        enabled: Whether anything is kept.

    Attributes:
        parent_of: Returns the block before a block in its prompt; None if there is none, or it is unknown.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self.parent_of: Callable[[BlockKey], BlockKey | None] = _unknown_parent
        self._known: dict[BlockKey, None] = {}
        """Held and reported; the first reported in front."""
        self._found: set[BlockKey] = set()
        """Held and not yet reported, as they wait in the queue."""
        self._changes: dict[BlockKey, RemovalCause | None] = {}
        """Stored (None) or removed since the last report; in neither of the two above."""
        self._queue: deque[BlockKey] = deque()
        """Blocks to report at the bounded rate, if they are still found, or still to be repeated."""
        self._repeated: set[BlockKey] = set()
        """Known blocks that the repetition under way has not stated yet."""
        self._asked_again = False
        self._orphans: dict[BlockKey, dict[BlockKey, None]] = {}
        """Known blocks that were reported before their parent, by parent."""
        self._orphaned: dict[BlockKey, BlockKey] = {}
        """The parents of these."""

    def __bool__(self) -> bool:
        """Whether something is to be reported."""
        return bool(self._changes or self._queue)

    @property
    def known(self) -> list[BlockKey]:
        """The blocks that were reported as stored and not as removed."""
        return list(self._known)

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
                self._repeated.discard(key)
                self._reunite(key)
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
        self._asked_again = False

    def repeat(self) -> None:
        """Report all blocks once more, at the bounded rate, for consumers that have lost events."""
        if self._queue:
            self._asked_again = True
        else:
            self._queue.extend(self._known)
            self._repeated.update(self._known)

    def take(self) -> list[TierEvent]:
        """Return the changes since the last call, and some of the blocks that were found or are repeated.

        There is at most one event of stored blocks, and one for each run of removals with one cause: consumers pay by
        the event.
        """
        if not (self._changes or self._queue):
            return []
        changes, self._changes = self._changes, {}
        stored: list[BlockKey] = []
        entered = [key for key, cause in changes.items() if cause is None]
        new = set(entered)
        for key in entered:
            if key in new:
                self._state(*self._line(key, new), stored)
        self._take_found_and_repeated(stored)
        events = [TierEvent(tuple(stored))] if stored else []
        left = ((key, cause) for key, cause in changes.items() if cause is not None)
        events += [TierEvent(tuple(key for key, _ in run), cause) for cause, run in groupby(left, itemgetter(1))]
        return events

    def _take_found_and_repeated(self, stored: list[BlockKey]) -> None:
        room = _FOUND_KEYS if self._found else _REPEATED_KEYS
        # Blocks that left, or were stated with one behind them, still take a little time.
        turns = min(_TURNS * room, len(self._queue))
        while turns and room > 0:
            turns -= 1
            key = self._queue.popleft()
            waiting = self._found if key in self._found else self._repeated
            if key in waiting:
                line, parent = self._line(key, waiting)
                if len(line) > room:
                    # The rest of a long prompt: the next report begins with it.
                    waiting.update(line[room:])
                    self._queue.appendleft(key)
                self._state(line[:room], parent, stored)
                room -= len(line)
        if not self._queue and self._asked_again:
            self._asked_again = False
            self.repeat()

    def _line(self, key: BlockKey, waiting: set[BlockKey]) -> tuple[list[BlockKey], BlockKey | None]:
        """Take a block and its ancestors out of those that wait, as far as they are among them.

        Returns:
            The blocks, the first one of the prompt in front, and its parent.
        """
        line: list[BlockKey] = []
        each: BlockKey | None = key
        while each is not None and each in waiting:
            waiting.discard(each)
            line.append(each)
            each = self.parent_of(each)
        line.reverse()
        return line, each

    def _state(self, line: Iterable[BlockKey], parent: BlockKey | None, stored: list[BlockKey]) -> None:
        """Report a block with a parent and its descendants, each with those that were reported before it."""
        known, orphaned = self._known, self._orphaned
        for key in line:
            known[key] = None
            stored.append(key)
            if orphaned:
                self._reunite(key)
            if parent is not None and (parent not in known or parent in orphaned):
                if len(orphaned) < _ORPHANS_MAX:
                    orphaned[key] = parent
                    self._orphans.setdefault(parent, {})[key] = None
            elif self._orphans:
                self._state_orphans_of(key, stored)
            parent = key

    def _state_orphans_of(self, key: BlockKey, stored: list[BlockKey]) -> None:
        """Report the blocks once more that were reported before a block and its descendants."""
        parents = [key]
        while parents:
            for child in list(self._orphans.get(parents.pop(), ())):
                self._reunite(child)
                stored.append(child)
                parents.append(child)

    def _reunite(self, key: BlockKey) -> None:
        """Forget that a block was reported before its parent."""
        parent = self._orphaned.pop(key, None)
        if parent is not None:
            siblings = self._orphans[parent]
            del siblings[key]
            if not siblings:
                del self._orphans[parent]


def _unknown_parent(key: BlockKey) -> BlockKey | None:
    """Return None: nothing is known of prompts."""
    return None
