"""Room for new blocks: free slots, then new segments, then eviction; and segments given up for others.

Slots of evicted blocks are written only when the journal says that these are gone, so that whoever reads one of them
finds out from the journal. So that stores need not wait for that, some slots are freed ahead of need.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from kvstore.backends.disk.files import remove_segment
from kvstore.backends.disk.index import Index
from kvstore.backends.disk.journal import Journal
from kvstore.backends.disk.layout import Geometry, Kind, Row, segment_name
from kvstore.backends.disk.owner import Owner
from kvstore.backends.disk.root import LedgerBusyError, Root
from kvstore.backends.disk.segments import SegmentFiles
from kvstore.diskio import OsDisk
from kvstore.diskio.transfers import TransferEngine
from kvstore.types import BlockKey, RemovalCause

__all__ = ["Space"]

_log = logging.getLogger("kvstore.backends.disk")

_AHEAD_SHARE: Final = 64
_AHEAD_MAX: Final = 256
"""Slots freed ahead of need: a 64th of all, which costs next to nothing of the capacity, and a few jobs at most."""

_ASK_AGAIN_S: Final = 1.0
"""How long "there is no room for a segment" is believed."""

_TRANSIENT_S: Final = 5.0
"""How long a segment may fail to be made before stores evict instead."""

_BUSY_TRIES: Final = 20
_BUSY_PAUSE_S: Final = 0.01
"""How long another engine may share out room before we do without: a fifth of a second."""

_VAIN_ROUNDS_MAX: Final = 4
"""Times in a row that a store is too late for the room it has made before it is told that there is none."""


class Space:
    """Finds slots. Used from the loop thread.

    Args:
        disk: What to call the system with.
        engine: Whose threads make segments.
        roots: Where segments lie.
        owner: Whose they are.
        index: What lies in them.
        journal: What is told of it.
        segments: Open ones.
        on_removed: Told of blocks that are evicted.
    """

    def __init__(
        self,
        disk: OsDisk,
        engine: TransferEngine,
        roots: Sequence[Root],
        owner: Owner,
        index: Index,
        journal: Journal,
        segments: SegmentFiles,
        on_removed: Callable[[Sequence[BlockKey], RemovalCause], None],
    ) -> None:
        self.evicted = 0
        self.segments_made = 0
        self.segments_given_up = 0
        self._disk = disk
        self._engine = engine
        self._roots = roots
        self._owner = owner
        self._geometry: Geometry = owner.geometry
        self._index = index
        self._journal = journal
        self._segments = segments
        self._on_removed = on_removed
        self._growing = asyncio.Lock()
        self._evicting = asyncio.Lock()
        self._full_until = 0.0
        self._failing_since = 0.0
        self._wants = False
        self._untold: list[Row] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    async def take(self, count: int) -> list[int]:
        """Take slots for new blocks; fewer than asked for if there is no room and no more may be evicted."""
        index = self._index
        slots = index.take(count)
        vain = 0
        try:
            while (short := count - len(slots)) and vain < _VAIN_ROUNDS_MAX:
                if not await self._whole(self._make_room(short + self._ahead)):
                    break
                taken = index.take(short)
                # What was freed may have been taken by another store meanwhile.
                vain = 0 if taken else vain + 1
                slots += taken
        except BaseException:
            index.give_back(slots)
            raise
        if index.free_slots < self._ahead and not self._tasks:
            task = asyncio.get_running_loop().create_task(self._get_ahead())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return slots

    async def _whole(self, work: Coroutine[Any, Any, bool]) -> bool:
        """Do something to its end, also if whoever asked for it does not wait for that any more."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _make_room(self, count: int) -> bool:
        return await self._grow(needed=True) or await self._evict(count)

    async def preallocate(self) -> None:
        """Make all segments that there is room for; what other namespaces hold is taken when it is needed."""
        while await self._grow(needed=False, reclaim=False):
            pass
        self._full_until = 0.0

    async def give_up_excess(self) -> None:
        """Give a segment to others who have less than their share, or to the filesystem, if that is due."""
        for path, root in enumerate(self._roots):
            own = [n for n in np.flatnonzero(self._index.columns.segments).tolist() if n % len(self._roots) == path]
            own_bytes = len(own) * self._geometry.segment_bytes
            excess = await self._engine.call(partial(root.excess_bytes, self._owner.name, own_bytes))
            if excess > 0 and own:
                self._full_until = time.monotonic() + _ASK_AGAIN_S
                await self._give_up(own)

    async def count_uses(self) -> None:
        """Take in what others have read: often, as they do not say when."""
        if self._owner.uses is not None:
            await self._engine.call(partial(self._index.count_uses, self._owner.uses.marks))

    async def close(self) -> None:
        """End what goes on in the background."""
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    @property
    def _ahead(self) -> int:
        slots = len(self._index.columns.segments) * self._geometry.segment_slots
        return min(_AHEAD_MAX, slots // _AHEAD_SHARE)

    async def _get_ahead(self) -> None:
        try:
            if not await self._grow(needed=False):
                await self._evict(2 * self._ahead - self._index.free_slots)
        except OSError as error:
            _log.warning("no room could be made ahead of need: %s", error)

    async def _grow(self, *, needed: bool, reclaim: bool = True) -> bool:
        """Make a segment if there is room for one; False if there is none."""
        before = self._index.free_slots
        async with self._growing:
            if needed and self._index.free_slots > before:
                return True
            if time.monotonic() < self._full_until:
                return False
            number = self._index.free_segment_number()
            for at in range(number, number + len(self._roots)):
                # The next root in turn; where that is full, another one.
                if at < len(self._index.columns.segments) and self._index.columns.segments[at]:
                    continue
                if await self._tried(at, reclaim):
                    self._say_wanted(False)
                    return True
            self._full_until = time.monotonic() + _ASK_AGAIN_S
            self._say_wanted(self._has_less_than_share())
            return False

    async def _tried(self, number: int, reclaim: bool) -> bool:
        """Make a segment; where that fails again and again, there is none, so that stores go on by eviction."""
        try:
            made = await self._make(number, reclaim)
        except OSError as error:
            now = time.monotonic()
            self._failing_since = self._failing_since or now
            if now - self._failing_since < _TRANSIENT_S:
                # A failure that passes is no reason to evict.
                raise
            _log.warning("no segment could be made: %s", error)
            return False
        self._failing_since = 0.0
        return made

    async def _make(self, number: int, reclaim: bool) -> bool:
        path = number % len(self._roots)
        name, size = segment_name(number), self._geometry.segment_bytes
        for _ in range(_BUSY_TRIES):
            try:
                made = await self._engine.call(
                    partial(self._roots[path].make_segment, self._owner.fds[path], name, size, reclaim=reclaim)
                )
                break
            except LedgerBusyError:
                await asyncio.sleep(_BUSY_PAUSE_S)
        else:
            return False
        if not made:
            return False
        first = number * self._geometry.segment_slots
        row = (Kind.SEGMENT, first, path, 0, b"")
        try:
            await self._journal.append([row], partial(self._index.open_segment, number, path))
        except OSError:
            await self._engine.call(partial(remove_segment, self._disk, self._owner.fds[path], name))
            raise
        self.segments_made += 1
        return True

    async def _evict(self, count: int) -> bool:
        """Evict blocks and make their slots free; False if there are none that may go."""
        async with self._evicting:
            index = self._index
            if count <= 0:
                return True
            told = index.evict(count)
            if len(told) < count:
                await self.count_uses()
                index.suggest(await self._engine.call(partial(index.coldest, count)))
                told += index.evict(count - len(told))
            self._tell(told)
            # With what could not be told the last time, because the journal could not be written.
            told, self._untold = self._untold + told, []
            if not told:
                return False
            free = partial(index.release, [slot for _, slot, *_ in told])
            try:
                await self._journal.append(told, free)
            except OSError:
                self._untold = told + self._untold
                raise
            return True

    async def _give_up(self, own: Sequence[int]) -> None:
        index, geometry = self._index, self._geometry
        # Not while slots are on their way from one block to another.
        async with self._evicting:
            number = index.least_used_segment(own)
            if number is None:
                return
            path = number % len(self._roots)
            rows = index.close_segment(number)
            self._tell(rows)
            first = number * geometry.segment_slots
            self._untold = [entry for entry in self._untold if index.segment_of(entry[1]) != number]
            rows.append((Kind.DROP, first, 0, 0, b""))
            await self._journal.append(rows, partial(index.drop_segment, number))
        self._segments.forget((0, number))
        await self._engine.call(partial(remove_segment, self._disk, self._owner.fds[path], segment_name(number)))
        self.segments_given_up += 1

    def _tell(self, rows: Sequence[Row]) -> None:
        self.evicted += len(rows)
        if rows:
            self._on_removed([key for *_, key in rows], RemovalCause.EVICTED)

    def _has_less_than_share(self) -> bool:
        return not np.any(self._index.columns.segments) or self._own_bytes() * 2 <= sum(
            root.capacity_bytes for root in self._roots
        )

    def _own_bytes(self) -> int:
        return int(np.count_nonzero(self._index.columns.segments)) * self._geometry.segment_bytes

    def _say_wanted(self, wanted: bool) -> None:
        if wanted != self._wants:
            self._wants = wanted
            work = self._engine.call(partial(self._write_want, wanted))
            task = asyncio.get_running_loop().create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _write_want(self, wanted: bool) -> None:
        for root in self._roots:
            root.want(self._owner.name, wanted=wanted)
