"""A ring: submissions written as arrays, one system call for all of them, completions read as arrays."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.diskio.uring.abi import (
    CQE,
    OFF_CQ_RING,
    OFF_SQ_RING,
    OFF_SQES,
    SQE,
    Op,
    Params,
    enter,
    register_event_fd,
    register_files,
    setup,
    submit,
)
from kvstore.runtime.lifetime import held

__all__ = ["Ring", "UringUnavailableError", "probe"]

_BUSY: Final = (errno.EAGAIN, errno.EBUSY, errno.EINTR)
_BUSY_PAUSE_S: Final = 0.0005
"""Pause when the kernel is out of memory for requests; what is in flight ends meanwhile."""

_IN_FLIGHT_BROKEN: Final = "io_uring_enter failed while operations were in flight"


class UringUnavailableError(OSError):
    """This kernel or container does not let us use io_uring."""


class Ring:
    """An io_uring for one thread at a time.

    Args:
        entries: Operations that one system call can submit; more go in waves.

    Raises:
        UringUnavailableError: Not built in, forbidden by sysctl or seccomp, or no memory may be locked for it.
    """

    def __init__(self, entries: int = 128) -> None:
        try:
            self._fd, params = setup(entries)
        except OSError as error:
            raise UringUnavailableError(error.errno, f"io_uring_setup: {error.strerror}") from error
        self._maps: list[mmap.mmap] = []
        self._barrier = threading.Lock()
        try:
            self._map(params)
            # What is in flight when this process is killed then shows from outside, see the module.
            if (lifetime := held()) is not None:
                register_files(self._fd, [lifetime])
        except OSError as error:
            self.close()
            raise UringUnavailableError(error.errno, f"io_uring can't be set up: {error.strerror}") from error
        except BaseException:
            self.close()
            raise
        self.entries = int(params.sq_entries)

    def run(self, sqes: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        """Do operations and wait for all of them; their order is the kernel's.

        Args:
            sqes: Array of ``abi.SQE``; ``user_data`` is overwritten. What the addresses in it point to must live
                until this returns; afterwards the kernel touches nothing of it, however it returns.

        Returns:
            Result per operation: what the system call would have returned, or minus its errno.
        """
        count = len(sqes)
        results = np.full(count, -errno.ECANCELED, dtype=np.int32)
        sqes["user_data"] = np.arange(count, dtype=np.uint64)
        submitted = finished = 0
        while finished < count:
            # As many in flight as the completion ring holds for certain (it has twice the entries).
            fresh = min(count - submitted, self.entries - (submitted - finished))
            if fresh > 0:
                self._push(sqes[submitted : submitted + fresh])
            else:
                fresh = 0
            try:
                taken = self._enter(fresh, in_flight=submitted - finished)
            except (OSError, SystemError):
                # Else the next call would submit them, with the addresses of memory that is somebody else's by then.
                self._take_back(fresh)
                raise
            if taken < fresh:
                self._take_back(fresh - taken)
            submitted += taken
            done = self._reap()
            results[done["user_data"].astype(np.intp)] = done["res"]
            finished += len(done)
        return results

    def submit(self, sqes: npt.NDArray[Any]) -> int:
        """Submit operations, with ``user_data`` as it is, and don't wait.

        Args:
            sqes: Array of ``abi.SQE``, at most ``entries``; together with what is in flight no more than that either.

        Returns:
            How many of them, from the first, are in flight from now on; or minus an errno: none is.
        """
        self._push(sqes)
        taken = submit(self._fd, len(sqes))
        if taken < len(sqes):
            self._take_back(len(sqes) - max(0, taken))
        return taken

    def completions(self) -> list[tuple[int, int]]:
        """Return ``user_data`` and result of what has completed since the last call, without waiting."""
        done = self._reap()
        return list(zip(done["user_data"].tolist(), done["res"].tolist(), strict=True))

    def signal(self, event_fd: int) -> None:
        """Count completions in an eventfd from now on. Raises OSError."""
        register_event_fd(self._fd, event_fd)

    def hold(self, files: Sequence[int]) -> None:
        """Keep files open, and with them the locks on them, until the last operation has ended. Raises OSError.

        Only while nothing is in flight, and instead of those that were given before.
        """
        lifetime = held()
        register_files(self._fd, [*files, *([] if lifetime is None else [lifetime])])

    def close(self) -> None:
        """Give the ring back; only when nothing runs. Idempotent."""
        # Arrays over the maps must be gone before the maps can be closed.
        for name in ("_sq_tail", "_sq_mask", "_sq_array", "_sqes", "_cq_head", "_cq_tail", "_cq_mask", "_cqes"):
            self.__dict__.pop(name, None)
        for mapping in self._maps:
            with contextlib.suppress(BufferError):
                mapping.close()
        self._maps.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _map(self, params: Params) -> None:
        sq, cq = params.sq_off, params.cq_off
        sq_map = self._new_map(sq.array + 4 * params.sq_entries, OFF_SQ_RING)
        cq_map = self._new_map(cq.cqes + CQE.itemsize * params.cq_entries, OFF_CQ_RING)
        sqe_map = self._new_map(SQE.itemsize * params.sq_entries, OFF_SQES)
        self._sq_tail = np.frombuffer(sq_map, np.uint32, 1, sq.tail)
        self._sq_mask = int(np.frombuffer(sq_map, np.uint32, 1, sq.ring_mask)[0])
        self._sq_array = np.frombuffer(sq_map, np.uint32, params.sq_entries, sq.array)
        self._sqes = np.frombuffer(sqe_map, SQE, params.sq_entries)
        self._cq_head = np.frombuffer(cq_map, np.uint32, 1, cq.head)
        self._cq_tail = np.frombuffer(cq_map, np.uint32, 1, cq.tail)
        self._cq_mask = int(np.frombuffer(cq_map, np.uint32, 1, cq.ring_mask)[0])
        self._cqes = np.frombuffer(cq_map, CQE, params.cq_entries, cq.cqes)
        # Made once: numpy lets go of the GIL to make one, which beside a busy thread is not to be had again for 5 ms.
        self._steps = np.arange(params.cq_entries)
        # Entry i of the ring is always submission i: the indirection that the interface offers is not needed.
        self._sq_array[:] = np.arange(params.sq_entries, dtype=np.uint32)

    def _new_map(self, size_bytes: int, offset: int) -> mmap.mmap:
        mapping = mmap.mmap(self._fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=offset)
        self._maps.append(mapping)
        return mapping

    def _push(self, sqes: npt.NDArray[Any]) -> None:
        tail = int(self._sq_tail[0])
        self._sqes[(tail + self._steps[: len(sqes)]) & self._sq_mask] = sqes
        # The kernel reads the tail in the enter call of this same thread, so program order is all the order needed.
        self._sq_tail[0] = (tail + len(sqes)) & 0xFFFFFFFF

    def _take_back(self, count: int) -> None:
        """Withdraw submissions that the kernel did not take, so that they are pushed again."""
        self._sq_tail[0] = (int(self._sq_tail[0]) - count) & 0xFFFFFFFF

    def _enter(self, fresh: int, in_flight: int) -> int:
        """Submit and wait for what is in flight; return how many of the fresh ones the kernel took."""
        result = enter(self._fd, fresh, fresh + in_flight)
        if result >= 0:
            return result
        if -result in _BUSY:
            if -result != errno.EINTR:
                time.sleep(_BUSY_PAUSE_S)
            return 0
        if not in_flight:
            raise OSError(-result, f"io_uring_enter: {os.strerror(-result)}")
        # Never leave while the kernel may still write to somebody's buffers.
        raise SystemError(f"{_IN_FLIGHT_BROKEN}: {os.strerror(-result)}")

    def _reap(self) -> npt.NDArray[Any]:
        # No entry may be read before the tail that says it is there: on any processor a lock that is let go of and
        # taken again in between sees to that.
        with self._barrier:
            head, tail = int(self._cq_head[0]), int(self._cq_tail[0])
        with self._barrier:
            done: npt.NDArray[Any] = self._cqes[(head + self._steps[: (tail - head) & 0xFFFFFFFF]) & self._cq_mask]
        if len(done):
            self._cq_head[0] = tail
        return done


def probe() -> str:
    """Try io_uring on this machine; return why it can't be used, or an empty string if it can."""
    try:
        ring = Ring(4)
    except UringUnavailableError as error:
        return str(error)
    try:
        nops = np.zeros(6, SQE)
        nops["opcode"] = Op.NOP
        results = ring.run(nops)
        return "" if not results.any() else f"a no-op returned {results.tolist()}"
    except OSError as error:
        return str(error)
    finally:
        ring.close()
