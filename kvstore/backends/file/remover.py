"""Removing blocks: only files of ours, and only as long as they are what they were taken for."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.backends.file.counters import Counters
from kvstore.backends.file.directories import Directories
from kvstore.backends.file.layout import block_name, quarantine_name
from kvstore.backends.file.quarantine import Quarantine
from kvstore.backends.file.root import Root
from kvstore.backends.file.space import charge
from kvstore.diskio import BatchDisk, CancelFlag, FileStatus, OsDisk, Rings, bare
from kvstore.types import BlockKey

__all__ = ["BlockRemover", "RemoveOp"]


@dataclass(slots=True, eq=False)
class RemoveOp:
    """One block to remove.

    Attributes:
        key: Its key.
        shard: Its shard.
        unless_used_after: Leave it if the filesystem knows of a later use than this (seconds since the epoch).
        identity: Leave it if it is not this file (inode, change time) any more; None: whichever it is.
        removed: Whether we removed it; None as long as nobody has tried.
        freed_bytes: What it was charged, if we removed it.
        used_at: Its last use, if it was left because of that.
        error: Why it could not be removed.
    """

    key: BlockKey
    shard: int
    unless_used_after: float | None = None
    identity: tuple[int, int] | None = None
    removed: bool | None = None
    freed_bytes: int = 0
    used_at: float | None = None
    error: OSError | None = None


class BlockRemover:
    """Removes batches of blocks; its methods are batch functions of a ``FileEngine``. Thread-safe.

    Args:
        disk: What to call the system with.
        root: The root directory.
        directories: Those of the namespace.
        counters: Where to count.
        quarantine: Where damaged blocks go.
        rings: Where threads get a ring from.
        namespace_hex: The namespace, for names in the quarantine.
    """

    def __init__(
        self,
        disk: OsDisk,
        root: Root,
        directories: Directories,
        counters: Counters,
        quarantine: Quarantine,
        rings: Rings,
        namespace_hex: str,
    ) -> None:
        self._disk = disk
        self._root = root
        self._directories = directories
        self._counters = counters
        self._quarantine = quarantine
        self._rings = rings
        self._namespace_hex = namespace_hex

    def unlink(self, ops: Sequence[RemoveOp], cancelled: CancelFlag) -> None:
        """Delete some blocks."""
        batch = BatchDisk.of_thread(self._disk, self._rings)
        rest = ops if batch is None or cancelled.is_set else self._unlink_batch(batch, ops)
        self._remove(rest, cancelled, quarantine=False)

    def isolate(self, ops: Sequence[RemoveOp], cancelled: CancelFlag) -> None:
        """Move some blocks into the quarantine, or delete them if they can't be kept there."""
        self._remove(ops, cancelled, quarantine=True)

    def _unlink_batch(self, batch: BatchDisk, ops: Sequence[RemoveOp]) -> list[RemoveOp]:
        """Delete blocks a call at a time for all of them; return those that met with anything unusual."""
        found, rest = [], []
        for op in ops:
            try:
                found.append((op, self._directories.find(op.shard)))
            except OSError:
                rest.append(op)
        statuses = batch.stat([block_name(op.key) for op, _ in found], [dir_fd for _, dir_fd in found])
        todo = []
        for (op, dir_fd), status in zip(found, statuses, strict=True):
            if not isinstance(status, FileStatus):
                rest.append(op)
                continue
            op.removed = False
            if self._may_go(op, status):
                todo.append((op, dir_fd, charge(status.st_size)))
        gone = batch.unlink([block_name(op.key) for op, _, _ in todo], [dir_fd for _, dir_fd, _ in todo])
        for (op, _, size_bytes), result in zip(todo, gone, strict=True):
            if result == 0:
                op.removed, op.freed_bytes = True, size_bytes
            else:
                rest.append(op)
        return rest

    def _may_go(self, op: RemoveOp, status: os.stat_result | FileStatus) -> bool:
        """Whether what has a block's name is still what was to be removed."""
        if not stat.S_ISREG(status.st_mode) or status.st_uid != self._root.owner_uid:
            self._counters.add("foreign_objects")
            return False
        if op.identity is not None and op.identity != (status.st_ino, status.st_ctime_ns):
            # Another writer has replaced the damaged block by a good one meanwhile.
            return False
        if op.unless_used_after is not None and status.st_mtime > op.unless_used_after:
            op.used_at = status.st_mtime
            return False
        return True

    def _remove(self, ops: Sequence[RemoveOp], cancelled: CancelFlag, *, quarantine: bool) -> None:
        for op in ops:
            if cancelled.is_set:
                break
            op.removed = False
            try:
                self._remove_one(op, quarantine)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                    op.error = bare(error)

    def _remove_one(self, op: RemoveOp, quarantine: bool) -> None:
        dir_fd = self._directories.find(op.shard)
        name = block_name(op.key)
        status = self._disk.stat(name, dir_fd)
        if not self._may_go(op, status):
            return
        size_bytes = charge(status.st_size)
        if quarantine and self._quarantine.make_room(size_bytes):
            kept = quarantine_name(self._namespace_hex, op.key, self._quarantine.next_time_ns())
            with contextlib.suppress(OSError):
                # What is kept stays charged; the quarantine strikes it out when it drops it.
                op.removed = self._quarantine.take(name, dir_fd, kept, status.st_ino)
                self._counters.add("quarantined_blocks", op.removed)
                return
        self._disk.unlink(name, dir_fd)
        op.removed, op.freed_bytes = True, size_bytes
