"""Waiting in tests: for a condition up to a deadline, never for a fixed time."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable

_PAUSE_S = 0.001


def eventually(predicate: Callable[[], object], timeout_s: float = 30.0, what: str = "") -> None:
    """Call the predicate repeatedly until it is true; raise ``AssertionError`` after the timeout.

    ``what`` names the condition in the message.
    """
    deadline = time.monotonic() + timeout_s
    while not predicate():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what or predicate!r}")
        time.sleep(_PAUSE_S)


async def eventually_async(predicate: Callable[[], object], timeout_s: float = 30.0, what: str = "") -> None:
    """Do the same as :func:`eventually` while the loop runs; the predicate may be a coroutine function."""
    deadline = time.monotonic() + timeout_s
    while not (await found if inspect.isawaitable(found := predicate()) else found):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what or predicate!r}")
        await asyncio.sleep(_PAUSE_S)
