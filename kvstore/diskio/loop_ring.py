"""A ring driven by an event loop: operations are submitted without waiting, and completions wake the loop.

It uses no threads, so no batch waits for the GIL, which takes up to a switch interval while a scheduler is busy.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy.typing as npt

from kvstore.diskio.ring import Ring
from kvstore.runtime.limits import Precedence
from kvstore.runtime.workers import to_the_end

_ENTRIES: Final = 256
"""Most operations in flight; eight times as many as saturate an NVMe drive with small blocks."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a ring that are no options; tests pass others."""

    # Limits of bytes in flight, for loads and for stores each. A drive writes 64 MiB in about 20 ms, the longest wait
    # of a new load in the drive's queue. Loads have a lower limit: concurrent operations end together and are verified
    # only then, which delays a job's last blocks. A slow drive gets a lower limit: submitted operations can't be
    # cancelled, and a job is reported only when its operations have ended.
    load_bytes_max: int = 24 << 20
    store_bytes_max: int = 64 << 20
    bytes_first: int = 16 << 20
    bytes_min: int = 1 << 20
    # An operation faster than the first raises the limit of bytes in flight; one slower than the second halves it.
    fast_s: float = 0.1
    slow_s: float = 0.5
    # Approximate bytes submitted in one turn of the loop. To pin their pages takes the kernel a quarter of a
    # millisecond if they are small.
    submit_bytes: int = 4 << 20

    def bytes_max(self, precedence: Precedence) -> int:
        """Return the most bytes in flight of one precedence."""
        return self.load_bytes_max if precedence is Precedence.LOAD else self.store_bytes_max


LIMITS: Final = Limits()

_BUSY: Final = frozenset({errno.EAGAIN, errno.EBUSY, errno.EINTR})
_BUSY_PAUSE_S: Final = 0.0005
"""Pause when the kernel has no memory for requests and no completion is pending."""

_NUMBER_BITS: Final = 32
_NUMBER_MASK: Final = (1 << _NUMBER_BITS) - 1

rings_at_work: Final[set[LoopRing]] = set()
"""Rings with operations in flight. This reference keeps them and all memory in use alive until the kernel is done, even
if the loop ends before, as it may with a frozen disk."""

_open_rings: Final[WeakKeyDictionary[threading.Thread, int]] = WeakKeyDictionary()
"""Number of open rings by thread."""


class _Batch:
    """Operations of one call; ``user_data`` of each is the number of the batch and its position in the batch."""

    __slots__ = (
        "done", "in_flight", "keep", "number", "precedence", "results", "sizes", "sqes", "submitted", "submitted_at",
    )  # fmt: skip

    def __init__(self, number: int, sqes: npt.NDArray[Any], sizes: Sequence[int], precedence: Precedence, keep: object):
        self.number, self.sqes, self.sizes, self.precedence, self.keep = number, sqes, sizes, precedence, keep
        self.results = [-errno.ECANCELED] * len(sqes)
        self.submitted = self.in_flight = 0
        self.submitted_at = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class LoopRing:
    """An io_uring for the thread of one running event loop; created there. Raises OSError if unavailable.

    ``workers_max``: as for :class:`Ring`. ``is_first``: Whether the thread had no open ring when this one was made.
    """

    def __init__(self, limits: Limits = LIMITS, *, workers_max: int = 0) -> None:
        self._limits = limits
        self._ring = Ring(_ENTRIES, workers_max)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._ring.event_fd, self._completed)
        self._thread = threading.current_thread()
        others = _open_rings.get(self._thread, 0)
        self.is_first = not others
        _open_rings[self._thread] = others + 1
        self._numbers = itertools.count()
        self._batches: dict[int, _Batch] = {}
        self._queues: dict[Precedence, deque[_Batch]] = {precedence: deque() for precedence in Precedence}
        self._bytes = dict.fromkeys(Precedence, 0)
        self._bytes_max = dict.fromkeys(Precedence, limits.bytes_first)
        self._slowed_at = dict.fromkeys(Precedence, 0.0)
        self._in_flight = 0
        self._resume: asyncio.Handle | None = None

    def __repr__(self) -> str:
        """Show the operations in flight and, per precedence, their bytes and the limit of them."""
        held = ", ".join(f"{each.name} {self._bytes[each]}/{self._bytes_max[each]} B" for each in Precedence)
        return f"LoopRing({self._in_flight} operations in flight of {len(self._batches)} batches, {held})"

    async def run(
        self, sqes: npt.NDArray[Any], sizes: Sequence[int], *, precedence: Precedence, keep: object = None
    ) -> list[int]:
        """Run operations and wait for all of them; the kernel chooses their order.

        If cancelled, the call drops operations not yet submitted and waits for the others. However the call ends, the
        kernel does not touch their memory afterwards.

        Args:
            sqes: Array of ``SQE``; ``user_data`` is overwritten.
            keep: Objects that must live as long as the operations.

        Returns:
            Result per operation: that of the system call, or minus its errno.
        """
        if not len(sqes):
            # Repeated empty calls must not block the loop.
            await asyncio.sleep(0)
            return []
        batch = _Batch(next(self._numbers) & _NUMBER_MASK, sqes, sizes, precedence, keep)
        sqes["user_data"] = range(batch.number << _NUMBER_BITS, (batch.number << _NUMBER_BITS) + len(sqes))
        self._batches[batch.number] = batch
        self._queues[precedence].append(batch)
        self._submit()
        try:
            await batch.done
        except asyncio.CancelledError:
            batch.done = self._loop.create_future()
            self._drop(batch)
            await to_the_end(batch.done)
            raise
        return batch.results

    def close(self) -> None:
        """Release the ring; only when no operation is in flight. Idempotent."""
        if self._resume is not None:
            self._resume.cancel()
        if self._ring.event_fd >= 0:
            self._loop.remove_reader(self._ring.event_fd)
            _open_rings[self._thread] -= 1
        self._ring.close()

    def _submit(self) -> None:
        """Submit as many operations as the limits allow in one turn of the loop."""
        budget_bytes = self._limits.submit_bytes
        for precedence, queue in self._queues.items():
            while queue:
                batch = queue[0]
                count = self._room_for(batch, budget_bytes)
                if not count:
                    break
                first = batch.submitted
                taken = self._ring.submit(batch.sqes[first : first + count])
                if taken < 0 and -taken not in _BUSY:
                    # The kernel refuses this and all further operations of the batch.
                    batch.results[first:] = [taken] * (len(batch.sqes) - first)
                    self._drop(batch)
                    continue
                taken = max(0, taken)
                batch.submitted += taken
                batch.submitted_at = self._loop.time()
                batch.in_flight += taken
                self._in_flight += taken
                size_bytes = sum(batch.sizes[first : first + taken])
                self._bytes[precedence] += size_bytes
                budget_bytes -= size_bytes
                if batch.submitted == len(batch.sqes):
                    queue.popleft()
                if self._in_flight:
                    rings_at_work.add(self)
                if taken < count:
                    if not self._in_flight:
                        self._submit_again(_BUSY_PAUSE_S)
                    return
                if budget_bytes <= 0:
                    self._submit_again(0)
                    return

    def _room_for(self, batch: _Batch, budget_bytes: int) -> int:
        """Return how many operations of a batch may be submitted.

        If none of its precedence is in flight, one of any length may be.
        """
        count = 0
        room = min(_ENTRIES - self._in_flight, len(batch.sqes) - batch.submitted)
        room_bytes = min(budget_bytes, self._bytes_max[batch.precedence] - self._bytes[batch.precedence])
        while count < room and room_bytes > 0:
            room_bytes -= batch.sizes[batch.submitted + count]
            count += 1
        return count

    def _submit_again(self, pause_s: float) -> None:
        if self._resume is None:
            self._resume = (
                self._loop.call_later(pause_s, self._resumed) if pause_s else self._loop.call_soon(self._resumed)
            )

    def _resumed(self) -> None:
        self._resume = None
        self._submit()

    def _completed(self) -> None:
        for user_data, result in self._ring.completions():
            batch = self._batches[user_data >> _NUMBER_BITS]
            place = user_data & _NUMBER_MASK
            batch.results[place] = result
            batch.in_flight -= 1
            self._in_flight -= 1
            self._bytes[batch.precedence] -= batch.sizes[place]
            self._adapt(batch, batch.sizes[place])
            self._end_if_done(batch)
        if not self._in_flight:
            rings_at_work.discard(self)
        if any(self._queues.values()):
            self._submit()

    def _adapt(self, batch: _Batch, size_bytes: int) -> None:
        """Adapt the limit of bytes in flight to the duration of an operation."""
        precedence, now = batch.precedence, self._loop.time()
        took_s = now - batch.submitted_at
        if took_s < self._limits.fast_s:
            self._bytes_max[precedence] = min(
                self._limits.bytes_max(precedence), self._bytes_max[precedence] + size_bytes
            )
        elif took_s > self._limits.slow_s and now - self._slowed_at[precedence] > self._limits.slow_s:
            self._bytes_max[precedence] = max(self._limits.bytes_min, self._bytes_max[precedence] // 2)
            self._slowed_at[precedence] = now

    def _drop(self, batch: _Batch) -> None:
        """Drop the operations of a batch that are not submitted yet."""
        if batch.submitted < len(batch.sqes):
            batch.sqes = batch.sqes[: batch.submitted]
            self._queues[batch.precedence].remove(batch)
        self._end_if_done(batch)

    def _end_if_done(self, batch: _Batch) -> None:
        if not batch.in_flight and batch.submitted == len(batch.sqes):
            self._batches.pop(batch.number, None)
            if not batch.done.done():
                batch.done.set_result(None)
