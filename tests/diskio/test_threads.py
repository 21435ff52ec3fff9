"""The thread engine: many threads per batch, loads first, cancellation that waits, and an end that does not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from kvstore.diskio import CancelFlag, Priority, ThreadEngine
from kvstore.testing.waiting import eventually_async


@asynccontextmanager
async def engine_of(threads: int) -> AsyncIterator[ThreadEngine]:
    """Make an engine and close it."""
    engine = ThreadEngine(threads, "test-disk")
    try:
        yield engine
    finally:
        assert await engine.close()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("test-disk")]


class Item:
    """Something to be done, and how often it was."""

    def __init__(self, name: int = 0) -> None:
        self.name = name
        self.done = 0
        self.thread = ""


def do(items: Sequence[Item], flag: CancelFlag) -> None:
    """Do items, as a batch function does."""
    for item in items:
        if flag.is_set:
            break
        item.done += 1
        item.thread = threading.current_thread().name


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 63, 64, 65, 1000])
async def test_every_item_is_done_once(count: int) -> None:
    """Whatever the length of a batch, each of its items is done exactly once."""
    async with engine_of(4) as engine:
        items = [Item() for _ in range(count)]
        await engine.run(do, items)
        assert [item.done for item in items] == [1] * count


async def test_a_batch_of_nothing_gives_others_a_turn() -> None:
    """Whoever asks for batches of nothing in a row does not keep the loop from running others."""
    async with engine_of(2) as engine:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while turns < 10:
                turns += 1
                await asyncio.sleep(0)

        beside = asyncio.create_task(other())
        for _ in range(10):
            await engine.run(do, [])
        assert turns == 10
        await beside


async def test_one_batch_uses_all_threads_at_once() -> None:
    """Eight items meet at a barrier of eight threads, which none passes alone."""
    barrier = threading.Barrier(8, timeout=60)
    async with engine_of(8) as engine:
        await engine.run(lambda items, flag: [barrier.wait() for _ in items] and None, [Item() for _ in range(8)])


async def test_units_are_even_and_bounded() -> None:
    """Items are spread evenly, and no unit is longer than it may be."""
    lengths: list[int] = []
    async with engine_of(4) as engine:
        await engine.run(lambda items, flag: lengths.append(len(items)), [Item() for _ in range(10)])
        assert sorted(lengths) == [2, 2, 3, 3]
        lengths.clear()
        await engine.run(lambda items, flag: lengths.append(len(items)), [Item() for _ in range(100)], unit_items_max=7)
        assert sum(lengths) == 100
        assert max(lengths) == 7


async def test_loads_go_before_stores() -> None:
    """A load submitted last is done next, before all stores that wait."""
    order: list[str] = []
    gate = threading.Event()
    async with engine_of(1) as engine:
        blocker = engine.submit(lambda items, flag: gate.wait() and None, [Item()])
        await eventually_async(lambda: engine.pending_units == 0)
        stores = [engine.submit(lambda items, flag, n=n: order.append(f"store {n}"), [Item()]) for n in range(3)]
        load = engine.submit(lambda items, flag: order.append("load"), [Item()], priority=Priority.LOAD)
        gate.set()
        for batch in (blocker, load, *stores):
            await batch.wait()
    assert order == ["load", "store 0", "store 1", "store 2"]


async def test_a_cancelled_wait_drops_the_rest_and_waits_for_what_runs() -> None:
    """Units that have not started are never started; the cancellation goes on when those that have are done."""
    gate = threading.Event()
    started: list[int] = []

    def slow(items: Sequence[Item], flag: CancelFlag) -> None:
        started.append(len(items))
        gate.wait()
        do(items, flag)

    async with engine_of(2) as engine:
        items = [Item() for _ in range(40)]
        batch = engine.submit(slow, items, unit_items_max=4)
        waiting = asyncio.create_task(batch.wait())
        await eventually_async(lambda: len(started) == 2)
        waiting.cancel()
        await asyncio.wait({waiting}, timeout=0.02)
        waiting.cancel()
        done, _ = await asyncio.wait({waiting}, timeout=0.02)
        assert not done
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert started == [4, 4]
        # Those that ran saw the flag before their first item.
        assert sum(item.done for item in items) == 0


async def test_cancelling_a_batch_that_waits_behind_a_stuck_one_is_immediate() -> None:
    """A batch of which nothing has started ends at once, however long the threads are busy."""
    gate = threading.Event()
    async with engine_of(1) as engine:
        stuck = engine.submit(lambda items, flag: gate.wait() and None, [Item()])
        await eventually_async(lambda: engine.pending_units == 0)
        waiting = asyncio.create_task(engine.run(do, [Item()]))
        await eventually_async(lambda: engine.pending_units == 1)
        waiting.cancel()
        async with asyncio.timeout(30):
            with pytest.raises(asyncio.CancelledError):
                await waiting
        gate.set()
        await stuck.wait()


async def test_what_a_batch_function_raises_reaches_who_waits() -> None:
    """An exception ends the batch, not the thread."""

    def bad(items: Sequence[Item], flag: CancelFlag) -> None:
        raise ValueError("bad")

    async with engine_of(2) as engine:
        for _ in range(5):
            with pytest.raises(ValueError, match="bad"):
                await engine.run(bad, [Item() for _ in range(4)])
        assert await engine.call(lambda: 42) == 42
        with pytest.raises(KeyError):
            await engine.call(lambda: {}["x"])


async def test_close_drops_what_waits_and_leaves_what_is_stuck() -> None:
    """Closing ends within its time limit although a thread never comes back; those who wait are released."""
    gate = threading.Event()
    engine = ThreadEngine(1, "test-stuck")
    stuck = engine.submit(lambda items, flag: gate.wait() and None, [Item()])
    await eventually_async(lambda: engine.pending_units == 0)
    item = Item()
    behind = engine.submit(do, [item])
    assert not await engine.close(timeout_s=0.05)
    await behind.wait()
    assert item.done == 0
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit(do, [Item()])
    gate.set()
    await stuck.wait()
    assert await engine.close()


async def test_threads_that_could_not_be_started_are_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that is reached for a moment fails a batch, or slows it, and is forgotten when it has passed."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("test-disk") and thread.name != allowed:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    async with engine_of(4) as engine:
        allowed = ""
        items = [Item() for _ in range(64)]
        for _ in range(3):
            with pytest.raises(OSError, match="can't start new thread"):
                await engine.run(do, items)
        assert engine.pending_units == 0
        assert [item.done for item in items] == [0] * len(items)
        allowed = "test-disk-0"
        await engine.run(do, items)
        assert engine._alive() == 1
        monkeypatch.undo()
        await engine.run(do, items)
        assert engine._alive() == 4
        assert [item.done for item in items] == [2] * len(items)
