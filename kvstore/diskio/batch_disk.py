"""The disk by the batch: each method is one turn with the GIL for many files, through a ring.

A busy Python process makes a thread wait up to 5 ms for the GIL after every system call. So what a backend does with
many files goes in a few steps (open them all, write them all, link them all), and whatever does not go the usual way
is left to the plain calls of :class:`~kvstore.diskio.OsDisk`, which know what to do about it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvstore.diskio.disk import FILE_MODE, OsDisk
from kvstore.diskio.rings import Rings
from kvstore.diskio.uring import Ring
from kvstore.diskio.uring.abi import Op
from kvstore.diskio.uring.calls import (
    STATX,
    close_all,
    link_all,
    open_all,
    stat_all,
    sync_all,
    unlink_all,
    vectored,
)

__all__ = ["BatchDisk", "FileStatus"]


class FileStatus(NamedTuple):
    """What is asked of a file, under the names of ``os.stat_result``."""

    st_mode: int
    st_ino: int
    st_nlink: int
    st_uid: int
    st_size: int
    st_mtime: float
    st_ctime_ns: int


class BatchDisk:
    """Many files at once; made by a thread for itself, and used by no other.

    A result is what the system call would have returned, or minus its errno; an interrupted call is not repeated.

    Args:
        disk: Whose seam for fault injection the calls go through.
        ring: The thread's ring.
    """

    def __init__(self, disk: OsDisk, ring: Ring) -> None:
        self._disk = disk
        self._ring = ring

    @classmethod
    def of_thread(cls, disk: OsDisk, rings: Rings) -> BatchDisk | None:
        """Return one for the calling thread, or None if it has no ring."""
        ring = rings.mine()
        return None if ring is None else cls(disk, ring)

    def tmpfiles(self, dir_fds: Sequence[int], flags: int) -> list[int]:
        """See :meth:`OsDisk.tmpfile`."""
        flags |= os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC
        return self._open("tmpfile", dir_fds, ["."] * len(dir_fds), flags)

    def open_files(self, names: Sequence[str], flags: int, dir_fds: Sequence[int]) -> list[int]:
        """See :meth:`OsDisk.open_file`."""
        return self._open("open", dir_fds, names, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)

    def close(self, fds: Sequence[int]) -> list[int]:
        """See :meth:`OsDisk.close`."""
        return self._calls("close", fds, lambda at: close_all(self._ring, _pick(fds, at)))

    def preadv(self, fds: Sequence[int], buffers: Sequence[Sequence[memoryview]]) -> list[int]:
        """See :meth:`OsDisk.preadv`; from the start of each file."""
        return self._vectored("preadv", Op.READV, fds, buffers)

    def pwritev(self, fds: Sequence[int], buffers: Sequence[Sequence[memoryview]]) -> list[int]:
        """See :meth:`OsDisk.pwritev`; from the start of each file."""
        return self._vectored("pwritev", Op.WRITEV, fds, buffers)

    def fdatasync(self, fds: Sequence[int]) -> list[int]:
        """See :meth:`OsDisk.fdatasync`."""
        return self._calls("fdatasync", fds, lambda at: sync_all(self._ring, _pick(fds, at)))

    def link_fds(self, fds: Sequence[int], names: Sequence[str], dir_fds: Sequence[int]) -> list[int]:
        """See :meth:`OsDisk.link_fd`."""
        return self._calls(
            "link", names, lambda at: link_all(self._ring, _pick(fds, at), _pick(dir_fds, at), _pick(names, at))
        )

    def unlink(self, names: Sequence[str], dir_fds: Sequence[int]) -> list[int]:
        """See :meth:`OsDisk.unlink`."""
        return self._calls("unlink", names, lambda at: unlink_all(self._ring, _pick(dir_fds, at), _pick(names, at)))

    def fstat(self, fds: Sequence[int]) -> list[FileStatus | int]:
        """See :meth:`OsDisk.fstat`; minus the errno instead of a status."""
        return self._stat("fstat", fds, fds, None)

    def stat(self, names: Sequence[str], dir_fds: Sequence[int]) -> list[FileStatus | int]:
        """See :meth:`OsDisk.stat`; minus the errno instead of a status."""
        return self._stat("stat", names, dir_fds, names)

    def _open(self, op: str, dir_fds: Sequence[int], names: Sequence[str], flags: int) -> list[int]:
        return self._calls(
            op, names, lambda at: open_all(self._ring, _pick(dir_fds, at), _pick(names, at), flags, FILE_MODE)
        )

    def _vectored(self, op: str, code: Op, fds: Sequence[int], buffers: Sequence[Sequence[memoryview]]) -> list[int]:
        return self._calls(
            op, fds, lambda at: vectored(self._ring, code, _pick(fds, at), [0] * len(at), _pick(buffers, at))
        )

    def _stat(
        self, op: str, subjects: Sequence[Any], fds: Sequence[int], names: Sequence[str] | None
    ) -> list[FileStatus | int]:
        found = np.zeros(len(fds), STATX)

        def look(at: Sequence[int]) -> list[int]:
            results, records = stat_all(self._ring, _pick(fds, at), None if names is None else _pick(names, at))
            found[list(at)] = records
            return results

        results = self._calls(op, subjects, look)
        rows = found[list(STATX.names or ())].tolist()
        return [result or _status(row) for result, row in zip(results, rows, strict=True)]

    def _calls(self, op: str, subjects: Sequence[Any], function: Callable[[Sequence[int]], list[int]]) -> list[int]:
        return self._disk.syscalls(op, subjects, function) if subjects else []


def _pick(values: Sequence[Any], at: Sequence[int]) -> list[Any]:
    return [values[i] for i in at]


def _status(row: Any) -> FileStatus:
    nlink, uid, mode, ino, size, ctime_s, ctime_ns, mtime_s, mtime_ns = row
    return FileStatus(mode, ino, nlink, uid, size, mtime_s + mtime_ns / 1e9, ctime_s * 1_000_000_000 + ctime_ns)
