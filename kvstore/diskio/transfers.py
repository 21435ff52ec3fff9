"""Batched transfers: many reads or writes at offsets per call, by io_uring or by threads.

A batch costs a constant number of turns with the GIL, not one per block: under io_uring one system call submits many
operations and no thread takes part; with plain system calls neighbours on the disk become one vectored call.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.codec.rows import address_of
from kvstore.diskio.disk import OsDisk
from kvstore.diskio.loop_ring import LoopRing
from kvstore.diskio.ring import IOVEC, SQE, SQE_ASYNC, Op, probe
from kvstore.diskio.threads import DiskThreads, Priority
from kvstore.runtime.limits import CallsUnderWay

__all__ = ["EngineChoice", "Transfer", "TransferEngine"]

_log = logging.getLogger("kvstore.diskio")

_R = TypeVar("_R")

EngineChoice: TypeAlias = Literal["auto", "io_uring", "threads"]
"""Engine of the I/O: ``auto`` is io_uring where this kernel and container allow it, else threads."""

_ALIGNMENT: Final = 4096
"""Direct I/O unit, bytes, of address, length and offset: every filesystem takes it (many take 512 as well)."""

_CLOSE_S_MIN: Final = 0.1
"""Idle threads end within this."""

_HELPERS: Final = 4
"""Threads under io_uring, for plain calls and for the rest of short transfers. Some calls last for seconds (a snapshot,
the removal of a segment), and others must not wait for them."""

_UNIT_MAX: Final = 16
"""Transfers that one thread does in a row: a load waits for one such unit of a store, some milliseconds."""

_RUN_BYTES_MAX: Final = 1 << 20
"""Longest run of neighbours that becomes one operation: longer ones are no faster."""

_RUN_BUFFERS_MAX: Final = 1024
"""Buffers of one vectored call (IOV_MAX)."""

_STUCK_MAX: Final = 16
"""Short transfers without progress before a disk is called broken."""

_NAMES: Final = {Op.READV: "preadv", Op.WRITEV: "pwritev"}
"""Names of operations at the seam for fault injection."""

_REPEATED: Final = frozenset({errno.EINTR, errno.EAGAIN, errno.ECANCELED})
"""Results of ring operations that the kernel has not really tried."""


@dataclass(slots=True, eq=False)
class Transfer:
    """One read or write; when its batch has ended, ``error`` or ``done_bytes`` gives the result.

    Attributes:
        buffers: Flat bytes, none empty; for direct I/O addresses, lengths and offset are aligned.
        size_bytes: Length of all buffers.
        done_bytes: Bytes moved: all of them unless the file ended or ``error`` is set; -1 if not tried.
        addresses: Addresses of the buffers if the caller knows them; empty: they are looked up.
    """

    fd: int
    offset: int
    buffers: Sequence[memoryview]
    size_bytes: int
    done_bytes: int = -1
    error: OSError | None = None
    addresses: Sequence[int] = ()


_Run: TypeAlias = list[Transfer]
"""Transfers that lie one behind the other in a file."""


class TransferEngine:
    """Moves batches; made on and used from one event loop. Loads go before stores.

    Where io_uring is not available, ``threads`` replace it, with one warning.

    Attributes:
        disk: Makes plain system calls.
        name: The engine in use, ``"io_uring"`` or ``"threads"``.
    """

    def __init__(self, disk: OsDisk, choice: EngineChoice = "auto", *, threads: int = 16) -> None:
        self.disk = disk
        self._ring = _loop_ring(choice)
        self.name = "threads" if self._ring is None else "io_uring"
        self._threads_max = threads if self._ring is None else _HELPERS
        self._threads = DiskThreads(self._threads_max)
        self._batches = CallsUnderWay()
        self._closing = False
        self._slow_fds: set[int] = set()

    def admit(self, fd: int) -> None:
        """Choose how a file is read and written; on any thread, before its first transfer.

        Some filesystems (FUSE, some network filesystems) can't report that an operation would wait, and the kernel
        would complete it during submission; kernel threads do it instead.
        """
        if not self.disk.tells_waiting(fd):
            self._slow_fds.add(fd)

    def hold(self, files: Sequence[int]) -> None:
        """Keep the locks on files until the last operation has ended, also if the process is killed meanwhile.

        So no engine adopts a directory that a killed one still writes to. Threads need no such care: a process ends
        when the last of its threads has returned from the kernel.
        """
        if self._ring is not None:
            try:
                self._ring.hold(files)
            except OSError as error:
                _log.warning("the ring can't hold locks (%s); a killed process may write after it has let go", error)

    async def read(self, transfers: Sequence[Transfer], priority: Priority = Priority.LOAD) -> None:
        """Read; the buffers are untouched afterwards, also when cancelled (see ``LoopRing.run``)."""
        await self._move(Op.READV, self.disk.preadv, transfers, priority)

    async def write(self, transfers: Sequence[Transfer], priority: Priority = Priority.STORE) -> None:
        """Write, with the same guarantee."""
        await self._move(Op.WRITEV, self.disk.pwritev, transfers, priority)

    async def call(self, function: Callable[[], _R], *, priority: Priority = Priority.STORE) -> _R:
        """Run one blocking function on a thread and return its result (or raise its exception)."""
        return await self._threads.call(function, priority=priority)

    async def close(self, timeout_s: float = 5.0) -> bool:
        """Wait for what runs and end the threads. Idempotent.

        Args:
            timeout_s: How long to wait: a frozen disk must not keep an engine from ending.

        Returns:
            Whether all has ended. Otherwise operations may still be in the kernel: their files must stay open.
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

    async def _move(self, op: Op, call: Callable[..., int], transfers: Sequence[Transfer], priority: Priority) -> None:
        if self._closing:
            raise RuntimeError("the transfer engine is closed")
        with self._batches:
            if self._ring is None:
                unit = max(1, min(_UNIT_MAX, -(-len(transfers) // self._threads_max)))
                units = [transfers[start : start + unit] for start in range(0, len(transfers), unit)]
                await self._threads.run([partial(_do, call, each) for each in units], priority=priority)
            else:
                await self._by_ring(self._ring, op, call, _runs(transfers), priority)

    async def _by_ring(
        self, ring: LoopRing, op: Op, call: Callable[..., int], runs: list[_Run], priority: Priority
    ) -> None:
        """Do runs by one batch of operations, and complete the rest by plain calls."""
        sizes = [sum([t.size_bytes for t in run]) for run in runs]

        async def move(at: Sequence[int]) -> list[int]:
            chosen = runs if len(at) == len(runs) else [runs[i] for i in at]
            sqes, iovecs = _operations(op, chosen)
            if self._slow_fds:
                sqes["flags"] = [SQE_ASYNC if run[0].fd in self._slow_fds else 0 for run in chosen]
            return await ring.run(sqes, [sizes[i] for i in at], priority=priority, keep=(iovecs, chosen))

        results = await self.disk.awaited_syscalls(_NAMES[op], [run[0].fd for run in runs], move)
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
            await self._threads.run(left, priority=priority)


def _loop_ring(choice: EngineChoice) -> LoopRing | None:
    """Return a ring for the running loop, or None, with a warning, where threads have to do."""
    if choice == "threads":
        return None
    if not (reason := probe()):
        try:
            return LoopRing()
        except OSError as error:
            reason = str(error)
    _log.warning("io_uring can't be used here (%s); disk uses threads, which cost more CPU", reason)
    return None


def _runs(transfers: Sequence[Transfer]) -> list[_Run]:
    """Group transfers that lie one behind the other in a file."""
    runs: list[_Run] = []
    fd, end, length, buffers = -1, -1, 0, 0
    for transfer in transfers:
        length += transfer.size_bytes
        buffers += len(transfer.buffers)
        joins = transfer.offset == end and transfer.fd == fd
        if joins and length <= _RUN_BYTES_MAX and buffers <= _RUN_BUFFERS_MAX:
            runs[-1].append(transfer)
        else:
            runs.append([transfer])
            fd, length, buffers = transfer.fd, transfer.size_bytes, len(transfer.buffers)
        end = transfer.offset + transfer.size_bytes
    return runs


def _operations(op: Op, runs: list[_Run]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return a vectored operation for each run, and the iovecs, which must live until these are submitted."""
    moved = list(chain.from_iterable(runs))
    addresses = [t.addresses or [address_of(b) for b in t.buffers] for t in moved]
    iovecs: npt.NDArray[Any] = np.empty(sum(map(len, addresses)), IOVEC)
    iovecs["base"] = list(chain.from_iterable(addresses))
    iovecs["len"] = [b.nbytes for t in moved for b in t.buffers]
    counts = [sum([len(t.buffers) for t in run]) for run in runs]
    sqes: npt.NDArray[Any] = np.zeros(len(runs), SQE)
    sqes["opcode"] = op
    sqes["fd"] = [run[0].fd for run in runs]
    sqes["off"] = [run[0].offset for run in runs]
    sqes["addr"] = iovecs.ctypes.data + IOVEC.itemsize * (np.cumsum(counts) - counts)
    sqes["len"] = counts
    return sqes, iovecs


def _do(call: Callable[..., int], transfers: Sequence[Transfer]) -> None:
    """Do transfers by plain calls: a run by one call; if that comes short, each by itself."""
    for run in _runs(transfers):
        done = -1
        if len(run) > 1:
            with contextlib.suppress(OSError):
                done = call(run[0].fd, [b for transfer in run for b in transfer.buffers], run[0].offset)
        if done == sum([t.size_bytes for t in run]):
            for transfer in run:
                transfer.done_bytes = transfer.size_bytes
        else:
            for transfer in run:
                _complete(call, transfer, 0)


def _complete(call: Callable[..., int], transfer: Transfer, done: int) -> None:
    """Do (the rest of) one transfer by plain calls; short ones resume at a whole unit."""
    stuck = 0
    try:
        while done < transfer.size_bytes:
            moved = call(transfer.fd, _after(transfer.buffers, done), transfer.offset + done)
            if moved == 0:
                break
            reached = done + moved
            resume = reached if reached == transfer.size_bytes else reached - reached % _ALIGNMENT
            stuck = stuck + 1 if resume <= done else 0
            if stuck > _STUCK_MAX:
                raise OSError(errno.EIO, f"transfers stay short: {done} of {transfer.size_bytes} bytes")
            done = resume
    except OSError as error:
        transfer.error = error
    transfer.done_bytes = done


def _after(buffers: Sequence[memoryview], skip: int) -> Sequence[memoryview]:
    """Return the buffers without their first ``skip`` bytes."""
    rest = []
    for buffer in buffers:
        if skip < buffer.nbytes:
            rest.append(buffer[skip:])
        skip = max(0, skip - buffer.nbytes)
    return rest
