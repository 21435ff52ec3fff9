"""A ring that an event loop drives: operations are submitted without waiting, and completions wake the loop.

No thread takes part, so no batch waits for one to get the GIL: beside a busy scheduler that is up to 5 ms each time.
All that completed while the loop was away is read at its next turn.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import numpy.typing as npt

from kvstore.diskio.threads import Priority
from kvstore.diskio.uring import Ring
from kvstore.diskio.uring.abi import clear_event

__all__ = ["LoopRing"]

_ENTRIES: Final = 256
"""Operations in flight at most; eight times what saturates an NVMe drive with small blocks."""

_IN_FLIGHT_BYTES: Final = 64 << 20
"""Bytes in flight at most, of loads and of stores each: so much a drive writes in some 20 ms, which is what a load that
comes in may find before it in the drive's queue."""

_BUSY: Final = frozenset({errno.EAGAIN, errno.EBUSY, errno.EINTR})
_BUSY_PAUSE_S: Final = 0.0005
"""Pause when the kernel is out of memory for requests and nothing is in flight whose end could be waited for."""

_NUMBER_BITS: Final = 32
_NUMBER_MASK: Final = (1 << _NUMBER_BITS) - 1


class _Batch:
    """Operations of one call; ``user_data`` of each is the batch's number and its own place."""

    __slots__ = ("done", "in_flight", "keep", "number", "priority", "results", "sizes", "sqes", "submitted")

    def __init__(self, number: int, sqes: npt.NDArray[Any], sizes: Sequence[int], priority: Priority, keep: object):
        self.number, self.sqes, self.sizes, self.priority, self.keep = number, sqes, sizes, priority, keep
        self.results = [-errno.ECANCELED] * len(sqes)
        self.submitted = self.in_flight = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class LoopRing:
    """An io_uring for the thread of one running event loop; made there.

    Raises:
        UringUnavailableError: See :class:`~kvstore.diskio.uring.Ring`.
        OSError: The kernel does not signal completions.
    """

    def __init__(self) -> None:
        self._ring = Ring(_ENTRIES)
        try:
            self._event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            try:
                self._ring.signal(self._event_fd)
            except OSError:
                os.close(self._event_fd)
                raise
        except OSError:
            self._ring.close()
            raise
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._event_fd, self._completed)
        self._numbers = itertools.count()
        self._batches: dict[int, _Batch] = {}
        self._queues: dict[Priority, deque[_Batch]] = {priority: deque() for priority in Priority}
        self._bytes = dict.fromkeys(Priority, 0)
        self._in_flight = 0
        self._retry: asyncio.TimerHandle | None = None
        self._closed = False

    async def run(
        self, sqes: npt.NDArray[Any], sizes: Sequence[int], *, priority: Priority, keep: object = None
    ) -> list[int]:
        """Do operations and wait for all of them; their order is the kernel's.

        When cancelled, those that have not been submitted are dropped, and the others are waited for before the
        cancellation goes on: after this call, however it ends, the kernel touches nothing that they point to.

        Args:
            sqes: Array of ``abi.SQE``; ``user_data`` is overwritten.
            sizes: Bytes that each moves.
            priority: Loads go first.
            keep: What must live as long as the operations do.

        Returns:
            Result per operation: what the system call would have returned, or minus its errno.
        """
        batch = _Batch(next(self._numbers) & _NUMBER_MASK, sqes, sizes, priority, keep)
        sqes["user_data"] = range(batch.number << _NUMBER_BITS, (batch.number << _NUMBER_BITS) + len(sqes))
        self._batches[batch.number] = batch
        self._queues[priority].append(batch)
        self._submit()
        try:
            await batch.done
        except asyncio.CancelledError:
            self._drop(batch)
            while batch.in_flight:
                batch.done = self._loop.create_future()
                try:
                    await batch.done
                except asyncio.CancelledError:
                    # Cancelled once more, which changes nothing: the buffers are still in use.
                    continue
            raise
        return batch.results

    def close(self) -> None:
        """Give the ring back; only when nothing runs. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._event_fd)
        self._ring.close()
        os.close(self._event_fd)

    def _submit(self) -> None:
        """Submit what there is room for."""
        for priority, queue in self._queues.items():
            while queue:
                batch = queue[0]
                count = self._room_for(batch)
                if not count:
                    break
                first = batch.submitted
                taken = self._ring.submit(batch.sqes[first : first + count])
                if taken < 0 and -taken not in _BUSY:
                    # The kernel has none of the rest, and won't take it.
                    batch.results[first:] = [taken] * (len(batch.sqes) - first)
                    self._drop(batch)
                    continue
                taken = max(0, taken)
                batch.submitted += taken
                batch.in_flight += taken
                self._in_flight += taken
                self._bytes[priority] += sum(batch.sizes[first : first + taken])
                if batch.submitted == len(batch.sqes):
                    queue.popleft()
                    self._end_if_done(batch)
                if taken < count:
                    self._submit_later()
                    return

    def _room_for(self, batch: _Batch) -> int:
        """Return how many more operations of a batch may be in flight; one always may, if nothing of its kind is."""
        count = 0
        room = min(_ENTRIES - self._in_flight, len(batch.sqes) - batch.submitted)
        size_bytes = self._bytes[batch.priority]
        while count < room and (size_bytes < _IN_FLIGHT_BYTES):
            size_bytes += batch.sizes[batch.submitted + count]
            count += 1
        return count

    def _submit_later(self) -> None:
        if not self._in_flight and self._retry is None:
            self._retry = self._loop.call_later(_BUSY_PAUSE_S, self._submit_again)

    def _submit_again(self) -> None:
        self._retry = None
        self._submit()

    def _completed(self) -> None:
        clear_event(self._event_fd)
        for user_data, result in self._ring.completions():
            batch = self._batches[user_data >> _NUMBER_BITS]
            place = user_data & _NUMBER_MASK
            batch.results[place] = result
            batch.in_flight -= 1
            self._in_flight -= 1
            self._bytes[batch.priority] -= batch.sizes[place]
            self._end_if_done(batch)
        self._submit()

    def _drop(self, batch: _Batch) -> None:
        """Forget what of a batch has not been submitted."""
        if batch.submitted < len(batch.sqes):
            batch.sqes = batch.sqes[: batch.submitted]
            self._queues[batch.priority].remove(batch)
        self._end_if_done(batch)

    def _end_if_done(self, batch: _Batch) -> None:
        if not batch.in_flight and batch.submitted == len(batch.sqes):
            self._batches.pop(batch.number, None)
            if not batch.done.done():
                batch.done.set_result(None)
