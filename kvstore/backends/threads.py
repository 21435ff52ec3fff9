"""Blocking calls of a backend, on threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from kvstore.runtime.workers import to_the_end

_R = TypeVar("_R")


async def run_in_thread(call: Callable[..., _R], *arguments: Any) -> _R:
    """Run a blocking call on a thread of the loop's pool, and wait for its end, even if cancelled.

    ``asyncio.to_thread`` returns when it is cancelled, while its thread still uses buffers and connections. This
    function then raises ``CancelledError`` only after the call has ended.

    Returns:
        Its result. Its exceptions are raised here.
    """
    task = asyncio.get_running_loop().create_task(asyncio.to_thread(call, *arguments))
    await to_the_end(task)
    return task.result()
