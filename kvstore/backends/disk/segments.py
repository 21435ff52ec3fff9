"""Open segments, of all owners: descriptors of those in use, bounded."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Sequence
from typing import Final

from kvstore.backends.disk.files import close_all, open_regular
from kvstore.backends.disk.layout import OWNER_SHIFT, SLOT_MASK, segment_name
from kvstore.diskio import Priority, TransferEngine

__all__ = ["SegmentFiles"]

_SegmentId = tuple[int, int]
"""Number of the owner (0: this engine) and of its segment."""

_OPEN_MAX: Final = 512
_SHARE_OF_LIMIT: Final = 4
"""A tier takes at most a quarter of the descriptors that the process may have."""


class SegmentFiles:
    """Opens segments on threads of the engine, and keeps those used last open. Used from the loop thread."""

    def __init__(self, engine: TransferEngine, *, direct: bool) -> None:
        self._disk = engine.disk
        self._engine = engine
        self._direct = os.O_DIRECT if direct else 0
        self._directories: dict[int, Sequence[int]] = {}
        self._segment_slots: dict[int, int] = {}
        self._open: OrderedDict[_SegmentId, int] = OrderedDict()
        self._in_use: Counter[_SegmentId] = Counter()
        self._doomed: set[_SegmentId] = set()
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._open_max = max(8, min(_OPEN_MAX, limit // _SHARE_OF_LIMIT))

    def add_owner(self, owner: int, directories: Sequence[int], segment_slots: int) -> None:
        """Note an owner's directory in each root, and the slots of its segments."""
        self._directories[owner], self._segment_slots[owner] = directories, segment_slots

    @contextlib.asynccontextmanager
    async def files_of(self, places: Sequence[int]) -> AsyncIterator[list[int]]:
        """Hold the segments of places open; yield a descriptor for each place, or minus the errno of its opening."""
        slots = self._segment_slots
        ids = [(p >> OWNER_SHIFT, (p & SLOT_MASK) // slots.get(p >> OWNER_SHIFT, 1)) for p in places]
        held = sorted(set(ids))
        self._in_use.update(held)
        try:
            fds = await self._open_missing([segment for segment in held if segment not in self._open])
            for segment in held:
                if segment in self._open:
                    self._open.move_to_end(segment)
                    fds[segment] = self._open[segment]
            yield [fds[segment] for segment in ids]
        finally:
            self._let_go(held)

    def forget(self, owner: int, segment: int) -> None:
        """Close a segment that is gone, when it is not in use any more."""
        if (owner, segment) in self._in_use:
            self._doomed.add((owner, segment))
        else:
            self._close((owner, segment))

    def forget_owner(self, owner: int) -> None:
        """Close the segments of an owner that is gone."""
        self._directories.pop(owner, None)
        self._segment_slots.pop(owner, None)
        for segment in [s for s in self._open if s[0] == owner]:
            self.forget(*segment)

    def close(self) -> None:
        """Close all; when nothing uses them any more."""
        for segment in list(self._open):
            self._close(segment)

    async def _open_missing(self, missing: Sequence[_SegmentId]) -> dict[_SegmentId, int]:
        """Open segments; return minus the errno of those that can't be opened."""
        opened: list[int] = []
        try:
            if missing:
                await self._engine.call(lambda: opened.extend(map(self._open_one, missing)), priority=Priority.LOAD)
        finally:
            # Also when cancelled: the call has ended then.
            for segment, fd in zip(missing, opened, strict=False):
                # Another call may have opened it at the same time.
                if fd >= 0 and self._open.setdefault(segment, fd) != fd:
                    self._disk.close(fd)
        return dict(zip(missing, opened, strict=True))

    def _let_go(self, segments: Sequence[_SegmentId]) -> None:
        for segment in segments:
            self._in_use[segment] -= 1
            if not self._in_use[segment]:
                del self._in_use[segment]
                if segment in self._doomed:
                    self._close(segment)
        if len(self._open) > self._open_max:
            for segment in [s for s in self._open if s not in self._in_use][: len(self._open) - self._open_max]:
                self._close(segment)

    def _close(self, segment: _SegmentId) -> None:
        self._doomed.discard(segment)
        close_all(self._disk, self._open.pop(segment, -1))

    def _open_one(self, segment: _SegmentId) -> int:
        owner, number = segment
        directories = self._directories.get(owner)
        if not directories:
            return -errno.ENOENT
        flags = (os.O_RDONLY if owner else os.O_RDWR) | self._direct
        try:
            fd, _ = open_regular(self._disk, segment_name(number), flags, directories[number % len(directories)])
        except OSError as error:
            return -(error.errno or errno.EIO)
        self._engine.admit(fd)
        return fd
