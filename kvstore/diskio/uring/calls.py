"""Many system calls of one kind as one batch of operations in a ring.

Each function returns a result per call: what the system call would have returned, or minus its errno. Sources: the
manual page io_uring_enter(2) for the operations, statx(2) for its structure.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.diskio.uring.abi import IOVEC, SQE, Op
from kvstore.diskio.uring.memory import address_of
from kvstore.diskio.uring.ring import Ring

__all__ = [
    "STATX",
    "close_all",
    "link_all",
    "open_all",
    "stat_all",
    "sync_all",
    "unlink_all",
    "vectored",
    "vectored_operations",
]

STATX: Final = np.dtype(
    {
        "names": ["nlink", "uid", "mode", "ino", "size", "ctime_s", "ctime_ns", "mtime_s", "mtime_ns"],
        "formats": ["u4", "u4", "u2", "u8", "u8", "i8", "u4", "i8", "u4"],
        "offsets": [16, 20, 28, 32, 40, 96, 104, 112, 120],
        "itemsize": 256,
    }
)
"""What is read of ``struct statx``."""

_STATX_BASIC: Final = 0x7FF
_AT_EMPTY_PATH: Final = 0x1000
_AT_SYMLINK_NOFOLLOW: Final = 0x100
_AT_SYMLINK_FOLLOW: Final = 0x400
_DATASYNC: Final = 1


def open_all(ring: Ring, dir_fds: Sequence[int], names: Sequence[str], flags: int, mode: int) -> list[int]:
    """Open files by their names in directories; the results are descriptors."""
    sqes = _operations(Op.OPENAT, dir_fds)
    paths = _strings(names)
    sqes["addr"] = paths.addresses
    sqes["len"] = mode
    sqes["op_flags"] = flags
    return _done(ring, sqes)


def close_all(ring: Ring, fds: Sequence[int]) -> list[int]:
    """Close descriptors."""
    return _done(ring, _operations(Op.CLOSE, fds))


def sync_all(ring: Ring, fds: Sequence[int]) -> list[int]:
    """Wait until the bytes of files would survive a power cut."""
    sqes = _operations(Op.FSYNC, fds)
    sqes["op_flags"] = _DATASYNC
    return _done(ring, sqes)


def link_all(ring: Ring, fds: Sequence[int], dir_fds: Sequence[int], names: Sequence[str]) -> list[int]:
    """Give files without a name, opened as ``fds``, names in directories."""
    sqes = _operations(Op.LINKAT, dir_fds)
    sources = _strings([f"/proc/self/fd/{fd}" for fd in fds])
    targets = _strings(names)
    sqes["addr"] = sources.addresses
    sqes["off"] = targets.addresses
    sqes["len"] = np.array(dir_fds, np.uint32)
    sqes["op_flags"] = _AT_SYMLINK_FOLLOW
    return _done(ring, sqes)


def unlink_all(ring: Ring, dir_fds: Sequence[int], names: Sequence[str]) -> list[int]:
    """Remove names of files."""
    sqes = _operations(Op.UNLINKAT, dir_fds)
    paths = _strings(names)
    sqes["addr"] = paths.addresses
    return _done(ring, sqes)


def stat_all(
    ring: Ring, fds: Sequence[int], names: Sequence[str] | None = None
) -> tuple[list[int], npt.NDArray[np.void]]:
    """Describe open files, or with ``names`` what has these names in open directories, not what it links to."""
    sqes = _operations(Op.STATX, fds)
    found: npt.NDArray[np.void] = np.zeros(len(fds), STATX)
    paths = _strings([""] * len(fds) if names is None else names)
    sqes["addr"] = paths.addresses
    sqes["len"] = _STATX_BASIC
    sqes["off"] = found.ctypes.data + STATX.itemsize * np.arange(len(fds), dtype=np.uint64)
    sqes["op_flags"] = _AT_EMPTY_PATH if names is None else _AT_SYMLINK_NOFOLLOW
    return _done(ring, sqes), found


def vectored(
    ring: Ring, op: Op, fds: Sequence[int], offsets: Sequence[int], buffers: Sequence[Sequence[memoryview]]
) -> list[int]:
    """Read or write: each operation its own buffers, one after the other, from an offset of its file on."""
    pieces = [[b for b in group if b.nbytes] for group in buffers]
    addresses = [[address_of(b) for b in group] for group in pieces]
    sqes, iovecs = vectored_operations(op, fds, offsets, pieces, addresses)
    results = _done(ring, sqes)
    # The kernel has done with it now.
    del iovecs
    return results


def vectored_operations(
    op: Op,
    fds: Sequence[int],
    offsets: Sequence[int],
    buffers: Sequence[Sequence[memoryview]],
    addresses: Sequence[Sequence[int]],
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return vectored reads or writes as operations.

    Args:
        op: READV or WRITEV.
        fds: File of each operation.
        offsets: Where in the file it starts.
        buffers: Its buffers, none of them empty.
        addresses: Where these lie.

    Returns:
        The operations, and what describes the buffers to the kernel: it must live until they have been submitted.
    """
    flat = [b.nbytes for group in buffers for b in group]
    iovecs: npt.NDArray[Any] = np.empty(len(flat), IOVEC)
    iovecs["base"] = [a for group in addresses for a in group]
    iovecs["len"] = flat
    counts = np.array([len(group) for group in buffers], np.uint64)
    sqes = _operations(op, fds)
    sqes["off"] = offsets
    sqes["addr"] = iovecs.ctypes.data + IOVEC.itemsize * (np.cumsum(counts) - counts)
    sqes["len"] = counts
    return sqes, iovecs


class _Strings:
    """Zero-terminated strings in memory that stays where it is as long as this lives."""

    def __init__(self, encoded: Sequence[bytes]) -> None:
        self._memory = np.frombuffer(b"\0".join(encoded) + b"\0", np.uint8)
        lengths = np.array([len(text) + 1 for text in encoded], np.uint64)
        start = np.uint64(self._memory.__array_interface__["data"][0])
        self.addresses = start + np.cumsum(lengths, dtype=np.uint64) - lengths


def _strings(texts: Sequence[str]) -> _Strings:
    return _Strings([os.fsencode(text) for text in texts])


def _operations(op: Op, fds: Sequence[int]) -> npt.NDArray[Any]:
    sqes: npt.NDArray[Any] = np.zeros(len(fds), SQE)
    sqes["opcode"] = op
    sqes["fd"] = fds
    return sqes


def _done(ring: Ring, sqes: npt.NDArray[Any]) -> list[int]:
    results: list[int] = ring.run(sqes).tolist()
    return results
