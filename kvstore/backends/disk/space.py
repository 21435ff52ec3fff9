"""Space for new blocks: free slots, then new segments, then eviction. Also gives up segments for other engines.

Every block enters by :meth:`Space.enter` and leaves by :meth:`Space.leave`. Its slot is reused only after the journal
has recorded the removal, which readers of the slot check. Some slots are freed ahead of need, so that stores do not
wait.
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

from kvstore.backends.disk.files import FileLock, segments_in, without_file
from kvstore.backends.disk.index import Index
from kvstore.backends.disk.journal import Journal
from kvstore.backends.disk.layout import Kind, Row, segment_name
from kvstore.backends.disk.owner import Owner
from kvstore.backends.disk.root import LedgerBusyError, Root
from kvstore.backends.disk.segments import SegmentFiles
from kvstore.diskio import TransferEngine
from kvstore.types import BlockKey, RemovalCause

_log = logging.getLogger("kvstore.backends.disk")

_R = TypeVar("_R")

_AHEAD_SHARE: Final = 64
_AHEAD_MAX: Final = 1024
"""Slots freed ahead of need: a 64th of all slots, and at most enough for a few jobs."""

_ASK_AGAIN_S: Final = 1.0
"""Time between two attempts to create a segment while there is no room for one."""

_LACKING_S: Final = 10.0
"""Time for which an engine without room retries without a store: its breaker may stop stores for up to 30 s."""

_TRANSIENT_S: Final = 5.0
"""Time for which creating a segment may fail, or wait for other engines, before stores evict instead. Allocating a
segment takes up to half a second on a busy drive, and engines take turns."""

_TURN_ROWS: Final = 1 << 11
"""Blocks of a segment removed in one iteration of the loop, in some milliseconds."""

_BUSY_PAUSE_S: Final = 0.01
"""Pause between two attempts to take the ledger's lock."""


class Space:
    """Provides slots. Used from the loop thread; segments are created and removed on threads of the engine.

    ``on_removed`` is called with blocks that are evicted or lost, once the journal has recorded it.
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
        self._lacking_until = 0.0
        self._failing_since = 0.0
        self._has_request = False
        self._closing: int | None = None
        """Segment that is being given up and still has its file."""
        self._ledger: FileLock | None = None
        """The ledger's lock while a segment may be given up."""
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
        if len(slots) < count:
            self._lacking_until = time.monotonic() + _LACKING_S
        if index.free_slots < self._ahead and not self._tasks:
            self._start(self._get_ahead())
        return slots

    async def end_lack(self) -> None:
        """Create or request a segment if stores lacked slots recently: the breaker may have stopped them since."""
        if time.monotonic() < self._lacking_until and await self._grow(needed=False):
            self._lacking_until = 0.0

    async def preallocate(self) -> None:
        """Create as many segments as fit. Space of ended owners is not reclaimed until stores need it."""
        while await self._grow(needed=False, reclaim=False):
            pass
        self._full_until = 0.0

    async def give_up_excess(self) -> None:
        """Give up a segment if other engines have less and request space, or free space is below the reserve."""
        for path, root in enumerate(self._roots):
            async with self._growing:
                own = [number for number in self._own_segments() if number % len(self._roots) == path]
                # Held until the file is gone, so that no other engine gives up a segment for the same bytes.
                lock = self._ledger = root.ledger()
                needed = partial(root.must_give_up, lock, self._owner.name, self._geometry.segment_bytes)
                try:
                    is_needed = await self._engine.call(needed)
                    if is_needed and own:
                        self._full_until = time.monotonic() + _ASK_AGAIN_S
                        await self._give_up(own)
                finally:
                    # After the last call of stopped threads, :meth:`release` does it.
                    with contextlib.suppress(OSError):
                        await self._engine.call(lock.release)

    async def match_files(self) -> None:
        """Give up segments whose files were deleted or have another length, and remove files without a segment.

        Other engines could not read blocks stored in a deleted file, and the space of a longer file counts as used. A
        file without a segment is left if it could not be removed when its segment was given up or could not be
        journalled.
        """
        async with self._growing:
            there = await self._engine.call(lambda: [segments_in(self._disk, fd) for fd in self._owner.fds])
            own = self._own_segments()
            for path, found in enumerate(there):
                for number in found.keys() - set(own):
                    await self._remove_file(number, path)
            for number in without_file(own, there, self._geometry.segment_bytes):
                if await self._give_up([number], RemovalCause.LOST):
                    self._full_until = 0.0

    async def enter(self, rows: Sequence[Row]) -> None:
        """Journal new blocks in pinned slots, then add them to the index and unpin the slots.

        Raises:
            OSError: The journal could not be written. The slots are free once no other engine finds the blocks.
        """
        slots = [slot for _, slot, *_ in rows]

        def enter_index() -> None:
            self._index.add(rows)
            self._index.unpin(slots)

        await self._journal.append(rows, enter_index, undo=partial(self._index.give_back, slots))

    async def leave(self, rows: Sequence[Row], cause: RemovalCause | None) -> None:
        """Journal the removal of departed blocks; only then update the index and report them with ``cause``, if any.

        Raises:
            OSError: The journal could not be written. The blocks leave once it can be.
        """

        def leave_index() -> None:
            self._index.leave(rows)
            for kind, slot, *_ in rows:
                if kind == Kind.DROP:
                    self._closing = None
                    self._segments.forget(0, slot // self._geometry.segment_slots)
            keys = [key for kind, *_, key in rows if kind != Kind.DROP]
            self._counts["evicted_blocks"] += len(keys) if cause is RemovalCause.EVICTED else 0
            if keys and cause is not None:
                self._on_removed(keys, cause)

        if rows:
            await self._journal.append(rows, leave_index, lasting=True)

    async def retry(self) -> None:
        """Write the records that could not be written to the journal so far, if any.

        Raises:
            OSError: They still cannot be written.
        """
        if self._journal.is_behind:
            await self._journal.append([])

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

    def release(self) -> None:
        """Release the ledger's lock, once all threads have ended."""
        if self._ledger is not None:
            self._ledger.release()

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
            level = logging.DEBUG if self._counts["ahead_errors"] else logging.WARNING
            _log.log(level, "slots could not be freed ahead of need: %s", error)
            self._counts["ahead_errors"] += 1

    async def _grow(self, *, needed: bool, reclaim: bool = True) -> bool:
        """Create a segment; False if there is no room for one."""
        before = self._index.free_slots
        async with self._growing:
            if needed and self._index.free_slots > before:
                return True
            if time.monotonic() < self._full_until:
                return False
            own = set(self._own_segments())
            roots = len(self._roots)
            free = (next(n for n in itertools.count(path, roots) if n not in own) for path in range(roots))
            errors: list[OSError] = []
            for number in sorted(free):
                # The next root in turn or, if it is full or fails, another one.
                try:
                    if await self._try_segment(number, reclaim):
                        self._request_space(False)
                        return True
                except OSError as error:
                    errors.append(error)
            if len(errors) == roots:
                raise errors[0]
            self._full_until = time.monotonic() + _ASK_AGAIN_S
            own_bytes = len(own) * self._geometry.segment_bytes
            self._request_space(own_bytes * 2 <= sum(root.capacity_bytes for root in self._roots))
            return False

    async def _try_segment(self, number: int, reclaim: bool) -> bool:
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
                _log.warning("a segment could not be created: %s", error)
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
        root, name, size = self._roots[path], segment_name(number), self._geometry.segment_bytes
        if not await self._engine.call(
            partial(root.make_segment, self._owner.fds[path], self._owner.name, name, size, reclaim=reclaim)
        ):
            return False
        first = number * self._geometry.segment_slots
        row = (Kind.SEGMENT, first, path, 0, b"")
        try:
            await self._journal.append([row], partial(self._index.open_segment, number, path))
        except OSError:
            await self._remove_file(number, path)
            raise
        self._counts["segments_made"] += 1
        return True

    async def _evict(self, count: int) -> bool:
        """Evict at most ``count`` blocks and free their slots; return whether any slot was freed."""
        # While the journal cannot be written, no further block departs.
        await self.retry()
        rows = self._index.evict(count)
        await self.leave(rows, RemovalCause.EVICTED)
        return bool(rows)

    async def _give_up(self, own: Sequence[int], cause: RemovalCause = RemovalCause.EVICTED) -> bool:
        """Give up the least used of these segments; return whether one was given up. The caller holds ``_growing``."""
        number = self._closing
        if number is None:
            by_use = await self._engine.call(partial(self._index.by_use, own))
            number = self._index.close_segment(by_use)
            if number is None:
                return False
            columns, first = self._index.columns, number * self._geometry.segment_slots
            held = columns.held(first, first + self._geometry.segment_slots).tolist()
            # On a full disk, there is no room for the frames until the file is removed.
            for start in range(0, len(held), _TURN_ROWS):
                with contextlib.suppress(OSError):
                    await self.leave(self._index.depart(held[start : start + _TURN_ROWS]), cause)
            self._closing = number
            with contextlib.suppress(OSError):
                await self.leave([(Kind.DROP, first, 0, 0, b"")], cause)
        await self._remove_file(number, number % len(self._roots))
        self._closing = None
        self._counts["segments_given_up"] += 1
        await self.retry()
        return True

    async def _remove_file(self, number: int, path: int) -> None:
        owner, name, size = self._owner, segment_name(number), self._geometry.segment_bytes
        await self._engine.call(partial(self._roots[path].remove_segment, owner.fds[path], owner.name, name, size))

    def _own_segments(self) -> list[int]:
        own: list[int] = np.flatnonzero(self._index.columns.segments).tolist()
        return own

    def _request_space(self, wanted: bool) -> None:
        # Repeated while it applies, because other engines act on each request once.
        if wanted or self._has_request:
            self._has_request = wanted
            for root in self._roots:
                self._start(self._engine.call(partial(root.want, self._owner.name, wanted=wanted)))

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
