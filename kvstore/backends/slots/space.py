"""Space for new blocks: free slots, then new segments, then eviction, a little of it ahead of need."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from kvstore.backends.slots.claims import Claims
from kvstore.backends.slots.index import Index
from kvstore.backends.slots.layout import State
from kvstore.backends.slots.root import Digests, LedgerBusyError, Root
from kvstore.backends.slots.rows import RowChange, TableWriter
from kvstore.backends.slots.segment import Segment
from kvstore.diskio import TransferEngine
from kvstore.types import BlockKey, RemovalCause

_log = logging.getLogger("kvstore.backends.disk")

_R = TypeVar("_R")

_AHEAD_SHARE: Final = 64
_AHEAD_MAX: Final = 1024
"""Slots freed ahead of need: a 64th of all slots, and at most enough for a few jobs."""

_ASK_AGAIN_S: Final = 1.0
"""Time between two attempts to make a segment while there is no room for one."""

_TRANSIENT_S: Final = 5.0
"""Time for which making a segment may fail, or wait for other engines, before stores evict instead. Allocating a
segment takes up to half a second on a busy drive, and engines take turns."""


class Space:
    """Provides slots. Used from the loop thread; segments are made on threads of the engine.

    Args:
        slots: Slots of a new segment, of ``slot_bytes`` each.
        on_removed: Called with blocks that are evicted, once their rows are written.
    """

    def __init__(
        self,
        engine: TransferEngine,
        roots: Sequence[Root],
        index: Index,
        tables: TableWriter,
        claims: Claims,
        counts: Counter[str],
        slot_bytes: int,
        slots: int,
        on_removed: Callable[[Sequence[BlockKey], RemovalCause], None],
    ) -> None:
        self._engine = engine
        self._roots = roots
        self._index = index
        self._tables = tables
        self._claims = claims
        self._counts = counts
        self._slot_bytes = slot_bytes
        self._slots = slots
        self._on_removed = on_removed
        self._growing = asyncio.Lock()
        self._full_until = 0.0
        self._failing_since = 0.0
        self._tasks: set[asyncio.Task[Any]] = set()

    async def take(self, count: int) -> list[int]:
        """Take slots for new blocks; fewer than ``count`` if there is no room and nothing more may be evicted."""
        index = self._index
        places = index.take(count)
        try:
            while len(places) < count and await asyncio.shield(self._start(self._grow(needed=True))):
                places += index.take(count - len(places))
            while len(places) < count and await asyncio.shield(self._start(self._evict(count - len(places)))):
                places += index.take(count - len(places))
        except BaseException:
            index.release(places)
            raise
        if index.free_slots < self._ahead and not self._tasks:
            self._start(self._get_ahead())
        return places

    def admit(self, segment: Segment, digests: Digests) -> None:
        """Add a segment that is held now, with its blocks."""
        for lock in (segment.table, segment.file):
            self._engine.admit(lock.fd)
        self._tables.settle_later(self._index.open_segment(segment, digests))

    async def close(self) -> None:
        """Wait for background work."""
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    @property
    def _ahead(self) -> int:
        return slots_ahead(self._index.slots)

    async def _get_ahead(self) -> None:
        try:
            if not await self._grow(needed=False):
                await self._evict(2 * self._ahead - self._index.free_slots)
        except OSError as error:
            level = logging.DEBUG if self._counts["ahead_errors"] else logging.WARNING
            _log.log(level, "slots could not be freed ahead of need: %s", error)
            self._counts["ahead_errors"] += 1

    async def _grow(self, *, needed: bool) -> bool:
        """Make a segment; False if there is no room for one, or after repeated failures, so that stores evict."""
        before = self._index.free_slots
        async with self._growing:
            if needed and self._index.free_slots > before:
                return True
            if time.monotonic() < self._full_until:
                return False
            own = Counter(segment.root for segment in self._index.segments.values())
            errors: list[Exception] = []
            # The root with the fewest segments or, if it is full or fails, another one.
            for root in sorted(self._roots, key=lambda root: own[root.position]):
                try:
                    made = await self._engine.call(partial(root.make_segment, self._slot_bytes, self._slots))
                except (OSError, LedgerBusyError) as error:
                    errors.append(error)
                    continue
                if made is not None:
                    self.admit(*made)
                    self._failing_since = 0.0
                    self._counts["segments_made"] += 1
                    return True
            if len(errors) == len(self._roots) and not self._keeps_failing():
                # The failure may be temporary, so nothing is evicted yet.
                raise OSError(f"no segment could be made: {errors[0]}") from errors[0]
            self._full_until = time.monotonic() + _ASK_AGAIN_S
            return False

    def _keeps_failing(self) -> bool:
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        return now - self._failing_since >= _TRANSIENT_S

    async def _evict(self, count: int) -> bool:
        """Evict at most ``count`` blocks and free their slots; return whether any slot was freed.

        A block whose row could not be written stays, and its slot is not reused. If the row was written all the same, a
        restart loses the block.
        """
        index = self._index
        keys: dict[int, BlockKey] = {}
        for place in index.evict(count):
            segment, slot = index.at(place)
            keys[place] = segment.key(slot)
        if not keys:
            return False
        with self._claims.held(keys.values()):
            failed = dict.fromkeys(keys, OSError("the write was cancelled"))
            try:
                failed = await self._tables.write([RowChange(place, State.FREE) for place in keys])
            finally:
                index.stay(failed)
                gone = [place for place in keys if place not in failed]
                index.leave(gone)
            if gone:
                self._counts["evicted_blocks"] += len(gone)
                self._on_removed([keys[place] for place in gone], RemovalCause.EVICTED)
        if failed and not gone:
            raise next(iter(failed.values()))
        return True

    def _start(self, work: Coroutine[Any, Any, _R]) -> asyncio.Task[_R]:
        """Start work that continues to its end even if the caller is cancelled."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # A cancelled caller no longer retrieves it.


def slots_ahead(slots: int) -> int:
    """Return the number of slots to free ahead of need."""
    return min(_AHEAD_MAX, slots // _AHEAD_SHARE)
