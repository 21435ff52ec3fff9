"""Follows the tables of segments that other engines hold, so that lookups of their blocks need no I/O.

What is known of these blocks may be old. A load therefore reads a block's row once more after its slot
(:mod:`kvstore.backends.disk.blocks`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from kvstore.backends.disk import files
from kvstore.backends.disk.drives import Drives
from kvstore.backends.disk.index import Index, News, RowChanges
from kvstore.backends.disk.layout import GROUP_ROWS, ROW, State, stem_of
from kvstore.backends.disk.root import Digests, Root, read_generations, read_rows
from kvstore.backends.disk.segment import SLOT_BITS, SLOT_MASK, Segment
from kvstore.backends.disk.watch import NAMES, WRITES, Watch
from kvstore.diskio import OsDisk
from kvstore.runtime.limits import Precedence

_log = logging.getLogger("kvstore.backends.disk")

_PAUSE_S: Final = 0.02
"""Pause between two reads of tables, so that changes are entered in batches."""

_POLL_S: Final = 1.0
"""Interval of looking without notifications: changes by other machines cause none."""

_TURN_ROWS: Final = 2048
_TURN_SLOTS: Final = 1 << 13
"""Changed rows, or slots of a new segment, entered in one turn of the loop: some milliseconds."""


@dataclass(eq=False)
class Followed:
    """A segment that another engine holds, or none."""

    segment: Segment
    file: os.stat_result  # Its table, as it was opened.
    watch: int
    uses: set[int] = field(default_factory=set)
    """Slots that were read since the last report of uses."""
    stale: set[int] = field(default_factory=set)
    """Groups of rows to read again, although no change was announced."""
    news: list[RowChanges] = field(default_factory=list)
    """Rows that were read and are not yet in the index."""


class Followers:
    """Enters the blocks of other engines in one root into the index. Used from the loop thread."""

    def __init__(self, drives: Drives, root: Root, index: Index, on_news: Callable[[News], None]) -> None:
        self.gone: list[Segment] = []
        """Segments that are not followed any more, and whose files are still open."""
        self._drives = drives
        self._engine = drives.of(root.position)
        self._root = root
        self._index = index
        self._on_news = on_news
        self._followed: dict[int, Followed] = {}
        """By the id of the segment."""
        self._changed = asyncio.Event()
        self._looking = asyncio.Lock()  # One look at a time opens the segments that are new.
        self._watches: set[int] = set()
        """Watches with a change since the last look."""
        self._watch = Watch(self._note_changes)

    def __len__(self) -> int:
        return len(self._followed)

    async def run(self) -> None:
        """Follow until cancelled; a table that fails does not affect the others."""
        loop = asyncio.get_running_loop()
        directory = self._watch.add(self._root.namespace_fd, NAMES)
        poll_at = loop.time() + _POLL_S
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(poll_at):
                    await self._changed.wait()
            self._changed.clear()
            watches, self._watches = self._watches, set()
            is_poll = loop.time() >= poll_at or directory in watches
            try:
                if is_poll:
                    poll_at = loop.time() + _POLL_S
                    await self._engine.call(partial(self._report_uses, list(self._followed.values())))
                await self.refresh(None if is_poll else watches)
            except Exception as error:  # The next look may succeed.
                _log.debug("the tables of other engines could not be read: %s", error)
            await asyncio.sleep(_PAUSE_S)

    async def refresh(self, watches: Collection[int] | None = None, *, report: bool = True) -> None:
        """Enter all changes that other engines have announced so far.

        Args:
            watches: Watches of the tables to read; None: all, including new ones.
            report: Whether to report the blocks of new segments.
        """
        async with self._looking:
            some = [each for each in self._followed.values() if watches is None or each.watch in watches]
            look = partial(self._look, some, again=watches is None)
            gone = await self._engine.call(look, precedence=Precedence.LOAD)
            for each in some:
                await self._enter(each)
            for each in gone:
                await self._forget(each)
            await self._close_gone()
            if watches is None:
                await self._follow_new(report=report)

    def take_over(self, segment: Segment, digests: Digests) -> list[int] | None:
        """Enter a segment that this engine holds now in place of the followed one; None if it was not followed.

        Returns:
            Places of blocks that are elsewhere, too (see :meth:`Index.open_segment`).
        """
        for each in self._followed.values():
            before = each.segment
            # A table that was replaced has another head; the next look forgets it.
            if (before.number, before.head) == (segment.number, segment.head):
                self._drop(each)
                doubled, news = self._index.take_over(before, segment, digests)
                self._on_news(news)
                return doubled
        return None

    def note_use(self, places: Sequence[int]) -> None:
        """Record uses of blocks, so that the engines that hold them keep them longer."""
        for place in places:
            if (each := self._followed.get(place >> SLOT_BITS)) is not None:
                each.uses.add(place & SLOT_MASK)

    def note_change(self, places: Sequence[int]) -> None:
        """Read the rows of slots again soon: they have changed, and no engine may have announced it."""
        for place in places:
            if (each := self._followed.get(place >> SLOT_BITS)) is not None:
                each.stale.add((place & SLOT_MASK) // GROUP_ROWS)
                self._note_changes((each.watch,))

    def close(self) -> None:
        """Stop watching; idempotent."""
        self._watch.close()

    def _note_changes(self, watches: Collection[int]) -> None:
        self._watches.update(watches)
        self._changed.set()

    def _look(self, some: Sequence[Followed], *, again: bool) -> list[Followed]:
        """Read the changed rows of tables; return those that are gone. On a thread.

        ``again``: Open the files again. It shows that they are the same ones, and makes network filesystems ask for
        their current content.
        """
        gone: list[Followed] = []
        root = self._root
        for each in some:
            segment = each.segment
            try:
                if again:
                    name = stem_of(segment.number) + ".tab"
                    with files.opened(root.disk, name, os.O_RDONLY, root.namespace_fd) as (fd, _):
                        if not os.path.samestat(root.disk.fstat(fd), each.file):
                            raise FileNotFoundError
                stale, each.stale = each.stale, set()
                each.news.extend(_changed_rows(root.disk, segment, stale))
            except OSError:
                gone.append(each)
        return gone

    async def _enter(self, followed: Followed) -> None:
        while followed.news and followed.segment.id in self._followed:
            slots, rows, used = followed.news.pop(0)
            if len(slots) > _TURN_ROWS:
                followed.news.insert(0, RowChanges(slots[_TURN_ROWS:], rows[_TURN_ROWS:], used[_TURN_ROWS:]))
            changes = RowChanges(slots[:_TURN_ROWS], rows[:_TURN_ROWS], used[:_TURN_ROWS])
            self._on_news(self._index.update(followed.segment, changes))
            await asyncio.sleep(0)

    async def _forget(self, followed: Followed) -> None:
        """Remove the blocks of a segment that is gone."""
        segment = followed.segment
        slots = segment.head.slots
        followed.news = [RowChanges(np.arange(slots), np.zeros(slots, ROW), np.zeros(slots, np.bool_))]
        await self._enter(followed)
        if segment.id in self._followed:
            self._drop(followed)

    def _drop(self, followed: Followed) -> None:
        self._watch.remove(followed.watch)
        del self._followed[followed.segment.id]
        self.gone.append(followed.segment)

    async def _close_gone(self) -> None:
        """Close the files of segments that are gone, unless a read uses them; no look is running."""
        for segment in [segment for segment in self.gone if not self._index.is_read(segment)]:
            self._index.forget(segment)
            self.gone.remove(segment)
            # The last close of a deleted file frees its space, and waits for a disk that is frozen.
            await self._engine.call(segment.close)

    def _opened(self, known: Collection[int]) -> Iterator[tuple[Followed, Digests]]:
        """Yield segments that are not known, with the digests of their slots; on threads."""
        root = self._root
        for number in set(root.table_numbers()).difference(known):
            with contextlib.suppress(OSError):
                if (opened := root.open_segment(number)) is not None:
                    segment, digests = opened
                    table = segment.table.fd
                    for fd in (table, segment.file.fd):
                        self._drives.admit(root.position, fd)
                    yield Followed(segment, root.disk.fstat(table), self._watch.add(table, WRITES)), digests

    async def _follow_new(self, *, report: bool) -> None:
        """Follow the segments that are new."""
        ours = {each.number for each in self._index.segments_in(self._root.position)}
        theirs = {each.segment.number for each in self._followed.values()}
        # One at a time, because the content of all tables together is as large as the index.
        new = self._opened(ours | theirs)
        while (found := await self._engine.call(partial(next, new, None))) is not None:
            await self._follow(*found, report=report)

    async def _follow(self, followed: Followed, digests: Digests, *, report: bool) -> None:
        """Enter a new segment and its blocks."""
        index, segment = self._index, followed.segment
        if any(each.number == segment.number for each in index.segments_in(segment.root)):
            # We have taken it since.
            self._watch.remove(followed.watch)
            segment.close()
            return
        index.follow(segment)
        self._followed[segment.id] = followed
        for start in range(0, segment.head.slots, _TURN_SLOTS):
            # Without blocks that are elsewhere, too.
            added = index.see(segment, digests, start, start + _TURN_SLOTS)
            if report:
                self._on_news(News(added, []))
            await asyncio.sleep(0)
            if segment.id not in self._followed:
                return

    def _report_uses(self, some: Sequence[Followed]) -> None:
        """Mark the slots that were read; on a thread."""
        for each in some:
            slots, each.uses = each.uses, set()
            if slots:
                with contextlib.suppress(OSError):
                    self._root.mark_uses(each.segment.number, sorted(slots))


def _changed_rows(disk: OsDisk, segment: Segment, stale: Collection[int]) -> list[RowChanges]:
    """Read the rows of stale groups, and of those with another generation than the one seen."""
    head = segment.head
    now = read_generations(disk, segment.table.fd, head)
    changed = now != segment.generations
    changed[list(stale)] = True
    groups = np.flatnonzero(changed)
    changes: list[RowChanges] = []
    for run in np.split(groups, np.flatnonzero(np.diff(groups) > 1) + 1) if len(groups) else []:
        first, end = int(run[0]) * GROUP_ROWS, min(head.slots, (int(run[-1]) + 1) * GROUP_ROWS)
        rows, intact = read_rows(disk, segment.table.fd, head, range(first, end))
        changes.append(RowChanges(np.arange(first, end), rows, intact & (rows["state"] == State.USED)))
    segment.generations = now
    return changes
