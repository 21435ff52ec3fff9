"""Batched transfers: many reads or writes at offsets per call, by io_uring or by threads.

A batch takes the GIL a constant number of times, not once per block. With io_uring, one system call submits many
operations without any thread. With plain system calls, neighbours on the disk become one vectored call.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.codec.rows import address_of
from kvstore.diskio.disk import OsDisk, bare
from kvstore.diskio.loop_ring import LoopRing
from kvstore.diskio.ring import IOVEC, SQE, SQE_ASYNC, Op, probe
from kvstore.runtime.limits import CallsUnderWay, Precedence
from kvstore.runtime.workers import Workers

_log = logging.getLogger("kvstore.diskio")

_R = TypeVar("_R")

EngineChoice: TypeAlias = Literal["auto", "io_uring", "threads"]
"""I/O engine: ``auto`` is io_uring where this kernel and container allow it, else threads."""

_ALIGNMENT: Final = 4096
"""Alignment for direct I/O of address, length and offset, in bytes; every filesystem accepts it, many also 512."""

_CLOSE_S_MIN: Final = 0.1
"""Minimum wait for the threads at a close; idle ones end within it."""

_HELPERS: Final = 4
"""Number of threads beside io_uring, for plain calls and for the rest of short transfers. Some calls take seconds (the
removal of a segment), and other calls must not wait for them."""

_RUN_BYTES_MAX: Final = 1 << 20
"""Longest run of neighbours combined into one operation; longer operations are no faster."""

_RUN_BUFFERS_MAX: Final = 1024
"""Most buffers of one vectored call (IOV_MAX)."""

_STUCK_MAX: Final = 16
"""Consecutive short transfers that end before the next aligned offset; after more, the transfer resumes unaligned."""

_NAMES: Final = {Op.READV: "preadv", Op.WRITEV: "pwritev"}
"""Names of operations for fault injection."""

_REPEATED: Final = frozenset({errno.EINTR, errno.EAGAIN, errno.ECANCELED})
"""Errors of ring operations that the kernel has not actually tried."""


@dataclass(slots=True, eq=False)
class Transfer:
    """One read or write; when its batch has ended, ``error`` or ``done_bytes`` has the result."""

    fd: int
    offset: int
    buffers: Sequence[memoryview]
    """Flat byte buffers, none empty; for direct I/O, addresses, lengths and offset are aligned."""
    size_bytes: int  # Total length of the buffers.
    done_bytes: int = -1
    """Bytes moved: ``size_bytes`` unless the file ended or ``error`` is set; -1 before the attempt."""
    error: OSError | None = None
    addresses: Sequence[int] = ()  # Addresses of the buffers if the caller has them; if empty, they are looked up.


_Run: TypeAlias = list[Transfer]
"""Transfers that are adjacent in a file."""


class TransferEngine:
    """Moves batches; created on and used from one event loop. Loads have precedence over stores.

    If io_uring is not available, ``threads`` replace it, with one warning. ``workers_max`` is for io_uring.
    """

    def __init__(self, disk: OsDisk, choice: EngineChoice = "auto", *, threads: int = 16, workers_max: int = 0) -> None:
        self.disk = disk  # Makes plain system calls.
        self._ring = _loop_ring(choice, workers_max)
        # The engine in use, ``"io_uring"`` or ``"threads"``.
        self.name = "threads" if self._ring is None else "io_uring"
        self._threads = Workers(threads if self._ring is None else _HELPERS, "kvstore-disk")
        self._batches = CallsUnderWay()
        self._closing = False
        self._releasing: asyncio.Task[None] | None = None
        # Files by operation that are submitted with SQE_ASYNC.
        self._async_fds: dict[Op, set[int]] = {Op.READV: set(), Op.WRITEV: set()}

    def admit(self, fd: int) -> None:
        """Choose how a file is read and written; call it on any thread, before the first transfer of the file.

        Some filesystems (FUSE, some network filesystems) can't report that an operation would block. The kernel would
        complete it during the submission, so kernel threads run these operations instead.

        They also run buffered writes if the thread already had a ring. Otherwise the kernel would try each write first,
        sort those that would block by a hash of their inode into 64 groups, for all rings of the thread, and run one of
        a group at a time, so that a write could wait for one of another ring, on a frozen drive. The kernel does not
        sort writes that it has not tried (since Linux 5.18), nor, in new kernels, direct writes to ext4 and XFS; those
        to btrfs may still wait.
        """
        is_slow = not self.disk.supports_nowait(fd)
        is_beside_another_ring = self._ring is not None and not self._ring.is_first
        is_queued = is_slow or (is_beside_another_ring and not self.disk.is_direct(fd))
        for op, is_async in ((Op.READV, is_slow), (Op.WRITEV, is_queued)):
            # A closed file may have had the same number.
            (self._async_fds[op].add if is_async else self._async_fds[op].discard)(fd)

    # Plain functions, because a coroutine that only awaits another one takes part in each of its resumptions.
    def read(
        self, transfers: Sequence[Transfer], precedence: Precedence = Precedence.LOAD
    ) -> Coroutine[Any, Any, None]:
        """Read; the buffers are not touched after the call, even if it is cancelled (see ``LoopRing.run``)."""
        return self._move(Op.READV, self.disk.preadv, transfers, precedence)

    def write(
        self, transfers: Sequence[Transfer], precedence: Precedence = Precedence.STORE
    ) -> Coroutine[Any, Any, None]:
        """Write, with the same guarantee. The file stays open until then: a kernel thread may look it up late."""
        return self._move(Op.WRITEV, self.disk.pwritev, transfers, precedence)

    async def call(self, function: Callable[[], _R], *, precedence: Precedence = Precedence.STORE) -> _R:
        """Run one blocking function on a thread and return its result (or raise its exception)."""
        return await self._threads.call(function, precedence=precedence)

    async def close(self, timeout_s: float = 5.0) -> bool:
        """Wait for running operations and end the threads. Idempotent.

        Args:
            timeout_s: Limit of the wait, so that a frozen disk cannot block the shutdown of an engine.

        Returns:
            Whether everything has ended. If not, operations may still be in the kernel, and their files must stay open.
        """
        self._closing = True
        deadline = time.monotonic() + max(_CLOSE_S_MIN, timeout_s)
        if self._ring is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._batches.ended()
        ended = await self._threads.close(max(_CLOSE_S_MIN, deadline - time.monotonic()))
        if self._ring is None:
            return ended
        if self._batches.count:
            _log.warning("%d batches are stuck in the kernel; leaving them", self._batches.count)
            return False
        self._ring.close()
        return ended

    def release(self, close_files: Callable[[], None]) -> None:
        """End without waiting: drop what has not begun, and close files once no operation uses them any more.

        Threads in the kernel are waited for on a thread. The end of a ring's operations needs a running loop.
        """
        self._closing = True
        self._threads.stop()
        if self._ring is not None:
            if self._batches.count:
                self._releasing = asyncio.get_running_loop().create_task(self._release_after_ring(close_files))
                return
            self._ring.close()

        def close_late() -> None:
            self._threads.join()
            close_files()

        threading.Thread(target=close_late, name="kvstore-closing", daemon=True).start()

    async def _release_after_ring(self, close_files: Callable[[], None]) -> None:
        while self._batches.count:
            # The end of the loop cancels it.
            with contextlib.suppress(asyncio.CancelledError):
                await self._batches.ended()
        self.release(close_files)

    async def _move(
        self, op: Op, call: Callable[..., int], transfers: Sequence[Transfer], precedence: Precedence
    ) -> None:
        if self._closing:
            raise OSError(errno.ESHUTDOWN, "the transfer engine is closed")
        runs, sizes, fds = _runs(transfers)
        with self._batches:
            if self._ring is None:
                await self._threads.run([partial(_do, call, run) for run in runs], precedence=precedence)
                return
            # All runs in one batch of operations.
            start = partial(self._start, self._ring, op, runs, sizes, fds, precedence)
            results = await self.disk.awaited_syscalls(_NAMES[op], fds, start)
            left = []
            for run, size_bytes, result in zip(runs, sizes, results, strict=True):
                if result == size_bytes:
                    for transfer in run:
                        transfer.done_bytes = transfer.size_bytes
                elif len(run) > 1:
                    left += [partial(_complete, call, transfer, 0) for transfer in run]
                elif result < 0 and -result not in _REPEATED:
                    run[0].error = OSError(-result, os.strerror(-result))
                    run[0].done_bytes = 0
                else:
                    done = max(0, result)
                    left.append(partial(_complete, call, run[0], done - done % _ALIGNMENT))
            if left:
                # Plain calls complete the short ones.
                await self._threads.run(left, precedence=precedence)

    def _start(
        self,
        ring: LoopRing,
        op: Op,
        runs: Sequence[_Run],
        sizes: Sequence[int],
        fds: Sequence[int],
        precedence: Precedence,
        at: Sequence[int],
    ) -> Coroutine[Any, Any, list[int]]:
        """Return the move of the runs at some positions."""
        if len(at) < len(runs):
            runs, sizes, fds = [runs[i] for i in at], [sizes[i] for i in at], [fds[i] for i in at]
        sqes, iovecs = _operations(op, runs, fds)
        if async_fds := self._async_fds[op]:
            sqes["flags"] = [SQE_ASYNC if fd in async_fds else 0 for fd in fds]
        return ring.run(sqes, sizes, precedence=precedence, keep=(iovecs, runs))


def _loop_ring(choice: EngineChoice, workers_max: int) -> LoopRing | None:
    """Return a ring for the running loop, or None if threads are used; warns if io_uring is unavailable."""
    if choice == "threads":
        return None
    if not (reason := probe()):
        try:
            return LoopRing(workers_max=workers_max)
        except OSError as error:
            reason = str(error)
    _log.warning("io_uring can't be used here (%s); disk uses threads, which cost more CPU", reason)
    return None


def _runs(transfers: Sequence[Transfer]) -> tuple[list[_Run], list[int], list[int]]:
    """Group transfers that are adjacent in a file; return the groups, their lengths in bytes and their files."""
    runs: list[_Run] = []
    sizes: list[int] = []
    fds: list[int] = []
    fd, end, length, buffers = -1, -1, 0, 0
    for transfer in transfers:
        length += transfer.size_bytes
        buffers += len(transfer.buffers)
        joins = transfer.offset == end and transfer.fd == fd
        if joins and length <= _RUN_BYTES_MAX and buffers <= _RUN_BUFFERS_MAX:
            runs[-1].append(transfer)
            sizes[-1] = length
        else:
            runs.append([transfer])
            fd, length, buffers = transfer.fd, transfer.size_bytes, len(transfer.buffers)
            sizes.append(length)
            fds.append(fd)
        end = transfer.offset + transfer.size_bytes
    return runs, sizes, fds


def _operations(op: Op, runs: Sequence[_Run], fds: Sequence[int]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return a vectored operation for each run, and the iovecs, which must live until the operations are submitted."""
    addresses: list[int] = []
    lengths: list[int] = []
    offsets, counts = [], []
    # One loop: this runs for each batch, and a comprehension is a call.
    for run in runs:
        before = len(lengths)
        for transfer in run:
            addresses += transfer.addresses or map(address_of, transfer.buffers)
            for buffer in transfer.buffers:
                lengths.append(buffer.nbytes)
        offsets.append(run[0].offset)
        counts.append(len(lengths) - before)
    iovecs: npt.NDArray[Any] = np.empty(len(lengths), IOVEC)
    iovecs["base"], iovecs["len"] = addresses, lengths
    sqes: npt.NDArray[Any] = np.zeros(len(runs), SQE)
    sqes["opcode"], sqes["fd"], sqes["off"] = op, fds, offsets
    sqes["addr"] = iovecs.ctypes.data + IOVEC.itemsize * (np.cumsum(counts) - counts)
    sqes["len"] = counts
    return sqes, iovecs


def _do(call: Callable[..., int], run: _Run) -> None:
    """Move a run in one plain call; if that is short, move each transfer separately."""
    is_whole = False
    if len(run) > 1:
        with contextlib.suppress(OSError):
            done = call(run[0].fd, [b for transfer in run for b in transfer.buffers], run[0].offset)
            is_whole = done == sum([transfer.size_bytes for transfer in run])
    for transfer in run:
        if is_whole:
            transfer.done_bytes = transfer.size_bytes
        else:
            _complete(call, transfer, 0)


def _complete(call: Callable[..., int], transfer: Transfer, done: int) -> None:
    """Move (the rest of) one transfer by plain calls; short ones resume at a multiple of ``_ALIGNMENT``."""
    stuck = 0
    try:
        while done < transfer.size_bytes:
            moved = call(transfer.fd, _after(transfer.buffers, done), transfer.offset + done)
            if moved == 0:
                break
            reached = done + moved
            resume = reached if reached == transfer.size_bytes else reached - reached % _ALIGNMENT
            stuck = stuck + 1 if resume <= done else 0
            # Buffered I/O may go on at any byte; on a full disk, only a write of the rest fails with ENOSPC.
            done = reached if stuck > _STUCK_MAX else resume
    except OSError as error:
        transfer.error = bare(error)
    transfer.done_bytes = done


def _after(buffers: Sequence[memoryview], skip: int) -> Sequence[memoryview]:
    """Return the buffers without their first ``skip`` bytes."""
    rest = []
    for buffer in buffers:
        if skip < buffer.nbytes:
            rest.append(buffer[skip:])
        skip = max(0, skip - buffer.nbytes)
    return rest
