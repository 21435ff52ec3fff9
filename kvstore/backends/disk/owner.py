"""The directory of an owner: new, or adopted from an engine that has ended. All calls block; used at start."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from kvstore.backends.disk import files, layout
from kvstore.backends.disk.columns import Columns
from kvstore.backends.disk.files import FileLock
from kvstore.backends.disk.journal import JournalEnd, create_journal, journals_in, load_owner, snapshot_parts
from kvstore.backends.disk.layout import PAGE, Geometry, Kind, Row
from kvstore.backends.disk.root import NO_ROOM, Root
from kvstore.diskio import OsDisk

_log = logging.getLogger("kvstore.backends.disk")

_TRIES_MAX: Final = 20
"""Attempts to create a directory and lock it before another engine does."""

_FULL_TRIES: Final = 5
_FULL_PAUSE_S: Final = 0.2
"""Attempts to adopt a directory if the disk has no room for another one, each after a pause."""


class Uses:
    """Marks of use, one byte per slot, set by readers in other processes. Used on threads.

    With ``slots``, a missing file is created. The file is not mapped into memory: on a full disk, a page fault without
    room for the page would kill the process.
    """

    def __init__(self, disk: OsDisk, dir_fd: int, slots: int = 0) -> None:
        self._disk = disk
        flags = os.O_RDWR | (os.O_CREAT if slots else 0)
        self._fd, self._size = files.open_regular(disk, layout.USES_NAME, flags, dir_fd)
        if self._size < slots:
            try:
                disk.ftruncate(self._fd, slots)
            except BaseException:
                self.close()
                raise
            self._size = slots

    def mark(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if slot < self._size:
                self._disk.pwritev(self._fd, [b"\1"], slot)

    def take(self, slots: int) -> list[int]:
        """Return the marked slots among the first ``slots``, and clear their marks."""
        marks = np.zeros(min(slots, self._size), np.uint8)
        if len(marks):
            self._disk.preadv(self._fd, [marks.data], 0)
        marked = np.flatnonzero(marks)
        # Not by numpy.unique, which imports a module at its first call; a process forked meanwhile could not import it.
        for page in sorted(set((marked // PAGE).tolist())):
            # A mark set between the read and this write is lost.
            start = page * PAGE
            self._disk.pwritev(self._fd, [bytes(min(PAGE, len(marks) - start))], start)
        return list(marked.tolist())

    def close(self) -> None:
        """Close the file; idempotent."""
        files.close_all(self._disk, self._fd)
        self._fd = -1


class Owner:
    """This engine's owner directory; the owner's name is its number as 16 hexadecimal digits."""

    def __init__(self, disk: OsDisk, name: str, geometry: Geometry, digest: bytes) -> None:
        self.name = name
        self.number = int(name, 16)
        self.geometry = geometry
        self.fds: list[int] = []  # Its directory in each root.
        self.locks: list[FileLock] = []  # Its lock in each root.
        self.columns = Columns(geometry.segment_slots)  # Its slots, from snapshot and journals.
        self.end = JournalEnd(0, 0, 1, -1)  # End of its journal, open for writing.
        self.uses: Uses | None = None  # Marks of readers; None if their file can't be created.
        self.intact = True  # Whether its files were complete; otherwise the slots must be scanned.
        self.corrections: list[Row] = []  # Journal records that correct differences between directory and journal.
        self._disk = disk
        self._digest = digest

    def open(self, roots: Sequence[Root], *, create: bool) -> bool:
        """Lock its directories, and read its files or create new ones.

        Returns:
            False, with everything closed, if another engine has a lock or the segments have another geometry.
        """
        usable = False
        try:
            usable = self._lock(roots, create) and self._load(is_new=create)
        finally:
            if not usable:
                self.close()
        return usable

    def _lock(self, roots: Sequence[Root], create: bool) -> bool:
        """Open and lock its directories; return whether they were free."""
        for root in roots:
            # Any root but the first may have been added to the configuration since.
            if create or root is not roots[0]:
                with contextlib.suppress(FileExistsError):
                    self._disk.mkdir(self.name, root.namespace_fd)
            try:
                self.fds.append(files.open_own_directory(self._disk, self.name, root.namespace_fd))
            except FileNotFoundError:
                # It has just been removed.
                return False
            lock = FileLock(self._disk, self.fds[-1], layout.LOCK_NAME)
            if not lock.try_acquire():
                return False
            self.locks.append(lock)
        return True

    def _load(self, *, is_new: bool) -> bool:
        state = load_owner(self._disk, self.fds, self.number, self._digest)
        if state is None:
            # Without a usable journal, all slots must be scanned.
            self.end = self.create_journal(max(journals_in(self._disk, self.fds[0]), default=0) + 1)
            self.intact = is_new
        else:
            state.reader.close()
            if state.geometry != self.geometry:
                # The directory stays readable, and its space is reclaimed when needed.
                return False
            self.columns, self.intact, self.end = state.columns, state.intact, state.reader.end
            self.end.fd, size = files.open_regular(
                self._disk, layout.journal_name(self.end.number), os.O_RDWR, self.fds[0]
            )
            if size > self.end.offset:
                # A crash left a partial frame.
                self._disk.ftruncate(self.end.fd, self.end.offset)
        self._match_segments()
        if not self.intact:
            # If this engine ends before its scan does, the next one scans.
            self.corrections.append((Kind.UNSURE, 0, 0, 0, b""))
        return True

    def create_journal(self, number: int) -> JournalEnd:
        return create_journal(self._disk, self.fds[0], number, self.number, self.geometry, self._digest)

    def write_snapshot(self, columns: Columns, journal: int) -> None:
        """Replace the snapshot by one that ``journal`` continues, and remove all earlier journals.

        Raises:
            OSError: The snapshot could not be written; the previous one is still there.
        """
        parts = snapshot_parts(columns, journal, self.number, self.geometry, self._digest)
        files.replace_file(self._disk, layout.INDEX_NAME, layout.INDEX_TMP_NAME, self.fds[0], parts)
        for number in journals_in(self._disk, self.fds[0]):
            if number < journal:
                self._disk.unlink(layout.journal_name(number), self.fds[0])

    def close(self) -> None:
        """Close all files, and release the locks; idempotent."""
        files.close_all(self._disk, self.end.fd)
        self.end.fd = -1
        if self.uses is not None:
            self.uses.close()
        for lock in self.locks:
            lock.release()
        files.close_all(self._disk, *self.fds)
        # Work delayed by a frozen disk may still use them; the closed engine refuses its calls.
        self.fds = [-1] * len(self.fds)

    def _match_segments(self) -> None:
        """Drop segments that are gone or damaged, and remove files of segments that an intact journal does not list.

        Segments may be gone because other engines reclaim them from owners that have ended.
        """
        columns, geometry = self.columns, self.geometry
        there: set[int] = set()
        for path, fd in enumerate(self.fds):
            for number, status in files.segments_in(self._disk, fd).items():
                known = number < len(columns.segments) and columns.segments[number] == path + 1
                whole = files.is_own_file(status) and status.st_size == geometry.segment_bytes
                if whole and not known and not self.intact and number % geometry.paths == path:
                    # The journal may have lost the record of this segment; the scan finds its blocks.
                    columns.open_segment(number, path)
                    self.corrections.append((Kind.SEGMENT, number * geometry.segment_slots, path, 0, b""))
                    known = True
                if known and whole:
                    there.add(number)
                else:
                    self._disk.unlink(layout.segment_name(number), fd)
        for number in np.flatnonzero(columns.segments).tolist():
            if number not in there:
                _log.info("the segment %s of the owner %s is gone or damaged", layout.segment_name(number), self.name)
                # Other engines may have read its blocks from this journal.
                self.corrections += columns.segment_removals(number)
                columns.drop_segment(number)


def take_owner(disk: OsDisk, roots: Sequence[Root], geometry: Geometry, slots_max: int, digest: bytes) -> Owner:
    """Adopt the most recently used directory of an owner that has ended, or create a new one."""
    owner = _adopt(disk, roots, geometry, digest) or _create_or_adopt(disk, roots, geometry, digest)
    with contextlib.suppress(OSError):
        # Only eviction uses the marks, and it works without them.
        owner.uses = Uses(disk, owner.fds[0], slots_max)
    return owner


def _create_or_adopt(disk: OsDisk, roots: Sequence[Root], geometry: Geometry, digest: bytes) -> Owner:
    """Create a directory; if the disk has no room for it, try to adopt again."""
    try:
        return _create(disk, roots, geometry, digest)
    except OSError as error:
        if error.errno in NO_ROOM:
            # Other engines lock an ended owner's directory for a moment to see whether it has ended.
            for _ in range(_FULL_TRIES):
                time.sleep(_FULL_PAUSE_S)
                if (owner := _adopt(disk, roots, geometry, digest, level=logging.DEBUG)) is not None:
                    return owner
        raise


def _adopt(
    disk: OsDisk, roots: Sequence[Root], geometry: Geometry, digest: bytes, *, level: int = logging.WARNING
) -> Owner | None:
    here = [each for each in roots[0].owners() if each.namespace == roots[0].namespace]
    for each in sorted(here, key=lambda each: each.changed_at, reverse=True):
        owner = Owner(disk, each.name, geometry, digest)
        try:
            if owner.open(roots, create=False):
                return owner
        except OSError as error:
            _log.log(level, "the directory of the owner %s can't be adopted: %s", owner.name, error)
    return None


def _create(disk: OsDisk, roots: Sequence[Root], geometry: Geometry, digest: bytes) -> Owner:
    for _ in range(_TRIES_MAX):
        owner = Owner(disk, secrets.token_hex(8), geometry, digest)
        if owner.open(roots, create=True):
            return owner
    raise OSError(errno.EAGAIN, f"other engines locked each of {_TRIES_MAX} new directories first")
