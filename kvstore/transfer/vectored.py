"""Copies of many pieces of this process's memory by one system call.

``process_vm_readv`` (Linux 3.2) copies between two lists of up to 1024 pieces each, and ctypes releases the GIL during
the call. One copy per layer would either hold the GIL or reacquire it after every layer, which takes up to 5 ms while
another thread runs Python. A process needs no privilege to read its own memory, but a sandbox may forbid the call.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

PIECES_MAX = 1024
"""Pieces per call, the kernel's UIO_MAXIOV."""

Pieces = npt.NDArray[np.uint64]
"""Pieces of memory, shape ``(n, 2)``: address, length. The layout of ``struct iovec``."""

_CALL_BYTES_MAX = 1 << 30
"""The kernel moves at most 2 GiB (less a page) per call and truncates the rest."""


def copy_pieces(targets: Pieces, sources: Pieces, go_on: Callable[[], bool] = lambda: True) -> bool:
    """Copy pieces of memory, each to the target of the same index and length.

    The caller is responsible for the addresses. An unmapped address is an error; any other is used unchecked.

    Args:
        targets: Targets, C-contiguous.
        sources: Sources, C-contiguous, of the same lengths.
        go_on: Called before each system call; false stops the copy.

    Returns:
        Whether everything was copied.

    Raises:
        OSError: The call failed or was incomplete.
    """
    at = 0
    ends = np.cumsum(sources[:, 1].astype(np.int64))
    while at < len(sources):
        if not go_on():
            return False
        done = int(ends[at - 1]) if at else 0
        fitting = int(np.searchsorted(ends, done + _CALL_BYTES_MAX, side="right"))
        # A piece above the limit gets a call of its own and fails as incomplete; no layer has such long pages.
        end = max(at + 1, min(at + PIECES_MAX, fitting))
        wanted = int(ends[end - 1]) - done
        if (moved := _readv(targets[at:end], sources[at:end])) != wanted:
            code = ctypes.get_errno() if moved < 0 else 0
            raise OSError(code, f"process_vm_readv moved {moved} of {wanted} bytes: {os.strerror(code)}")
        at = end
    return True


def is_available() -> bool:
    """Return whether the call works here: Linux, not forbidden by a sandbox."""
    if _CALL is None:
        return False
    source, target = np.array([7], np.uint64), np.zeros(1, np.uint64)
    moved = _readv(*(np.array([[one.ctypes.data, one.nbytes]], np.uint64) for one in (target, source)))
    return moved == source.nbytes and bool(target[0] == source[0])


def _readv(targets: Pieces, sources: Pieces) -> int:
    if _CALL is None:
        return -1
    moved: int = _CALL(os.getpid(), targets.ctypes.data, len(targets), sources.ctypes.data, len(sources), 0)
    return moved


def _find_call() -> Any:
    try:
        call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (OSError, AttributeError):
        return None
    call.restype = ctypes.c_ssize_t
    call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    return call


_CALL = _find_call()
