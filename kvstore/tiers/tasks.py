"""Ends of tasks: cancelled and waited for, or awaited to their end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

__all__ = ["end_all", "to_its_end"]


async def to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Await something that, cancelled half-way, would leave the medium locked or half closed."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


async def end_all(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait until they have let go of what they use."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
