"""Threads that make blocking calls for an event loop: loads before stores; they never delay the end of a process."""

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
from typing import Final, TypeVar

from kvstore.runtime.workers import to_the_end

__all__ = ["DiskThreads", "Priority"]

_log = logging.getLogger("kvstore.diskio")

_R = TypeVar("_R")

_POLL_S: Final = 0.001
"""Threads end within microseconds of their last system call; there is nothing to await."""


class Priority(enum.IntEnum):
    """Order of submissions; equal ones first in, first out."""

    LOAD = 0
    STORE = 1


class _Batch:
    """Calls that one coroutine waits for together."""

    def __init__(self, count: int) -> None:
        self.left = count
        self.error: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self._loop.create_future()

    def finish(self) -> None:
        """Wake the waiting coroutine; from any thread."""
        try:
            self._loop.call_soon_threadsafe(self.done.set_result, None)
        except RuntimeError:
            _log.debug("a batch ended after its event loop")


class DiskThreads:
    """A bounded pool of daemon threads, started on demand. Made on and used from one event loop.

    They are daemons because a frozen disk may hold one for ever, and that must not keep the process from ending.
    There are at most as many system calls in flight as threads.
    """

    def __init__(self, threads: int) -> None:
        self._threads_max = threads
        self._changed = threading.Condition()
        self._queue: list[tuple[int, int, _Batch, Callable[[], None]]] = []
        self._sequence = itertools.count()
        self._threads: list[threading.Thread] = []
        self._closing = False
        self._running = 0

    async def run(self, calls: Sequence[Callable[[], None]], *, priority: Priority = Priority.STORE) -> None:
        """Make calls, many at once, and wait for all of them.

        When cancelled, calls not yet started are dropped, and the others are waited for: after this call, however it
        ends, no thread touches their memory.

        Raises:
            OSError: There is no thread yet, and none can be started.
            RuntimeError: The pool is closed.
        """
        if not calls:
            # Repeated empty calls must not starve the loop.
            await asyncio.sleep(0)
            return
        batch = _Batch(len(calls))
        with self._changed:
            if self._closing:
                raise RuntimeError("the threads are closed")
            for call in calls:
                heapq.heappush(self._queue, (int(priority), next(self._sequence), batch, call))
            try:
                self._start_threads()
            except OSError:
                self._drop(batch)
                raise
            self._changed.notify(len(calls))
        try:
            await asyncio.shield(batch.done)
        except asyncio.CancelledError:
            with self._changed:
                if self._drop(batch):
                    raise
            await to_the_end(batch.done)
            raise
        if batch.error is not None:
            raise batch.error

    async def call(self, function: Callable[[], _R], *, priority: Priority = Priority.STORE) -> _R:
        """Make one call and return its result (or raise its exception)."""
        results: list[_R] = []
        await self.run([lambda: results.append(function())], priority=priority)
        if not results:
            raise RuntimeError("the threads were closed")
        return results[0]

    async def close(self, timeout_s: float = 5.0) -> bool:
        """Drop the calls not yet started, wait for those under way, and return whether all threads have ended."""
        with self._changed:
            self._closing = True
            for batch in {batch for _, _, batch, _ in self._queue}:
                if self._drop(batch):
                    batch.finish()
            self._changed.notify_all()
        deadline = time.monotonic() + timeout_s
        while alive := sum(thread.is_alive() for thread in self._threads):
            if time.monotonic() > deadline:
                _log.warning("%d disk threads are stuck in the kernel; leaving them", alive)
                return False
            await asyncio.sleep(_POLL_S)
        return True

    def _drop(self, batch: _Batch) -> bool:
        """Drop the calls of a batch that have not started; return whether the batch has ended by that."""
        kept = [entry for entry in self._queue if entry[2] is not batch]
        dropped = len(self._queue) - len(kept)
        heapq.heapify(kept)
        self._queue = kept
        batch.left -= dropped
        return dropped > 0 and not batch.left

    def _start_threads(self) -> None:
        wanted = min(self._threads_max, self._running + len(self._queue))
        while len(self._threads) < wanted:
            thread = threading.Thread(target=self._work, name=f"kvstore-disk-{len(self._threads)}", daemon=True)
            try:
                thread.start()
            # A limit of threads or memory, which may pass: the next call tries again.
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
                _, _, batch, call = heapq.heappop(self._queue)
                self._running += 1
            try:
                call()
            # Any exception belongs to the coroutine that waits, never to the thread.
            except BaseException as error:
                batch.error = error
            with self._changed:
                self._running -= 1
                batch.left -= 1
                ended = not batch.left
            if ended:
                batch.finish()
            # An idle thread must not keep the buffers of its last call alive.
            del batch, call
