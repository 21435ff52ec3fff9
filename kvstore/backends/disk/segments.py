"""Open segments of all owners: a bounded cache of descriptors."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, TypeAlias

from kvstore.backends.disk.files import close_all, open_regular
from kvstore.backends.disk.layout import OWNER_SHIFT, SLOT_MASK, segment_name
from kvstore.diskio import TransferEngine
from kvstore.runtime.limits import Precedence

__all__ = ["SegmentFiles"]

_SegmentId = tuple[int, int]
"""Number of the owner (0: this engine) and of its segment."""

_Directories: TypeAlias = Callable[[], AbstractContextManager[Sequence[int]]]

_OPEN_MAX: Final = 512
_SHARE_OF_LIMIT: Final = 4
"""A tier keeps at most 512 descriptors open, and at most a quarter of the process's limit."""


@dataclass(slots=True, eq=False)
class _File:
    """An open segment, or minus the errno of the failed open."""

    fd: int
    users: int = 0


class SegmentFiles:
    """Opens segments on threads of the engine, and keeps the most recently used open. Used from the loop thread."""

    def __init__(self, engine: TransferEngine, *, direct: bool) -> None:
        self._disk = engine.disk
        self._engine = engine
        self._direct = os.O_DIRECT if direct else 0
        self._owners: dict[int, tuple[_Directories, int]] = {}
        self._open: OrderedDict[_SegmentId, _File] = OrderedDict()
        """Files that further calls may use; all other files in use are closed after their last use."""
        self._forgotten = 0
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._open_max = max(8, min(_OPEN_MAX, limit // _SHARE_OF_LIMIT))

    def add_owner(self, owner: int, directories: _Directories, segment_slots: int) -> None:
        """Add an owner: a context of its open directory in each root, and the number of slots per segment."""
        self._owners[owner] = directories, segment_slots

    @contextlib.asynccontextmanager
    async def files_of(self, places: Sequence[int]) -> AsyncIterator[list[int]]:
        """Hold the segments of places open; yield a descriptor for each place, or minus the errno of the open."""
        ids = [self._segment_of(place) for place in places]
        held: dict[_SegmentId, _File] = {}
        try:
            await self._hold(sorted(set(ids)), held)
            yield [held[segment].fd for segment in ids]
        finally:
            for segment, file in held.items():
                file.users -= 1
                if self._open.get(segment) is not file:
                    self._close(file)
            idle = [segment for segment, file in self._open.items() if not file.users]
            for segment in idle[: max(0, len(self._open) - self._open_max)]:
                self._close(self._open.pop(segment))

    def forget(self, owner: int, segment: int) -> None:
        """Close a segment that is gone, after its last use; another file may get its name."""
        self._forgotten += 1
        if (file := self._open.pop((owner, segment), None)) is not None:
            self._close(file)

    def forget_owner(self, owner: int) -> None:
        """Close the segments of an owner that is gone."""
        self._owners.pop(owner, None)
        self._forgotten += 1
        for segment in [s for s in self._open if s[0] == owner]:
            self.forget(*segment)

    def close(self) -> None:
        """Close all segments; only when none is in use."""
        for segment in list(self._open):
            self.forget(*segment)

    def _segment_of(self, place: int) -> _SegmentId:
        owner = place >> OWNER_SHIFT
        _, segment_slots = self._owners.get(owner, (None, 1))
        return owner, (place & SLOT_MASK) // segment_slots

    async def _hold(self, segments: Iterable[_SegmentId], held: dict[_SegmentId, _File]) -> None:
        """Count a use of segments, opening those that are not open."""
        missing: list[_SegmentId] = []
        for segment in segments:
            if (file := self._open.get(segment)) is None:
                missing.append(segment)
            else:
                self._open.move_to_end(segment)
                file.users += 1
                held[segment] = file
        if not missing:
            return
        opened: list[tuple[int, bool]] = []
        forgotten = self._forgotten
        try:
            await self._engine.call(lambda: opened.extend(map(self._open_one, missing)), precedence=Precedence.LOAD)
        finally:
            # If cancelled, the call on the thread has also ended by now.
            for segment, (fd, is_lasting) in zip(missing, opened, strict=False):
                held[segment] = _File(fd, users=1)
                # Meanwhile another call may have opened the segment, or the segment may be gone.
                if is_lasting and segment not in self._open and self._forgotten == forgotten:
                    self._open[segment] = held[segment]

    def _close(self, file: _File) -> None:
        if not file.users:
            close_all(self._disk, file.fd)

    def _open_one(self, segment: _SegmentId) -> tuple[int, bool]:
        """Open a segment; return its descriptor, or minus the errno, and whether it may serve further calls."""
        owner, number = segment
        directories, _ = self._owners.get(owner, (None, 1))
        if directories is None:
            return -errno.ENOENT, False
        name, is_lasting = segment_name(number), True
        try:
            with directories() as fds:
                dir_fd = fds[number % len(fds)]
                try:
                    fd, _ = open_regular(self._disk, name, (os.O_RDONLY if owner else os.O_RDWR) | self._direct, dir_fd)
                except OSError as error:
                    if owner or error.errno != errno.EROFS:
                        raise
                    # Loads continue on a disk that has become read-only; later it may be writable again.
                    fd, _ = open_regular(self._disk, name, os.O_RDONLY | self._direct, dir_fd)
                    is_lasting = False
        except OSError as error:
            return -(error.errno or errno.EIO), False
        self._engine.admit(fd)
        return fd, is_lasting
