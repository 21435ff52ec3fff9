"""The cost of a call does not grow with the number of blocks: counted in function calls, which load can't disturb."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.eviction import POLICY_NAMES
from tests.tiering.engine import Engine, key_of

BATCH = 50


def calls_of(action: Callable[[], Any]) -> int:
    """Return the number of Python and C functions that an action calls."""
    count = 0

    def count_calls(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # Its callbacks would be counted, too.
    sys.setprofile(count_calls)
    try:
        action()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def costs(blocks: int, eviction: str) -> dict[str, int]:
    """Return the calls of each operation on a batch of blocks, with a full primary tier and some pinned blocks."""
    engine = Engine(slots=blocks, eviction=eviction)
    engine.store_and_forget([key_of(number) for number in range(blocks)])
    manager = engine.manager
    pinned = [key_of(number) for number in range(BATCH)]
    reader = engine.request()
    engine.load(pinned, reader)
    assert manager.prepare_load(pinned, reader) is not None
    engine.settle()

    ctx = engine.request()
    here = [key_of(blocks - 1 - number) for number in range(BATCH)]
    absent = [key_of(blocks + number) for number in range(BATCH)]
    found = {
        "hit": calls_of(lambda: [manager.lookup(key, ctx) for key in here]),
        "miss": calls_of(lambda: [manager.lookup(key, ctx) for key in absent]),
        "step": calls_of(manager.on_step_end),
        "prepare store": calls_of(lambda: manager.prepare_store(absent, ctx)),
        "complete store": calls_of(lambda: manager.complete_store(absent, ctx)),
        "finish": calls_of(lambda: manager.on_request_finished(ctx)),
    }
    engine.settle()
    # Repeat: blocks skipped in the first round must not be skipped again in each round.
    again = engine.request()
    more = [key_of(2 * blocks + number) for number in range(BATCH)]
    found["prepare store again"] = calls_of(lambda: manager.prepare_store(more, again))
    manager.complete_store(more, again)
    manager.on_request_finished(again)
    engine.settle()
    evicted = [key_of(number) for number in range(3 * blocks) if key_of(number) in engine.tier.blocks]
    evicted = [key for key in evicted if key not in engine.primary][:10]
    assert len(evicted) == 10
    third = engine.request()
    found["promote"] = calls_of(lambda: [manager.lookup(key, third) for key in evicted])
    return found


@pytest.mark.parametrize("eviction", POLICY_NAMES)
def test_the_cost_of_a_call_does_not_grow_with_the_number_of_blocks(eviction: str) -> None:
    """Hits, misses, stores into a full primary tier and promotions make as many calls with 500 blocks as with 10,000.

    Small differences come from the garbage collector and the timing of answers; 20 times the blocks would show.
    """
    few, many = costs(500, eviction), costs(10_000, eviction)
    assert few.keys() == many.keys()
    for operation, calls in few.items():
        assert many[operation] <= 1.1 * calls + BATCH, (operation, few, many)


def test_a_step_calls_only_the_parts_with_work() -> None:
    """A step costs the same before blocks are pinned and retained as after these leases and priorities have ended."""
    engine = Engine()
    idle = calls_of(engine.manager.on_step_end)
    assert idle < 20, "mostly those of the tier"
    engine.store_and_forget([key_of(1)], retain=5)
    busy = calls_of(engine.manager.on_step_end)
    engine.clock.now += 3601
    engine.settle_steps(2)
    assert calls_of(engine.manager.on_step_end) == idle < busy
