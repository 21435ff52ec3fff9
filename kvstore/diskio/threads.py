"""Threads that do batches of block operations.

A batch is one function and many items. It is cut into units of several items; the units of one batch run on many
threads at once, and its end wakes the event loop once. So a thread is handed work, and the loop an answer, once a unit
and once a batch, not once a block (the GIL is what these cost).
"""

from __future__ import annotations

import asyncio
import enum
import errno
import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar

__all__ = ["Batch", "BatchFunction", "CancelFlag", "Priority", "ThreadEngine"]

_log = logging.getLogger("kvstore.diskio")

_I = TypeVar("_I")
_R = TypeVar("_R")

_UNIT_ITEMS_MAX: Final = 16
"""Longest unit. A load waits for at most one unit of a store per thread: 16 blocks are some milliseconds."""


class Priority(enum.IntEnum):
    """Which units go first; equal ones in the order of their submission."""

    LOAD = 0
    STORE = 1


class CancelFlag:
    """Tells a running unit that nobody waits for its rest any more; looked at between two blocks."""

    __slots__ = ("is_set",)

    def __init__(self) -> None:
        self.is_set = False


BatchFunction = Callable[[Sequence[_I], CancelFlag], None]
"""Does some items of a batch, one after the other, writing each result into its item. Runs in a worker thread."""


class Batch(Generic[_I]):
    """Items on their way through a :class:`ThreadEngine`; made by :meth:`ThreadEngine.submit`.

    Attributes:
        items: The items, each holding its own result once the batch is done.
        error: What the function raised, if it did.
    """

    def __init__(self, engine: ThreadEngine, function: BatchFunction[_I], items: Sequence[_I]) -> None:
        self.items = items
        self.error: BaseException | None = None
        self.flag = CancelFlag()
        self._engine = engine
        self._function = function
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._ended = False
        self._units_left = 0

    async def wait(self) -> None:
        """Wait until no thread works on the items. For one waiter.

        When cancelled, units that have not started are dropped, and those that have are waited for before the
        cancellation goes on: after this call, however it ends, nothing touches the items or their buffers.

        Raises:
            Exception: What the function raised (it should write results, also bad ones, into the items instead).
        """
        if self._ended:
            # A batch of nothing: whoever asks for one again and again must not keep the loop from all else.
            await asyncio.sleep(0)
        try:
            # Bare, though a cancellation takes the future with it: asyncio.wait would take as long as all else that
            # the loop does for a batch.
            await self._done
        except asyncio.CancelledError:
            self._engine.cancel(self)
            while not self._ended:
                self._done = self._loop.create_future()
                try:
                    await self._done
                except asyncio.CancelledError:
                    # Cancelled once more, which changes nothing: the buffers are still in use.
                    continue
            raise
        if self.error is not None:
            raise self.error

    def _run(self, items: Sequence[_I]) -> None:
        try:
            self._function(items, self.flag)
        # Whatever a batch function raises belongs to whoever waits for the batch, never to the thread.
        except BaseException as error:
            self.error = error

    def _finish(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._set_done)
        except RuntimeError:
            # The loop is closed: nobody waits any more.
            _log.debug("a batch ended after its event loop")

    def _set_done(self) -> None:
        self._ended = True
        if not self._done.done():
            self._done.set_result(None)


class ThreadEngine:
    """A bounded pool of daemon threads that run batches; loads before stores.

    Made on and used from one event loop. Threads are started by the first batch. They are daemons because a frozen
    disk may hold one for ever, and that must not keep the process from ending.

    Args:
        threads: How many, and so the most system calls in flight.
        name: Prefix of the threads' names.
    """

    def __init__(self, threads: int, name: str = "kvstore-disk") -> None:
        self._threads_max = threads
        self._name = name
        self._changed = threading.Condition()
        self._queue: list[tuple[int, int, Batch[Any], Sequence[Any]]] = []
        self._sequence = itertools.count()
        self._threads: list[threading.Thread] = []
        self._closing = False
        self._running = 0

    @property
    def pending_units(self) -> int:
        """Units that wait for a thread."""
        return len(self._queue)

    def submit(
        self,
        function: BatchFunction[_I],
        items: Sequence[_I],
        *,
        priority: Priority = Priority.STORE,
        unit_items_max: int = _UNIT_ITEMS_MAX,
        threads_max: int | None = None,
    ) -> Batch[_I]:
        """Start a batch and return at once.

        Args:
            function: Does a part of the items; called from several threads at once with different parts.
            items: What to do; they are spread evenly over the threads.
            priority: Which batches it goes before.
            unit_items_max: Items per unit at most.
            threads_max: Threads it may use at once to begin with; None: all.

        Raises:
            OSError: There is no thread yet, and none to be had.
        """
        batch = Batch(self, function, items)
        if not items:
            batch._set_done()
            return batch
        threads = min(threads_max or self._threads_max, self._threads_max)
        units = _cut(items, threads, unit_items_max)
        batch._units_left = len(units)
        with self._changed:
            if self._closing:
                raise RuntimeError("the thread engine is closed")
            for unit in units:
                heapq.heappush(self._queue, (int(priority), next(self._sequence), batch, unit))
            try:
                self._start_threads()
            except OSError:
                self._queue = [entry for entry in self._queue if entry[2] is not batch]
                heapq.heapify(self._queue)
                raise
            self._changed.notify(len(units))
        return batch

    async def run(
        self,
        function: BatchFunction[_I],
        items: Sequence[_I],
        *,
        priority: Priority = Priority.STORE,
        unit_items_max: int = _UNIT_ITEMS_MAX,
    ) -> None:
        """Submit a batch and wait for it (see :meth:`Batch.wait`)."""
        await self.submit(function, items, priority=priority, unit_items_max=unit_items_max).wait()

    async def call(self, function: Callable[[], _R], *, priority: Priority = Priority.STORE) -> _R:
        """Run one plain function on a thread and return what it returns (or raise what it raises)."""
        results: list[_R] = []

        def only(_items: Sequence[None], _flag: CancelFlag) -> None:
            results.append(function())

        await self.run(only, [None], priority=priority)
        return results[0]

    def cancel(self, batch: Batch[Any]) -> None:
        """Drop the units of a batch that have not started, and tell those that have."""
        batch.flag.is_set = True
        with self._changed:
            kept = [entry for entry in self._queue if entry[2] is not batch]
            dropped = len(self._queue) - len(kept)
            if dropped:
                self._queue = kept
                heapq.heapify(self._queue)
            batch._units_left -= dropped
            ended = dropped > 0 and batch._units_left == 0
        if ended:
            batch._finish()

    async def close(self, timeout_s: float = 5.0) -> bool:
        """Drop what has not started and end the threads. Idempotent.

        Args:
            timeout_s: How long to wait for what has started: a frozen disk must not keep an engine from ending.

        Returns:
            Whether all threads have ended.
        """
        with self._changed:
            self._closing = True
            batches = {id(entry[2]): entry[2] for entry in self._queue}
            self._changed.notify_all()
        for batch in batches.values():
            self.cancel(batch)
        deadline = time.monotonic() + timeout_s
        while any(thread.is_alive() for thread in self._threads):
            if time.monotonic() > deadline:
                _log.warning("%d disk threads are stuck in the kernel; leaving them", self._alive())
                return False
            # Threads end within microseconds of their last system call; there is nothing to await.
            await asyncio.sleep(0.001)
        return True

    def _alive(self) -> int:
        return sum(thread.is_alive() for thread in self._threads)

    def _start_threads(self) -> None:
        wanted = min(self._threads_max, self._running + len(self._queue))
        while len(self._threads) < wanted:
            name = f"{self._name}-{len(self._threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            try:
                thread.start()
            # A limit of threads or memory that is reached, which passes: the next batch tries again.
            except (RuntimeError, MemoryError) as error:
                if self._threads:
                    return
                raise OSError(errno.EAGAIN, f"no thread for the disk can be started: {error}") from error
            self._threads.append(thread)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    if self._closing:
                        return
                    self._changed.wait()
                _, _, batch, items = heapq.heappop(self._queue)
                self._running += 1
            batch._run(items)
            with self._changed:
                self._running -= 1
                batch._units_left -= 1
                ended = batch._units_left == 0
            if ended:
                batch._finish()
            # A thread that waits must not keep the batch's buffers alive.
            del batch, items


def _cut(items: Sequence[_I], threads: int, unit_items_max: int) -> list[Sequence[_I]]:
    """Cut items into units: as many as there are threads, more if they would be too long, of nearly equal length."""
    count = max(min(threads, len(items)), -(-len(items) // unit_items_max))
    size, longer = divmod(len(items), count)
    units, start = [], 0
    for index in range(count):
        end = start + size + (index < longer)
        units.append(items[start:end])
        start = end
    return units
