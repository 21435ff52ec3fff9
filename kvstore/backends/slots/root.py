"""A root directory: opening and checks, and the files of segments. All methods block; none waits for long.

Each root stands for itself: its tables describe its own segments, so the order of several roots means nothing. The
space in use is the total length of all segments in the directory, so there is no counter that could become wrong.

Files of a segment are made and removed under the ledger's lock, which no store, load or lookup takes. The table gets
its name last and loses it first, so a segment without a table is a stale file.
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
from itertools import count
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.backends.disk import directories, files
from kvstore.backends.disk.files import FileLock
from kvstore.backends.slots.config import SlotsConfig
from kvstore.backends.slots.layout import (
    FORMAT,
    NOTES,
    PAGE,
    ROW,
    ROW_BYTES,
    USES,
    Head,
    decode_head,
    decode_rows,
    encode_head,
    is_namespace,
    stem_of,
    table_number,
)
from kvstore.backends.slots.segment import OpenFile, Segment, Table
from kvstore.diskio import OsDisk
from kvstore.errors import AbsentError, ConfigError
from kvstore.namespace import Namespace

_log = logging.getLogger("kvstore.backends.disk")

_STATE_DIR: Final = ".kvstore"
_LAYOUT_NAME: Final = "disk.json"
_LEDGER_NAME: Final = "ledger.lock"

_LEDGER_WAIT_S: Final = 1.0
_LEDGER_RETRY_S: Final = 0.01
"""Longest wait for the ledger, and the pause between two tries; making a segment takes up to half a second."""

_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NO_FALLOCATE: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})

Digests = npt.NDArray[np.uint64]


class LedgerBusyError(Exception):
    """Another engine holds the ledger's lock; try again."""


@dataclass(slots=True)
class Root:
    """An open root directory. ``position`` is that in the list of roots."""

    disk: OsDisk
    path: str
    position: int
    fd: int
    digest: bytes  # Digest of the namespace.
    state_fd: int = -1  # Its directory ``.kvstore``.
    namespace_fd: int = -1  # The directory of the engine's namespace.
    capacity_bytes: int = 0
    reserve_bytes: int = 0  # Bytes of the filesystem to keep free.
    direct: bool = True  # Whether segments are read and written with direct I/O.
    _refused: set[str] = field(default_factory=set)
    """Tables that can't be used, each named in the log once."""

    def close(self) -> None:
        """Close what is open; idempotent."""
        files.close_all(self.disk, self.fd, self.state_fd, self.namespace_fd)
        self.fd = self.state_fd = self.namespace_fd = -1

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

    def take_segments(self, ours: Collection[int]) -> Iterator[tuple[Segment, Digests]]:
        """Yield the segments of the namespace that no engine holds, with the digests of their slots.

        ``ours``: Numbers of those that this engine holds.
        """
        for number in self.table_numbers():
            if number in ours:
                continue
            try:
                taken = self.take_segment(number)
            except OSError as error:
                # Only the blocks of this segment are missing.
                self._refuse(stem_of(number), error.strerror or str(error))
                continue
            if taken is not None:
                yield taken

    def make_segment(self, slot_bytes: int, slots: int) -> tuple[Segment, Digests] | None:
        """Make a segment; None if capacity, reserve or filesystem leave no room for it.

        Raises:
            LedgerBusyError: Another engine holds the ledger's lock.
            OSError: The disk fails.
        """
        head = Head(secrets.randbits(64), slots, slot_bytes, self.digest)
        with self._ledger_held(), contextlib.ExitStack() as undo:
            for name in self._stale():
                files.remove_segment(self.disk, self.namespace_fd, name)
            if self.missing_bytes(head.segment_bytes) > 0:
                return None
            there = {table_number(name) for name in files.names_in(self.disk, self.namespace_fd)}
            number = next(number for number in count() if number not in there)
            stem = stem_of(number)
            file, table = self._lock_of(stem + ".seg"), self._lock_of(stem + ".tab.tmp")
            for lock in (file, table):
                undo.callback(lock.release)
            undo.callback(self._unlink, stem + ".tab.tmp")
            undo.callback(files.remove_segment, self.disk, self.namespace_fd, stem + ".seg")
            if not file.try_acquire() or not table.try_acquire():
                return None
            try:
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
        content = Table(head, np.zeros(head.groups, np.uint32), np.zeros(slots, ROW), np.zeros(slots, np.bool_))
        return Segment(self.position, number, table, file, content), content.rows["digest"]

    def remove_segment(self, segment: Segment) -> None:
        """Remove the files of a segment that is held, and free its space immediately.

        Raises:
            LedgerBusyError: Another engine holds the ledger's lock.
            OSError: The disk fails.
        """
        with self._ledger_held():
            self._unlink(stem_of(segment.number) + ".tab")
            for ending in (USES, NOTES):
                self._unlink(stem_of(segment.number) + ending)
            files.remove_segment(self.disk, self.namespace_fd, stem_of(segment.number) + ".seg")

    def has_files_of(self, segment: Segment) -> bool:
        """Return whether a segment's files still have their names and lengths."""
        for lock, size_bytes in ((segment.table, segment.head.table_bytes), (segment.file, segment.head.segment_bytes)):
            status = self.disk.fstat(lock.fd)
            if not status.st_nlink or status.st_size != size_bytes:
                return False
        return True

    def is_held(self, number: int) -> bool:
        """Return whether an engine holds a segment.

        Raises:
            OSError: It can't be opened.
        """
        lock = self._lock_of(stem_of(number) + ".tab")
        try:
            return not lock.try_acquire(create=False)
        finally:
            lock.release()

    def stale_files(self) -> dict[str, os.stat_result]:
        """Return the files of the namespace that belong to no segment.

        Raises:
            LedgerBusyError: Another engine holds the ledger's lock.
            OSError: The disk fails.
        """
        with self._ledger_held():
            return {name: self.disk.stat(name, self.namespace_fd) for name in self._stale()}

    def remove_stale(self, names: Collection[str]) -> int:
        """Remove files that still belong to no segment; return their number.

        Raises:
            LedgerBusyError: Another engine holds the ledger's lock.
            OSError: The disk fails.
        """
        with self._ledger_held():
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
        with self._ledger_held():
            names = self._names()
            if self.namespace_fd >= 0 and not any(table_number(name) is not None for name in names):
                for name in names:
                    self._unlink(name)
                with contextlib.suppress(OSError):
                    self.disk.rmdir(self.digest.hex(), self.fd)

    def missing_bytes(self, more_bytes: int) -> int:
        """Return how far ``more_bytes`` would exceed the capacity or the free space."""
        filesystem = self.disk.statvfs(self.fd)
        free = filesystem.f_bavail * filesystem.f_frsize
        return more_bytes + max(self._used_bytes() - self.capacity_bytes, self.reserve_bytes - free)

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
        """Return the slots of a segment that other engines have read since the last call.

        Raises:
            OSError: The disk fails.
        """
        name = stem_of(segment.number) + USES
        with contextlib.suppress(FileNotFoundError):
            if self.disk.stat(name, self.namespace_fd).st_size:
                with files.opened(self.disk, name, os.O_RDWR, self.namespace_fd) as (fd, size):
                    marks = files.read_at(self.disk, fd, 0, min(size, segment.head.slots))
                    # Marks set between the read and this call are lost.
                    self.disk.ftruncate(fd, 0)
                    return list(np.flatnonzero(np.frombuffer(marks, np.uint8)).tolist())
        return []

    def _used_bytes(self) -> int:
        used = 0
        for namespace in filter(is_namespace, files.names_in(self.disk, self.fd)):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                fd = files.open_own_directory(self.disk, namespace, self.fd)
                try:
                    entries = files.entries_in(self.disk, fd)
                finally:
                    self.disk.close(fd)
                used += sum(status.st_size for name, status in entries.items() if name.endswith(".seg"))
        return used

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
                try:
                    if not lock.try_acquire(create=False, flags=os.O_RDWR):
                        return None
                except OSError as error:
                    if error.errno not in (errno.EROFS, errno.EACCES):
                        raise
                    # Loads continue on a disk that has become read-only.
                    if not lock.try_acquire(create=False):
                        return None
            file, table = locks
            content = self._read_table(stem, table.fd, file.fd)
            if content is None:
                return None
            undo.pop_all()
        return Segment(self.position, number, table, file, content), content.rows["digest"]

    def open_segment(self, number: int) -> tuple[Segment, Digests] | None:
        """Open a segment that this engine does not hold; None if it can't be used.

        Raises:
            OSError: It can't be opened or read.
        """
        stem = stem_of(number)
        with contextlib.ExitStack() as undo:
            opened = [
                OpenFile(self.disk, files.open_regular(self.disk, stem + end, os.O_RDONLY, self.namespace_fd)[0])
                for end in (".tab", ".seg")
            ]
            for each in opened:
                undo.callback(each.release)
            table, file = opened
            content = self._read_table(stem, table.fd, file.fd)
            if content is None:
                return None
            undo.pop_all()
        return Segment(self.position, number, table, file, content, is_ours=False), content.rows["digest"]

    def _read_table(self, stem: str, table_fd: int, file_fd: int) -> Table | None:
        """Read the table of a segment, and set up the segment's file for transfers; None if it can't be used."""
        head = decode_head(files.read_at(self.disk, table_fd, 0, PAGE), self.digest)
        if head is None:
            self._refuse(stem, "the head of the table is damaged, or of another format")
            return None
        generations = read_generations(self.disk, table_fd, head)
        content = files.read_at(self.disk, table_fd, head.rows_at, head.slots * ROW_BYTES)
        if len(content) != head.slots * ROW_BYTES or self.disk.fstat(file_fd).st_size != head.segment_bytes:
            self._refuse(stem, "a file has another length")
            return None
        self._set_direct(file_fd)
        return Table(head, generations, *decode_rows(content, np.arange(head.slots), head))

    def _refuse(self, stem: str, reason: str) -> None:
        if stem not in self._refused:
            self._refused.add(stem)
            _log.warning("the segment %s in %s can't be used: %s", stem, self.path, reason)

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

    def _stale(self) -> list[str]:
        """Return what an engine left that ended while it made or removed a segment; the caller holds the ledger."""
        names = set(self._names())

        def is_stale(name: str) -> bool:
            stem = name.partition(".")[0]
            return name.endswith(".tab.tmp") or (stem.isdecimal() and stem + ".tab" not in names)

        return sorted(filter(is_stale, names))

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.disk.unlink(name, self.namespace_fd)

    @contextlib.contextmanager
    def _ledger_held(self) -> Iterator[None]:
        lock = FileLock(self.disk, self.state_fd, _LEDGER_NAME)
        deadline = time.monotonic() + _LEDGER_WAIT_S
        while not lock.try_acquire():
            if time.monotonic() >= deadline:
                raise LedgerBusyError
            time.sleep(_LEDGER_RETRY_S)
        try:
            yield
        finally:
            lock.release()


def read_generations(disk: OsDisk, table_fd: int, head: Head) -> npt.NDArray[np.uint32]:
    """Return the generations of the groups of rows of a table.

    Raises:
        OSError: The table can't be read, or is too short.
    """
    content = files.read_at(disk, table_fd, PAGE, head.groups * 4)
    if len(content) != head.groups * 4:
        raise OSError(errno.EIO, "the table is too short")
    return np.frombuffer(content, np.uint32)


def open_root(disk: OsDisk, position: int, config: SlotsConfig, namespace: Namespace) -> Root:
    """Open a root directory, check it, and create its state directory and the namespace's directory.

    Raises:
        ConfigError: The directory can't be used as it is.
    """
    path = _path_of(config, position)
    root: Root | None = None
    try:
        root = Root(disk, path, position, directories.open_directory(disk, path), namespace.digest)
        directories.check_mode(disk.fstat(root.fd).st_mode, path)
        root.state_fd = directories.enter(disk, _STATE_DIR, root.fd, path)
        if _check_layout(disk, root) is None:
            files.write_json(disk, _LAYOUT_NAME, root.state_fd, {"format": FORMAT})
        filesystem = disk.statvfs(root.fd)
        total = filesystem.f_blocks * filesystem.f_frsize
        shares = 1 if config.capacity.percent is not None else len(config.paths)
        root.capacity_bytes = config.capacity.resolve(total) // shares
        root.reserve_bytes = config.reserve.resolve(total)
        root.direct = config.direct != "off" and directories.takes_direct(disk, _LEDGER_NAME, root.state_fd, path)
        if config.direct == "on" and not root.direct:
            raise ConfigError(
                f"'direct' is 'on', but the filesystem of {path!r} refuses direct I/O. Use 'auto', or a directory on "
                "another filesystem."
            )
        root.namespace_fd = directories.enter(disk, namespace.hex, root.fd, path)
        # Blocks are readable without this file, so a full disk or a foreign object there must not prevent a start.
        with contextlib.suppress(OSError):
            if files.read_json(disk, "namespace.json", root.namespace_fd) is None:
                files.write_json(disk, "namespace.json", root.namespace_fd, namespace.document())
    except BaseException as error:
        if root is not None:
            root.close()
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise AbsentError(
                f"'path' is {path!r}, which this user may not use ({error.strerror}). Change its owner or mode, "
                "remount it, or name another directory."
            ) from error
        raise
    return root


def check_root(disk: OsDisk, position: int, config: SlotsConfig) -> None:
    """Refuse an existing root whose state :func:`open_root` would refuse; writes nothing.

    Raises:
        ConfigError: The directory can't be used as it is.
    """
    path = _path_of(config, position)
    # Missing directories are made when the root opens; access is checked elsewhere, for every tier with a directory.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        root = Root(disk, path, position, disk.open_root(path), b"")
        try:
            root.state_fd = directories.own_directory(disk, _STATE_DIR, root.fd, path)
            _check_layout(disk, root)
        finally:
            root.close()


def open_existing_root(disk: OsDisk, position: int, config: SlotsConfig) -> Root:
    """Open a root for the admin tools, without a namespace, and change nothing.

    Raises:
        ConfigError: There is no tier, or it is of another format.
        OSError: It can't be opened.
    """
    path = _path_of(config, position)
    try:
        root = Root(disk, path, position, disk.open_root(path), b"", direct=False)
        try:
            root.state_fd = files.open_own_directory(disk, _STATE_DIR, root.fd)
            _check_layout(disk, root)
        except BaseException:
            root.close()
            raise
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"There is no file tier at {path!r}. Give the 'path' of one.") from error
    return root


def _path_of(config: SlotsConfig, position: int) -> str:
    return os.path.abspath(os.path.expanduser(config.paths[position]))


def _check_layout(disk: OsDisk, root: Root) -> dict[str, Any] | None:
    """Return what the root states of itself, or None if it is new."""
    found = files.read_json(disk, _LAYOUT_NAME, root.state_fd)
    if found is not None and found.get("format") != FORMAT:
        raise ConfigError(
            f"{root.path!r} is of format {found.get('format')!r}, this kvstore knows {FORMAT}. Use the kvstore that "
            "made it, or name another 'path'."
        )
    return found
