"""The directory of an owner: made new, or taken over from one that is no more. All of it blocks; done at start."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.backends.disk.columns import Columns
from kvstore.backends.disk.files import JournalEnd, OwnerState, load_owner, names_in, open_own_directory, open_regular
from kvstore.backends.disk.journal import create_journal
from kvstore.backends.disk.layout import (
    LOCK_NAME,
    SEGMENT_NAME,
    USES_NAME,
    Geometry,
    Kind,
    Row,
    is_owner,
    journal_name,
    journal_number,
    segment_name,
)
from kvstore.backends.disk.locks import FileLock
from kvstore.backends.disk.root import Root
from kvstore.diskio import OsDisk

__all__ = ["Owner", "Uses", "take_owner"]

_log = logging.getLogger("kvstore.backends.disk")

_TRIES_MAX: Final = 20
"""How often a directory may be taken by somebody else between looking at it and locking it."""


class Uses:
    """One byte a slot that readers in other processes set, mapped into memory. On threads only: a fault may wait."""

    def __init__(self, disk: OsDisk, dir_fd: int, slots: int, *, create: bool) -> None:
        self.marks: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        fd, size = open_regular(disk, USES_NAME, os.O_RDWR | (os.O_CREAT if create else 0), dir_fd)
        try:
            if create and size < slots:
                disk.ftruncate(fd, slots)
                size = slots
            if size:
                self.marks = np.frombuffer(mmap.mmap(fd, size), np.uint8)
        finally:
            disk.close(fd)

    def mark(self, slots: Sequence[int]) -> None:
        """Set the marks of slots."""
        at = np.array(slots)
        self.marks[at[at < len(self.marks)]] = 1


@dataclass(slots=True)
class Owner:
    """The owner that this engine is.

    Attributes:
        name: Name of its directory, 16 hexadecimal digits.
        number: The same as a number.
        fds: Its directory in each root.
        locks: Its lock in each root.
        geometry: Of its segments.
        columns: Its slots, as snapshot and journals say.
        end: Where its journal goes on, open for writing.
        uses: What others have read; None where there is no room for that.
        intact: Whether the files told all; otherwise the slots have to be looked at.
        adopted: Whether another engine filled it.
        corrections: Journal records of what was found to be otherwise than the journal says.
    """

    disk: OsDisk
    name: str
    number: int
    fds: list[int]
    locks: list[FileLock]
    geometry: Geometry
    columns: Columns
    end: JournalEnd
    uses: Uses | None = None
    intact: bool = True
    adopted: bool = False
    corrections: list[Row] = field(default_factory=list)

    @property
    def home_fd(self) -> int:
        """The directory that journal, snapshot and uses are in."""
        return self.fds[0]

    def close(self) -> None:
        """Let go of the locks and directories; idempotent. The journal belongs to whoever writes it."""
        for lock in self.locks:
            lock.release()
        fds, self.fds = self.fds, []
        for fd in fds:
            with contextlib.suppress(OSError):
                self.disk.close(fd)


def take_owner(disk: OsDisk, roots: Sequence[Root], geometry: Geometry, slots_max: int, digest: bytes) -> Owner:
    """Take over the directory of a dead owner, the one used last; or make a new one.

    Raises:
        OSError: The disk fails, or has no room for a new one.
    """
    home_fd = roots[0].namespace_fd
    for name in _by_last_use(disk, home_fd):
        owner = _adopt(disk, roots, name, geometry, digest)
        if owner is not None:
            break
    else:
        owner = _create(disk, roots, geometry, digest)
    with contextlib.suppress(OSError, ValueError):
        # Only eviction needs it, and does without.
        owner.uses = Uses(disk, owner.home_fd, slots_max, create=True)
    return owner


def _by_last_use(disk: OsDisk, namespace_fd: int) -> list[str]:
    found = []
    for name in filter(is_owner, names_in(disk, namespace_fd)):
        with contextlib.suppress(OSError):
            fd = open_own_directory(disk, name, namespace_fd)
            try:
                found.append((max((disk.stat(each, fd).st_mtime for each in names_in(disk, fd)), default=0.0), name))
            finally:
                disk.close(fd)
    return [name for _, name in sorted(found, reverse=True)]


def _adopt(disk: OsDisk, roots: Sequence[Root], name: str, geometry: Geometry, digest: bytes) -> Owner | None:
    """Take over a directory; None if it has an owner, or is not usable for us."""
    fds: list[int] = []
    locks: list[FileLock] = []
    try:
        if not _lock(disk, roots, name, fds, locks, create=False):
            _let_go(disk, fds, locks)
            return None
        number = int(name, 16)
        state = load_owner(disk, fds[0], number, digest) or _without_journal(disk, fds, geometry, number, digest)
        if state.geometry != geometry:
            # Of another configuration: it stays readable, and its room is taken back when somebody needs it.
            disk.close(state.end.fd)
            _let_go(disk, fds, locks)
            return None
        end = _open_end(disk, fds[0], state.end)
        owner = Owner(disk, name, number, fds, locks, geometry, state.columns, end, intact=state.intact, adopted=True)
        _match_segments(disk, owner)
        return owner
    except OSError as error:
        _log.warning("the directory of the owner %s can't be taken over: %s", name, error)
        _let_go(disk, fds, locks)
        return None
    except BaseException:
        _let_go(disk, fds, locks)
        raise


def _create(disk: OsDisk, roots: Sequence[Root], geometry: Geometry, digest: bytes) -> Owner:
    for _ in range(_TRIES_MAX):
        name = secrets.token_hex(8)
        fds: list[int] = []
        locks: list[FileLock] = []
        try:
            if not _lock(disk, roots, name, fds, locks, create=True):
                _let_go(disk, fds, locks)
                continue
            number = int(name, 16)
            end = create_journal(disk, fds[0], 1, number, geometry, digest)
        except BaseException:
            _let_go(disk, fds, locks)
            raise
        return Owner(disk, name, number, fds, locks, geometry, Columns(geometry.segment_slots), end)
    raise OSError(errno.EAGAIN, "each new directory was taken by somebody else")


def _lock(
    disk: OsDisk, roots: Sequence[Root], name: str, fds: list[int], locks: list[FileLock], *, create: bool
) -> bool:
    """Open and lock the directories of an owner, adding them to ``fds`` and ``locks``."""
    for root in roots:
        try:
            if create:
                disk.mkdir(name, root.namespace_fd)
            fds.append(open_own_directory(disk, name, root.namespace_fd))
        except FileNotFoundError:
            # A root that is new in the list, or a directory that was removed this moment.
            if root is roots[0]:
                return False
            disk.mkdir(name, root.namespace_fd)
            fds.append(open_own_directory(disk, name, root.namespace_fd))
        lock = FileLock(disk, fds[-1], LOCK_NAME)
        if not lock.try_acquire():
            return False
        locks.append(lock)
    return True


def _let_go(disk: OsDisk, fds: Sequence[int], locks: Sequence[FileLock]) -> None:
    for lock in locks:
        lock.release()
    for fd in fds:
        with contextlib.suppress(OSError):
            disk.close(fd)


def _without_journal(disk: OsDisk, fds: Sequence[int], geometry: Geometry, number: int, digest: bytes) -> OwnerState:
    """Return what can be said of an owner without a usable journal: that its slots have to be looked at."""
    numbers = [n for name in names_in(disk, fds[0]) if (n := journal_number(name)) is not None]
    end = create_journal(disk, fds[0], max(numbers, default=0) + 1, number, geometry, digest)
    columns = Columns(geometry.segment_slots)
    for path, fd in enumerate(fds):
        for name in names_in(disk, fd):
            match = SEGMENT_NAME.fullmatch(name)
            if match and int(match[1]) % geometry.paths == path:
                columns.open_segment(int(match[1]), path)
    return OwnerState(geometry, columns, end, intact=False)


def _open_end(disk: OsDisk, dir_fd: int, end: JournalEnd) -> JournalEnd:
    """Open the last journal for writing, without what a crash left half written behind its end."""
    disk.close(end.fd)
    end.fd = -1
    end.fd, size = open_regular(disk, journal_name(end.number), os.O_RDWR, dir_fd)
    try:
        if size > end.offset:
            disk.ftruncate(end.fd, end.offset)
    except BaseException:
        disk.close(end.fd)
        raise
    return end


def _match_segments(disk: OsDisk, owner: Owner) -> None:
    """Forget segments that are gone or have another length, and remove those that an intact journal does not know.

    Other engines take segments of an owner that is no more when they need room.
    """
    columns, geometry = owner.columns, owner.geometry
    there: set[int] = set()
    for path, fd in enumerate(owner.fds):
        for name in names_in(disk, fd):
            match = SEGMENT_NAME.fullmatch(name)
            if match is None:
                continue
            number = int(match[1])
            known = number < len(columns.segments) and columns.segments[number] == path + 1
            whole = disk.stat(name, fd).st_size == geometry.segment_bytes
            if whole and not known and not owner.intact and number % geometry.paths == path:
                # What was lost of the journal may have told of it; its slots tell what is in it.
                columns.open_segment(number, path)
                owner.corrections.append((Kind.SEGMENT, number * geometry.segment_slots, path, 0, b""))
                known = True
            if known and whole:
                there.add(number)
            else:
                disk.unlink(name, fd)
    for number in np.flatnonzero(columns.segments).tolist():
        if number not in there:
            _log.info("the segment %s of the owner %s was taken for others", segment_name(number), owner.name)
            columns.drop_segment(number)
            owner.corrections.append((Kind.DROP, number * geometry.segment_slots, 0, 0, b""))
