"""Worker threads for work that would block the loop: encoding, system calls."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

__all__ = ["Workers", "to_the_end"]

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
                # The buffers are in use until then. The caller raises in any case.
                with contextlib.suppress(Exception):
                    await to_the_end(future)
            raise

    def close(self) -> None:
        """Stop the threads without waiting: work that has not begun is dropped, running work goes on."""
        self._pool.shutdown(wait=False, cancel_futures=True)


async def to_the_end(future: asyncio.Future[Any]) -> None:
    """Wait for a future however often this is cancelled, and end as it did unless this was cancelled."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    future.result()
