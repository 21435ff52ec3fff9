"""The other owners of the namespace: their journals are followed, so that their blocks are known from memory."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.backends.disk.columns import Columns
from kvstore.backends.disk.files import OwnerState, load_owner, names_in, open_own_directory, open_regular
from kvstore.backends.disk.index import OWNER_SHIFT, Index
from kvstore.backends.disk.layout import (
    JOURNAL_HEADER_BYTES,
    Geometry,
    Kind,
    decode_journal_header,
    is_owner,
    journal_name,
    read_frames,
)
from kvstore.backends.disk.owner import Uses
from kvstore.backends.disk.root import Root
from kvstore.backends.disk.table import NOWHERE
from kvstore.backends.disk.watch import Watch
from kvstore.diskio import OsDisk, Priority
from kvstore.diskio.transfers import TransferEngine
from kvstore.types import BlockKey, RemovalCause

__all__ = ["Followers", "Other"]

_log = logging.getLogger("kvstore.backends.disk")

_PAUSE_S: Final = 0.02
"""Between two looks at journals, so that what comes in meanwhile is taken together."""

_POLL_S: Final = 1.0
"""How often to look though nothing was told: changes by other machines are not."""

_READ_BYTES: Final = 1 << 20
"""What is read of a journal at a time: about 12,000 records."""

_READ_BYTES_MAX: Final = 128 << 20
"""Longest frame that there can be, and some more."""

_TURN_RECORDS: Final = 2048
"""Records taken into the table in one turn of the loop: about two milliseconds."""


class Other:
    """One other owner. Its files are read on threads, its blocks looked up on the loop.

    Attributes:
        number: Of its directory's name.
        name: That name.
        place: What its slots' places begin with.
        fds: Its directory in each root; where a root lacks it, that of the first.
        geometry: Of its segments.
    """

    def __init__(self, disk: OsDisk, name: str, place: int, fds: list[int], state: OwnerState) -> None:
        self.name = name
        self.number = int(name, 16)
        self.place = place << OWNER_SHIFT
        self.fds = fds
        self.geometry: Geometry = state.geometry
        self.initial: Columns | None = state.columns
        self.read_slots: set[int] = set()
        self._disk = disk
        self._end = state.end
        self._uses: Uses | None = None

    def news(self, digest: bytes) -> list[npt.NDArray[Any]]:
        """Return what its journal says since the last time.

        Raises:
            OSError: It can't be read, or is gone.
        """
        found: list[npt.NDArray[Any]] = []
        size_bytes = _READ_BYTES
        while True:
            content = np.empty(size_bytes, np.uint8)
            length = self._disk.preadv(self._end.fd, [content.data], self._end.offset)
            frames = read_frames(content.data[:length], self.number, self._end.number, self._end.sequence)
            self._end.offset += frames.size_bytes
            self._end.sequence = frames.sequence
            if len(frames.records):
                found.append(frames.records)
            if frames.next_journal:
                self._follow(frames.next_journal, digest)
            elif not frames.size_bytes and length == size_bytes < _READ_BYTES_MAX:
                # A frame that is longer than this: a segment of small blocks was given up.
                size_bytes = min(2 * size_bytes, _READ_BYTES_MAX)
            elif not frames.size_bytes:
                return found

    def load(self, digest: bytes) -> Columns | None:
        """Return all of its slots, for a scan; None if its files can't be read."""
        fds, state = self.fds, None
        with contextlib.suppress(OSError):
            # Without directories it is followed no more, and has no blocks that anybody finds.
            state = load_owner(self._disk, fds[0], self.number, digest) if fds else None
        if state is None:
            return None
        self._disk.close(state.end.fd)
        return state.columns

    def tell_uses(self) -> None:
        """Mark the slots that were read, so that their owner keeps them longer."""
        slots, self.read_slots = self.read_slots, set()
        if not slots or not self.fds:
            return
        with contextlib.suppress(OSError, ValueError):
            if self._uses is None:
                self._uses = Uses(self._disk, self.fds[0], 0, create=False)
            self._uses.mark(list(slots))

    def watched_fd(self) -> int:
        """Return the journal that tells of changes."""
        return self._end.fd

    def close(self) -> None:
        """Let go of its files."""
        fds, self.fds = {*self.fds, self._end.fd}, []
        self._uses = None
        for fd in fds:
            with contextlib.suppress(OSError):
                self._disk.close(fd)

    def _follow(self, number: int, digest: bytes) -> None:
        fd, _ = open_regular(self._disk, journal_name(number), 0, self.fds[0])
        header = bytearray(JOURNAL_HEADER_BYTES)
        self._disk.preadv(fd, [memoryview(header)], 0)
        found = decode_journal_header(bytes(header), number, self.number, digest)
        if found is None:
            self._disk.close(fd)
            raise FileNotFoundError(f"{journal_name(number)} is not what follows")
        self._disk.close(self._end.fd)
        self._end.fd, self._end.number, self._end.offset = fd, number, JOURNAL_HEADER_BYTES
        self._end.sequence = 1


class Followers:
    """Follows all other owners of the namespace.

    Args:
        disk: What to call the system with.
        engine: Whose threads read.
        roots: Where they are.
        own_name: Ours, which is not followed.
        digest: Digest of the namespace.
        on_added: Told, on the loop, of blocks that came.
        on_removed: Told, on the loop, of blocks that left.
    """

    def __init__(
        self,
        disk: OsDisk,
        engine: TransferEngine,
        roots: Sequence[Root],
        own_name: str,
        digest: bytes,
        on_added: Callable[[Sequence[BlockKey]], None],
        on_removed: Callable[[Sequence[BlockKey], RemovalCause], None],
    ) -> None:
        self.others: dict[int, Other] = {}
        self._disk = disk
        self._engine = engine
        self._roots = roots
        self._own_name = own_name
        self._digest = digest
        self._on_added = on_added
        self._on_removed = on_removed
        self._names: dict[str, int] = {}
        self._next_place = 1
        self._changed = asyncio.Event()
        self._watch = Watch(self._changed.set)
        self._lock = asyncio.Lock()
        self.gone: Callable[[int], None] = lambda place: None
        self.segment_gone: Callable[[tuple[int, int]], None] = lambda segment: None

    def find(self) -> list[Other]:
        """Open the owners that are not followed yet; on a thread, one call at a time."""
        found = []
        home = self._roots[0]
        for name in filter(is_owner, names_in(self._disk, home.namespace_fd)):
            if name == self._own_name or name in self._names:
                continue
            with contextlib.suppress(OSError):
                other = self._open(name)
                if other is not None:
                    found.append(other)
        return found

    def take(self, found: Sequence[Other], index: Index) -> list[Columns]:
        """Follow owners from now on: their blocks enter the table. Return what is in their slots."""
        loaded = []
        for other in found:
            columns, other.initial = other.initial, None
            if columns is None:
                continue
            held = columns.held()
            index.table.add_all(columns.digest[held], held + other.place)
            self.others[other.place >> OWNER_SHIFT] = other
            loaded.append(columns)
        return loaded

    def directories(self) -> dict[int, Sequence[int]]:
        """Return the directories of all others, by the number in their places."""
        return {place: other.fds for place, other in self.others.items()}

    async def run(self, index: Index) -> None:
        """Follow for ever; what goes wrong with one owner ends nothing but that one."""
        self._watch.add(self._roots[0].namespace_fd)
        for other in self.others.values():
            self._watch.add(other.watched_fd())
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await self._changed.wait()
            self._changed.clear()
            try:
                await self.refresh(index)
            except OSError as error:
                _log.debug("other owners could not be looked at: %s", error)
            await asyncio.sleep(_PAUSE_S)

    async def refresh(self, index: Index, only: Collection[int] | None = None) -> None:
        """Take in what others have done until now.

        Args:
            index: Where to.
            only: Numbers in places of those to look at; None: all, and who is new.
        """
        async with self._lock:
            others = {n: other for n, other in self.others.items() if only is None or n in only}
            look = partial(self._look, others, find=only is None)
            news, found = await self._engine.call(look, priority=Priority.LOAD)
            for place, frames in news.items():
                if frames is None:
                    self._forget(place)
                    continue
                for records in frames:
                    for start in range(0, len(records), _TURN_RECORDS):
                        self._apply(index, others[place], records[start : start + _TURN_RECORDS])
                        await asyncio.sleep(0)
            for columns in self.take(found, index):
                keys = columns.keys_in(columns.held())
                for start in range(0, len(keys), _TURN_RECORDS):
                    self._on_added(keys[start : start + _TURN_RECORDS])
                    await asyncio.sleep(0)

    def close(self) -> None:
        """Let go of all files, when nothing is read any more."""
        self._watch.close()
        for other in self.others.values():
            other.close()
        self.others.clear()

    def close_watch(self) -> None:
        """Be told of nothing any more."""
        self._watch.close()

    def _look(
        self, others: dict[int, Other], *, find: bool
    ) -> tuple[dict[int, list[npt.NDArray[Any]] | None], list[Other]]:
        """Read what is new; on a thread. None for an owner that is gone or whose journal broke off."""
        news: dict[int, list[npt.NDArray[Any]] | None] = {}
        for place, other in others.items():
            try:
                if find:
                    other.tell_uses()
                before = other.watched_fd()
                news[place] = other.news(self._digest)
                if other.watched_fd() != before:
                    self._watch.add(other.watched_fd())
                if find and not news[place] and not self._is_there(other):
                    news[place] = None
            except OSError:
                news[place] = None
        found = self.find() if find else []
        for other in found:
            self._watch.add(other.watched_fd())
        return news, found

    def _is_there(self, other: Other) -> bool:
        try:
            self._disk.stat(other.name, self._roots[0].namespace_fd)
        except FileNotFoundError:
            return False
        return True

    def _open(self, name: str) -> Other | None:
        fds = [open_own_directory(self._disk, name, self._roots[0].namespace_fd)]
        state = None
        try:
            for root in self._roots[1:]:
                try:
                    fds.append(open_own_directory(self._disk, name, root.namespace_fd))
                except OSError:
                    fds.append(fds[0])
            state = load_owner(self._disk, fds[0], int(name, 16), self._digest)
        finally:
            if state is None:
                for fd in set(fds):
                    self._disk.close(fd)
        if state is None:
            return None
        place = self._next_place
        self._next_place += 1
        self._names[name] = place
        return Other(self._disk, name, place, fds, state)

    def _forget(self, place: int) -> None:
        """Follow an owner no more. Its blocks are found missing when somebody reads them; if it is there, it is new."""
        other = self.others.pop(place)
        self._names.pop(other.name, None)
        self.gone(place)
        other.close()

    def _apply(self, index: Index, other: Other, records: npt.NDArray[Any]) -> None:
        table = index.table
        added: list[BlockKey] = []
        removed: list[BlockKey] = []
        rows = zip(
            records["kind"].tolist(), records["slot"].tolist(), records["digest"].tolist(),
            records["key_length"].tolist(), records["key"].tolist(), strict=True,
        )  # fmt: skip
        for kind, slot, digest, length, key in rows:
            place = other.place + slot
            if kind == Kind.ADD:
                if table.find(digest) == NOWHERE:
                    table.set(digest, place)
                    added.append(key[:length])
            elif kind in (Kind.REMOVE, Kind.BAD) and length and table.remove(digest, place):
                removed.append(key[:length])
            elif kind in (Kind.SEGMENT, Kind.DROP):
                # What is open under this number is another file than the one that has the name from now on.
                self.segment_gone((other.place >> OWNER_SHIFT, slot // other.geometry.segment_slots))
        if added:
            self._on_added(added)
        if removed:
            self._on_removed(removed, RemovalCause.EVICTED)
