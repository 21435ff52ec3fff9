"""Writing blocks: each is published whole or not at all, and the first writer of a key wins."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from kvstore.backends.base import outcome_of
from kvstore.backends.file.counters import Counters
from kvstore.backends.file.directories import Directories
from kvstore.backends.file.layout import block_name, tmp_name
from kvstore.backends.file.root import Root
from kvstore.backends.file.space import charge
from kvstore.diskio import ALIGNMENT, CancelFlag, OsDisk, bare, is_aligned, write_all
from kvstore.types import BlockKey, Outcome

__all__ = ["BlockWriter", "WriteOp"]

_log = logging.getLogger("kvstore.backends.file")

_NO_HARD_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})
_ATTEMPTS_MAX: Final = 3
"""Tries per block; each but the last ends because the directory changed under us."""


@dataclass(slots=True, eq=False)
class WriteOp:
    """One block to write.

    Attributes:
        key: Its key.
        shard: Its shard.
        buffers: Its bytes, flat.
        charge_bytes: What it is charged.
        entered: Whether it is in the ledger.
        outcome: What became of it; None as long as nobody has tried.
        found_bytes: What the record that was there already is charged, if that is the outcome.
        error: Why it failed.
    """

    key: BlockKey
    shard: int
    buffers: Sequence[memoryview]
    charge_bytes: int
    entered: bool = False
    outcome: Outcome | None = None
    found_bytes: int = 0
    error: OSError | None = None


class BlockWriter:
    """Writes batches of blocks; :meth:`write` is a :data:`~kvstore.diskio.BatchFunction`. Thread-safe.

    Args:
        disk: What to call the system with.
        root: The root directory.
        directories: Those of the namespace.
        counters: Where to count.
        writer: Who we are, for names of unpublished files.
        durability: What a published block survives.
        record_bytes_min: Shortest record; a shorter file of ours is what a power cut left.
        look_first: Whether to look for a record of another engine before writing one's own.
    """

    def __init__(
        self,
        disk: OsDisk,
        root: Root,
        directories: Directories,
        counters: Counters,
        *,
        writer: str,
        durability: Literal["none", "data", "full"],
        record_bytes_min: int,
        look_first: bool,
    ) -> None:
        self._disk = disk
        self._root = root
        self._directories = directories
        self._counters = counters
        self._writer = writer
        self._durability = durability
        self._record_bytes_min = record_bytes_min
        self._look_first = look_first
        self._numbers = itertools.count(1)
        self._warned_direct = False

    def write(self, ops: Sequence[WriteOp], cancelled: CancelFlag) -> None:
        """Write some blocks, setting the outcome of each."""
        for op in ops:
            if cancelled.is_set:
                break
            try:
                op.outcome = self._write_one(op)
            except OSError as error:
                op.error = bare(error)
                op.outcome = outcome_of(error)
        if self._durability == "full":
            self._sync_names([op for op in ops if op.outcome is Outcome.OK])

    def _write_one(self, op: WriteOp) -> Outcome:
        for attempt in range(1, _ATTEMPTS_MAX + 1):
            dir_fd = self._directories.ensure(op.shard)
            if self._look_first:
                outcome = self._look_at_existing(op, dir_fd)
                if outcome is not None:
                    return outcome
            try:
                self._publish(op, dir_fd)
                return Outcome.OK
            except FileExistsError:
                outcome = self._look_at_existing(op, dir_fd)
                if outcome is not None:
                    return outcome
            except (FileNotFoundError, PermissionError):
                # In a removed directory Linux says ENOENT, or EPERM for a file without a name.
                if attempt == _ATTEMPTS_MAX or self._disk.fstat(dir_fd).st_nlink:
                    raise
                self._directories.renew(op.shard)
        raise OSError(errno.EIO, "the directory keeps changing")

    def _publish(self, op: WriteOp, dir_fd: int) -> None:
        direct = self._root.direct_write
        if direct and any(b.nbytes % ALIGNMENT for b in op.buffers):
            direct = False
            self._counters.add("direct_io_fallbacks")
        try:
            self._publish_once(op, dir_fd, os.O_DIRECT if direct else 0)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            self._counters.add("direct_io_fallbacks")
            self._warn_direct(op, str(error.strerror))
            self._publish_once(op, dir_fd, 0)

    def _publish_once(self, op: WriteOp, dir_fd: int, flags: int) -> None:
        """Write a file and give it its name; whatever fails, nothing of it stays and it is never tried again."""
        name = block_name(op.key)
        tmp = None
        if self._root.tmpfile:
            fd = self._disk.tmpfile(dir_fd, flags)
        else:
            tmp = tmp_name(self._writer, next(self._numbers))
            fd = self._disk.open_file(tmp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, dir_fd)
        published = False
        try:
            try:
                write_all(self._disk, fd, op.buffers, unit=ALIGNMENT if flags else 1)
                if self._durability != "none":
                    self._disk.fdatasync(fd)
                if tmp is None:
                    self._disk.link_fd(fd, name, dir_fd)
                    published = True
            finally:
                self._close(fd, name, dir_fd, published)
            if tmp is not None:
                self._name_file(tmp, name, dir_fd)
        finally:
            if tmp is not None:
                # Gone if it was renamed; if it can't be removed, the next start sweeps it.
                with contextlib.suppress(OSError):
                    self._disk.unlink(tmp, dir_fd)

    def _close(self, fd: int, name: str, dir_fd: int, published: bool) -> None:
        try:
            self._disk.close(fd)
        except OSError:
            # Some filesystems tell only now that the bytes did not get through.
            if published:
                self._disk.unlink(name, dir_fd)
            raise

    def _name_file(self, tmp: str, name: str, dir_fd: int) -> None:
        try:
            self._disk.link(tmp, name, dir_fd, dir_fd)
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            # No hard links here (FAT, some network filesystems). Two writers may pass this look at the same time;
            # then the second replaces the first, with the bytes of the same key.
            try:
                self._disk.stat(name, dir_fd)
            except FileNotFoundError:
                self._disk.rename(tmp, name, dir_fd, dir_fd)
            else:
                raise FileExistsError(errno.EEXIST, "the block is there already") from None

    def _look_at_existing(self, op: WriteOp, dir_fd: int) -> Outcome | None:
        """Judge what has the name of a block; None if it is out of the way now."""
        name = block_name(op.key)
        try:
            status = self._disk.stat(name, dir_fd)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(status.st_mode) or status.st_uid != self._root.owner_uid:
            self._counters.add("foreign_objects")
            op.error = PermissionError(errno.EPERM, f"{name} is not a block of ours")
            return Outcome.REFUSED
        if status.st_size < self._record_bytes_min:
            # Published files are whole; this one was cut by a power failure and holds no record.
            self._disk.unlink(name, dir_fd)
            self._counters.add("swept_torn")
            return None
        op.found_bytes = charge(status.st_size)
        return Outcome.EXISTS

    def _sync_names(self, ops: Sequence[WriteOp]) -> None:
        """Make the names of published blocks survive a power cut; take back those where that fails."""
        for shard in {op.shard for op in ops}:
            try:
                self._disk.fsync(self._directories.find(shard))
            except OSError as error:
                for op in ops:
                    if op.shard == shard:
                        op.error, op.outcome = bare(error), outcome_of(error)
                        with contextlib.suppress(OSError):
                            self._disk.unlink(block_name(op.key), self._directories.find(shard))

    def _warn_direct(self, op: WriteOp, reason: str) -> None:
        if is_aligned(op.buffers):
            # Not our buffers' fault: this filesystem does not do it.
            self._root.direct_write = False
        if not self._warned_direct:
            self._warned_direct = True
            _log.warning("%s refuses direct I/O (%s); writing through the page cache", self._root.path, reason)
