"""The kernel's io_uring interface: numbers, structures and the three system calls.

Source: ``include/uapi/linux/io_uring.h`` and the manual pages io_uring_setup(2), io_uring_enter(2) and
io_uring_register(2). The system call numbers are the same on all architectures that have been added since 2018 and on
x86-64 and arm64.
"""

from __future__ import annotations

import ctypes
import enum
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import numpy as np

__all__ = [
    "CQE",
    "IOVEC",
    "OFF_CQ_RING",
    "OFF_SQES",
    "OFF_SQ_RING",
    "SQE",
    "Op",
    "Params",
    "clear_event",
    "enter",
    "register_event_fd",
    "register_files",
    "setup",
    "submit",
]

SYS_SETUP: Final = 425
SYS_ENTER: Final = 426
SYS_REGISTER: Final = 427

OFF_SQ_RING: Final = 0
OFF_CQ_RING: Final = 0x8000000
OFF_SQES: Final = 0x10000000

ENTER_GETEVENTS: Final = 1
SQE_ASYNC: Final = 1 << 4
"""``flags`` of a submission: a kernel thread does it, and submitting it never waits for the file."""

REGISTER_FILES: Final = 2
UNREGISTER_FILES: Final = 3
REGISTER_EVENTFD: Final = 4
SETUP_CLAMP: Final = 1 << 4


class Op(enum.IntEnum):
    """Operations that are used here."""

    NOP = 0
    READV = 1
    WRITEV = 2
    FSYNC = 3


SQE: Final = np.dtype(
    {
        # Unions of the structure appear under the name that the operations above give them.
        "names": ["opcode", "flags", "ioprio", "fd", "off", "addr", "len", "op_flags", "user_data"],
        "formats": ["u1", "u1", "u2", "i4", "u8", "u8", "u4", "u4", "u8"],
        "offsets": [0, 1, 2, 4, 8, 16, 24, 28, 32],
        "itemsize": 64,
    }
)
"""One submission."""

CQE: Final = np.dtype([("user_data", "u8"), ("res", "i4"), ("flags", "u4")])
"""One completion; ``res`` is what the system call would have returned, or minus its errno."""

IOVEC: Final = np.dtype([("base", "u8"), ("len", "u8")])
"""One buffer of a vectored read or write."""


class _SqOffsets(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint32)
        for name in ("head", "tail", "ring_mask", "ring_entries", "flags", "dropped", "array", "resv1")
    ] + [("user_addr", ctypes.c_uint64)]


class _CqOffsets(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint32)
        for name in ("head", "tail", "ring_mask", "ring_entries", "overflow", "cqes", "flags", "resv1")
    ] + [("user_addr", ctypes.c_uint64)]


class Params(ctypes.Structure):
    """``struct io_uring_params``: what is asked of the kernel, and where it put things."""

    _fields_ = [
        ("sq_entries", ctypes.c_uint32),
        ("cq_entries", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("sq_thread_cpu", ctypes.c_uint32),
        ("sq_thread_idle", ctypes.c_uint32),
        ("features", ctypes.c_uint32),
        ("wq_fd", ctypes.c_uint32),
        ("resv", ctypes.c_uint32 * 3),
        ("sq_off", _SqOffsets),
        ("cq_off", _CqOffsets),
    ]


# CDLL drops the GIL for the length of each call: these may wait.
_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long

# PyDLL keeps it: these don't wait, and to get it back from a thread that computes in Python takes up to 5 ms.
_held_libc = ctypes.PyDLL(None, use_errno=True)
_held_syscall = _held_libc.syscall
_held_syscall.restype = ctypes.c_long
_held_read = _held_libc["read"]
_held_read.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
_held_read.restype = ctypes.c_ssize_t


def setup(entries: int) -> tuple[int, Params]:
    """Make a ring; return its descriptor and parameters. Raises OSError (ENOSYS, EPERM: not allowed here)."""
    params = Params(flags=SETUP_CLAMP)
    fd = _syscall(ctypes.c_long(SYS_SETUP), ctypes.c_uint(entries), ctypes.byref(params))
    if fd < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return int(fd), params


def enter(fd: int, to_submit: int, min_complete: int) -> int:
    """Submit and wait; return how many were submitted, or minus an errno."""
    done = _syscall(
        ctypes.c_long(SYS_ENTER),
        ctypes.c_int(fd),
        ctypes.c_uint(to_submit),
        ctypes.c_uint(min_complete),
        ctypes.c_uint(ENTER_GETEVENTS),
        ctypes.c_void_p(None),
        ctypes.c_size_t(0),
    )
    return int(done) if done >= 0 else -ctypes.get_errno()


def submit(fd: int, to_submit: int) -> int:
    """Submit and don't wait, keeping the GIL; return how many were submitted, or minus an errno."""
    done = _held_syscall(
        ctypes.c_long(SYS_ENTER),
        ctypes.c_int(fd),
        ctypes.c_uint(to_submit),
        ctypes.c_uint(0),
        ctypes.c_uint(0),
        ctypes.c_void_p(None),
        ctypes.c_size_t(0),
    )
    return int(done) if done >= 0 else -ctypes.get_errno()


def register_event_fd(fd: int, event_fd: int) -> None:
    """Let a ring count its completions in an eventfd. Raises OSError."""
    _register(fd, REGISTER_EVENTFD, [event_fd])


def register_files(fd: int, files: Sequence[int]) -> None:
    """Let a ring keep files open until its last operation has ended, whoever closes them before. Raises OSError.

    Instead of those that it kept so far.
    """
    with suppress(OSError):
        # ENXIO: there were none.
        _register(fd, UNREGISTER_FILES, [])
    _register(fd, REGISTER_FILES, files)


def _register(fd: int, what: int, numbers: Sequence[int]) -> None:
    values = (ctypes.c_int32 * len(numbers))(*numbers)
    arguments = (ctypes.c_uint(what), ctypes.byref(values) if numbers else None, ctypes.c_uint(len(numbers)))
    if _syscall(ctypes.c_long(SYS_REGISTER), ctypes.c_int(fd), *arguments) < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def clear_event(event_fd: int) -> None:
    """Set a non-blocking eventfd back to nothing, keeping the GIL; it may be so already."""
    count = ctypes.c_uint64()
    _held_read(event_fd, ctypes.byref(count), ctypes.sizeof(count))
