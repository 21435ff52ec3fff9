"""The inventory of a tier as reported to consumers of its events, and the changes to report."""

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
for a millisecond after each step, so shorter reports would take longer in total."""

_REPEATED_KEYS: Final = 128
"""Repeated blocks per report. A repetition is not urgent, and the engine may be busy."""

_TURNS: Final = 4
"""Maximum blocks examined per block that may be reported."""

_ORPHANS_MAX: Final = 1 << 16
"""Blocks remembered as reported before their parents; further ones are corrected by the next repetition."""


class Inventory:
    """The blocks of one tier reported to consumers of its events, and the changes since the last report.

    It keeps sets instead of a log: no change is lost for lack of room, and a block that left and returned between two
    reports is not a change. After all reports are taken, the blocks reported as stored and not as removed are exactly
    the blocks of the tier. Changes are reported immediately; blocks found at start, and repetitions, at a bounded rate.

    Consumers that index prefixes ignore a block with an unknown parent. Reports therefore list parents first, and a
    block reported before its parent is repeated after the parent.

    Args:
        enabled: Whether blocks and changes are recorded.

    Attributes:
        parent_of: Returns the preceding block in a block's prompt; None if there is none or it is unknown.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self.parent_of: Callable[[BlockKey], BlockKey | None] = _unknown_parent
        self._known: dict[BlockKey, None] = {}
        """Held and reported, in the order of their reports."""
        self._found: set[BlockKey] = set()
        """Held and not yet reported, waiting in the queue."""
        self._changes: dict[BlockKey, RemovalCause | None] = {}
        """Stored (None) or removed since the last report; in neither of the two above."""
        self._queue: deque[BlockKey] = deque()
        """Blocks to report at the bounded rate, unless they are no longer in ``_found`` or ``_repeated``."""
        self._repeated: set[BlockKey] = set()
        """Known blocks that the running repetition has not reported yet."""
        self._asked_again = False
        self._orphans: dict[BlockKey, dict[BlockKey, None]] = {}
        """Known blocks reported before their parent, by parent."""
        self._orphaned: dict[BlockKey, BlockKey] = {}
        """Parents of these blocks, by block."""

    def __bool__(self) -> bool:
        """Whether there are blocks or changes to report."""
        return bool(self._changes or self._queue)

    @property
    def known(self) -> list[BlockKey]:
        """The blocks reported as stored and not as removed."""
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
        """Note blocks that left the tier; for blocks never reported, this is not a change."""
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
        """Report all blocks again, at the bounded rate, for consumers that have lost events."""
        if self._queue:
            self._asked_again = True
        else:
            self._queue.extend(self._known)
            self._repeated.update(self._known)

    def take(self) -> list[TierEvent]:
        """Return the changes since the last call, and some of the found or repeated blocks.

        There is at most one event of stored blocks, and one event per run of removals with the same cause, because each
        event has a cost for consumers.
        """
        if not (self._changes or self._queue):
            return []
        changes, self._changes = self._changes, {}
        stored: list[BlockKey] = []
        entered = [key for key, cause in changes.items() if cause is None]
        new = set(entered)
        for key in entered:
            if key in new and not self._state_alone(key, new, stored):
                self._state(*self._line(key, new), stored)
        self._take_found_and_repeated(stored)
        events = [TierEvent(tuple(stored))] if stored else []
        left = ((key, cause) for key, cause in changes.items() if cause is not None)
        events += [TierEvent(tuple(key for key, _ in run), cause) for cause, run in groupby(left, itemgetter(1))]
        return events

    def _take_found_and_repeated(self, stored: list[BlockKey]) -> None:
        room = _FOUND_KEYS if self._found else _REPEATED_KEYS
        # Bounded, because blocks that left, or were already reported with a descendant, also take some time.
        turns = min(_TURNS * room, len(self._queue))
        while turns and room > 0:
            turns -= 1
            key = self._queue.popleft()
            waiting = self._found if key in self._found else self._repeated
            if key not in waiting:
                continue
            if self._state_alone(key, waiting, stored):
                room -= 1
                continue
            line, parent = self._line(key, waiting)
            if len(line) > room:
                # The next report begins with the rest of this long prompt.
                waiting.update(line[room:])
                self._queue.appendleft(key)
            self._state(line[:room], parent, stored)
            room -= len(line)
        if not self._queue and self._asked_again:
            self._asked_again = False
            self.repeat()

    def _state_alone(self, key: BlockKey, waiting: set[BlockKey], stored: list[BlockKey]) -> bool:
        """Report a block if it has no unreported parent, and no orphans (blocks reported before their parents) exist.

        A fast path for the usual case: it runs on the scheduler's thread for each block.
        """
        known, parent = self._known, self.parent_of(key)
        if self._orphaned or (parent is not None and (parent in waiting or parent not in known)):
            return False
        waiting.discard(key)
        known[key] = None
        stored.append(key)
        return True

    def _line(self, key: BlockKey, waiting: set[BlockKey]) -> tuple[list[BlockKey], BlockKey | None]:
        """Remove a block and its unbroken line of ancestors from ``waiting``.

        Returns:
            The blocks in the order of the prompt, and the parent of the first.
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
        """Report a line of blocks after ``parent``, and again the descendants reported before one of them."""
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
        """Report the descendants of a block again that were reported before their parents."""
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
    """Return None: parents are unknown."""
    return None
