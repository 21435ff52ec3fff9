"""The inventory of a tier as reported to consumers of its events, and the changes to report."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from typing import Final

from kvstore.types import BlockKey, RemovalCause, TierEvent

_FOUND_KEYS: Final = 1024
"""Recovered blocks per report, and so per step of the engine: some milliseconds of its scheduler. An idle engine pauses
for a millisecond after each step, so shorter reports would take longer in total."""

_ACCESSES_MAX: Final = 4096
"""Jobs that read blocks, remembered until the next report."""

_EXAMINED_PER_REPORTED: Final = 4
"""Maximum blocks examined per block that may be reported."""


class Inventory:
    """The blocks of one tier reported to consumers of its events, and the changes since the last report.

    It keeps sets instead of a log: no change is lost for lack of room, and a block that left and returned between two
    reports is not a change. After all reports are taken, the blocks reported as stored and not as removed are exactly
    the blocks of the tier. Changes are reported immediately; blocks found at start at a bounded rate.

    A block is reported as stored once until it is reported as removed, because some consumers count the reports.

    Args:
        enabled: Whether blocks and changes are recorded.
        accesses: Whether reads of blocks are recorded, too.
    """

    def __init__(self, *, enabled: bool = True, accesses: bool = False) -> None:
        self._enabled = enabled
        self._accesses: deque[TierEvent] | None = deque(maxlen=_ACCESSES_MAX) if accesses else None
        self._known: dict[BlockKey, None] = {}
        """Held and reported, in the order of their reports."""
        self._found: set[BlockKey] = set()
        """Held and not yet reported, waiting in the queue."""
        self._changes: dict[BlockKey, RemovalCause | None] = {}
        """Stored (None) or removed since the last report; in neither of the two above."""
        self._queue: deque[BlockKey] = deque()
        """Blocks to report at the bounded rate, unless they are no longer in ``_found``."""
        self._is_dropped = False
        """Whether consumers have dropped all blocks since the last report, or will drop them with the next one."""

    def __bool__(self) -> bool:
        """Whether there are blocks or changes to report, or consumers that drop all blocks with the next report."""
        return bool(self._changes or self._queue or self._is_dropped)

    @property
    def known(self) -> list[BlockKey]:
        """The blocks reported as stored and not as removed."""
        return list(self._known)

    def stored(self, keys: Iterable[BlockKey]) -> None:
        """Note blocks that entered the tier. They are reported in this order, even if a scan has found them before."""
        changes = self._changes
        for key in keys if self._enabled else ():
            if key in changes:
                if changes[key] is not None:
                    del changes[key]
                    self._known[key] = None
            elif key not in self._known:
                self._found.discard(key)
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
                changes[key] = cause
            elif key in self._found:
                self._found.discard(key)
            elif key in changes and changes[key] is None:
                del changes[key]

    def accessed(self, keys: Iterable[BlockKey]) -> None:
        """Note that a job has read blocks. Only the last jobs are kept, and reporting them needs no extra step."""
        if self._accesses is not None and (read := tuple(keys)):
            self._accesses.append(TierEvent(read, accessed=True))

    def clear(self, cause: RemovalCause) -> None:
        """Note that all blocks left the tier."""
        held = [key for key, change in self._changes.items() if change is None]
        self.removed([*self._known, *self._found, *held], cause)
        self._queue.clear()

    def restate(self) -> None:
        """Note that consumers have dropped all blocks: report those in the tier again, at the bounded rate."""
        stored = [key for key, change in self._changes.items() if change is None]
        held = [*self._known, *stored]
        self._known.clear()
        self._changes.clear()
        self.found(held)
        self._is_dropped = self._enabled

    def take(self) -> list[TierEvent]:
        """Return the changes since the last call, and some of the found blocks.

        There is at most one event of stored blocks, one event per job that read blocks, and one event per run of
        removals with the same cause, because each event has a cost for consumers.
        """
        self._is_dropped = False
        if not (self._changes or self._queue or self._accesses):
            return []
        changes, self._changes = self._changes, {}
        stored = [key for key, cause in changes.items() if cause is None]
        stored += self._take_found()
        self._known.update(dict.fromkeys(stored))
        events = [TierEvent(tuple(stored))] if stored else []
        if self._accesses:
            events += self._accesses
            self._accesses.clear()
        left = ((key, cause) for key, cause in changes.items() if cause is not None)
        events += [TierEvent(tuple(key for key, _ in run), cause) for cause, run in groupby(left, itemgetter(1))]
        return events

    def _take_found(self) -> list[BlockKey]:
        found: list[BlockKey] = []
        # Bounded, because blocks that have left the tier take time too.
        for _ in range(min(_EXAMINED_PER_REPORTED * _FOUND_KEYS, len(self._queue))):
            key = self._queue.popleft()
            if key in self._found:
                self._found.discard(key)
                found.append(key)
                if len(found) == _FOUND_KEYS:
                    break
        return found
