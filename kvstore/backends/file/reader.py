"""Reading blocks: nothing that lies in the directory can hang, lead out of it, or overrun a buffer."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.backends.base import outcome_of
from kvstore.backends.file.counters import Counters
from kvstore.backends.file.directories import Directories
from kvstore.backends.file.layout import block_name
from kvstore.backends.file.root import Root
from kvstore.backends.file.space import charge
from kvstore.diskio import ALIGNMENT, BatchDisk, CancelFlag, FileStatus, OsDisk, Rings, bare, is_aligned, read_into
from kvstore.types import BlockKey, Outcome

__all__ = ["BlockReader", "ReadOp", "StatOp"]

_log = logging.getLogger("kvstore.backends.file")

_ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV})
"""What opening says where there is no block: nothing, or a symbolic link, socket or dead device in its place."""


_FINAL: Final = frozenset({errno.EIO, errno.EMFILE, errno.ENFILE})
"""What the disk says for good; after anything else in a batch the block is read by itself, with all precautions."""


@dataclass(slots=True, eq=False)
class ReadOp:
    """One block to read.

    Attributes:
        key: Its key.
        shard: Its shard.
        buffers: Where its bytes go, flat.
        outcome: What became of it; None as long as nobody has tried.
        filled_bytes: Length of the record.
        identity: Inode and change time of the file that was read.
        error: Why it failed.
    """

    key: BlockKey
    shard: int
    buffers: Sequence[memoryview]
    outcome: Outcome | None = None
    filled_bytes: int = 0
    identity: tuple[int, int] | None = None
    error: OSError | None = None


@dataclass(slots=True, eq=False)
class StatOp:
    """One block to look for.

    Attributes:
        key: Its key.
        shard: Its shard.
        charge_bytes: What it is charged; None if it is not there (or nobody has looked).
        used_at: Last use that the filesystem knows of, seconds since the epoch.
        error: Why it could not be looked for.
    """

    key: BlockKey
    shard: int
    charge_bytes: int | None = None
    used_at: float = 0.0
    error: OSError | None = None


class BlockReader:
    """Reads batches of blocks; its methods are batch functions of a ``FileEngine``. Thread-safe.

    Args:
        disk: What to call the system with.
        root: The root directory.
        directories: Those of the namespace.
        counters: Where to count.
        rings: Where threads get a ring from.
        record_bytes_min: Shortest record; a shorter file is none.
    """

    def __init__(
        self,
        disk: OsDisk,
        root: Root,
        directories: Directories,
        counters: Counters,
        rings: Rings,
        *,
        record_bytes_min: int,
    ) -> None:
        self._disk = disk
        self._root = root
        self._directories = directories
        self._counters = counters
        self._rings = rings
        self._record_bytes_min = record_bytes_min
        self._warned_direct = False

    def read(self, ops: Sequence[ReadOp], cancelled: CancelFlag) -> None:
        """Read some blocks, setting the outcome of each."""
        batch = BatchDisk.of_thread(self._disk, self._rings)
        if batch is not None and not cancelled.is_set:
            self._read_batch(batch, ops)
        for op in ops:
            if cancelled.is_set:
                break
            if op.outcome is not None:
                continue
            try:
                op.outcome = self._read_one(op)
            except OSError as error:
                op.error = bare(error)
                op.outcome = outcome_of(error)

    def look(self, ops: Sequence[StatOp], cancelled: CancelFlag) -> None:
        """Look whether some blocks are there."""
        batch = BatchDisk.of_thread(self._disk, self._rings)
        rest = ops if batch is None or cancelled.is_set else self._look_batch(batch, ops)
        for op in rest:
            if cancelled.is_set:
                break
            try:
                self._note_found(op, self._disk.stat(block_name(op.key), self._directories.find(op.shard)))
            except OSError as error:
                if error.errno not in _ABSENT:
                    op.error = bare(error)

    def mark_used(self, ops: Sequence[StatOp], cancelled: CancelFlag) -> None:
        """Note the use of some blocks in the times of their files, for others who share them."""
        for op in ops:
            if cancelled.is_set:
                break
            try:
                dir_fd = self._directories.find(op.shard)
                status = self._disk.stat(block_name(op.key), dir_fd)
                # A file with another name elsewhere may be somebody's own.
                if self._is_ours(status) and status.st_nlink == 1 and status.st_mtime < op.used_at:
                    self._disk.utime(block_name(op.key), dir_fd, op.used_at)
            except OSError as error:
                op.error = bare(error)

    def reads_in_batches(self, ops: Sequence[ReadOp]) -> bool:
        """Whether blocks go the usual way, if nothing happens: then a batch of calls is the quickest."""
        return self._root.direct_read and all(is_aligned(op.buffers) for op in ops)

    def _read_batch(self, batch: BatchDisk, ops: Sequence[ReadOp]) -> None:
        """Read blocks a call at a time for all of them; what meets with anything unusual keeps no outcome."""
        if not self._root.direct_read:
            return
        found = [(op, dir_fd) for op in ops if is_aligned(op.buffers) and (dir_fd := self._find(op.shard)) >= 0]
        names, dir_fds = [block_name(op.key) for op, _ in found], [dir_fd for _, dir_fd in found]
        fds = batch.open_files(names, os.O_RDONLY | os.O_DIRECT, dir_fds)
        for (op, _), fd in zip(found, fds, strict=True):
            if fd == -errno.ENOENT:
                op.outcome = Outcome.MISS
            elif -fd in _FINAL:
                _fail(op, -fd)
        opened = [(op, fd) for (op, _), fd in zip(found, fds, strict=True) if fd >= 0]
        try:
            self._fill_batch(batch, opened)
        finally:
            batch.close([fd for _, fd in opened])

    def _fill_batch(self, batch: BatchDisk, opened: Sequence[tuple[ReadOp, int]]) -> None:
        todo = []
        for (op, fd), status in zip(opened, batch.fstat([fd for _, fd in opened]), strict=True):
            if isinstance(status, FileStatus):
                op.outcome = self._judged(op, status)
                if op.outcome is None:
                    todo.append((op, fd, status.st_size))
            elif -status in _FINAL:
                _fail(op, -status)
        filled = batch.preadv([fd for _, fd, _ in todo], [op.buffers for op, _, _ in todo])
        for (op, _, size_bytes), got in zip(todo, filled, strict=True):
            if got == size_bytes:
                op.outcome, op.filled_bytes = Outcome.OK, got
            elif -got in _FINAL:
                _fail(op, -got)

    def _look_batch(self, batch: BatchDisk, ops: Sequence[StatOp]) -> list[StatOp]:
        """Look for all blocks by one call; return those of which nothing is known then."""
        found = [(op, dir_fd) for op in ops if (dir_fd := self._find(op.shard)) >= 0]
        rest = [op for op in ops if self._find(op.shard) < 0]
        statuses = batch.stat([block_name(op.key) for op, _ in found], [dir_fd for _, dir_fd in found])
        for (op, _), status in zip(found, statuses, strict=True):
            if isinstance(status, FileStatus):
                self._note_found(op, status)
            elif -status not in _ABSENT:
                rest.append(op)
        return rest

    def _find(self, shard: int) -> int:
        """Return the directory of a shard, or -1 if it can't be had; why is found out by the plain way."""
        try:
            return self._directories.find(shard)
        except OSError:
            return -1

    def _note_found(self, op: StatOp, status: os.stat_result | FileStatus) -> None:
        if self._is_ours(status) and status.st_size >= self._record_bytes_min:
            op.charge_bytes = charge(status.st_size)
            op.used_at = status.st_mtime

    def _read_one(self, op: ReadOp) -> Outcome:
        direct = self._root.direct_read
        if direct and any(b.nbytes % ALIGNMENT for b in op.buffers):
            direct = False
            self._counters.add("direct_io_fallbacks")
        try:
            if direct:
                try:
                    return self._read_once(op, os.O_DIRECT)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    refused = str(error.strerror)
            outcome = self._read_once(op, 0)
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            if error.errno != errno.ENOENT:
                self._counters.add("foreign_objects")
            return Outcome.MISS
        if direct and outcome is Outcome.OK:
            # It was direct I/O that failed, not something planted that can't be read so (such as a directory).
            self._counters.add("direct_io_fallbacks")
            self._warn_direct(op, refused)
        return outcome

    def _read_once(self, op: ReadOp, flags: int) -> Outcome:
        dir_fd = self._directories.find(op.shard)
        fd = self._disk.open_file(block_name(op.key), os.O_RDONLY | flags, dir_fd)
        try:
            status = self._disk.fstat(fd)
            if (outcome := self._judged(op, status)) is not None:
                return outcome
            op.filled_bytes = read_into(self._disk, fd, op.buffers, status.st_size, unit=ALIGNMENT if flags else 1)
            return Outcome.OK
        finally:
            self._disk.close(fd)

    def _judged(self, op: ReadOp, status: os.stat_result | FileStatus) -> Outcome | None:
        """Return what an open file is if it can't be read as a block; None if it can."""
        if not self._is_ours(status):
            self._counters.add("foreign_objects")
            return Outcome.MISS
        op.identity = (status.st_ino, status.st_ctime_ns)
        return Outcome.CORRUPT if status.st_size > sum(b.nbytes for b in op.buffers) else None

    def _is_ours(self, status: os.stat_result | FileStatus) -> bool:
        return stat.S_ISREG(status.st_mode) and status.st_uid == self._root.owner_uid

    def _warn_direct(self, op: ReadOp, reason: str) -> None:
        if is_aligned(op.buffers):
            # Not our buffers' fault: this filesystem does not do it.
            self._root.direct_read = False
        if not self._warned_direct:
            self._warned_direct = True
            _log.warning("%s refuses direct I/O (%s); reading through the page cache", self._root.path, reason)


def _fail(op: ReadOp, number: int) -> None:
    op.error = OSError(number, os.strerror(number))
    op.outcome = outcome_of(op.error)
