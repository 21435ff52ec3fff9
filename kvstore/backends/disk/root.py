"""A root directory and the files of segments. All methods block; none waits for long.

Each root stands for itself: its tables describe its own segments, so the order of several roots means nothing. The
space in use is the total length of all segments in the directory, so there is no counter that could become wrong.

Files of a segment are made and removed under the ledger's lock, which no store, load or lookup takes. The table gets
its name last and loses it first, so a segment without a table is stale; so is a table without its segment.

A segment that no engine holds is room, with or without blocks. So an engine gives a segment to another one by releasing
its locks: there is no state in between, and its blocks stay.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.backends.disk import files
from kvstore.backends.disk.files import FileLock
from kvstore.backends.disk.layout import (
    FORMAT,
    LAYOUT_NAME,
    NOTES,
    PAGE,
    ROW,
    ROW_BYTES,
    STATE_DIR,
    USES,
    Head,
    Rows,
    decode_head,
    decode_rows,
    encode_head,
    is_namespace,
    is_segment,
    stem_of,
    table_number,
)
from kvstore.backends.disk.ledger import LedgerBusyError, ledger_held
from kvstore.backends.disk.members import Member, Members, is_locked
from kvstore.backends.disk.segment import HeldFile, OpenFile, Segment, Table
from kvstore.config import Capacity
from kvstore.diskio import OsDisk

_log = logging.getLogger("kvstore.backends.disk")

_LOOK_S: Final = 10.0
"""Interval of looking for segments without a holder while the same engines are there."""

_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NO_FALLOCATE: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})

Digests = npt.NDArray[np.uint64]


class Stored(NamedTuple):
    """A segment in a root, of any namespace."""

    namespace: str
    stem: str
    size_bytes: int


class Due(Enum):
    """A segment that an engine must give up."""

    NONE = 0
    GIVE = 1  # To an engine that asks for one.
    REMOVE = 2  # To restore capacity or reserve.


@dataclass(slots=True)
class Root:
    """An open root directory. ``position`` is that in the list of roots."""

    disk: OsDisk
    path: str
    position: int
    fd: int
    state_fd: int  # Its directory ``.kvstore``.
    namespace_fd: int  # The directory of the engine's namespace.
    digest: bytes  # Digest of the namespace.
    capacity: Capacity  # Of this root.
    reserve: Capacity
    direct: bool  # Whether segments are read and written with direct I/O.
    members: Members
    capacity_bytes: int = 0
    reserve_bytes: int = 0  # Bytes of the filesystem to keep free.
    unused_bytes: int = 0  # Free bytes of the filesystem at the last look.
    _refused: set[str] = field(default_factory=set)
    """Segments that can't be used or removed, each named in the log once."""
    _open: set[Segment] = field(default_factory=set)
    """Segments that were opened here, so that none stays open, or locked, if its opener was cancelled meanwhile."""
    _open_max: int = 64  # At more, those that were closed are dropped; not at each, because there are thousands.
    _seen: dict[str, list[Stored]] = field(default_factory=dict)
    """Segments by namespace, as they were listed last."""
    _due_since: float = 0.0  # Time since which some engine must give up a segment; 0: none must.
    _looked: object = None
    """The other engines, and the time of change of the directory, at the last look for segments without a holder."""
    _looked_at: float = 0.0

    def close(self) -> None:
        """Close what is open, with all segments; idempotent. No other call is running."""
        for segment in self._open:
            segment.close()
        self.members.leave()
        files.close_all(self.disk, self.fd, self.state_fd, self.namespace_fd)
        self.fd = self.state_fd = self.namespace_fd = -1

    def note_roots(self, count: int) -> None:
        """Record with how many roots this one was used last, for the next start (``check_drives``)."""
        document = {"format": FORMAT, "roots": count}
        found = files.read_json(self.disk, LAYOUT_NAME, self.state_fd)
        # A root that is not new is usable with another number, also on a full disk.
        with contextlib.suppress(LedgerBusyError, *(() if found is None else (OSError,))):
            # Of starts of older versions that were killed.
            left = [name for name in files.names_in(self.disk, self.state_fd) if name.endswith(".tmp")]
            if left or found != document:
                with ledger_held(self.disk, self.state_fd):
                    for name in left:
                        with contextlib.suppress(FileNotFoundError):
                            self.disk.unlink(name, self.state_fd)
                    files.write_json(self.disk, LAYOUT_NAME, self.state_fd, document)

    def enter(self, digest: bytes) -> None:
        """Open the directory of another namespace, if there is one.

        Raises:
            OSError: It can't be opened.
        """
        files.close_all(self.disk, self.namespace_fd)
        self.digest, self.namespace_fd = digest, -1
        with contextlib.suppress(FileNotFoundError):
            self.namespace_fd = files.open_own_directory(self.disk, digest.hex(), self.fd)

    def table_numbers(self) -> list[int]:
        """Return the numbers of the namespace's segments."""
        return sorted(number for name in self._names() if (number := table_number(name)) is not None)

    def held_segments(self) -> list[int]:
        """Return the numbers of the namespace's segments that engines hold.

        Raises:
            LedgerBusyError: Another engine holds the ledger's lock.
            OSError: The disk fails.
        """
        with ledger_held(self.disk, self.state_fd):
            stored = [each for each in self._stored() if each.namespace == self.digest.hex()]
            ours = self._held_here()
            return [int(each.stem) for each in stored if self._is_held(each, ours)]

    def take_segments(self, held_bytes: int) -> Iterator[tuple[Segment, Digests]]:
        """Yield segments of the namespace that no engine held and this one holds now, up to its share of the space.

        An engine that is alone in the root takes all of them. ``held_bytes``: Length of those that it held before.
        """
        others = self.members.others()
        now, changed = time.monotonic(), self.disk.fstat(self.namespace_fd).st_mtime_ns
        found = changed, {each.name for each in others}
        # An engine that ends leaves its segments; one that gives one up does so for another that asks for it.
        if found == self._looked and now - self._looked_at < _LOOK_S:
            return
        stored = self._stored()
        with ledger_held(self.disk, self.state_fd):
            unheld = self._unheld(stored, others)
        # After a change it looks twice: an engine that has ended may hold its segments a little longer than its file.
        self._looked, self._looked_at = found, now if found == self._looked else 0.0
        share = (self._free_bytes(stored) + _size_of(stored)) // (len(others) + 1)
        spare = _size_of(unheld) - _asked_bytes(others, held_bytes)
        for each in sorted(each for each in unheld if each.namespace == self.digest.hex()):
            if spare < each.size_bytes or (others and held_bytes + each.size_bytes > share):
                return
            try:
                taken = self._take(each.stem)
            except OSError:
                return
            if taken is not None:
                held_bytes += each.size_bytes
                spare -= each.size_bytes
                yield taken

    def get_segment(self, slot_bytes: int, slots: int, held_bytes: int) -> tuple[Segment, Digests] | None:
        """Take a segment that no engine holds, or make one; None if there is no room, which is asked for then.

        Other segments without a holder are removed for a new one: first those of unused namespaces, the oldest of them
        first. For each engine that asks for a segment and holds less than this one, room is left.

        Raises:
            LedgerBusyError: Another engine holds the ledger's lock.
            OSError: The disk fails.
        """
        head = Head(secrets.randbits(64), slots, slot_bytes, self.digest)
        if self.is_gone():
            raise FileNotFoundError(errno.ENOENT, "deleted or renamed", self.path)
        with ledger_held(self.disk, self.state_fd):
            others, stored = self.members.others(), self._stored()
            unheld = self._unheld(stored, others)
            missing = head.segment_bytes - self._free_bytes(stored)
            got: tuple[Segment, Digests] | None = None
            if missing + _asked_bytes(others, held_bytes) <= _size_of(unheld):
                ours = (each.stem for each in unheld if each.namespace == self.digest.hex())
                got = next(filter(None, map(self._take, ours)), None)
                # A quota may leave less room than the filesystem reports.
                while got is None and (missing > 0 or (got := self._make(head)) is None) and unheld:
                    missing -= self._remove(unheld.pop(0))
        if got is None:
            self.members.state(held_bytes, head.segment_bytes)
        else:
            self.members.state(held_bytes + got[0].head.segment_bytes)
        return got

    def due(self, held_bytes: int, asked_bytes: int, segment_bytes: int, largest_s: float) -> Due:
        """State what this engine holds and asks for; return whether it must give up a segment of ``segment_bytes``.

        If capacity or reserve is exceeded, segments without a holder are removed, and then one of the engine that holds
        most. It also gives one to an engine that asks for it and would then hold no more. If it does neither for
        ``largest_s``, because it is stopped, any other engine does.

        Raises:
            LedgerBusyError: Another engine holds the ledger's lock.
            OSError: The disk fails.
        """
        self.members.state(held_bytes, asked_bytes)
        others, stored = self.members.others(), self._stored()
        due = Due.NONE
        free = self._free_bytes(stored)
        if free < 0:
            due = Due.REMOVE if self._reclaim(others) else Due.NONE
        elif behind := [each for each in others if each.is_behind(held_bytes, segment_bytes)]:
            # Free space and segments without a holder are there for the engines that ask.
            with ledger_held(self.disk, self.state_fd):
                free += _size_of(self._unheld(stored, others))
            due = Due.GIVE if free < sum(each.asked_bytes for each in behind) else Due.NONE
        now = time.monotonic()
        self._due_since = (self._due_since or now) if due is not Due.NONE else 0.0
        largest = max([(each.held_bytes, each.name) for each in others], default=(0, ""))
        is_turn = (held_bytes, self.members.name) > largest or now - self._due_since >= largest_s
        if due is Due.NONE or not is_turn:
            return Due.NONE
        self._due_since = now
        return due

    def remove_segment(self, segment: Segment) -> None:
        """Remove the files of a segment that is held, and free its space immediately.

        Raises:
            LedgerBusyError: Another engine holds the ledger's lock.
            OSError: The disk fails.
        """
        stem = stem_of(segment.number)
        with ledger_held(self.disk, self.state_fd):
            # The name of a file that was deleted or moved may be another engine's now.
            if files.named(self.disk, segment.table.fd, stem + ".tab", self.namespace_fd) is not None:
                for ending in (".tab", USES, NOTES):
                    self._unlink(stem + ending)
            if files.named(self.disk, segment.file.fd, stem + ".seg", self.namespace_fd) is not None:
                self._unlink(stem + ".seg")
            self.disk.ftruncate(segment.file.fd, 0)

    def has_files_of(self, segment: Segment) -> bool:
        """Return whether a segment's files still have their names, and lengths with which engines take them."""
        stem, head = stem_of(segment.number), segment.head
        # From the root, because the directory may have been renamed.
        names = (f"{self.digest.hex()}/{stem}{ending}" for ending in (".tab", ".seg"))
        fds = segment.table.fd, segment.file.fd
        table, file = (files.named(self.disk, fd, name, self.fd) for fd, name in zip(fds, names, strict=True))
        if table is None or file is None:
            return False
        return table.st_size >= head.table_bytes and file.st_size == head.segment_bytes

    def is_gone(self) -> bool:
        """Return whether its directories were deleted or renamed, so that no other engine looks there."""
        there = (self.state_fd, STATE_DIR), (self.namespace_fd, self.digest.hex())
        return any(files.named(self.disk, fd, name, self.fd) is None for fd, name in there)

    def stale_files(self) -> dict[str, os.stat_result]:
        """Return the files of the namespace that belong to no segment.

        Raises:
            LedgerBusyError: Another engine holds the ledger's lock.
            OSError: The disk fails.
        """
        with ledger_held(self.disk, self.state_fd):
            return self._stale()

    def remove_stale(self, names: Collection[str]) -> int:
        """Remove files that still belong to no segment; return their number.

        Raises:
            LedgerBusyError: Another engine holds the ledger's lock.
            OSError: The disk fails.
        """
        with ledger_held(self.disk, self.state_fd):
            found = [name for name in self._stale() if name in names]
            for name in found:
                files.remove_segment(self.disk, self.namespace_fd, name)
        return len(found)

    def remove_namespace(self) -> None:
        """Remove the directory of the namespace, unless it has segments.

        Raises:
            LedgerBusyError: Another engine holds the ledger's lock.
            OSError: The disk fails.
        """
        with ledger_held(self.disk, self.state_fd):
            names = self._names()
            if self.namespace_fd >= 0 and not any(table_number(name) is not None for name in names):
                for name in names:
                    self._unlink(name)
                with contextlib.suppress(OSError):
                    self.disk.rmdir(self.digest.hex(), self.fd)

    def mark_uses(self, number: int, slots: Sequence[int]) -> None:
        """Mark slots of a segment as read, for the engine that holds it.

        The file is not mapped into memory: on a full disk, a page fault without room for the page would kill the
        process.

        Raises:
            OSError: The disk fails.
        """
        flags = os.O_RDWR | os.O_CREAT
        with files.opened(self.disk, stem_of(number) + USES, flags, self.namespace_fd) as (fd, _):
            for slot in slots:
                self.disk.pwritev(fd, [b"\1"], slot)

    def take_uses(self, segment: Segment) -> list[int]:
        """Return the slots of a segment that other engines have read since the last call, as far as its file works."""
        name = stem_of(segment.number) + USES
        with contextlib.suppress(OSError):
            if self.disk.stat(name, self.namespace_fd).st_size:
                with files.opened(self.disk, name, os.O_RDWR, self.namespace_fd) as (fd, size):
                    marks = files.read_at(self.disk, fd, 0, min(size, segment.head.slots))
                    # Marks set between the read and this call are lost.
                    self.disk.ftruncate(fd, 0)
                    return list(np.flatnonzero(np.frombuffer(marks, np.uint8)).tolist())
        return []

    def free_bytes(self) -> int:
        """Return the bytes that capacity and reserve leave for more segments; negative if one of them is exceeded."""
        return self._free_bytes(self._stored())

    def measure(self) -> None:
        """Look at the filesystem again: its free bytes, and shares of its size, because a volume may grow."""
        filesystem = self.disk.statvfs(self.fd)
        total = filesystem.f_blocks * filesystem.f_frsize
        self.capacity_bytes, self.reserve_bytes = self.capacity.resolve(total), self.reserve.resolve(total)
        self.unused_bytes = filesystem.f_bavail * filesystem.f_frsize

    def _free_bytes(self, stored: Collection[Stored]) -> int:
        """Return the :meth:`free_bytes`, given all segments."""
        self.measure()
        return min(self.capacity_bytes - _size_of(stored), self.unused_bytes - self.reserve_bytes)

    def _stored(self) -> list[Stored]:
        seen: dict[str, list[Stored]] = {}
        for namespace in filter(is_namespace, files.names_in(self.disk, self.fd)):
            try:
                with self._namespace_opened(namespace) as fd:
                    entries = files.entries_in(self.disk, fd, is_segment)
            except (FileNotFoundError, NotADirectoryError, PermissionError):
                continue
            except OSError as error:
                if namespace == self.digest.hex():
                    raise
                # Its segments count as they were seen last, and only they can't be taken or removed.
                self._refuse(f"{namespace}/*", f"they can't be listed: {error.strerror or error}")
                seen[namespace] = self._seen.get(namespace, [])
                continue
            seen[namespace] = [
                Stored(namespace, name[:-4], status.st_size)
                for name, status in entries.items()
                if files.is_own_file(status)
            ]
        self._seen = seen
        return [each for some in seen.values() for each in some]

    def _unheld(self, stored: Collection[Stored], others: Collection[Member]) -> list[Stored]:
        """Return the segments without a holder: those of unused namespaces first, of these the oldest.

        The caller holds the ledger, because the lock of a segment can't be taken while another engine looks at it.
        """
        in_use = {self.digest.hex(), *(each.namespace for each in others)}
        ours = self._held_here()
        unheld = [each for each in stored if not self._is_held(each, ours)]
        return sorted(unheld, key=lambda each: (each.namespace in in_use, self._changed_at(each)))

    def _changed_at(self, stored: Stored) -> float:
        """Return when the table of a segment was written last; 0 of a segment without a table."""
        with contextlib.suppress(OSError), self._namespace_opened(stored.namespace) as namespace_fd:
            return self.disk.stat(stored.stem + ".tab", namespace_fd).st_mtime
        return 0.0

    def _held_here(self) -> set[tuple[str, str]]:
        """Return namespace and stem of the segments that this engine holds."""
        ours = [each for each in self._open.copy() if each.is_ours and each.file.fd >= 0]
        return {(self.digest.hex(), stem_of(each.number)) for each in ours}

    def _is_held(self, stored: Stored, ours: Collection[tuple[str, str]]) -> bool:
        if stored[:2] in ours:
            return True
        # One that can't be opened is another user's, damaged, or has just been removed.
        with (
            contextlib.suppress(OSError),
            self._namespace_opened(stored.namespace) as namespace_fd,
            files.opened(self.disk, stored.stem + ".seg", os.O_RDONLY, namespace_fd) as (fd, _),
        ):
            return is_locked(self.disk, fd)
        return True

    def _reclaim(self, others: Collection[Member]) -> bool:
        """Remove segments without a holder until capacity and reserve hold; return whether more must be removed."""
        with ledger_held(self.disk, self.state_fd):
            # Another engine may have removed some.
            stored = self._stored()
            missing, unheld = -self._free_bytes(stored), self._unheld(stored, others)
            while missing > 0 and unheld:
                missing -= self._remove(unheld.pop(0))
            return missing > 0

    def _remove(self, stored: Stored) -> int:
        """Remove a segment without a holder; return its length, or 0. The caller holds the ledger."""
        try:
            with self._namespace_opened(stored.namespace) as fd, contextlib.ExitStack() as stack:
                for ending in (".seg", ".tab"):
                    lock = FileLock(self.disk, fd, stored.stem + ending)
                    stack.callback(lock.release)
                    # A segment without a table was made or removed in part.
                    with contextlib.suppress(FileNotFoundError):
                        if not lock.try_acquire(create=False):
                            return 0
                for ending in (".tab", ".tab.tmp", USES, NOTES):
                    with contextlib.suppress(FileNotFoundError):
                        self.disk.unlink(stored.stem + ending, fd)
                files.remove_segment(self.disk, fd, stored.stem + ".seg")
        except OSError as error:
            # Only its space stays occupied.
            self._refuse(f"{stored.namespace}/{stored.stem}", f"it can't be removed: {error.strerror or error}")
            return 0
        return stored.size_bytes

    def _take(self, stem: str) -> tuple[Segment, Digests] | None:
        """Lock and read a segment; None if an engine holds it or it can't be used.

        Raises:
            OSError: The disk is read-only.
        """
        try:
            return self.take_segment(int(stem))
        except FileNotFoundError:
            # It was removed since, or lacks a table.
            return None
        except OSError as error:
            if error.errno == errno.EROFS:
                # Its blocks are loaded all the same, as those of other engines.
                raise
            # Only the blocks of this segment are missing.
            self._refuse(stem, f"it can't be used: {error.strerror or error}")
            return None

    def take_segment(self, number: int) -> tuple[Segment, Digests] | None:
        """Lock the files of a segment and read its table; None if an engine holds it or it can't be used.

        Raises:
            OSError: It can't be opened or read.
        """
        stem = stem_of(number)
        with contextlib.ExitStack() as undo:
            locks = self._lock_of(stem + ".seg"), self._lock_of(stem + ".tab")
            for lock in locks:
                undo.callback(lock.release)
                if not lock.try_acquire(create=False, flags=os.O_RDWR):
                    return None
            file, table = locks
            content = self._read_table(stem, table.fd, file.fd)
            if content is None:
                return None
            undo.pop_all()
        return self._opened(number, table, file, content)

    def open_segment(self, number: int) -> tuple[Segment, Digests] | None:
        """Open a segment that this engine does not hold; None if it can't be used.

        Raises:
            OSError: It can't be opened or read.
        """
        stem = stem_of(number)
        with contextlib.ExitStack() as undo:
            opened: list[OpenFile] = []
            for ending in (".tab", ".seg"):
                fd, _ = files.open_regular(self.disk, stem + ending, os.O_RDONLY, self.namespace_fd)
                opened.append(OpenFile(self.disk, fd))
                undo.callback(opened[-1].release)
            table, file = opened
            content = self._read_table(stem, table.fd, file.fd)
            if content is None:
                return None
            undo.pop_all()
        return self._opened(number, table, file, content, is_ours=False)

    def _opened(
        self, number: int, table: HeldFile, file: HeldFile, content: Table, *, is_ours: bool = True
    ) -> tuple[Segment, Digests]:
        segment = Segment(self.position, number, table, file, content, is_ours=is_ours)
        # Single operations, because several threads do so.
        self._open.add(segment)
        if len(self._open) > self._open_max:
            self._open.difference_update([each for each in self._open.copy() if each.file.fd < 0])
            self._open_max = 2 * len(self._open)
        return segment, content.rows["digest"]

    def _read_table(self, stem: str, table_fd: int, file_fd: int) -> Table | None:
        """Read the table of a segment, and set up the segment's file for transfers; None if it can't be used."""
        head = decode_head(files.read_at(self.disk, table_fd, 0, PAGE), self.digest)
        if head is None:
            self._refuse(stem, "it can't be used: the head of the table is damaged, or of another format")
            return None
        # Before the rows are read: a table that does not belong to the segment may be longer than the memory.
        table_bytes, file_bytes = (self.disk.fstat(fd).st_size for fd in (table_fd, file_fd))
        if table_bytes < head.table_bytes or file_bytes != head.segment_bytes:
            self._refuse(stem, "it can't be used: a file has another length")
            return None
        generations = read_generations(self.disk, table_fd, head)
        self._set_direct(file_fd)
        return Table(head, generations, *read_rows(self.disk, table_fd, head, range(head.slots)))

    def _make(self, head: Head) -> tuple[Segment, Digests] | None:
        """Make a segment; None if the filesystem has no room for it. The caller holds the ledger."""
        for name in self._stale():
            # What can't be removed keeps its name, and nothing else.
            with contextlib.suppress(OSError):
                files.remove_segment(self.disk, self.namespace_fd, name)
        there = {name.partition(".")[0] for name in self._names()}
        number = next(number for number in count() if stem_of(number) not in there)
        stem = stem_of(number)
        with contextlib.ExitStack() as undo:
            file, table = self._lock_of(stem + ".seg"), self._lock_of(stem + ".tab.tmp")
            for lock in (file, table):
                undo.callback(lock.release)
            undo.callback(files.remove_segment, self.disk, self.namespace_fd, stem + ".seg")
            undo.callback(self._unlink, stem + ".tab.tmp")
            try:
                if not file.try_acquire() or not table.try_acquire():
                    return None
                self._allocate(file.fd, head.segment_bytes)
                self._allocate(table.fd, head.table_bytes)
                files.write_at(self.disk, table.fd, encode_head(head), 0)
                self.disk.fdatasync(table.fd)
            except OSError as error:
                if error.errno in _NO_ROOM:
                    return None
                raise
            self.disk.rename(stem + ".tab.tmp", stem + ".tab", self.namespace_fd)
            undo.pop_all()
        self._set_direct(file.fd)
        rows, intact = np.zeros(head.slots, ROW), np.zeros(head.slots, np.bool_)
        return self._opened(number, table, file, Table(head, np.zeros(head.groups, np.uint32), rows, intact))

    def _refuse(self, stem: str, reason: str) -> None:
        if stem not in self._refused:
            self._refused.add(stem)
            _log.warning("segment %s in %s: %s", stem, self.path, reason)

    def _lock_of(self, name: str) -> FileLock:
        return FileLock(self.disk, self.namespace_fd, name)

    def _set_direct(self, fd: int) -> None:
        if self.direct:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)

    def _allocate(self, fd: int, size_bytes: int) -> None:
        try:
            self.disk.syscall("fallocate", os.posix_fallocate, fd, 0, size_bytes)
        except OSError as error:
            if error.errno not in _NO_FALLOCATE:
                raise
            # Without preallocation, stores fail once the filesystem is full.
            self.disk.ftruncate(fd, size_bytes)

    def _names(self) -> list[str]:
        return files.names_in(self.disk, self.namespace_fd) if self.namespace_fd >= 0 else []

    def _stale(self) -> dict[str, os.stat_result]:
        """Return the files of incomplete segments; the caller holds the ledger.

        An engine leaves them that ends while it makes or removes a segment, and a user who deletes one of its files.
        """
        entries = files.entries_in(self.disk, self.namespace_fd) if self.namespace_fd >= 0 else {}

        def is_stale(name: str) -> bool:
            stem = name.partition(".")[0]
            is_whole = stem + ".tab" in entries and stem + ".seg" in entries
            # Older versions gave "namespace.json" a temporary name of its own at each start.
            is_part = name.endswith(".tab.tmp") or ((stem.isdecimal() or name.endswith(".tmp")) and not is_whole)
            return is_part and files.is_own_file(entries[name])

        return {name: entries[name] for name in sorted(filter(is_stale, entries))}

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.disk.unlink(name, self.namespace_fd)

    @contextlib.contextmanager
    def _namespace_opened(self, name: str) -> Iterator[int]:
        if name == self.digest.hex() and self.namespace_fd >= 0:
            yield self.namespace_fd
            return
        fd = files.open_own_directory(self.disk, name, self.fd)
        try:
            yield fd
        finally:
            files.close_all(self.disk, fd)


def _size_of(stored: Collection[Stored]) -> int:
    return sum(each.size_bytes for each in stored)


def _asked_bytes(others: Collection[Member], held_bytes: int) -> int:
    """Return the room that engines ask for which would still hold no more than one with ``held_bytes``."""
    return sum(each.asked_bytes for each in others if each.is_behind(held_bytes))


def read_generations(disk: OsDisk, table_fd: int, head: Head) -> npt.NDArray[np.uint32]:
    """Return the generations of the groups of rows of a table.

    Raises:
        OSError: The table can't be read, or is too short.
    """
    return np.frombuffer(_read_whole(disk, table_fd, PAGE, head.groups * 4), np.uint32)


def read_rows(disk: OsDisk, table_fd: int, head: Head, slots: range) -> tuple[Rows, npt.NDArray[np.bool_]]:
    """Return rows of a table, and which of them are intact.

    Raises:
        OSError: The table can't be read, or is too short.
    """
    content = _read_whole(disk, table_fd, head.row_at(slots.start), len(slots) * ROW_BYTES)
    return decode_rows(content, np.arange(slots.start, slots.stop), head)


def _read_whole(disk: OsDisk, table_fd: int, offset: int, size_bytes: int) -> memoryview:
    content = files.read_at(disk, table_fd, offset, size_bytes)
    if len(content) != size_bytes:
        raise OSError(errno.EIO, "the table is too short")
    return content
