"""Blocking calls of backends."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvstore.backends.threads import run_in_thread


async def test_a_cancelled_call_has_ended() -> None:
    """A cancellation, even a repeated one, is raised only after the call has ended."""
    entered, gate, ended = threading.Event(), threading.Event(), threading.Event()

    def call() -> None:
        entered.set()
        gate.wait(20)
        ended.set()

    task = asyncio.create_task(run_in_thread(call))
    while not entered.is_set():
        await asyncio.sleep(0.001)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_the_result_and_the_exception_are_those_of_the_call() -> None:
    """The result is returned and the exception raised."""
    assert await run_in_thread(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await run_in_thread(divmod, 7, 0)
