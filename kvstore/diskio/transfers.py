"""Batched transfers: many reads or writes at offsets per call, by io_uring or by threads.

A batch costs a constant number of turns with the GIL, not one per block: under io_uring one system call submits what
there is room for, and no thread takes part; with plain system calls neighbours on the disk become one vectored call.
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
from typing import Final, TypeVar

from kvstore.diskio.disk import OsDisk
from kvstore.diskio.loop_ring import LoopRing
from kvstore.diskio.rings import EngineChoice, is_usable
from kvstore.diskio.threads import CancelFlag, Priority, ThreadEngine
from kvstore.diskio.transfer import ALIGNMENT, after
from kvstore.diskio.uring import probe
from kvstore.diskio.uring.abi import SQE_ASYNC, Op
from kvstore.diskio.uring.calls import vectored_operations
from kvstore.diskio.uring.memory import address_of

__all__ = ["Transfer", "TransferEngine"]

_log = logging.getLogger("kvstore.diskio")

_R = TypeVar("_R")

_CLOSE_S_MIN: Final = 0.1
"""Threads that have nothing to do end within this."""

_HELPERS: Final = 2
"""Threads under io_uring: for plain calls, and for the rest of what came short."""

_RUN_BYTES_MAX: Final = 1 << 20
"""Longest run of neighbours that becomes one operation: above it a device has enough in one piece."""

_RUN_BUFFERS_MAX: Final = 1024
"""Buffers of one vectored call (IOV_MAX)."""

_STUCK_MAX: Final = 16
"""Short transfers without progress before a disk is called broken."""

_NAMES: Final = {Op.READV: "preadv", Op.WRITEV: "pwritev"}
"""What operations are called at the seam for fault injection."""

_REPEATED: Final = frozenset({errno.EINTR, errno.EAGAIN, errno.ECANCELED})
"""What an operation in a ring may say without having been tried properly."""


@dataclass(slots=True, eq=False)
class Transfer:
    """One read or write; when its batch has ended, ``error`` or ``done_bytes`` says what became of it.

    Attributes:
        fd: The file.
        offset: Where in the file, bytes.
        buffers: Flat bytes, one after the other; for direct I/O addresses, lengths and offset are aligned.
        size_bytes: Length of all buffers.
        done_bytes: Bytes moved: all of them unless the file ended or ``error`` is set; -1 if nobody has tried.
        error: Why it failed.
        addresses: Where the buffers lie, of whoever knows it already; empty: it is found out.
    """

    fd: int
    offset: int
    buffers: Sequence[memoryview]
    size_bytes: int
    done_bytes: int = -1
    error: OSError | None = None
    addresses: Sequence[int] = ()


class TransferEngine:
    """Moves batches; made on and used from one event loop. Loads go before stores.

    Args:
        disk: What makes plain system calls.
        choice: What to use. ``io_uring`` that is not to be had is replaced by threads, said once in the log.
        threads: Threads where there is no io_uring, and so the most system calls in flight.
        name: Prefix of the threads' names.

    Attributes:
        name: ``"io_uring"`` or ``"threads"``: what is used.
    """

    def __init__(self, disk: OsDisk, choice: EngineChoice = "auto", *, threads: int = 16, name: str = "disk") -> None:
        self._disk = disk
        self._ring = _loop_ring(choice, name)
        self.name = "threads" if self._ring is None else "io_uring"
        self._engine = ThreadEngine(threads if self._ring is None else _HELPERS, f"kvstore-{name}")
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = False
        self._slow_fds: set[int] = set()

    def admit(self, fd: int) -> None:
        """Find out how a file is to be read and written; on any thread, before its first transfer.

        Where a filesystem can't tell that an operation would wait (FUSE, some network filesystems), the kernel would do
        it to its end while it is submitted; its own threads do it instead.
        """
        if not self._disk.tells_waiting(fd):
            self._slow_fds.add(fd)

    def hold(self, files: Sequence[int]) -> None:
        """Keep the locks on files until the last operation has ended, also if the process is killed meanwhile.

        So nobody takes over what a killed process still writes to. Threads keep them by themselves: a process ends when
        the last of its threads has come back from the kernel.
        """
        if self._ring is not None:
            try:
                self._ring.hold(files)
            except OSError as error:
                _log.warning("the ring can't hold locks (%s); a killed process may write after it has let go", error)

    async def read(self, transfers: Sequence[Transfer], priority: Priority = Priority.LOAD) -> None:
        """Read, and wait until nothing touches the buffers any more, also when cancelled (see ``LoopRing.run``)."""
        await self._move(Op.READV, self._disk.preadv, transfers, priority)

    async def write(self, transfers: Sequence[Transfer], priority: Priority = Priority.STORE) -> None:
        """Write, with the same guarantee."""
        await self._move(Op.WRITEV, self._disk.pwritev, transfers, priority)

    async def call(self, function: Callable[[], _R], *, priority: Priority = Priority.STORE) -> _R:
        """Run one plain blocking function on a thread and return what it returns (or raise what it raises)."""
        return await self._engine.call(function, priority=priority)

    async def close(self, timeout_s: float = 5.0) -> bool:
        """Wait for what runs and end the threads. Idempotent.

        Args:
            timeout_s: How long to wait: a frozen disk must not keep an engine from ending.

        Returns:
            Whether all has ended. What has not may still be in the kernel: its files stay open, and its buffers alive.
        """
        self._closing = True
        deadline = time.monotonic() + max(_CLOSE_S_MIN, timeout_s)
        if self._ring is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._idle.wait()
        ended = await self._engine.close(max(_CLOSE_S_MIN, deadline - time.monotonic()))
        if self._ring is None:
            return ended
        if self._running:
            _log.warning("%d batches are stuck in the kernel; leaving them", self._running)
            return False
        self._ring.close()
        return ended

    async def _move(self, op: Op, call: Callable[..., int], transfers: Sequence[Transfer], priority: Priority) -> None:
        if self._closing:
            raise RuntimeError("the transfer engine is closed")
        self._running += 1
        self._idle.clear()
        try:
            if self._ring is None:
                await self._engine.run(partial(_call_runs, call), transfers, priority=priority)
            else:
                await self._ring_runs(self._ring, op, call, _runs(transfers), priority)
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def _ring_runs(
        self, ring: LoopRing, op: Op, call: Callable[..., int], runs: Sequence[Sequence[Transfer]], priority: Priority
    ) -> None:
        """Do runs by one batch of operations, and what does not go that way by plain calls."""
        fds, offsets, sizes = [run[0].fd for run in runs], [run[0].offset for run in runs], [_size(run) for run in runs]
        buffers = [[b for t in run for b in t.buffers if b.nbytes] for run in runs]
        addresses = [_addresses(run) for run in runs]

        async def move(at: Sequence[int]) -> list[int]:
            sqes, iovecs = vectored_operations(
                op, _pick(fds, at), _pick(offsets, at), _pick(buffers, at), _pick(addresses, at)
            )
            sqes["flags"] = [SQE_ASYNC if fds[i] in self._slow_fds else 0 for i in at]
            return await ring.run(sqes, _pick(sizes, at), priority=priority, keep=(iovecs, runs))

        results = await self._disk.awaited_syscalls(_NAMES[op], fds, move)
        left = []
        for run, size_bytes, result in zip(runs, sizes, results, strict=True):
            if result == size_bytes:
                for transfer in run:
                    transfer.done_bytes = transfer.size_bytes
            elif len(run) > 1:
                left += [(transfer, 0) for transfer in run]
            elif result < 0 and -result not in _REPEATED:
                run[0].error = OSError(-result, os.strerror(-result))
                run[0].done_bytes = 0
            else:
                left.append((run[0], max(0, result) - max(0, result) % ALIGNMENT))
        if left:
            await self._engine.run(partial(_complete_all, call), left, priority=priority)


def _loop_ring(choice: EngineChoice, name: str) -> LoopRing | None:
    """Return a ring of the running loop's, or None where threads are to be used, said once in the log."""
    if choice == "threads" or not is_usable(probe(), name):
        return None
    try:
        return LoopRing()
    except OSError as error:
        is_usable(str(error), name)
        return None


def _runs(transfers: Sequence[Transfer]) -> list[list[Transfer]]:
    """Group transfers that lie one behind the other in a file."""
    runs: list[list[Transfer]] = []
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


def _size(run: Sequence[Transfer]) -> int:
    return sum([t.size_bytes for t in run])


def _addresses(run: Sequence[Transfer]) -> list[int]:
    """Return where the buffers lie that are not empty."""
    if all([t.addresses for t in run]):
        return [address for t in run for address in t.addresses]
    return [address_of(b) for t in run for b in t.buffers if b.nbytes]


def _pick(values: Sequence[_R], at: Sequence[int]) -> Sequence[_R]:
    return values if len(at) == len(values) else [values[i] for i in at]


def _call_runs(call: Callable[..., int], transfers: Sequence[Transfer], flag: CancelFlag) -> None:
    """Do a part of a batch by plain calls; in a worker thread."""
    for run in _runs(transfers):
        if flag.is_set:
            return
        _call_run(call, run)


def _complete_all(call: Callable[..., int], left: Sequence[tuple[Transfer, int]], flag: CancelFlag) -> None:
    """Do the rests of transfers, of which so many bytes are done; in a worker thread."""
    for transfer, done in left:
        if flag.is_set:
            return
        _complete(call, transfer, done)


def _call_run(call: Callable[..., int], run: Sequence[Transfer]) -> None:
    """Do a run by one system call; if that does not do all of it, each transfer by itself."""
    if len(run) > 1:
        try:
            done = call(run[0].fd, _buffers(run), run[0].offset)
        except OSError:
            done = -1
        if done == _size(run):
            for transfer in run:
                transfer.done_bytes = transfer.size_bytes
            return
    for transfer in run:
        _complete(call, transfer, 0)


def _complete(call: Callable[..., int], transfer: Transfer, done: int) -> None:
    """Do (the rest of) one transfer by plain calls; short ones are taken up again at a whole unit."""
    stuck = 0
    try:
        while done < transfer.size_bytes:
            moved = call(transfer.fd, after(transfer.buffers, done), transfer.offset + done)
            if moved == 0:
                break
            reached = done + moved
            resume = reached if reached == transfer.size_bytes else reached - reached % ALIGNMENT
            stuck = stuck + 1 if resume <= done else 0
            if stuck > _STUCK_MAX:
                raise OSError(errno.EIO, f"transfers stay short: {done} of {transfer.size_bytes} bytes")
            done = resume
    except OSError as error:
        transfer.error = error
    transfer.done_bytes = done


def _buffers(run: Sequence[Transfer]) -> list[memoryview]:
    return [b for transfer in run for b in transfer.buffers]
