"""Open segments, of all owners: descriptors of those in use, bounded."""

from __future__ import annotations

import errno
import os
import resource
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

from kvstore.backends.disk.files import close_all, open_regular
from kvstore.backends.disk.layout import segment_name
from kvstore.diskio import OsDisk, Priority, TransferEngine

__all__ = ["SegmentFiles", "SegmentId"]

SegmentId = tuple[int, int]
"""Number of the owner (0: this engine) and of its segment."""

_OPEN_MAX: Final = 512
_SHARE_OF_LIMIT: Final = 4
"""A tier takes at most a quarter of the descriptors that the process may have."""


class SegmentFiles:
    """Opens segments on threads of the engine, and keeps those used last open. Used from the loop thread."""

    def __init__(self, disk: OsDisk, engine: TransferEngine) -> None:
        self._disk = disk
        self._engine = engine
        self._open: OrderedDict[SegmentId, int] = OrderedDict()
        self._in_use: Counter[SegmentId] = Counter()
        self._doomed: set[SegmentId] = set()
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._open_max = max(8, min(_OPEN_MAX, limit // _SHARE_OF_LIMIT))

    async def hold(
        self, wanted: Sequence[SegmentId], directories: dict[int, Sequence[int]], *, direct: bool
    ) -> dict[SegmentId, int]:
        """Return descriptors of segments, which stay open until :meth:`let_go`; or minus an errno.

        Args:
            wanted: Each once.
            directories: Directory in each root, by owner.
            direct: Whether to open for direct I/O.
        """
        missing = [segment for segment in wanted if segment not in self._open]
        self._in_use.update(wanted)
        try:
            if missing:
                opened = await self._engine.call(
                    lambda: [self._open_one(segment, directories, direct) for segment in missing],
                    priority=Priority.LOAD,
                )
                for segment, fd in zip(missing, opened, strict=True):
                    # Another call may have opened it at the same time.
                    if fd >= 0 and self._open.setdefault(segment, fd) != fd:
                        self._disk.close(fd)
        except BaseException:
            self.let_go(wanted)
            raise
        found = dict(zip(missing, opened, strict=True)) if missing else {}
        for segment in wanted:
            if segment in self._open:
                self._open.move_to_end(segment)
                found[segment] = self._open[segment]
        return found

    def let_go(self, segments: Iterable[SegmentId]) -> None:
        """Undo one :meth:`hold`."""
        for segment in segments:
            self._in_use[segment] -= 1
            if not self._in_use[segment]:
                del self._in_use[segment]
                if segment in self._doomed:
                    self._close(segment)
        if len(self._open) > self._open_max:
            for segment in [s for s in self._open if s not in self._in_use][: len(self._open) - self._open_max]:
                self._close(segment)

    def forget(self, segment: SegmentId) -> None:
        """Close a segment that is gone, when it is not in use any more."""
        if segment in self._in_use:
            self._doomed.add(segment)
        else:
            self._close(segment)

    def forget_owner(self, owner: int) -> None:
        """Close the segments of an owner that is gone."""
        for segment in [s for s in self._open if s[0] == owner]:
            self.forget(segment)

    def close(self) -> None:
        """Close all; when nothing uses them any more."""
        for segment in list(self._open):
            self._close(segment)

    def _close(self, segment: SegmentId) -> None:
        self._doomed.discard(segment)
        close_all(self._disk, self._open.pop(segment, -1))

    def _open_one(self, segment: SegmentId, directories: dict[int, Sequence[int]], direct: bool) -> int:
        owner, number = segment
        dir_fds = directories.get(owner)
        if not dir_fds:
            return -errno.ENOENT
        flags = os.O_RDWR if owner == 0 else os.O_RDONLY
        try:
            fd, _ = open_regular(
                self._disk, segment_name(number), flags | (os.O_DIRECT if direct else 0), dir_fds[number % len(dir_fds)]
            )
        except OSError as error:
            return -(error.errno or errno.EIO)
        self._engine.admit(fd)
        return fd
