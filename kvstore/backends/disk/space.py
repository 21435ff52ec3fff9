"""Space for new blocks: free slots, then new segments, then eviction. Also gives up segments for other engines.

The slot of an evicted block is reused only after the journal has recorded the eviction, from which readers of the slot
detect it. Some slots are freed ahead of need, so that stores need not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np

from kvstore.backends.disk.files import names_in, remove_segment
from kvstore.backends.disk.index import Index
from kvstore.backends.disk.journal import Journal
from kvstore.backends.disk.layout import Kind, Row, segment_name
from kvstore.backends.disk.owner import Owner
from kvstore.backends.disk.root import LedgerBusyError, Root
from kvstore.backends.disk.segments import SegmentFiles
from kvstore.diskio import TransferEngine
from kvstore.types import BlockKey, RemovalCause

__all__ = ["Space"]

_log = logging.getLogger("kvstore.backends.disk")

_R = TypeVar("_R")

_AHEAD_SHARE: Final = 64
_AHEAD_MAX: Final = 1024
"""Slots freed ahead of need: a 64th of all slots, and at most enough for a few jobs."""

_ASK_AGAIN_S: Final = 1.0
"""Time between two tries to make a segment when there is no room for one."""

_TRANSIENT_S: Final = 5.0
"""Time for which creating a segment may fail, or wait for other engines, before stores evict instead. Allocating a
segment takes up to half a second on a busy drive, and engines take turns."""

_BUSY_PAUSE_S: Final = 0.01
"""Pause between two attempts to take the ledger's lock."""


class Space:
    """Provides slots. Used from the loop thread; segments are created and removed on threads of the engine.

    ``on_removed`` is called with blocks that are evicted or lost.
    """

    def __init__(
        self,
        engine: TransferEngine,
        roots: Sequence[Root],
        owner: Owner,
        index: Index,
        journal: Journal,
        segments: SegmentFiles,
        counts: Counter[str],
        on_removed: Callable[[Sequence[BlockKey], RemovalCause], None],
    ) -> None:
        self._counts = counts
        self._disk = engine.disk
        self._engine = engine
        self._roots = roots
        self._owner = owner
        self._geometry = owner.geometry
        self._index = index
        self._journal = journal
        self._segments = segments
        self._on_removed = on_removed
        self._growing = asyncio.Lock()
        self._full_until = 0.0
        self._failing_since = 0.0
        self._wants = False
        self._unwritten: list[Row] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    async def take(self, count: int) -> list[int]:
        """Take slots for new blocks; fewer than ``count`` if there is no room and nothing more may be evicted."""
        index = self._index
        slots = index.take(count)
        try:
            while len(slots) < count and await asyncio.shield(self._start(self._grow(needed=True))):
                slots += index.take(count - len(slots))
            while len(slots) < count and await asyncio.shield(self._start(self._evict(count - len(slots)))):
                slots += index.take(count - len(slots))
        except BaseException:
            index.give_back(slots)
            raise
        if index.free_slots < self._ahead and not self._tasks:
            self._start(self._get_ahead())
        return slots

    async def preallocate(self) -> None:
        """Create as many segments as fit. Space of ended owners is not reclaimed until stores need it."""
        while await self._grow(needed=False, reclaim=False):
            pass
        self._full_until = 0.0

    async def give_up_excess(self) -> None:
        """Give up a segment if other engines have less than their share, or free space is below the reserve."""
        for path, root in enumerate(self._roots):
            own = [number for number in self._own_segments() if number % len(self._roots) == path]
            own_bytes = len(own) * self._geometry.segment_bytes
            excess = await self._engine.call(partial(root.excess_bytes, self._owner.name, own_bytes))
            if excess > 0 and own:
                self._full_until = time.monotonic() + _ASK_AGAIN_S
                await self._give_up(own)

    async def note_missing(self) -> None:
        """Give up segments whose files were deleted: other engines could not read blocks stored there."""
        own = self._own_segments()
        there = await self._engine.call(lambda: [set(names_in(self._disk, fd)) for fd in self._owner.fds])
        for number in own:
            if segment_name(number) not in there[number % len(there)]:
                self._full_until = 0.0
                await self._give_up([number], RemovalCause.LOST)

    async def count_uses(self) -> None:
        """Count the reads by other engines as uses."""
        if self._owner.uses is not None:
            slots = len(self._index.columns.age)
            with contextlib.suppress(OSError):
                self._index.touch(await self._engine.call(partial(self._owner.uses.take, slots)))

    async def close(self) -> None:
        """Wait for background work."""
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    @property
    def _ahead(self) -> int:
        slots = len(self._index.columns.segments) * self._geometry.segment_slots
        return min(_AHEAD_MAX, slots // _AHEAD_SHARE)

    async def _get_ahead(self) -> None:
        try:
            if not await self._grow(needed=False):
                await self.count_uses()
                await self._evict(2 * self._ahead - self._index.free_slots)
        except OSError as error:
            _log.warning("no room could be made ahead of need: %s", error)

    async def _grow(self, *, needed: bool, reclaim: bool = True) -> bool:
        """Create a segment; False if there is no room for one."""
        before = self._index.free_slots
        async with self._growing:
            if needed and self._index.free_slots > before:
                return True
            if time.monotonic() < self._full_until:
                return False
            own = set(self._own_segments())
            number = next(n for n in itertools.count() if n not in own)
            for at in range(number, number + len(self._roots)):
                # The next root in turn or, if it is full, another one.
                if at not in own and await self._tried(at, reclaim):
                    self._say_wanted(False)
                    return True
            self._full_until = time.monotonic() + _ASK_AGAIN_S
            own_bytes = len(own) * self._geometry.segment_bytes
            self._say_wanted(own_bytes * 2 <= sum(root.capacity_bytes for root in self._roots))
            return False

    async def _tried(self, number: int, reclaim: bool) -> bool:
        """Create a segment; False if there is no room, or after repeated failures, so that stores evict instead."""
        while True:
            try:
                made = await self._make(number, reclaim)
            except LedgerBusyError:
                if self._keeps_failing():
                    return False
                await asyncio.sleep(_BUSY_PAUSE_S)
            except OSError as error:
                if not self._keeps_failing():
                    # The failure may be temporary, so nothing is evicted yet.
                    raise
                _log.warning("no segment could be made: %s", error)
                return False
            else:
                self._failing_since = 0.0
                return made

    def _keeps_failing(self) -> bool:
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        return now - self._failing_since >= _TRANSIENT_S

    async def _make(self, number: int, reclaim: bool) -> bool:
        path = number % len(self._roots)
        name, size = segment_name(number), self._geometry.segment_bytes
        if not await self._engine.call(
            partial(self._roots[path].make_segment, self._owner.fds[path], name, size, reclaim=reclaim)
        ):
            return False
        first = number * self._geometry.segment_slots
        row = (Kind.SEGMENT, first, path, 0, b"")
        try:
            await self._journal.append([row], partial(self._index.open_segment, number, path))
        except OSError:
            await self._engine.call(partial(remove_segment, self._disk, self._owner.fds[path], name))
            raise
        self._counts["segments_made"] += 1
        return True

    async def _evict(self, count: int) -> bool:
        """Evict at most ``count`` blocks and free their slots; return whether any slot was freed."""
        rows = self._index.evict(count)
        self._report(rows)
        # Includes earlier evictions that could not be journalled.
        rows, self._unwritten = self._unwritten + rows, []
        try:
            if rows:
                await self._journal.append(rows)
        except OSError:
            self._unwritten += rows
            raise
        self._index.give_back([slot for _, slot, *_ in rows])
        return bool(rows)

    async def _give_up(self, own: Sequence[int], cause: RemovalCause = RemovalCause.EVICTED) -> None:
        index, geometry = self._index, self._geometry
        number = index.least_used_segment(own)
        if number is None:
            return
        path = number % len(self._roots)
        rows = index.close_segment(number)
        self._report(rows, cause)
        self._segments.forget(0, number)
        # The file first: on a full disk, there is no room for a frame before. Readers find no file there.
        await self._engine.call(partial(remove_segment, self._disk, self._owner.fds[path], segment_name(number)))
        self._counts["segments_given_up"] += 1
        rows.append((Kind.DROP, number * geometry.segment_slots, 0, 0, b""))
        await self._journal.append(rows, partial(index.columns.drop_segment, number))

    def _report(self, rows: Sequence[Row], cause: RemovalCause = RemovalCause.EVICTED) -> None:
        self._counts["evicted_blocks"] += len(rows) if cause is RemovalCause.EVICTED else 0
        if rows:
            self._on_removed([key for *_, key in rows], cause)

    def _own_segments(self) -> list[int]:
        own: list[int] = np.flatnonzero(self._index.columns.segments).tolist()
        return own

    def _say_wanted(self, wanted: bool) -> None:
        # Repeated while it applies, because other engines act on each request once.
        if wanted or self._wants:
            self._wants = wanted
            for root in self._roots:
                self._start(self._engine.call(partial(root.want, self._owner.name, wanted=wanted)))

    def _start(self, work: Coroutine[Any, Any, _R]) -> asyncio.Task[_R]:
        """Start work that continues to its end even if the caller is cancelled."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
