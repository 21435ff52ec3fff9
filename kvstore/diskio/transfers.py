"""Batched transfers: many reads or writes at offsets per call, by io_uring or by threads.

A batch costs a constant number of turns with the GIL, not one per block: under io_uring one system call submits and
awaits a whole unit; with plain system calls neighbours on the disk become one vectored call.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from kvstore.diskio.disk import OsDisk
from kvstore.diskio.rings import EngineChoice, Rings
from kvstore.diskio.threads import Batch, CancelFlag, Priority, ThreadEngine
from kvstore.diskio.transfer import ALIGNMENT, after
from kvstore.diskio.uring import Ring
from kvstore.diskio.uring.abi import Op
from kvstore.diskio.uring.calls import vectored

__all__ = ["Transfer", "TransferEngine"]

_R = TypeVar("_R")

_RINGS: Final = 4
"""Threads under io_uring, each with a ring: units in flight at once, so that a load need not wait behind a store."""

_UNIT_BYTES_MAX: Final = 32 << 20
"""Longest unit under io_uring: what a cancelled or more urgent call has to wait for, some milliseconds."""

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
        self._rings = Rings(choice, name)
        self.name = "io_uring" if self._rings.used else "threads"
        self._engine = ThreadEngine(_RINGS if self._rings.used else threads, f"kvstore-{name}")

    async def read(self, transfers: Sequence[Transfer], priority: Priority = Priority.LOAD) -> None:
        """Read, and wait until nothing touches the buffers any more, also when cancelled (see ``Batch.wait``)."""
        await self._submit(self._read_unit, transfers, priority).wait()

    async def write(self, transfers: Sequence[Transfer], priority: Priority = Priority.STORE) -> None:
        """Write, with the same guarantee."""
        await self._submit(self._write_unit, transfers, priority).wait()

    async def call(self, function: Callable[[], _R], *, priority: Priority = Priority.STORE) -> _R:
        """Run one plain blocking function on a thread and return what it returns (or raise what it raises)."""
        return await self._engine.call(function, priority=priority)

    async def close(self, timeout_s: float = 5.0) -> bool:
        """End the threads; see :meth:`ThreadEngine.close`. Idempotent."""
        ended = await self._engine.close(timeout_s)
        if ended:
            self._rings.close()
        return ended

    def _submit(
        self, unit: Callable[[Sequence[Transfer], CancelFlag], None], transfers: Sequence[Transfer], priority: Priority
    ) -> Batch[Transfer]:
        if not self._rings.used:
            return self._engine.submit(unit, transfers, priority=priority)
        longest = max((t.size_bytes for t in transfers), default=1)
        items_max = max(1, _UNIT_BYTES_MAX // max(1, longest))
        return self._engine.submit(unit, transfers, priority=priority, unit_items_max=items_max, threads_max=1)

    def _read_unit(self, transfers: Sequence[Transfer], flag: CancelFlag) -> None:
        self._unit(Op.READV, self._disk.preadv, transfers, flag)

    def _write_unit(self, transfers: Sequence[Transfer], flag: CancelFlag) -> None:
        self._unit(Op.WRITEV, self._disk.pwritev, transfers, flag)

    def _unit(self, op: Op, call: Callable[..., int], transfers: Sequence[Transfer], flag: CancelFlag) -> None:
        """Do a part of a batch; in a worker thread."""
        runs = _runs(transfers)
        ring = self._rings.mine()
        if ring is None:
            for run in runs:
                if flag.is_set:
                    return
                _call_run(call, run)
        elif not flag.is_set:
            _ring_runs(self._disk, ring, op, call, runs)


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


def _call_run(call: Callable[..., int], run: Sequence[Transfer]) -> None:
    """Do a run by one system call; if that does not do all of it, each transfer by itself."""
    if len(run) > 1:
        try:
            done = call(run[0].fd, _buffers(run), run[0].offset)
        except OSError:
            done = -1
        if done == sum(t.size_bytes for t in run):
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


def _ring_runs(disk: OsDisk, ring: Ring, op: Op, call: Callable[..., int], runs: Sequence[Sequence[Transfer]]) -> None:
    """Do runs by one batch of operations."""
    fds, offsets, buffers = [run[0].fd for run in runs], [run[0].offset for run in runs], [_buffers(r) for r in runs]
    known = all(t.addresses for run in runs for t in run)
    addresses = [[a for t in run for a in t.addresses] for run in runs] if known else None

    def move(at: Sequence[int]) -> list[int]:
        places = None if addresses is None else [addresses[i] for i in at]
        return vectored(ring, op, [fds[i] for i in at], [offsets[i] for i in at], [buffers[i] for i in at], places)

    results = disk.syscalls(_NAMES[op], fds, move)
    for run, result in zip(runs, results, strict=True):
        if result == sum(t.size_bytes for t in run):
            for transfer in run:
                transfer.done_bytes = transfer.size_bytes
        elif len(run) > 1:
            for transfer in run:
                _complete(call, transfer, 0)
        elif result < 0 and -result not in _REPEATED:
            run[0].error = OSError(-result, os.strerror(-result))
            run[0].done_bytes = 0
        else:
            _complete(call, run[0], max(0, result) - max(0, result) % ALIGNMENT)


def _buffers(run: Sequence[Transfer]) -> list[memoryview]:
    return [b for transfer in run for b in transfer.buffers]
