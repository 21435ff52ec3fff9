"""Follows the journals of the namespace's other owners, so that lookups of their blocks need no I/O."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.backends.disk.columns import Columns
from kvstore.backends.disk.files import close_all, names_in, open_own_directory, segments_in, without_file
from kvstore.backends.disk.index import Index
from kvstore.backends.disk.journal import JournalReader, load_owner
from kvstore.backends.disk.layout import INDEX_NAME, OWNER_SHIFT, Geometry, Kind, is_owner, journal_name
from kvstore.backends.disk.owner import Uses
from kvstore.backends.disk.root import Root, has_ended
from kvstore.backends.disk.segments import SegmentFiles
from kvstore.backends.disk.table import NOWHERE
from kvstore.backends.disk.watch import Watch
from kvstore.diskio import OsDisk, TransferEngine
from kvstore.runtime.limits import Precedence
from kvstore.types import BlockKey, RemovalCause

_log = logging.getLogger("kvstore.backends.disk")

_PAUSE_S: Final = 0.02
"""Pause between two reads of the journals, so that changes are applied in batches."""

_POLL_S: Final = 1.0
"""Polling interval without notifications: changes by other machines cause none."""

_TRY_LOCK_S: Final = 10.0
"""Interval at which the lock of an engine is tried, to close the journal of one that has ended."""

_TURN_RECORDS: Final = 2048
"""Records applied in one turn of the loop: about two milliseconds."""

_TURN_SLOTS: Final = 1 << 13
_TURN_ROWS: Final = 1 << 12
"""Slots of a new owner, or table rows searched for a removed owner, in one turn of the loop: some milliseconds."""


class Other:
    """One other owner. Its files are read on threads, its blocks looked up on the loop.

    Only the journal of a running engine stays open.
    """

    def __init__(self, disk: OsDisk, roots: Sequence[Root], name: str, number: int) -> None:
        self.name = name
        self.number = number  # Its number, the upper part of its places.
        self.first = number << OWNER_SHIFT  # Place of its slot 0.
        self.geometry = Geometry(0, 1, len(roots))
        self.initial: Columns | None = None
        self.news: deque[npt.NDArray[Any]] = deque()  # Journal records that were read and are not yet in the index.
        self.is_lost = False  # Whether the owner is gone, or its journal could not be read.
        self.read_slots: set[int] = set()  # Slots read since the last report of uses.
        self._disk = disk
        self._roots = roots
        self._reader: JournalReader | None = None
        self._file: os.stat_result | None = None  # The journal that is read, as it was when opened or closed.
        self._index: tuple[int, int, int] | None = None  # The snapshot when the journal was closed.
        self._tried_at = 0.0

    def open(self, digest: bytes, watch: Callable[[int], object]) -> bool:
        """Read its files, and watch its journal; False if they are unusable. If it fails, :meth:`close` it."""
        with self.directories() as fds:
            state = load_owner(self._disk, fds, int(self.name, 16), digest)
            if state is not None:
                self.geometry, self.initial, self._reader = state.geometry, state.columns, state.reader
                self._enter(state.reader, watch)
                self._close_ended(fds)
                self._drop_missing(state.columns, fds[: state.geometry.paths])
        return state is not None

    @contextlib.contextmanager
    def directories(self) -> Iterator[list[int]]:
        """Hold its directory in each of its roots open; for a root without one, that in the first root."""
        with contextlib.ExitStack() as stack:
            fds: list[int] = []
            for root in self._roots:
                try:
                    fds.append(open_own_directory(self._disk, self.name, root.namespace_fd))
                except OSError:
                    if not fds:
                        raise
                    fds.append(fds[0])
                else:
                    stack.callback(close_all, self._disk, fds[-1])
            # Roots may have been added to the configuration since.
            yield fds[: self.geometry.paths]

    def look(self, watch: Callable[[int], object]) -> None:
        """Read new records.

        Raises:
            OSError: The owner is gone, or its journal can't be read or was replaced.
        """
        if (reader := self._reader) is None:
            return
        is_open = reader.end.fd >= 0
        file = self._file_now(reader)
        may_have_ended = is_open and time.monotonic() > self._tried_at + _TRY_LOCK_S
        if file is not None and not may_have_ended and not self._has_changed(file, reader):
            return
        with self.directories() as reader.fds:
            gone = f"the journal {reader.end.number} of {self.name} was removed or replaced"
            before = reader.end.number
            if not is_open:
                if file is None or self._index_now(reader.fds) != self._index:
                    raise FileNotFoundError(gone)
                reader.reopen()
            self.news.extend(reader.read())
            if reader.end.number != before:
                self._enter(reader, watch)
            elif file is None:
                raise FileNotFoundError(gone)
            if may_have_ended or not is_open:
                self._close_ended(reader.fds)

    def load(self, digest: bytes) -> Columns | None:
        """Return all of its slots, for a scan; None if its files can't be read."""
        with contextlib.suppress(OSError), self.directories() as fds:
            if (state := load_owner(self._disk, fds, int(self.name, 16), digest)) is not None:
                state.reader.close()
                self._drop_missing(state.columns, fds)
                return state.columns
        return None

    def report_uses(self) -> None:
        """Mark the slots that were read, so that their owner keeps them longer."""
        slots, self.read_slots = self.read_slots, set()
        if slots:
            with contextlib.suppress(OSError), self.directories() as fds:
                uses = Uses(self._disk, fds[0])
                try:
                    uses.mark(list(slots))
                finally:
                    uses.close()

    def close(self) -> None:
        """Close its journal for good."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _enter(self, reader: JournalReader, watch: Callable[[int], object]) -> None:
        """Note which file the reader has opened, and watch it."""
        self._file = self._disk.fstat(reader.end.fd)
        watch(reader.end.fd)

    def _file_now(self, reader: JournalReader) -> os.stat_result | None:
        """Return the status of the journal; None if it is gone or another file.

        A directory that was removed in part and then adopted has a new journal of the same number.
        """
        path = os.path.join(self.name, journal_name(reader.end.number))
        with contextlib.suppress(FileNotFoundError):
            file = self._disk.stat(path, self._roots[0].namespace_fd)
            if self._file is not None and os.path.samestat(file, self._file):
                return file
        return None

    def _index_now(self, fds: Sequence[int]) -> tuple[int, int, int] | None:
        """Return what identifies the snapshot; a journal without records is recognized by it alone."""
        with contextlib.suppress(FileNotFoundError):
            file = self._disk.stat(INDEX_NAME, fds[0])
            return file.st_ino, file.st_size, file.st_mtime_ns
        return None

    def _has_changed(self, file: os.stat_result, reader: JournalReader) -> bool:
        """Whether the journal has unread records, or, once it is closed, may be a new file with its inode number."""
        if file.st_size != reader.end.offset:
            return True
        return reader.end.fd < 0 and self._file is not None and file.st_ctime_ns != self._file.st_ctime_ns

    def _drop_missing(self, columns: Columns, fds: Sequence[int]) -> None:
        """Drop segments without a whole file: a torn or full journal can't record that others have removed them.

        The files are listed after the journal was read, and are made before it records them.
        """
        there = [segments_in(self._disk, fd) for fd in fds]
        for number in without_file(np.flatnonzero(columns.segments).tolist(), there, self.geometry.segment_bytes):
            columns.drop_segment(number)

    def _close_ended(self, fds: Sequence[int]) -> None:
        """Close the journal if its engine has ended: there may be more ended owners than descriptors."""
        self._tried_at = time.monotonic()
        with contextlib.suppress(OSError):
            if (reader := self._reader) is not None and has_ended(self._disk, fds[0]):
                self._file, self._index = self._disk.fstat(reader.end.fd), self._index_now(fds)
                reader.close()


class Followers:
    """Follows all other owners of the namespace, and enters their blocks into the index. Used from the loop thread."""

    def __init__(
        self,
        engine: TransferEngine,
        roots: Sequence[Root],
        own_name: str,
        digest: bytes,
        index: Index,
        segments: SegmentFiles,
        on_added: Callable[[Sequence[BlockKey]], None],
        on_removed: Callable[[Sequence[BlockKey], RemovalCause], None],
        on_doubt: Callable[[], None],
    ) -> None:
        self.others: dict[int, Other] = {}
        self._disk = engine.disk
        self._engine = engine
        self._roots = roots
        self._digest = digest
        self._index = index
        self._segments = segments
        self._on_added = on_added
        self._on_removed = on_removed
        self._on_doubt = on_doubt
        self._own_name = own_name
        self._numbers = itertools.count(1)
        self._gone: dict[int, int] = {}
        self._has_doubt = False
        """Whether blocks with unknown keys were removed from the table."""
        self._found: list[Other] = []
        self._changed = asyncio.Event()
        self.watch = Watch(lambda _: self._changed.set())
        self._lock = asyncio.Lock()

    async def run(self) -> None:
        """Follow until cancelled; a failing owner does not affect the others."""
        self.watch.add(self._roots[0].namespace_fd)
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await self._changed.wait()
            self._changed.clear()
            try:
                await self.refresh()
                # Without the lock, because it writes: on a frozen filesystem, reads go on.
                await self._engine.call(partial(self._report_uses, list(self.others.values())))
            except OSError as error:
                _log.debug("the journals of other owners could not be read: %s", error)
            await asyncio.sleep(_PAUSE_S)

    async def refresh(self, only: Collection[int] | None = None, *, report: bool = True) -> None:
        """Apply all changes that other owners have made so far.

        Args:
            only: Numbers of the owners to read; None: all, including new ones.
            report: Whether to call ``on_added`` for the blocks of new owners.
        """
        async with self._lock:
            others = [other for other in self.others.values() if only is None or other.number in only]
            look = partial(self._look, others, find=only is None)
            await self._engine.call(look, precedence=Precedence.LOAD)
            # If this call is cancelled here, the next one applies the remaining records.
            for other in others:
                if other.is_lost:
                    self._forget(other)
                while other.news:
                    records = other.news.popleft()
                    if len(records) > _TURN_RECORDS:
                        other.news.appendleft(records[_TURN_RECORDS:])
                    self._apply(other, records[:_TURN_RECORDS])
                    await asyncio.sleep(0)
            await self._clear_rows()
            while self._found:
                other = self._found.pop()
                self.others[other.number] = other
                self._segments.add_owner(other.number, other.directories, other.geometry.segment_slots)
                await self._take(other, report)
            if self._has_doubt:
                self._has_doubt = False
                self._on_doubt()

    async def scan(self) -> list[Columns]:
        """Return the slots of all other owners, read from their files now."""
        others = list(self.others.values())
        loaded = await self._engine.call(
            lambda: [other.load(self._digest) for other in others], precedence=Precedence.LOAD
        )
        return [columns for columns in loaded if columns is not None]

    def close(self) -> None:
        """Close all files; only when no read is running."""
        self.watch.close()
        for other in [*self.others.values(), *self._found]:
            other.close()
        self.others.clear()

    def _report_uses(self, others: Sequence[Other]) -> None:
        for other in others:
            other.report_uses()

    def _look(self, others: Sequence[Other], *, find: bool) -> None:
        """Read new records of other owners, and with ``find`` open new owners; on a thread."""
        for other in others:
            try:
                other.look(self.watch.add)
            except OSError:
                other.is_lost = True
        if find:
            known = {self._own_name, *(other.name for other in [*others, *self._found] if not other.is_lost)}
            for name in set(filter(is_owner, names_in(self._disk, self._roots[0].namespace_fd))) - known:
                new = Other(self._disk, self._roots, name, next(self._numbers))
                with contextlib.suppress(OSError):
                    if new.open(self._digest, self.watch.add):
                        self._found.append(new)
                        continue
                new.close()

    async def _take(self, other: Other, report: bool) -> None:
        """Add the blocks that a new owner already holds."""
        columns, other.initial = other.initial, None
        if columns is None:
            return
        for start in range(0, len(columns.size), _TURN_SLOTS):
            held = columns.held(start, start + _TURN_SLOTS)
            self._index.table.add_all(columns.digest[held], held + other.first)
            if report and len(held):
                self._on_added(columns.keys_in(held))
            await asyncio.sleep(0)

    def _forget(self, other: Other) -> None:
        """Stop following an owner; if its directory still exists, it counts as new."""
        del self.others[other.number]
        self._segments.forget_owner(other.number)
        other.close()
        other.news.clear()
        self._gone[other.first] = 0

    async def _clear_rows(self) -> None:
        """Remove the blocks of owners that are gone from the table."""
        table = self._index.table
        for first in list(self._gone):
            while (row := self._gone[first]) < table.rows:
                removed = table.remove_places(first, first + (1 << OWNER_SHIFT), row, _TURN_ROWS)
                self._has_doubt = self._has_doubt or removed > 0
                self._gone[first] = row + _TURN_ROWS
                await asyncio.sleep(0)
            del self._gone[first]

    def _apply(self, other: Other, records: npt.NDArray[Any]) -> None:
        table = self._index.table
        added: list[BlockKey] = []
        removed: list[BlockKey] = []
        rows = zip(
            records["kind"].tolist(), records["slot"].tolist(), records["digest"].tolist(),
            records["key_length"].tolist(), records["key"].tolist(), strict=True,
        )  # fmt: skip
        for kind, slot, digest, length, key in rows:
            place = other.first + slot
            if kind == Kind.ADD:
                if table.find(digest) == NOWHERE:
                    table.set(digest, place)
                    added.append(key[:length])
            elif kind in (Kind.REMOVE, Kind.BAD) and length and table.remove(digest, place):
                removed.append(key[:length])
            elif kind in (Kind.SEGMENT, Kind.DROP):
                # Another file may have this name from now on.
                self._segments.forget(other.number, slot // other.geometry.segment_slots)
        if added:
            self._on_added(added)
        if removed:
            self._on_removed(removed, RemovalCause.EVICTED)
