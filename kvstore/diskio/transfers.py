"""Batched transfers: many reads or writes at offsets per call, by io_uring or by threads.

A batch costs a constant number of turns with the GIL, not one per block: under io_uring one system call submits and
awaits a whole unit; with plain system calls neighbours on the disk become one vectored call.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, TypeVar

import numpy as np

from kvstore.diskio.disk import OsDisk
from kvstore.diskio.threads import Batch, CancelFlag, Priority, ThreadEngine
from kvstore.diskio.transfer import ALIGNMENT
from kvstore.diskio.uring import Ring, UringUnavailableError, probe
from kvstore.diskio.uring.abi import IOVEC, SQE, Op

__all__ = ["EngineChoice", "Transfer", "TransferEngine", "address_of"]

_log = logging.getLogger("kvstore.diskio")

EngineChoice: TypeAlias = Literal["auto", "io_uring", "threads"]
"""What does the transfers: ``auto`` is io_uring where this kernel and container allow it, else threads."""

_R = TypeVar("_R")

_RINGS: Final = 4
"""Threads under io_uring, each with a ring: units in flight at once, so that a load need not wait behind a store."""

_RING_ENTRIES: Final = 128
"""Operations in flight per ring; four times what saturates an NVMe drive with small blocks."""

_UNIT_BYTES_MAX: Final = 32 << 20
"""Longest unit under io_uring: what a cancelled or more urgent call has to wait for, some milliseconds."""

_RUN_BYTES_MAX: Final = 1 << 20
"""Longest run of neighbours that becomes one operation: above it a device has enough in one piece."""

_RUN_BUFFERS_MAX: Final = 1024
"""Buffers of one vectored call (IOV_MAX)."""

_STUCK_MAX: Final = 16
"""Short transfers without progress before a disk is called broken."""

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
    """

    fd: int
    offset: int
    buffers: Sequence[memoryview]
    size_bytes: int
    done_bytes: int = -1
    error: OSError | None = None


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
        reason = "" if choice == "threads" else probe()
        if reason:
            _log.warning("io_uring can't be used here (%s); %s uses threads, which cost more CPU", reason, name)
        self.name = "threads" if choice == "threads" or reason else "io_uring"
        self._ringed = self.name == "io_uring"
        self._engine = ThreadEngine(_RINGS if self._ringed else threads, f"kvstore-{name}")
        self._local = threading.local()
        self._rings: list[Ring] = []

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
            for ring in self._rings:
                ring.close()
            self._rings.clear()
        return ended

    def _submit(
        self, unit: Callable[[Sequence[Transfer], CancelFlag], None], transfers: Sequence[Transfer], priority: Priority
    ) -> Batch[Transfer]:
        if not self._ringed:
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
        ring = self._ring() if self._ringed else None
        if ring is None:
            for run in runs:
                if flag.is_set:
                    return
                _call_run(call, run)
        elif not flag.is_set:
            _ring_runs(ring, op, call, runs)

    def _ring(self) -> Ring | None:
        """Return this thread's ring, or None if it can't have one (then it makes plain calls)."""
        ring: Ring | None = getattr(self._local, "ring", None)
        if ring is None and not getattr(self._local, "refused", False):
            try:
                ring = Ring(_RING_ENTRIES)
            except UringUnavailableError as error:
                self._local.refused = True
                _log.warning("a further ring can't be had (%s); a thread makes plain system calls", error)
            else:
                self._local.ring = ring
                self._rings.append(ring)
        return ring


def address_of(buffer: memoryview) -> int:
    """Return the address of a contiguous buffer that is not empty; it stays valid as long as the buffer does."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    except TypeError:
        # Read-only memory, which ctypes does not take; five times slower, and rare.
        address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
        return address


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
            done = call(run[0].fd, [b for t in run for b in t.buffers], run[0].offset)
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
            moved = call(transfer.fd, _after(transfer.buffers, done), transfer.offset + done)
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


def _ring_runs(ring: Ring, op: Op, call: Callable[..., int], runs: Sequence[Sequence[Transfer]]) -> None:
    """Do runs by one batch of operations."""
    buffers = [b for run in runs for t in run for b in t.buffers if b.nbytes]
    iovecs = np.empty(len(buffers), IOVEC)
    iovecs["base"] = [address_of(b) for b in buffers]
    iovecs["len"] = [b.nbytes for b in buffers]
    counts = np.array([sum(1 for t in run for b in t.buffers if b.nbytes) for run in runs])
    sqes: np.ndarray[Any, Any] = np.zeros(len(runs), SQE)
    sqes["opcode"] = op
    sqes["fd"] = [run[0].fd for run in runs]
    sqes["off"] = [run[0].offset for run in runs]
    sqes["addr"] = iovecs.ctypes.data + IOVEC.itemsize * (np.cumsum(counts) - counts)
    sqes["len"] = counts
    # The kernel has done with the buffers and with iovecs when this returns.
    results = ring.run(sqes).tolist()
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


def _after(buffers: Sequence[memoryview], skip: int) -> Sequence[memoryview]:
    """Return the buffers without their first ``skip`` bytes."""
    if skip == 0:
        return buffers
    rest = []
    for buffer in buffers:
        if skip < buffer.nbytes:
            rest.append(buffer[skip:])
        skip = max(0, skip - buffer.nbytes)
    return rest
