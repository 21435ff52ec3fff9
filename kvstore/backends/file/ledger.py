"""The ledger: how many bytes and files the root holds, agreed on by all processes that use it.

A small file, changed under its lock. A block is entered before it is written, and struck out after that failed or after
it was removed, so whatever dies in between leaves the ledger too high, never too low; :meth:`Ledger.reconcile` sets it
right after a scan. What is struck out is gathered and entered with the next change, to spare system calls. Each writer
also says what it is writing and removing: a scan may see that already or not.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import xxhash

from kvstore.backends.file.layout import LEDGER_NAME
from kvstore.backends.file.space import Usage
from kvstore.diskio import OsDisk, read_into, write_all

__all__ = ["LEDGER_BYTES", "Ledger", "LedgerState", "Removal", "Work"]

LEDGER_BYTES: Final = 8192
_MAGIC: Final = b"KVLEDGR1"
_HEADER: Final = struct.Struct("<8sQQQQQQ")
_SLOT: Final = struct.Struct("<96sQQQQ")
_CHECKSUM_AT: Final = _HEADER.size - 8
_SLOTS_AT: Final = 128
_SLOTS_MAX: Final = (LEDGER_BYTES - _SLOTS_AT) // _SLOT.size
_LOCK_TIMEOUT_S: Final = 2.0
"""How long to wait for another process that holds the ledger: it does so for microseconds, unless it was stopped."""


class Work(NamedTuple):
    """What a writer has in hand.

    Attributes:
        writing_bytes: Bytes entered, whose writing it has not finished.
        writing_files: Files of these.
        removing_bytes: Most bytes that it is about to remove and has not struck out.
        removing_files: Files of these.
    """

    writing_bytes: int = 0
    writing_files: int = 0
    removing_bytes: int = 0
    removing_files: int = 0

    def plus(self, other: Work, sign: int = 1) -> Work:
        """Return the sum (or difference), never below zero."""
        return Work(*(max(0, mine + sign * its) for mine, its in zip(self, other, strict=True)))


@dataclass(slots=True, eq=False)
class Removal:
    """Files about to be removed.

    Attributes:
        size_bytes: The most that they are charged.
        files: How many at most.
        is_begun: Whether the ledger knows.
    """

    size_bytes: int
    files: int
    is_begun: bool = False


@dataclass(slots=True)
class LedgerState:
    """What the ledger says. The totals only grow; what is used is their difference.

    Attributes:
        bytes_added: Bytes ever entered.
        bytes_removed: Bytes ever struck out.
        files_added: Files ever entered.
        files_removed: Files ever struck out.
        is_counted: Whether it has been set right by a scan since it was made; until then it says nothing.
        work: What each writer has in hand.
    """

    bytes_added: int = 0
    bytes_removed: int = 0
    files_added: int = 0
    files_removed: int = 0
    is_counted: bool = False
    work: dict[str, Work] = field(default_factory=dict)

    @property
    def used_bytes(self) -> int:
        """Bytes of all files, those being written included."""
        return max(0, self.bytes_added - self.bytes_removed)

    @property
    def used_files(self) -> int:
        """The files, those being written included."""
        return max(0, self.files_added - self.files_removed)

    def total(self, *, but: Collection[str] = ()) -> Work:
        """Return what all writers have in hand, but for some."""
        return functools.reduce(Work.plus, (work for writer, work in self.work.items() if writer not in but), Work())

    def take(self, writer: str, more: Work) -> None:
        """Note more work of a writer.

        Raises:
            OSError: There are too many writers.
        """
        if writer not in self.work and len(self.work) >= _SLOTS_MAX:
            raise OSError(errno.EUSERS, f"more than {_SLOTS_MAX} engines use this directory at once")
        self.work[writer] = self.work.get(writer, Work()).plus(more)

    def correct(self, used: tuple[int, int]) -> None:
        """Set what is used, bytes and files."""
        size_bytes = used[0] - (self.bytes_added - self.bytes_removed)
        files = used[1] - (self.files_added - self.files_removed)
        self.bytes_added += max(0, size_bytes)
        self.bytes_removed += max(0, -size_bytes)
        self.files_added += max(0, files)
        self.files_removed += max(0, -files)
        self.is_counted = True


class Ledger:
    """This process's hand in the ledger. Thread-safe; every method may block for :data:`_LOCK_TIMEOUT_S`.

    All methods raise ``OSError`` when the disk fails and ``TimeoutError`` when another process does not let go.

    Args:
        disk: What to call the system with.
        root_fd: The root directory.
        state_fd: Its state directory.
        writer: Who we are.
    """

    def __init__(self, disk: OsDisk, root_fd: int, state_fd: int, writer: str) -> None:
        self._disk = disk
        self._root_fd = root_fd
        self._state_fd = state_fd
        self._writer = writer
        self._mutex = threading.Lock()
        self._fd = -1
        self._finished = Work()
        self._removed = [0, 0]  # bytes, files
        self.used_bytes = 0
        """What the ledger said last."""
        self.free_bytes = 0
        """What the filesystem said last."""
        self.is_counted = False
        """Whether the ledger said last that it can be relied on."""
        self.wants_recount = False
        """Whether it may be too high, because something could not be struck out."""

    def open(self) -> LedgerState:
        """Open or make the file and return what it says."""
        with self._transaction() as state:
            return state

    def reserve(self, charges: Sequence[int], decide: Callable[[Sequence[int], Usage], int]) -> tuple[int, Usage]:
        """Enter the first blocks of a batch, as many as may be written.

        Args:
            charges: What each block is charged.
            decide: Returns how many are granted (a plain function, called with the ledger locked).

        Returns:
            How many were entered, and the usage with them.
        """
        with self._transaction() as state:
            # Until a scan has counted what is there, nobody knows what room there is.
            count = decide(charges, self._usage(state)) if state.is_counted else 0
            size = sum(charges[:count])
            if count:
                state.take(self._writer, Work(writing_bytes=size, writing_files=count))
            state.bytes_added += size
            state.files_added += count
            return count, self._usage(state)

    def finish(self, entered: tuple[int, int], failed: tuple[int, int]) -> None:
        """Note the end of writes: (bytes, files) entered before, and those of them that failed. Does no I/O."""
        self._note(Work(writing_bytes=entered[0], writing_files=entered[1]), failed)

    def begin(self, removal: Removal) -> None:
        """Enter that files are about to be removed."""
        with self._transaction() as state:
            state.take(self._writer, Work(removing_bytes=removal.size_bytes, removing_files=removal.files))
        removal.is_begun = True

    def end(self, removal: Removal, removed: tuple[int, int]) -> None:
        """Note the end of a removal, begun or not: bytes and files that were really removed. Does no I/O."""
        begun = Work(removing_bytes=removal.size_bytes, removing_files=removal.files)
        self._note(begun if removal.is_begun else Work(), removed)

    def flush(self) -> LedgerState:
        """Enter what was noted, and return what the ledger says then."""
        with self._transaction() as state:
            return state

    def usage(self) -> Usage:
        """Enter what was noted, and return the usage then."""
        with self._transaction() as state:
            return self._usage(state)

    def reconcile(self, start: LedgerState, found: tuple[int, int], dead: Sequence[str]) -> LedgerState:
        """Set the ledger right after a scan.

        Files may have come and gone during the scan. So the truth lies between what was found less what was struck out
        meanwhile, and what was found plus what was entered meanwhile or was being written at the start. What is being
        removed now may be gone already, but is yet to be struck out.

        Args:
            start: What the ledger said right before the scan.
            found: Bytes and files that the scan counted.
            dead: Writers that are no more; what they had in hand is forgotten.
        """
        with self._transaction() as state:
            for writer in dead:
                state.work.pop(writer, None)
            writing, removing = start.total(but=dead), state.total()
            low = (
                found[0] - (state.bytes_removed - start.bytes_removed),
                found[1] - (state.files_removed - start.files_removed),
            )
            high = (
                found[0] + state.bytes_added - start.bytes_added + writing.writing_bytes + removing.removing_bytes,
                found[1] + state.files_added - start.files_added + writing.writing_files + removing.removing_files,
            )
            used = state.bytes_added - state.bytes_removed, state.files_added - state.files_removed
            if state.is_counted:
                high = min(max(used[0], low[0]), high[0]), min(max(used[1], low[1]), high[1])
            state.correct(high)
            self.wants_recount = False
            return state

    def close(self) -> None:
        """Enter what was noted, give up our place and close the file. Idempotent."""
        if self._fd < 0:
            return
        try:
            with self._transaction() as state:
                state.work.pop(self._writer, None)
        finally:
            fd, self._fd = self._fd, -1
            self._disk.close(fd)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[LedgerState]:
        """Lock, read, let the caller change, write what changed, unlock."""
        with self._mutex:
            self._lock()
            try:
                content = self._read()
                state = _decode(content)
                self._enter_notes(state)
                yield state
                self._write(content, _encode(state))
                self._finished, self._removed = Work(), [0, 0]
                self.used_bytes = state.used_bytes
                self.is_counted = state.is_counted
            finally:
                self._unlock()

    def _write(self, content: bytes, changed: bytes) -> None:
        if changed == content:
            return
        try:
            write_all(self._disk, self._fd, [memoryview(changed)])
        except OSError:
            # Nobody knows whether it was written. What was to be struck out must not be so twice: rather never.
            self._removed = [0, 0]
            self.wants_recount = True
            raise

    def _note(self, done: Work, removed: tuple[int, int]) -> None:
        with self._mutex:
            self._finished = self._finished.plus(done)
            self._removed[0] += removed[0]
            self._removed[1] += removed[1]

    def _enter_notes(self, state: LedgerState) -> None:
        work = state.work.get(self._writer)
        if work is not None:
            state.work[self._writer] = left = work.plus(self._finished, -1)
            if left == Work():
                del state.work[self._writer]
        state.bytes_removed += self._removed[0]
        state.files_removed += self._removed[1]

    def _lock(self) -> None:
        """Lock the file that has the name now, opening it if need be."""
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        pause_s = 0.0001
        while True:
            if self._fd < 0:
                self._fd = self._disk.open_file(LEDGER_NAME, os.O_RDWR | os.O_CREAT, self._state_fd)
            try:
                self._disk.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError("another process holds the space ledger") from None
                time.sleep(pause_s)
                pause_s = min(pause_s * 2, 0.005)
                continue
            try:
                if self._disk.fstat(self._fd).st_nlink:
                    return
            except OSError:
                self._unlock()
                raise
            # Somebody removed it, and another process may have made a new one.
            fd, self._fd = self._fd, -1
            self._disk.close(fd)

    def _unlock(self) -> None:
        try:
            self._disk.flock(self._fd, fcntl.LOCK_UN)
        except OSError:
            # Closing lets go as well; the next transaction opens the file again.
            fd, self._fd = self._fd, -1
            self._disk.close(fd)

    def _read(self) -> bytes:
        content = bytearray(LEDGER_BYTES)
        length = read_into(self._disk, self._fd, [memoryview(content)], LEDGER_BYTES)
        return bytes(content[:length])

    def _usage(self, state: LedgerState) -> Usage:
        filesystem = self._disk.statvfs(self._root_fd)
        work = state.total()
        self.free_bytes = filesystem.f_bavail * filesystem.f_frsize
        return Usage(
            used_bytes=state.used_bytes,
            pending_bytes=work.writing_bytes,
            pending_files=work.writing_files,
            free_bytes=self.free_bytes,
            free_files=filesystem.f_favail if filesystem.f_files else None,
        )


def _encode(state: LedgerState) -> bytes:
    totals = (state.bytes_added, state.bytes_removed, state.files_added, state.files_removed, int(state.is_counted))
    slots = b"".join(_SLOT.pack(writer.encode(), *state.work[writer]) for writer in sorted(state.work))
    content = (_HEADER.pack(_MAGIC, *totals, 0).ljust(_SLOTS_AT, b"\0") + slots).ljust(LEDGER_BYTES, b"\0")
    return content[:_CHECKSUM_AT] + _checksum(content) + content[_CHECKSUM_AT + 8 :]


def _decode(content: bytes) -> LedgerState:
    """Return what the bytes say; a state that has not been counted if they are new or damaged."""
    if len(content) != LEDGER_BYTES or content[_CHECKSUM_AT : _CHECKSUM_AT + 8] != _checksum(content):
        return LedgerState()
    magic, bytes_added, bytes_removed, files_added, files_removed, is_counted, _ = _HEADER.unpack_from(content)
    if magic != _MAGIC:
        return LedgerState()
    work = {}
    for writer, *numbers in _SLOT.iter_unpack(content[_SLOTS_AT:]):
        if any(numbers):
            work[writer.rstrip(b"\0").decode()] = Work(*numbers)
    return LedgerState(bytes_added, bytes_removed, files_added, files_removed, bool(is_counted), work)


def _checksum(content: bytes) -> bytes:
    """Return the checksum of all bytes but its own."""
    return xxhash.xxh3_64_digest(content[:_CHECKSUM_AT] + content[_CHECKSUM_AT + 8 :])
