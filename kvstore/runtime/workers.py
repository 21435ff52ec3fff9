"""Worker threads for what would block the loop: encoding, system calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["Workers"]

_T = TypeVar("_T")


class Workers:
    """A few threads, and calls into them that never let go of their buffers early.

    One call should do the work of a whole batch: each costs two waits for the GIL, however much it does.
    """

    def __init__(self, count: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name)

    async def run(self, work: Callable[[], _T]) -> _T:
        """Run ``work`` on a thread and return its result.

        When cancelled it drops the work if it has not begun, and otherwise waits for its end before it raises
        ``CancelledError``: once this has returned, ``work`` touches nothing.
        """
        submitted = self._pool.submit(work)
        future = asyncio.wrap_future(submitted)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            # Asked of the pool's own future: the wrapped one would say yes although the thread is at work.
            if not submitted.cancel():
                await _wait_through_cancellations(future)
            raise

    def close(self) -> None:
        """Stop the threads; work that has not begun is dropped. Does not wait for what has."""
        self._pool.shutdown(wait=False, cancel_futures=True)


async def _wait_through_cancellations(future: asyncio.Future[_T]) -> None:
    """Wait for a future's end, however often the waiting task is cancelled meanwhile."""
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue  # The promise about buffers stands all the same, and the caller raises in the end.
    if not future.cancelled():
        future.exception()  # Retrieved, so that asyncio does not log it as lost.
