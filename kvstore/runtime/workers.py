"""Threads for work that would block the loop (encoding, system calls), with loads before stores."""

from __future__ import annotations

import asyncio
import errno
import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from kvstore.runtime.limits import Precedence

_log = logging.getLogger("kvstore.runtime")

_R = TypeVar("_R")

_POLL_S: Final = 0.001
"""Polling interval for the end of the threads, which takes microseconds after their last call."""


class _Batch:
    """Calls awaited together by one coroutine."""

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
            _log.debug("a batch ended after its event loop had closed")


class Workers:
    """A bounded pool of threads, started on demand. Belongs to one event loop.

    The threads are daemons: a hanging disk may block one forever, and this must not prevent the exit of the process.
    """

    def __init__(self, count: int, name: str) -> None:
        self._threads_max = count
        self._name = name
        self._changed = threading.Condition()
        self._queue: list[tuple[int, int, _Batch, Callable[[], None]]] = []
        self._sequence = itertools.count()
        self._threads: list[threading.Thread] = []
        self._closing = False
        self._running = 0

    async def run(self, calls: Sequence[Callable[[], None]], *, precedence: Precedence = Precedence.STORE) -> None:
        """Run calls concurrently, and wait for all of them.

        A cancellation drops the calls not yet started and waits for the others: no thread touches their memory after
        this method has ended, even by cancellation.

        Raises:
            OSError: The pool is closed, or no thread is running and none can be started.
        """
        if not calls:
            # Repeated empty calls must not starve the loop.
            await asyncio.sleep(0)
            return
        batch = _Batch(len(calls))
        with self._changed:
            if self._closing:
                raise _closed()
            for call in calls:
                heapq.heappush(self._queue, (int(precedence), next(self._sequence), batch, call))
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

    async def call(self, function: Callable[[], _R], *, precedence: Precedence = Precedence.STORE) -> _R:
        """Run one call; return its result or raise its exception."""
        results: list[_R] = []
        await self.run([lambda: results.append(function())], precedence=precedence)
        return results[0]

    def stop(self) -> None:
        """Drop the calls not yet started; the threads end after the running ones. Idempotent."""
        with self._changed:
            self._closing = True
            for batch in {batch for _, _, batch, _ in self._queue}:
                batch.error = _closed()
                if self._drop(batch):
                    batch.finish()
            self._changed.notify_all()

    async def close(self, timeout_s: float = 5.0) -> bool:
        """Call :meth:`stop`, wait for running calls, and return whether all threads have ended."""
        self.stop()
        deadline = time.monotonic() + timeout_s
        while alive := sum(thread.is_alive() for thread in self._threads):
            if time.monotonic() > deadline:
                _log.warning("%d threads of %s are stuck in the kernel and are left behind", alive, self._name)
                return False
            await asyncio.sleep(_POLL_S)
        return True

    def join(self) -> None:
        """Block until all threads have ended, after :meth:`stop`."""
        for thread in self._threads:
            thread.join()

    def _drop(self, batch: _Batch) -> bool:
        """Drop the calls of a batch that have not started; return whether none of its calls is left."""
        kept = [entry for entry in self._queue if entry[2] is not batch]
        batch.left -= len(self._queue) - len(kept)
        heapq.heapify(kept)
        self._queue = kept
        return not batch.left

    def _start_threads(self) -> None:
        wanted = min(self._threads_max, self._running + len(self._queue))
        while len(self._threads) < wanted:
            thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
            try:
                thread.start()
            # A limit of threads or memory, possibly temporary: the next call tries again.
            except (RuntimeError, MemoryError) as error:
                if self._threads:
                    return
                raise OSError(errno.EAGAIN, f"no worker thread can be started: {error}") from error
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
            # Every exception is raised in the waiting coroutine, never in the thread.
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


def _closed() -> OSError:
    return OSError(errno.ESHUTDOWN, "the threads are closed")


async def to_the_end(future: asyncio.Future[Any]) -> None:
    """Wait for a future despite cancellations; then raise the cancellation or the future's exception, if any."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not future.cancelled():
            future.exception()  # Marks it as retrieved.
        raise cancelled
    future.result()
