"""Limiter and BufferPool: no grant or buffer is lost or handed out twice, whatever is cancelled."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.runtime.buffers import BufferPool, SlotBuffers
from kvstore.runtime.limits import CallsUnderWay, Limiter, Precedence, RetryBudget


async def test_loads_pass_waiting_stores() -> None:
    """A later load is served before a waiting store."""
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


async def test_a_small_request_does_not_pass_a_large_one_that_waits() -> None:
    """Otherwise a series of small loads would block a large load for ever."""
    limiter = Limiter(3)
    async with limiter.hold(1):
        large = asyncio.create_task(limiter.enter(3))
        await asyncio.sleep(0)
        small = asyncio.create_task(limiter.enter(1))
        await asyncio.sleep(0)
        assert limiter.in_use == 1 and not large.done() and not small.done()
    assert await large == 3
    limiter.leave(3)
    assert await small == 1


async def test_a_cancelled_request_holds_up_no_other() -> None:
    """A small request behind a large one is served when the large one is cancelled, not only at the next return."""
    limiter = Limiter(3)
    async with limiter.hold(1):
        large = asyncio.create_task(limiter.enter(3))
        await asyncio.sleep(0)
        small = asyncio.create_task(limiter.enter(1))
        await asyncio.sleep(0)
        large.cancel()
        assert await asyncio.wait_for(small, 20) == 1
        assert large.cancelled() and limiter.in_use == 2
    limiter.leave(1)


async def test_a_request_cancelled_after_its_grant_returns_it() -> None:
    """A waiter that is cancelled between its grant and its next step does not keep the grant."""
    limiter = Limiter(3)
    async with limiter.hold(3):
        waiting = asyncio.create_task(limiter.enter(2))
        await asyncio.sleep(0)
    assert limiter.in_use == 2 and not waiting.done()
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled() and limiter.in_use == 0


async def test_a_request_for_more_than_there_is_waits_for_all_of_it() -> None:
    """A request above the total is served alone."""
    limiter = Limiter(3)
    async with limiter.hold(100):
        assert limiter.in_use == 3
    assert limiter.in_use == 0


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from(Precedence), st.integers(0, 5)), max_size=25))
def test_random_cancellations_lose_nothing(plan: list[tuple[int, Precedence, int]]) -> None:
    """Users that arrive, wait and are cancelled at random restore the limiter's state, and never exceed it."""

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
        turns = 1000
        while turns and not all(task.done() for task in tasks):
            turns -= 1
            await asyncio.sleep(0)
        assert turns, "a user waits for ever"
        assert not [task for task in tasks if not task.cancelled() and task.exception()]
        assert held == 0
        assert limiter.in_use == 0

    asyncio.run(scenario())


async def test_lease_larger_than_the_pool_is_refused() -> None:
    """A lease of more buffers than the pool has is an error at once."""
    pool = BufferPool(256, 2)
    with pytest.raises(ConfigError, match="split the batch"):
        async with pool.lease(3):
            pass
    pool.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SlotBuffers(memoryview(b"abcd"), 2), "writable"),
        (lambda: SlotBuffers(memoryview(bytearray(10)), 3), "does not divide"),
        (lambda: SlotBuffers(memoryview(bytearray(10)), 0), "does not divide"),
        (lambda: Limiter(0), "at least 1"),
    ],
)
def test_impossible_parameters_are_config_errors(make: object, message: str) -> None:
    """Read-only memory, uneven slots and a limit of zero are ConfigErrors that give the reason."""
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]


def test_slots_outside_the_primary_tier_are_refused() -> None:
    """A slot number beyond the end, or below zero, gives no view."""
    for slot_bytes in (1, 4):
        slots = SlotBuffers(memoryview(bytearray(2 * slot_bytes)), slot_bytes)
        for slot in (-1, 2):
            with pytest.raises(IndexError):
                slots.view(slot)
        view = slots.view(1)
        view.release()
        slots.release()


async def test_a_limit_can_be_changed_while_it_is_in_use() -> None:
    """New grants wait for a lower limit, larger requests are served alone, and a higher limit admits waiters."""
    limiter = Limiter(4)
    assert await limiter.enter(4) == 4
    waiting = [asyncio.create_task(limiter.enter(3)), asyncio.create_task(limiter.enter(1))]
    await asyncio.sleep(0)
    assert limiter.waiting == 2
    limiter.total = 2
    limiter.leave(4)
    assert await waiting[0] == 2
    assert not waiting[1].done() and limiter.in_use == 2
    limiter.total = 3
    assert await waiting[1] == 1
    limiter.leave(2)
    limiter.leave(1)
    assert (limiter.in_use, limiter.waiting) == (0, 0)


def test_a_budget_allows_a_share_of_tries() -> None:
    """After the initial allowance, retries are bounded by that share of the requests."""
    budget = RetryBudget(3, 0.25)
    budget.earn(1000)
    assert [budget.spend() for _ in range(4)] == [True, True, True, False]
    spent = 0
    for _ in range(100):
        budget.earn()
        spent += budget.spend()
    assert spent == 25


async def test_ended_waits_for_the_last_call() -> None:
    """The wait ends when no call runs any more, including failed calls."""
    calls = CallsUnderWay()
    await calls.ended()
    waiting = None
    with calls:
        with contextlib.suppress(ValueError), calls:
            waiting = asyncio.create_task(calls.ended())
            await asyncio.sleep(0)
            raise ValueError
        await asyncio.sleep(0)
        assert not waiting.done()
    await waiting
