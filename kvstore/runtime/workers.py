"""Worker threads for work that would block the loop: encoding, system calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["Workers"]

_T = TypeVar("_T")


class Workers:
    """Runs work on a few threads; a call returns only when its work no longer touches any buffer.

    One call should do the work of a whole batch: each call costs two waits for the GIL.
    """

    def __init__(self, count: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name)

    async def run(self, work: Callable[[], _T]) -> _T:
        """Run ``work`` on a thread and return its result.

        When cancelled, it drops work that has not begun, and waits for the end of work that has, before it raises
        ``CancelledError``.
        """
        submitted = self._pool.submit(work)
        future = asyncio.wrap_future(submitted)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            # The pool's own future: the wrapped one can be cancelled while the thread is running.
            if not submitted.cancel():
                await _wait_through_cancellations(future)
            raise

    def close(self) -> None:
        """Stop the threads without waiting: work that has not begun is dropped, running work goes on."""
        self._pool.shutdown(wait=False, cancel_futures=True)


async def _wait_through_cancellations(future: asyncio.Future[_T]) -> None:
    """Wait for a future's end, however often the waiting task is cancelled meanwhile."""
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue  # The buffers are still in use; the caller raises in the end.
    if not future.cancelled():
        future.exception()  # Retrieved, so that asyncio does not log it as lost.
