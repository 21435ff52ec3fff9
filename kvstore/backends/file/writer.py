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
from kvstore.diskio import ALIGNMENT, BatchDisk, CancelFlag, OsDisk, Rings, bare, is_aligned, write_all
from kvstore.types import BlockKey, Outcome

__all__ = ["BlockWriter", "WriteOp"]

_log = logging.getLogger("kvstore.backends.file")

_NO_HARD_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})
_FINAL: Final = frozenset({errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE})
"""What the disk says for good; after anything else in a batch the block is written by itself, with all precautions."""

_SHORT: Final = -errno.EAGAIN
"""What a short write counts as: it is to be done again."""

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


@dataclass(slots=True, eq=False)
class _NewFile:
    """A file on its way to being a block."""

    op: WriteOp
    dir_fd: int
    fd: int = -1
    published: bool = False

    @property
    def name(self) -> str:
        return block_name(self.op.key)

    @property
    def size_bytes(self) -> int:
        return sum(b.nbytes for b in self.op.buffers)


class BlockWriter:
    """Writes batches of blocks; :meth:`write` is a :data:`~kvstore.diskio.BatchFunction`. Thread-safe.

    Args:
        disk: What to call the system with.
        root: The root directory.
        directories: Those of the namespace.
        counters: Where to count.
        rings: Where threads get a ring from.
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
        rings: Rings,
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
        self._rings = rings
        self._writer = writer
        self._durability = durability
        self._record_bytes_min = record_bytes_min
        self._look_first = look_first
        self._numbers = itertools.count(1)
        self._warned_direct = False

    def write(self, ops: Sequence[WriteOp], cancelled: CancelFlag) -> None:
        """Write some blocks, setting the outcome of each."""
        batch = BatchDisk.of_thread(self._disk, self._rings)
        if batch is not None and not cancelled.is_set:
            self._write_batch(batch, ops)
        for op in ops:
            if cancelled.is_set:
                break
            if op.outcome is not None:
                continue
            try:
                op.outcome = self._write_one(op)
            except OSError as error:
                _fail(op, bare(error))
        if self._durability == "full":
            self._sync_names([op for op in ops if op.outcome is Outcome.OK])

    def writes_in_batches(self, ops: Sequence[WriteOp]) -> bool:
        """Whether blocks go the usual way, if nothing happens: then a batch of calls is the quickest."""
        return self._may_batch and all(is_aligned(op.buffers) for op in ops)

    @property
    def _may_batch(self) -> bool:
        return self._root.tmpfile and self._root.direct_write

    def _write_batch(self, batch: BatchDisk, ops: Sequence[WriteOp]) -> None:
        """Publish blocks a call at a time for all of them; what meets with anything unusual keeps no outcome."""
        if not self._may_batch:
            return
        files = [_NewFile(op, dir_fd) for op in ops if is_aligned(op.buffers) and (dir_fd := self._ensure(op)) >= 0]
        if self._look_first:
            found = batch.stat([file.name for file in files], [file.dir_fd for file in files])
            files = [file for file, status in zip(files, found, strict=True) if status == -errno.ENOENT]
        for file, fd in zip(files, batch.tmpfiles([file.dir_fd for file in files], os.O_DIRECT), strict=True):
            file.fd = fd
        files = _went_well(files, [min(file.fd, 0) for file in files])
        try:
            self._publish_batch(batch, files)
        finally:
            closed = batch.close([file.fd for file in files])
        for file, result in zip(files, closed, strict=True):
            if file.published:
                self._note_published(file, result)

    def _publish_batch(self, batch: BatchDisk, files: Sequence[_NewFile]) -> None:
        """Write files and give them their names."""
        written = batch.pwritev([file.fd for file in files], [file.op.buffers for file in files])
        results = [
            min(n, 0) if n < 0 or n == file.size_bytes else _SHORT for file, n in zip(files, written, strict=True)
        ]
        whole = _went_well(files, results)
        if self._durability != "none":
            whole = _went_well(whole, batch.fdatasync([file.fd for file in whole]))
        fds, names, dir_fds = [f.fd for f in whole], [f.name for f in whole], [f.dir_fd for f in whole]
        for file, result in zip(whole, batch.link_fds(fds, names, dir_fds), strict=True):
            file.published = result == 0
            if result == -errno.EEXIST:
                with contextlib.suppress(OSError):
                    file.op.outcome = self._look_at_existing(file.op, file.dir_fd)
            elif result < 0:
                _went_well([file], [result])

    def _note_published(self, file: _NewFile, closed: int) -> None:
        op = file.op
        op.outcome = Outcome.OK
        if closed < 0:
            # Some filesystems tell only now that the bytes did not get through.
            _fail(op, OSError(-closed, os.strerror(-closed)))
            with contextlib.suppress(OSError):
                self._disk.unlink(file.name, file.dir_fd)

    def _ensure(self, op: WriteOp) -> int:
        """Return the directory of a block, or -1 if it can't be had."""
        try:
            return self._directories.ensure(op.shard)
        except OSError as error:
            _fail(op, bare(error))
            return -1

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
                        _fail(op, bare(error))
                        with contextlib.suppress(OSError):
                            self._disk.unlink(block_name(op.key), self._directories.find(shard))

    def _warn_direct(self, op: WriteOp, reason: str) -> None:
        if is_aligned(op.buffers):
            # Not our buffers' fault: this filesystem does not do it.
            self._root.direct_write = False
        if not self._warned_direct:
            self._warned_direct = True
            _log.warning("%s refuses direct I/O (%s); writing through the page cache", self._root.path, reason)


def _fail(op: WriteOp, error: OSError) -> None:
    op.error, op.outcome = error, outcome_of(error)


def _went_well(files: Sequence[_NewFile], results: Sequence[int]) -> list[_NewFile]:
    """Return the files whose result is 0; those to which the disk said no for good have failed."""
    well = []
    for file, result in zip(files, results, strict=True):
        if result == 0:
            well.append(file)
        elif -result in _FINAL:
            _fail(file.op, OSError(-result, os.strerror(-result)))
    return well
