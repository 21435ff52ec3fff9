"""An io_uring: submissions are written as arrays, with one system call for all; completions are read as arrays.

Source of all constants and structures: ``include/uapi/linux/io_uring.h`` and the manual pages io_uring_setup(2),
io_uring_enter(2) and io_uring_register(2). The system call numbers are those of x86-64, arm64 and every later
architecture.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import mmap
import os
import threading
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.runtime.lifetime import held

_SYS_SETUP: Final = 425
_SYS_ENTER: Final = 426
_SYS_REGISTER: Final = 427

_OFF_SQ_RING: Final = 0
_OFF_CQ_RING: Final = 0x8000000
_OFF_SQES: Final = 0x10000000

_SETUP_CLAMP: Final = 1 << 4
_REGISTER_FILES: Final = 2
_REGISTER_EVENTFD: Final = 4
_REGISTER_IOWQ_MAX_WORKERS: Final = 19

SQE_ASYNC: Final = 1 << 4
"""Flag of a submission: a kernel thread runs the operation, so that submitting it never waits for the file."""


class Op(enum.IntEnum):
    """Operations used here."""

    NOP = 0
    READV = 1
    WRITEV = 2
    FSYNC = 3


SQE: Final = np.dtype(
    {
        # Unions are named after their use by the operations above.
        "names": ["opcode", "flags", "ioprio", "fd", "off", "addr", "len", "op_flags", "user_data"],
        "formats": ["u1", "u1", "u2", "i4", "u8", "u8", "u4", "u4", "u8"],
        "offsets": [0, 1, 2, 4, 8, 16, 24, 28, 32],
        "itemsize": 64,
    }
)
"""One submission."""

CQE: Final = np.dtype([("user_data", "u8"), ("res", "i4"), ("flags", "u4")])
"""One completion; ``res`` is the result of the system call, or minus its errno."""

IOVEC: Final = np.dtype([("base", "u8"), ("len", "u8")])
"""One buffer of a vectored read or write."""

_SQ_OFFSETS: Final = [(n, "u4") for n in ("head", "tail", "mask", "entries", "flags", "dropped", "array", "resv")]
_CQ_OFFSETS: Final = [(n, "u4") for n in ("head", "tail", "mask", "entries", "overflow", "cqes", "flags", "resv")]
_PARAMS: Final = np.dtype(
    [
        *((n, "u4") for n in ("sq_entries", "cq_entries", "flags", "sq_cpu", "sq_idle", "features", "wq_fd")),
        ("resv", "u4", 3),
        ("sq", [*_SQ_OFFSETS, ("user_addr", "u8")]),
        ("cq", [*_CQ_OFFSETS, ("user_addr", "u8")]),
    ]
)
"""``struct io_uring_params``: the settings of a ring, and the offsets of its parts in the mappings."""

# CDLL releases the GIL during each call; these calls may block, or pin the pages of megabytes.
_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long

# PyDLL keeps the GIL: this call doesn't block, and taking it back from a busy Python thread takes time.
_held_read = ctypes.PyDLL(None, use_errno=True)["read"]
_held_read.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
_held_read.restype = ctypes.c_ssize_t


class Ring:
    """An io_uring for one thread at a time, with at most ``entries`` operations in flight.

    ``workers_max``: most kernel threads that run the operations of all rings of the thread, but for those with
    :data:`SQE_ASYNC`; 0 leaves it to the kernel, which takes the entries of its first ring, or four for each processor
    if that is less.

    Attributes:
        event_fd: An eventfd that becomes readable when operations complete, until :meth:`completions` is called.

    Raises:
        OSError: The kernel has no io_uring, sysctl or seccomp forbids it, or its memory can't be locked.
    """

    def __init__(self, entries: int, workers_max: int = 0) -> None:
        self._maps: list[mmap.mmap] = []
        self._barrier = threading.Lock()
        self._fd = self.event_fd = -1
        try:
            self._fd, params = setup(entries)
            self._map(params)
            self.event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            register(self._fd, _REGISTER_EVENTFD, [self.event_fd])
            if workers_max:
                with contextlib.suppress(OSError):  # Linux 5.15.
                    register(self._fd, _REGISTER_IOWQ_MAX_WORKERS, [workers_max, 0])
            # Makes operations in flight at a kill visible to other processes, see kvstore.runtime.lifetime.
            if (lifetime := held()) is not None:
                register(self._fd, _REGISTER_FILES, [lifetime])
        except OSError as error:
            self.close()
            raise OSError(error.errno, f"io_uring can't be set up: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    def submit(self, sqes: npt.NDArray[Any]) -> int:
        """Submit operations, with ``user_data`` unchanged, without waiting.

        Args:
            sqes: Array of ``SQE``; together with the operations in flight at most ``entries``.

        Returns:
            Number of operations submitted, from the first on; or minus an errno if none was.
        """
        tail = int(self._sq_tail[0])
        self._sqes[(tail + self._steps[: len(sqes)]) & self._sq_mask] = sqes
        # The kernel reads the tail in an enter call on this thread, so program order suffices.
        self._sq_tail[0] = (tail + len(sqes)) & 0xFFFFFFFF
        taken = submit(self._fd, len(sqes))
        # Withdraw the operations that the kernel did not take; otherwise the next call would submit them.
        self._sq_tail[0] = (tail + max(0, taken)) & 0xFFFFFFFF
        return taken

    def completions(self) -> list[tuple[int, int]]:
        """Return ``user_data`` and result of the operations completed since the last call, without waiting."""
        count = ctypes.c_uint64()
        _held_read(self.event_fd, ctypes.byref(count), ctypes.sizeof(count))
        # An entry must be read after the tail that covers it. On every processor, releasing and taking a lock in
        # between enforces this order.
        with self._barrier:
            head, tail = int(self._cq_head[0]), int(self._cq_tail[0])
        with self._barrier:
            done = self._cqes[(head + self._steps[: (tail - head) & 0xFFFFFFFF]) & self._cq_mask]
        if len(done):
            self._cq_head[0] = tail
        return list(zip(done["user_data"].tolist(), done["res"].tolist(), strict=True))

    def close(self) -> None:
        """Release the ring; only when no operation is in flight. Idempotent."""
        # The maps can only be closed after the arrays over them are gone.
        for name in ("_sq_tail", "_sqes", "_cq_head", "_cq_tail", "_cqes"):
            self.__dict__.pop(name, None)
        for mapping in self._maps:
            with contextlib.suppress(BufferError):
                mapping.close()
        self._maps.clear()
        for fd in (self._fd, self.event_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self.event_fd = -1

    def _map(self, params: Any) -> None:
        sq, cq, sq_entries, cq_entries = (params[name] for name in ("sq", "cq", "sq_entries", "cq_entries"))
        sq_map = self._new_map(int(sq["array"] + 4 * sq_entries), _OFF_SQ_RING)
        cq_map = self._new_map(int(cq["cqes"] + CQE.itemsize * cq_entries), _OFF_CQ_RING)
        self._sqes = np.frombuffer(self._new_map(int(SQE.itemsize * sq_entries), _OFF_SQES), SQE, sq_entries)
        self._sq_tail = np.frombuffer(sq_map, np.uint32, 1, sq["tail"])
        self._sq_mask = int(np.frombuffer(sq_map, np.uint32, 1, sq["mask"])[0])
        self._cq_head = np.frombuffer(cq_map, np.uint32, 1, cq["head"])
        self._cq_tail = np.frombuffer(cq_map, np.uint32, 1, cq["tail"])
        self._cq_mask = int(np.frombuffer(cq_map, np.uint32, 1, cq["mask"])[0])
        self._cqes = np.frombuffer(cq_map, CQE, cq_entries, cq["cqes"])
        # Created once: numpy releases the GIL to create an array, and taking it back from a busy thread takes time.
        self._steps = np.arange(cq_entries)
        # Entry i of the ring is always submission i; the interface's indirection is not needed.
        np.frombuffer(sq_map, np.uint32, sq_entries, sq["array"])[:] = np.arange(sq_entries, dtype=np.uint32)

    def _new_map(self, size_bytes: int, offset: int) -> mmap.mmap:
        mapping = mmap.mmap(self._fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=offset)
        self._maps.append(mapping)
        return mapping


def setup(entries: int) -> tuple[int, Any]:
    """Create a ring; return its descriptor and parameters. Raises OSError (ENOSYS, EPERM: not allowed here)."""
    params = np.zeros(1, _PARAMS)
    params["flags"] = _SETUP_CLAMP
    fd = _syscall(ctypes.c_long(_SYS_SETUP), ctypes.c_uint(entries), ctypes.c_void_p(params.ctypes.data))
    return _checked(fd), params[0]


def submit(fd: int, to_submit: int) -> int:
    """Submit without waiting, and without the GIL; return the number submitted, or minus an errno."""
    no_mask, no_size = ctypes.c_void_p(None), ctypes.c_size_t(0)
    done = _syscall(ctypes.c_long(_SYS_ENTER), fd, ctypes.c_uint(to_submit), 0, 0, no_mask, no_size)
    return int(done) if done >= 0 else -ctypes.get_errno()


def register(fd: int, what: int, numbers: Sequence[int]) -> None:
    """Register files, an eventfd or limits with a ring, see io_uring_register(2). Raises OSError."""
    values = (ctypes.c_int32 * len(numbers))(*numbers)
    arguments = (ctypes.c_uint(what), ctypes.byref(values) if numbers else None, ctypes.c_uint(len(numbers)))
    _checked(_syscall(ctypes.c_long(_SYS_REGISTER), ctypes.c_int(fd), *arguments))


def _checked(result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return int(result)


def probe() -> str:
    """Try io_uring on this machine; return the reason why it can't be used, or an empty string."""
    nops = np.zeros(4, SQE)
    try:
        with contextlib.closing(Ring(len(nops))) as ring:
            taken, done = ring.submit(nops), ring.completions()
    except OSError as error:
        return str(error)
    return "" if done == [(0, 0)] * len(nops) else f"of {len(nops)} no-ops {taken} were taken and {done} came back"
