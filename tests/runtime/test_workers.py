"""Worker threads: parallel calls, loads first, cancellation that waits, and a close that does not."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from kvstore.runtime.limits import Precedence
from kvstore.runtime.workers import Workers, to_the_end
from kvstore.testing.waiting import eventually_async


@asynccontextmanager
async def pool_of(threads: int) -> AsyncIterator[Workers]:
    """Create a pool and close it."""
    pool = Workers(threads, "kvstore-test")
    try:
        yield pool
    finally:
        assert await pool.close()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvstore-test")]


def counting(done: list[int], n: int) -> Callable[[], None]:
    """Return a call that records its number."""
    return lambda: done.append(n)


def waiting_in(pool: Workers) -> int:
    """Return the number of calls that wait for a thread."""
    return len(pool._queue)


async def blocked(pool: Workers, gate: threading.Event) -> asyncio.Task[None]:
    """Keep one thread busy until the gate opens."""
    task = asyncio.create_task(pool.run([lambda: gate.wait() and None]))
    await asyncio.sleep(0)
    await eventually_async(lambda: waiting_in(pool) == 0)
    return task


@pytest.mark.parametrize("count", [0, 1, 3, 64, 1000])
async def test_every_call_is_made_once(count: int) -> None:
    """Whatever the length of a batch, each of its calls is made exactly once."""
    async with pool_of(4) as pool:
        done: list[int] = []
        await pool.run([counting(done, n) for n in range(count)])
        assert sorted(done) == list(range(count))


async def test_a_batch_of_nothing_gives_others_a_turn() -> None:
    """A series of empty batches does not prevent the loop from running other tasks."""
    async with pool_of(2) as pool:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while turns < 10:
                turns += 1
                await asyncio.sleep(0)

        beside = asyncio.create_task(other())
        for _ in range(10):
            await pool.run([])
        assert turns == 10
        await beside


async def test_one_batch_uses_all_threads_at_once() -> None:
    """Eight calls meet at a barrier, which needs all eight."""
    barrier = threading.Barrier(8, timeout=60)
    async with pool_of(8) as pool:
        await pool.run([lambda: barrier.wait() and None] * 8)


async def test_loads_go_before_stores() -> None:
    """The load submitted last is executed next, before all waiting stores."""
    order: list[str] = []
    gate = threading.Event()
    async with pool_of(1) as pool:
        blocker = await blocked(pool, gate)
        stores = [asyncio.create_task(pool.run([lambda n=n: order.append(f"store {n}")])) for n in range(3)]
        await eventually_async(lambda: waiting_in(pool) == 3)
        load = asyncio.create_task(pool.run([lambda: order.append("load")], precedence=Precedence.LOAD))
        await eventually_async(lambda: waiting_in(pool) == 4)
        gate.set()
        await asyncio.gather(blocker, load, *stores)
    assert order == ["load", "store 0", "store 1", "store 2"]


async def test_cancelled_wait_drops_queued_calls_and_awaits_running_ones() -> None:
    """Calls that have not started are never made; each cancellation is raised when running calls have ended."""
    gate = threading.Event()
    started: list[int] = []

    def slow() -> None:
        started.append(1)
        gate.wait()

    async with pool_of(2) as pool:
        waiting = asyncio.create_task(pool.run([slow] * 10))
        await eventually_async(lambda: len(started) == 2)
        for _ in range(2):
            waiting.cancel()
            done, _ = await asyncio.wait({waiting}, timeout=0.02)
            assert not done
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert len(started) == 2


async def test_cancelling_a_batch_that_waits_behind_a_stuck_one_is_immediate() -> None:
    """A batch without a started call ends at once, however long the threads are busy."""
    gate = threading.Event()
    async with pool_of(1) as pool:
        stuck = await blocked(pool, gate)
        done: list[int] = []
        waiting = asyncio.create_task(pool.run([counting(done, 1)]))
        await eventually_async(lambda: waiting_in(pool) == 1)
        waiting.cancel()
        async with asyncio.timeout(30):
            with pytest.raises(asyncio.CancelledError):
                await waiting
        gate.set()
        await stuck
        assert not done


async def test_exception_of_a_call_reaches_the_waiter() -> None:
    """An exception ends the batch, not the thread."""

    def bad() -> None:
        raise ValueError("bad")

    async with pool_of(2) as pool:
        for _ in range(5):
            with pytest.raises(ValueError, match="bad"):
                await pool.run([bad] * 4)
        assert await pool.call(lambda: 42) == 42
        with pytest.raises(KeyError):
            await pool.call(lambda: {}["x"])


async def test_close_drops_queued_calls_and_leaves_stuck_threads() -> None:
    """Closing ends within its time limit even if a thread never returns; waiting callers are released."""
    gate = threading.Event()
    pool = Workers(1, "kvstore-test")
    stuck = await blocked(pool, gate)
    done: list[int] = []
    behind = asyncio.create_task(pool.run([counting(done, 1)]))
    called = asyncio.create_task(pool.call(lambda: done.append(2)))
    await eventually_async(lambda: waiting_in(pool) == 2)
    assert not await pool.close(timeout_s=0.05)
    for dropped in (behind, called):
        with pytest.raises(OSError, match="closed"):
            await dropped
    assert not done
    with pytest.raises(OSError, match="closed"):
        await pool.run([counting(done, 3)])
    gate.set()
    await stuck
    assert await pool.close()


async def test_a_failure_after_a_cancelled_wait_is_no_error_of_the_loop() -> None:
    """The waiting call ends with its cancellation, and the task's exception counts as retrieved."""
    unnoticed: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unnoticed.append(context))
    failing = asyncio.Event()

    async def fail() -> None:
        await failing.wait()
        raise OSError("for the test")

    waiting = asyncio.create_task(to_the_end(asyncio.create_task(fail())))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.sleep(0)
    failing.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gc.collect()
    assert unnoticed == []


async def test_threads_that_could_not_be_started_are_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary thread limit fails or slows a batch, and has no lasting effect."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("kvstore-test") and thread.name != allowed:
            raise RuntimeError("can't start new thread")
        start(thread)

    def alive() -> int:
        return sum(thread.name.startswith("kvstore-test") for thread in threading.enumerate())

    monkeypatch.setattr(threading.Thread, "start", refuse)
    async with pool_of(4) as pool:
        allowed = ""
        done: list[int] = []
        calls = [counting(done, n) for n in range(64)]
        for _ in range(3):
            with pytest.raises(OSError, match="can't start new thread"):
                await pool.run(calls)
        assert waiting_in(pool) == 0
        assert done == []
        allowed = "kvstore-test-0"
        await pool.run(calls)
        assert alive() == 1
        monkeypatch.undo()
        await pool.run(calls)
        assert alive() == 4
        assert sorted(done) == sorted([*range(64), *range(64)])
