"""Vectored reads and writes as operations for a ring. Source: the manual page io_uring_enter(2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.diskio.uring.abi import IOVEC, SQE, Op

__all__ = ["vectored_operations"]


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
    sqes: npt.NDArray[Any] = np.zeros(len(fds), SQE)
    sqes["opcode"] = op
    sqes["fd"] = fds
    sqes["off"] = offsets
    sqes["addr"] = iovecs.ctypes.data + IOVEC.itemsize * (np.cumsum(counts) - counts)
    sqes["len"] = counts
    return sqes, iovecs
