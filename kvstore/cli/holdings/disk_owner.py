"""An owner's directory of a disk tier, read and changed from outside an engine."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvstore.backends.disk.columns import Columns
from kvstore.backends.disk.files import OwnerState, load_owner, names_in, open_regular
from kvstore.backends.disk.followers import Other
from kvstore.backends.disk.layout import (
    INDEX_NAME,
    LOCK_NAME,
    PAGE,
    SEGMENT_NAME,
    digest_of,
    encode_frame,
    journal_name,
    records_of,
    segment_name,
)
from kvstore.cli.holdings.base import HeldBlock, Litter
from kvstore.diskio import OsDisk

__all__ = ["EMPTY_PAGE", "HeldOwner", "Place"]

EMPTY_PAGE = bytes(PAGE)


class Place(NamedTuple):
    """Where a block was found: the owner's name, the slot, and the tick that tells whether the slot has changed."""

    owner: str
    slot: int
    tick: int


class HeldOwner:
    """The files of one owner, kept up with its journal, and the segment that was read last."""

    def __init__(self, disk: OsDisk, name: str, fds: list[int], digest: bytes) -> None:
        self.name = name
        self.fds = fds
        self._disk = disk
        self._digest = digest
        self._segment = (-1, -1)
        loaded = load_owner(disk, fds[0], int(name, 16), digest)
        if loaded is None:
            raise FileNotFoundError(f"{name} has no journal")
        self._take(loaded)

    def refresh(self) -> None:
        """Take in what its engine has done since; if that is not to be found, every slot counts as changed."""
        try:
            for records in self._followed.news(self._digest):
                self._tick += 1
                self.columns.apply(records, np.full(len(records), self._tick, np.uint32))
        except OSError:
            loaded = load_owner(self._disk, self.fds[0], int(self.name, 16), self._digest)
            if loaded is None:
                raise
            self._disk.close(self._state.end.fd)
            loaded.columns.used += self._tick
            self._take(loaded)

    def still_holds(self, block: HeldBlock) -> bool:
        """Tell whether a block lies where it was found."""
        slot, columns = block.place.slot, self.columns
        return slot < len(columns.used) and columns.used_at(slot) == block.place.tick and columns.holds(slot, block.key)

    def read(self, slot: int, at: int, buffer: memoryview) -> int:
        """Read a part of a slot; return how many bytes came."""
        geometry = self._state.geometry
        length = self._disk.preadv(self._open(slot, os.O_RDONLY), [buffer], geometry.offset_of(slot) + at)
        # What is read once would only be in the way in the page cache.
        os.posix_fadvise(self._segment[1], geometry.offset_of(slot), geometry.slot_bytes, os.POSIX_FADV_DONTNEED)
        return length

    def withdraw(self, blocks: Sequence[HeldBlock], kind: int) -> int:
        """Remove blocks that still lie where they were found; the caller has the owner's lock."""
        self.refresh()
        found = [block for block in blocks if self.still_holds(block)]
        for block in found:
            fd = self._open(block.place.slot, os.O_RDWR)
            self._disk.pwritev(fd, [EMPTY_PAGE], self._state.geometry.offset_of(block.place.slot))
        end = self._state.end
        if found and self._state.intact and self._disk.fstat(end.fd).st_size == end.offset:
            # Otherwise the next engine looks at the slots themselves, for which the journal has to stay as it is.
            rows = [(kind, block.place.slot, 0, digest_of(block.key), block.key) for block in found]
            fd, _ = open_regular(self._disk, journal_name(end.number), os.O_WRONLY, self.fds[0])
            try:
                frame = encode_frame(records_of(rows), end.sequence, int(self.name, 16), end.number)
                self._disk.pwritev(fd, [frame], end.offset)
                self._disk.fdatasync(fd)
            finally:
                self._disk.close(fd)
        self.refresh()
        return len(found)

    def remove(self) -> int:
        """Remove all files of a dead owner, the lock last, which the caller has; return how many blocks that were."""
        for fd in self.fds:
            for name in sorted(names_in(self._disk, fd), key=lambda name: name == LOCK_NAME):
                self._disk.unlink(name, fd)
        return len(self.columns.held())

    def litter(self) -> list[Litter]:
        """Return the files of a dead owner that nobody reads, by their names; the caller has its lock."""
        self.refresh()
        found = []
        for fd in self.fds:
            for name in names_in(self._disk, fd):
                match = SEGMENT_NAME.fullmatch(name)
                number = int(match[1]) if match else 0
                is_known = number < len(self.columns.segments) and self.columns.segments[number]
                if name == f"{INDEX_NAME}.tmp":
                    why = "a snapshot that was not finished"
                elif match and self._state.intact and not is_known:
                    why = "a segment that no journal knows"
                else:
                    continue
                status = self._disk.stat(name, fd)
                if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                    found.append(Litter(name, why, status.st_size))
        return found

    def unlink(self, name: str) -> bool:
        """Remove a file of a dead owner; the caller has its lock."""
        removed = False
        for fd in self.fds:
            with contextlib.suppress(FileNotFoundError):
                self._disk.unlink(name, fd)
                removed = True
        return removed

    def close(self) -> None:
        """Let go of its files."""
        self._close_segment()
        self._followed.close()

    def _take(self, state: OwnerState) -> None:
        self._state = state
        self._followed = Other(self._disk, self.name, 0, self.fds, state)
        self.columns: Columns = state.columns
        self._tick = 1 + int(self.columns.used.max(initial=0))

    def _open(self, slot: int, flags: int) -> int:
        number = slot // self._state.geometry.segment_slots
        if self._segment[0] != number or flags != os.O_RDONLY:
            self._close_segment()
            fd, _ = open_regular(self._disk, segment_name(number), flags, self.fds[number % len(self.fds)])
            self._segment = (number, fd)
        return self._segment[1]

    def _close_segment(self) -> None:
        if self._segment[1] >= 0:
            self._disk.close(self._segment[1])
        self._segment = (-1, -1)
