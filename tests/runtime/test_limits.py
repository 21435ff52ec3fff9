"""Limiter, BufferPool, Workers: nothing is lost or handed out twice, whatever is cancelled when."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.runtime.buffers import BufferPool, SlotBuffers
from kvstore.runtime.limits import Limiter, Precedence
from kvstore.runtime.workers import Workers


async def test_loads_pass_waiting_stores() -> None:
    """A load that comes later is served before a store that waits."""
    limiter = Limiter(1)
    order: list[str] = []

    async def user(name: str, precedence: Precedence) -> None:
        async with limiter.hold(1, precedence):
            order.append(name)
            await asyncio.sleep(0)

    async with limiter.hold(1):
        tasks = [asyncio.create_task(user("store", Precedence.STORE))]
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(user("load", Precedence.LOAD)))
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert order == ["load", "store"]


async def test_a_request_for_more_than_there_is_waits_for_all_of_it() -> None:
    """An amount beyond the total is served alone instead of never."""
    limiter = Limiter(3)
    async with limiter.hold(100):
        assert limiter.in_use == 3
    assert limiter.in_use == 0


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from(Precedence), st.integers(0, 5)), max_size=25))
def test_random_cancellations_lose_nothing(plan: list[tuple[int, Precedence, int]]) -> None:
    """Users that come, wait and are cancelled at random leave the limiter as it was, and never exceed it."""

    async def scenario() -> None:
        limiter = Limiter(4)
        held = 0

        async def user(amount: int, precedence: Precedence) -> None:
            nonlocal held
            async with limiter.hold(amount, precedence):
                held += amount
                assert held <= 4
                try:
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
                finally:
                    held -= amount

        tasks = []
        for amount, precedence, cancel_after in plan:
            task = asyncio.create_task(user(amount, precedence))
            tasks.append(task)
            for _ in range(cancel_after):
                await asyncio.sleep(0)
            if cancel_after % 2:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert held == 0
        assert limiter.in_use == 0

    asyncio.run(scenario())


async def test_pool_buffers_are_distinct_and_come_back() -> None:
    """A lease hands out different buffers and returns all of them."""
    pool = BufferPool(4096, 4)
    async with pool.lease(3) as buffers:
        for i, buffer in enumerate(buffers):
            buffer[:] = bytes([i]) * 4096
        assert [buffer[0] for buffer in buffers] == [0, 1, 2]
        assert pool.free_count == 1
    assert pool.free_count == 4
    pool.close()


async def test_pool_refuses_what_it_can_never_give() -> None:
    """A lease of more buffers than the pool has is an error at once."""
    pool = BufferPool(256, 2)
    with pytest.raises(ConfigError, match="split the batch"):
        async with pool.lease(3):
            pass
    pool.close()


async def test_cancelled_work_is_awaited_before_the_cancellation_is_raised() -> None:
    """A cancelled call into a worker thread returns only when the thread has let go, also when cancelled twice."""
    workers = Workers(1, "test")
    started, release, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        release.wait(60)
        ended.set()

    task = asyncio.create_task(workers.run(work))
    await asyncio.to_thread(started.wait, 60)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
    workers.close()


async def test_work_that_has_not_begun_is_dropped_when_cancelled() -> None:
    """Cancelling a call that still waits for its thread ends at once and the work never runs."""
    workers = Workers(1, "test")
    release = threading.Event()
    ran: list[int] = []
    blocker = asyncio.create_task(workers.run(lambda: release.wait(60)))
    await asyncio.sleep(0)
    queued = asyncio.create_task(workers.run(lambda: ran.append(1)))
    await asyncio.sleep(0)
    queued.cancel()
    with pytest.raises(asyncio.CancelledError):
        await queued
    release.set()
    await blocker
    workers.close()
    assert ran == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SlotBuffers(memoryview(b"abcd"), 2), "writable"),
        (lambda: SlotBuffers(memoryview(bytearray(10)), 3), "does not divide"),
        (lambda: Limiter(0), "at least 1"),
    ],
)
def test_what_can_not_work_is_refused_clearly(make: object, message: str) -> None:
    """Read-only memory, uneven slots and a limit of nothing are ConfigErrors that say so."""
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]


def test_slots_outside_the_primary_tier_are_refused() -> None:
    """A slot number beyond the end, or below zero, never gives a view."""
    slots = SlotBuffers(memoryview(bytearray(8)), 4)
    for slot in (-1, 2):
        with pytest.raises(IndexError):
            slots.view(slot)
    view = slots.view(1)
    view.release()
    slots.release()
