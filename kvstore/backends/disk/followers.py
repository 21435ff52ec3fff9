"""Follows the journals of the namespace's other owners, so that lookups of their blocks need no I/O."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Final

import numpy.typing as npt

from kvstore.backends.disk.columns import Columns
from kvstore.backends.disk.files import close_all, names_in, open_own_directory
from kvstore.backends.disk.index import Index
from kvstore.backends.disk.journal import OwnerState, load_owner
from kvstore.backends.disk.layout import OWNER_SHIFT, Kind, is_owner
from kvstore.backends.disk.owner import Uses
from kvstore.backends.disk.root import Root
from kvstore.backends.disk.segments import SegmentFiles
from kvstore.backends.disk.table import NOWHERE
from kvstore.diskio import OsDisk, TransferEngine
from kvstore.runtime.limits import Precedence
from kvstore.types import BlockKey, RemovalCause

__all__ = ["Followers", "Other"]

_log = logging.getLogger("kvstore.backends.disk")

_PAUSE_S: Final = 0.02
"""Pause between two reads of the journals, so that changes are applied in batches."""

_POLL_S: Final = 1.0
"""Polling interval without notifications: changes by other machines cause none."""

_TURN_RECORDS: Final = 2048
"""Records applied in one turn of the loop: about two milliseconds."""

_TURN_SLOTS: Final = 1 << 13
_TURN_ROWS: Final = 1 << 12
"""Slots of a new owner, or table rows searched for a removed owner, in one turn of the loop: some milliseconds."""


class Other:
    """One other owner. Its files are read on threads, its blocks looked up on the loop.

    Attributes:
        number: Its number, the upper part of its places.
        first: Place of its slot 0.
        fds: Its directory in each root; for a root without one, the directory in the first root.
        news: Journal records that were read and are not yet in the index.
        is_lost: Whether the owner is gone, or its journal could not be read.
        read_slots: Slots read since the last report of uses.
    """

    def __init__(self, disk: OsDisk, name: str, number: int, fds: list[int], state: OwnerState) -> None:
        self.name = name
        self.number = number
        self.first = number << OWNER_SHIFT
        self.fds = fds
        self.geometry = state.geometry
        self.reader = state.reader
        self.initial: Columns | None = state.columns
        self.news: deque[npt.NDArray[Any]] = deque()
        self.is_lost = False
        self.read_slots: set[int] = set()
        self._disk = disk
        self._uses: Uses | None = None

    def load(self, digest: bytes) -> Columns | None:
        """Return all of its slots, for a scan; None if its files can't be read."""
        with contextlib.suppress(OSError):
            # An owner without open directories is no longer followed.
            if (fds := self.fds) and (state := load_owner(self._disk, fds, int(self.name, 16), digest)) is not None:
                state.reader.close()
                return state.columns
        return None

    def report_uses(self) -> None:
        """Mark the slots that were read, so that their owner keeps them longer."""
        slots, self.read_slots = self.read_slots, set()
        if slots and self.fds:
            with contextlib.suppress(OSError):
                if self._uses is None:
                    self._uses = Uses(self._disk, self.fds[0])
                self._uses.mark(list(slots))

    def close(self) -> None:
        """Close its files."""
        fds, self.fds = set(self.fds), []
        self.reader.close()
        if self._uses is not None:
            self._uses.close()
        close_all(self._disk, *fds)


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
        self._own_name = own_name
        self._numbers = itertools.count(1)
        self._gone: dict[int, int] = {}
        self._found: list[Other] = []
        self._changed = asyncio.Event()
        self.watch = Watch(self._changed.set)
        self._lock = asyncio.Lock()

    async def run(self) -> None:
        """Follow until cancelled; a failing owner does not affect the others."""
        self.watch.add(self._roots[0].namespace_fd)
        for other in self.others.values():
            self.watch.add(other.reader.end.fd)
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await self._changed.wait()
            self._changed.clear()
            try:
                await self.refresh()
            except OSError as error:
                _log.debug("other owners could not be looked at: %s", error)
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
                self._segments.add_owner(other.number, other.fds, other.geometry.segment_slots)
                await self._take(other, report)

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

    def _look(self, others: Sequence[Other], *, find: bool) -> None:
        """Read new records of other owners, and with ``find`` open new owners; on a thread."""
        for other in others:
            try:
                if find:
                    other.report_uses()
                before = other.reader.end.fd
                other.news.extend(other.reader.read())
                if other.reader.end.fd != before:
                    self.watch.add(other.reader.end.fd)
                if find and not other.news:
                    self._disk.stat(other.name, self._roots[0].namespace_fd)
            except OSError:
                other.is_lost = True
        if find:
            known = {self._own_name, *(other.name for other in [*others, *self._found] if not other.is_lost)}
            for name in set(filter(is_owner, names_in(self._disk, self._roots[0].namespace_fd))) - known:
                with contextlib.suppress(OSError):
                    if (new := self._open(name)) is not None:
                        self._found.append(new)
                        self.watch.add(new.reader.end.fd)

    def _open(self, name: str) -> Other | None:
        fds = [open_own_directory(self._disk, name, self._roots[0].namespace_fd)]
        state = None
        try:
            for root in self._roots[1:]:
                try:
                    fds.append(open_own_directory(self._disk, name, root.namespace_fd))
                except OSError:
                    fds.append(fds[0])
            state = load_owner(self._disk, fds, int(name, 16), self._digest)
        finally:
            if state is None:
                close_all(self._disk, *set(fds))
        if state is None:
            return None
        return Other(self._disk, name, next(self._numbers), fds, state)

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
                table.remove_places(first, first + (1 << OWNER_SHIFT), row, _TURN_ROWS)
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


_EVENTS: Final = 0x2 | 0x40 | 0x80 | 0x100 | 0x200
"""IN_MODIFY, IN_MOVED_FROM, IN_MOVED_TO, IN_CREATE, IN_DELETE (inotify(7))."""

_libc = ctypes.CDLL(None, use_errno=True)


class Watch:
    """Calls back on the loop, with some delay, when a watched file or directory changes (inotify).

    Changes by other machines cause no call. Without free inotify watches in the kernel, no change does. The caller
    therefore also polls.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._fd = int(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._notified)

    def add(self, fd: int) -> None:
        """Watch an open file or directory until it is removed; on any thread."""
        if self._fd >= 0:
            _libc.inotify_add_watch(self._fd, f"/proc/self/fd/{fd}".encode(), ctypes.c_uint32(_EVENTS))

    def close(self) -> None:
        """Stop watching; idempotent."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _notified(self) -> None:
        try:
            os.read(self._fd, 65536)
        except BlockingIOError:
            return
        self._on_change()
