"""Space for new blocks: free slots, then further segments, then eviction, a little of it ahead of need.

Also gives segments to other engines, and removes some to restore capacity and reserve. Such a segment leaves the index
first; its locks are released once no operation runs on any of its slots.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from kvstore.backends.disk.claims import Claims
from kvstore.backends.disk.drives import Drives
from kvstore.backends.disk.followers import Followers
from kvstore.backends.disk.index import Index
from kvstore.backends.disk.layout import PAGE, State
from kvstore.backends.disk.ledger import LedgerBusyError
from kvstore.backends.disk.limits import Limits
from kvstore.backends.disk.notes import SegmentNotes
from kvstore.backends.disk.root import Digests, Due, Root
from kvstore.backends.disk.rows import RowChange, TableWriter
from kvstore.backends.disk.segment import SLOT_BITS, Segment
from kvstore.backends.disk.table import NOWHERE
from kvstore.codec.record import HEADER_BYTES
from kvstore.config import ByteSize
from kvstore.types import BlockKey, RemovalCause

_log = logging.getLogger("kvstore.backends.disk")

_R = TypeVar("_R")

_AHEAD_SHARE: Final = 64
_AHEAD_MAX: Final = 1024
"""Slots freed ahead of need: a 64th of all slots, and at most enough for a few jobs."""

_QUIET_TRIES: Final = 50
_QUIET_PAUSE_S: Final = 0.01
"""Attempts to release a segment while operations on it end, before the next round of upkeep does."""


class Space:
    """Provides slots. Used from the loop thread; segments are made on threads of the engine.

    Args:
        lengths: Lengths of slots, the longest first; a segment has slots of one length.
        segment_bytes: Longest segment.
        on_added: Called with the blocks of segments that other engines held.
        on_removed: Called with blocks that are evicted, once their rows are written, and with those of segments that
            are given up or lost.
    """

    def __init__(
        self,
        drives: Drives,
        roots: Sequence[Root],
        index: Index,
        tables: TableWriter,
        followers: Sequence[Followers],
        notes: SegmentNotes,
        claims: Claims,
        counts: Counter[str],
        lengths: Sequence[int],
        segment_bytes: int,
        limits: Limits,
        on_added: Callable[[Sequence[BlockKey]], None],
        on_removed: Callable[[Sequence[BlockKey], RemovalCause], None],
    ) -> None:
        self._drives = drives
        self._roots = roots
        self._index = index
        self._tables = tables
        self._followers = followers
        self._notes = notes
        self._claims = claims
        self._counts = counts
        self._lengths = lengths
        self._segment_bytes = segment_bytes
        self._limits = limits
        self._wasted: Counter[int] = Counter()
        """Bytes of longer slots than needed, by the length that was needed."""
        self._length = lengths[0]  # Of the slots that were needed last.
        self._on_added = on_added
        self._on_removed = on_removed
        self._growing = asyncio.Lock()
        self._changing = [asyncio.Lock() for _ in roots]
        """Held while segments of a root are taken, made or given up, so that a frozen root stops no other one."""
        self._silent: set[int] = set()
        """Positions of roots that made no segment in time."""
        self._stored_at = -self._limits.asking_s
        self._lacks_room = False
        self._leaving: dict[Segment, bool] = {}
        """Segments that left the index and are still held, and whether their files are to be removed."""
        self._full_until = 0.0
        self._failing_since = 0.0
        self._failure: OSError | None = None
        """Of the last eviction."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._getting_ahead: asyncio.Task[None] | None = None

    async def take(self, sizes: Sequence[int]) -> list[int]:
        """Take slots for records of these lengths; ``NOWHERE`` without room, where nothing more may be evicted."""
        self._stored_at = time.monotonic()
        self._failure = None
        if sizes.count(sizes[0]) == len(sizes):
            # Blocks that no codec shortens.
            places = await self._take(len(sizes), self._slot_length(sizes[0]))
            return places + [NOWHERE] * (len(sizes) - len(places))
        lengths = [self._slot_length(size) for size in sizes]
        taken: dict[int, list[int]] = {}
        try:
            for length in sorted(set(lengths), reverse=True):
                taken[length] = await self._take(lengths.count(length), length)
        except BaseException:
            self._index.release([place for places in taken.values() for place in places])
            raise
        in_order = {length: iter(places) for length, places in taken.items()}
        return [next(in_order[length], NOWHERE) for length in lengths]

    async def take_segments(self, root: Root, *, report: bool) -> None:
        """Take segments that no engine holds, up to this engine's share; ``report`` their blocks as added."""
        await asyncio.shield(self._start(self._take_from(root, report=report)))

    async def share(self, root: Root) -> None:
        """Give up a segment if an engine that holds less asks for one, or if capacity or reserve is exceeded."""
        await asyncio.shield(self._start(self._share(root)))
        if self._is_asking:
            await asyncio.shield(self._start(self._grow(self._length, needed=False)))

    async def drop_lost(self, root: Root) -> None:
        """Drop segments whose files were deleted or have another length: nobody else could read new blocks there."""
        await asyncio.shield(self._start(self._drop_lost(root)))

    def described(self) -> str:
        """Return how much of the capacity this engine holds, and who may hold the rest."""

        def total(sizes: Iterable[int]) -> str:
            return ByteSize(sum(sizes) >> 20 << 20).text

        roots = self._roots
        return (
            f"this engine holds {total(map(self._held_bytes, roots))} of a capacity of "
            f"{total(root.capacity_bytes for root in roots)}; other engines hold the rest, or the disk is full: "
            f"{total(root.unused_bytes for root in roots)} are free, and the reserve is "
            f"{total(root.reserve_bytes for root in roots)}"
        )

    async def close(self) -> None:
        """Wait for background work."""
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    async def _take(self, count: int, length: int) -> list[int]:
        """Take at most ``count`` slots, of this length or a longer one."""
        index = self._index
        if frozen := self._drives.frozen():
            index.avoid(frozen, self._limits.frozen_s)
        places = index.take(count, length)
        try:
            while len(places) < count and await asyncio.shield(self._start(self._grow(length, needed=True))):
                places += index.take(count - len(places), length)
            if len(places) < count:
                places += index.take(count - len(places), length, longer=True)
            while len(places) < count and await asyncio.shield(self._start(self._evict(count - len(places), length))):
                longer = index.take(count - len(places), length, longer=True)
                places += longer
                self._wasted[length] += sum([index.at(place)[0].head.slot_bytes - length for place in longer])
            if len(places) < count:
                # Slots that can perhaps not be written are better than none.
                places += index.take(count - len(places), length, longer=True, resting=True)
            if not places and self._failure is not None:
                raise self._failure
        except BaseException:
            index.release(places)
            raise
        is_getting = self._getting_ahead is not None and not self._getting_ahead.done()
        if not is_getting and index.free_slots(length) < self._ahead:
            self._getting_ahead = self._start(self._get_ahead(length))
        return places

    def _slot_length(self, record_bytes: int) -> int:
        """Return the length of the shortest slot for a record."""
        for length in reversed(self._lengths):
            if record_bytes <= length - PAGE + HEADER_BYTES:
                return length
        return self._lengths[0]

    @property
    def _is_asking(self) -> bool:
        return self._lacks_room and time.monotonic() - self._stored_at < self._limits.asking_s

    @property
    def _ahead(self) -> int:
        return slots_ahead(self._index.slots)

    async def _get_ahead(self, length: int) -> None:
        try:
            if not await self._grow(length, needed=False):
                await self._evict(2 * self._ahead - self._index.free_slots(length), length)
        except OSError as error:
            level = logging.DEBUG if self._counts["ahead_errors"] else logging.WARNING
            _log.log(level, "slots could not be freed ahead of need: %s", error)
            self._counts["ahead_errors"] += 1

    async def _grow(self, length: int, *, needed: bool) -> bool:
        """Make a segment; False if there is no room for one, or after repeated failures, so that stores evict."""
        before = self._index.free_slots(length)
        async with self._growing:
            if needed and self._index.free_slots(length) > before:
                return True
            if time.monotonic() < self._full_until:
                return False
            if await self._make(length):
                return True
            misfit = self._index.coldest(length, is_wasting=self._wasted[length] >= self._segment_bytes)
            # While one can't be let go, no further one is given up.
            if misfit is None or self._leaving:
                return False
            self._wasted[length] = 0
            async with self._changing[misfit.root]:
                if misfit.id not in self._index.segments:
                    return False
                await self._give_up(misfit, RemovalCause.EVICTED, remove=True)
            try:
                await self._let_go(self._roots[misfit.root], misfit)
            except (OSError, LedgerBusyError):
                # The next round of upkeep repeats it.
                return False
            return await self._make(length)

    async def _make(self, length: int) -> bool:
        """Make a segment, or take one that no engine holds; the caller holds ``_growing``."""

        def rank(root: Root) -> tuple[bool, int]:
            return self._changing[root.position].locked(), self._held_bytes(root)

        errors: list[Exception] = []
        # One that did not answer in time is left out until it does.
        silent = {position for position in self._silent if self._changing[position].locked()}
        able = [root for root in self._roots if root.position not in silent] or self._roots
        # The root with the least segments or, if it is busy, full or failing, another one.
        for root in sorted(able, key=rank):
            try:
                got = await self._get_segment(root, length)
            except (OSError, LedgerBusyError) as error:
                errors.append(error)
                continue
            if got:
                self._failing_since = 0.0
                self._lacks_room = False
                self._counts["segments_added"] += 1
                return True
        if len(errors) == len(able) and not self._keeps_failing():
            # The failure may be temporary, so nothing is evicted yet.
            raise OSError(f"no segment could be made: {errors[0]}") from errors[0]
        self._full_until = time.monotonic() + self._limits.ask_again_s
        self._lacks_room = True
        self._length = length
        return False

    async def _get_segment(self, root: Root, length: int) -> bool:
        """Make a segment in a root, or take one; False if there is no room.

        Raises:
            OSError: The disk fails; or the root is frozen, and there are others. It then goes on when it can.
            LedgerBusyError: Another engine holds the ledger.
        """
        lock = self._changing[root.position]

        async def get() -> bool:
            try:
                count, held_bytes = self._segment_bytes // length, self._held_bytes(root)
                got = await self._drives.of(root.position).call(partial(root.get_segment, length, count, held_bytes))
                if got is not None:
                    self._admit(*got, report=True)
                return got is not None
            finally:
                lock.release()
                self._silent.discard(root.position)

        try:
            async with asyncio.timeout(self._limits.frozen_s if len(self._roots) > 1 else None):
                await lock.acquire()
                return await asyncio.shield(self._start(get()))
        except TimeoutError as error:
            self._silent.add(root.position)
            raise OSError(errno.ETIMEDOUT, f"{root.path} does not answer") from error

    async def _take_from(self, root: Root, *, report: bool) -> None:
        async with self._changing[root.position]:
            # One at a time, because the content of all tables together is as large as the index.
            segments = root.take_segments(self._held_bytes(root))
            while (taken := await self._drives.of(root.position).call(partial(next, segments, None))) is not None:
                self._admit(*taken, report=report)

    def _admit(self, segment: Segment, digests: Digests, *, report: bool) -> None:
        """Add a segment that is held now, with its blocks."""
        for lock in (segment.table, segment.file):
            self._drives.admit(segment.root, lock.fd)
        if (doubled := self._followers[segment.root].take_over(segment, digests)) is None:
            doubled = self._index.open_segment(segment, digests)
        self._tables.change_all(segment)
        self._tables.settle_later(doubled)
        # Also those that were followed: now this engine reports them to consumers of events.
        if report and (keys := segment.keys(segment.held())):
            self._on_added(keys)

    async def _share(self, root: Root) -> None:
        async with self._changing[root.position]:
            asked_bytes = self._segment_bytes if self._is_asking else 0
            due = await self._drives.of(root.position).call(
                partial(root.due, self._held_bytes(root), asked_bytes, self._segment_bytes, self._limits.largest_s)
            )
            unsettled = {place >> SLOT_BITS for place in self._tables.unsettled}
            able = [each for each in self._index.segments_in(root.position) if each.id not in unsettled]
            is_giving = any(each.root == root.position for each in self._leaving)
            if due is not Due.NONE and able and not is_giving:
                self._full_until = time.monotonic() + self._limits.ask_again_s
                least_used = min(able, key=lambda segment: segment.total_age)
                await self._give_up(least_used, RemovalCause.EVICTED, remove=due is Due.REMOVE)
        for segment in [each for each in self._leaving if each.root == root.position]:
            await self._let_go(root, segment)

    async def _drop_lost(self, root: Root) -> None:
        async with self._changing[root.position]:
            segments = self._index.segments_in(root.position)
            intact = await self._drives.of(root.position).call(lambda: [root.has_files_of(each) for each in segments])
            for segment in [segment for segment, good in zip(segments, intact, strict=True) if not good]:
                await self._give_up(segment, RemovalCause.LOST, remove=True)

    async def _give_up(self, segment: Segment, cause: RemovalCause, *, remove: bool) -> None:
        """Let a segment leave the index; the caller holds the lock of its root."""
        held = segment.held().tolist()
        for start in range(0, len(held), self._limits.turn_slots):
            if keys := self._index.withdraw(segment, held[start : start + self._limits.turn_slots]):
                self._on_removed(keys, cause)
            await asyncio.sleep(0)
        if keys := self._index.close_segment(segment):
            self._on_removed(keys, cause)
        self._leaving[segment] = remove

    async def _let_go(self, root: Root, segment: Segment) -> None:
        """Release a segment that left the index, or remove its files, once no operation runs on its slots."""
        for _ in range(_QUIET_TRIES):
            if self._index.is_quiet(segment) and not self._tables.is_announcing(segment):
                break
            await asyncio.sleep(_QUIET_PAUSE_S)
        else:
            return
        async with self._changing[root.position]:
            if segment not in self._leaving:
                return
            await self._notes.forget(segment)
            if self._leaving[segment]:
                await self._drives.of(root.position).call(partial(root.remove_segment, segment))
            await self._drives.of(root.position).call(segment.close)
            del self._leaving[segment]
            self._index.forget(segment)
            self._counts["segments_given_up"] += 1

    def _held_bytes(self, root: Root) -> int:
        return sum(
            each.head.segment_bytes
            for each in self._index.known.values()
            if each.is_ours and each.root == root.position
        )

    def _keeps_failing(self) -> bool:
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        return now - self._failing_since >= self._limits.transient_s

    async def _evict(self, count: int, length: int) -> bool:
        """Evict at most ``count`` blocks in slots of at least this length; return whether there were any.

        A block whose row could not be written stays, and its slot is not reused. If the row was written all the same, a
        restart loses the block.
        """
        index = self._index
        keys: dict[int, BlockKey] = {}
        for place in index.evict(count, length):
            segment, slot = index.at(place)
            key = segment.key(slot)
            if self._claims.of(key) is None:
                keys[place] = key
            else:
                index.stay((place,))  # Its put is about to end.
        if not keys:
            return False
        with self._claims.held(keys.values()):
            failed = dict.fromkeys(keys, OSError("the write was cancelled"))
            try:
                failed = await self._tables.write([RowChange(place, State.FREE) for place in keys])
            finally:
                index.stay(failed)
                fails = index.note_failures(failed)
                self._failure = next(iter(failed.values()), None)
                gone = [place for place in keys if place not in failed]
                left = index.leave(gone)
            if gone:
                self._counts["evicted_blocks"] += len(gone)
            if left:
                self._on_removed(left, RemovalCause.EVICTED)
        if failed and fails:
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
