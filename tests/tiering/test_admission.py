"""Admission that each tier chooses (``"min_uses": "auto"``): fewer writes where that costs few hits."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvstore.types import BlockKey, LookupResult
from tests.tiering.engine import Engine, key_of
from tests.tiering.fake_tier import ROW_BYTES


def _serve(engine: Engine, keys: list[BlockKey], **policy: Any) -> None:
    ctx = engine.request(keys, **policy)
    hits = 0
    while hits < len(keys) and engine.manager.lookup(keys[hits], ctx) is not LookupResult.MISS:
        hits += 1
    if hits:
        engine.load(keys[:hits], ctx)
    plan = engine.store(keys[hits:], ctx) if hits < len(keys) else None
    assert plan is None or plan.keys
    engine.manager.on_request_finished(ctx)
    engine.settle()


def _popular(requests: int) -> list[list[BlockKey]]:
    """One of 100 popular blocks for each two blocks that are used once."""
    rng = random.Random(1)
    singles = iter(range(1000, 10_000))
    return [[key_of(number)] for _ in range(requests) for number in (rng.randrange(100), next(singles), next(singles))]


def _returning(requests: int, start: int = 0) -> list[list[BlockKey]]:
    """Blocks that are used twice, the second time after 99 others."""
    return [[key_of(start + number)] for first in range(requests) for number in (first, first - 50) if number >= 0]


def _written(prompts: list[list[BlockKey]], min_uses: object) -> tuple[int, Engine]:
    engine = Engine(slots=8, capacity=128, policy={"min_uses": min_uses})
    for prompt in prompts:
        _serve(engine, prompt)
    return engine.tier.bytes_stored, engine


def test_blocks_that_are_used_once_are_not_written_where_others_are_popular() -> None:
    """The tier then stores at the second use, with fewer writes and no fewer loads, and counts both."""
    prompts = _popular(1500)
    (every, plain), (chosen, auto) = _written(prompts, 1), _written(prompts, "auto")
    flow = auto.manager.stats().tiers[0]
    assert chosen < 0.7 * every
    assert flow.loaded >= plain.manager.stats().tiers[0].loaded
    assert flow.saved_writes > 0 >= flow.lost_hits


def test_all_blocks_are_written_where_each_returns_once() -> None:
    """Where storing at the second use would lose every hit, blocks are stored at the first."""
    prompts = _returning(1500)
    (every, _), (chosen, auto) = _written(prompts, 1), _written(prompts, "auto")
    assert chosen == every
    assert auto.manager.stats().tiers[0].saved_writes == 0


def test_the_choice_returns_to_all_blocks_when_they_come_back() -> None:
    """After popular blocks, blocks that return once are stored at their first use again."""
    engine = _written(_popular(1500), "auto")[1]
    before = engine.tier.bytes_stored
    _serve(engine, [key_of(9999)])
    assert engine.tier.bytes_stored == before
    for prompt in _returning(1500, 20_000):
        _serve(engine, prompt)
    _serve(engine, [key_of(30_000)])
    assert key_of(30_000) in engine.tier.blocks


@pytest.mark.parametrize("capacity", [None, 32])
def test_a_tier_without_a_limit_or_with_little_room_stores_all_blocks(capacity: int | None) -> None:
    """Without a capacity no block displaces another, and below 64 blocks there is too little to choose by."""
    engine = Engine(slots=8, capacity=capacity, policy={"min_uses": "auto"})
    for prompt in _popular(500):
        _serve(engine, prompt)
    _serve(engine, [key_of(9999)])
    assert key_of(9999) in engine.tier.blocks


def test_a_large_tier_stores_all_blocks_while_it_is_filling() -> None:
    """Blocks that were simulated before the size of the tier was known do not make it look full."""
    engine = Engine(slots=64, policy={"min_uses": "auto"})
    for first in range(0, 16_000, 32):
        if first == 8000:
            engine.tier.capacity = 100_000
        _serve(engine, [key_of(number) for number in range(first, first + 32)])
    assert len(engine.tier.blocks) == 16_000


def test_hits_in_the_primary_tier_are_not_lost() -> None:
    """Blocks that return while the primary tier holds them let a tier wait for the second use of the others."""
    engine, written = Engine(slots=64, capacity=128, policy={"min_uses": "auto"}), 0
    for number in range(1500):
        for each in {number, max(0, number - 5), 10_000 + number}:
            _serve(engine, [key_of(each)])
        written += key_of(10_000 + number) in engine.tier.blocks
    assert written < 900


def test_lazy_stores_of_two_tiers_follow_the_choice_of_each() -> None:
    """With ``lazy``, the blocks that a tier admits are written to it before their eviction."""
    engine = Engine(slots=8, tiers=["disk", "far"], policy={"min_uses": "auto", "lazy": True})
    keys = [key_of(number) for number in range(4)]
    _serve(engine, keys)
    assert not any(tier.blocks for tier in engine.tiers)
    assert engine.manager.close()
    assert [list(tier.blocks) for tier in engine.tiers] == [keys, keys]


def test_counts_are_those_of_two_tiers() -> None:
    """Over changes of the traffic, the estimates are near the difference to a tier that stores all blocks."""
    prompts = _returning(600, 40_000) + _popular(1500)
    for start in (20_000, 30_000):
        prompts += _returning(300, start) + _popular(300)
    (every, plain), (chosen, auto) = _written(prompts, 1), _written(prompts, "auto")
    flow = auto.manager.stats().tiers[0]
    saved, lost = (every - chosen) // ROW_BYTES, plain.manager.stats().tiers[0].loaded - flow.loaded
    assert saved > 1000
    assert flow.saved_writes == pytest.approx(saved, rel=0.1)
    assert flow.lost_hits == pytest.approx(lost, abs=0.01 * len(prompts))


def test_requests_that_store_nothing_in_a_tier_fill_no_room_of_it() -> None:
    """Beside many blocks that are not stored there, blocks that return once are stored at their first use."""
    engine, written = Engine(slots=8, capacity=128, policy={"min_uses": "auto"}), set[BlockKey]()
    for number, prompt in enumerate(_returning(1000)):
        _serve(engine, prompt)
        _serve(engine, [key_of(10_000 + 2 * number), key_of(10_001 + 2 * number)], tiers=[])
        assert prompt[0] in engine.tier.blocks
        written.update(prompt)
    assert engine.tier.bytes_stored == len(written) * ROW_BYTES
    flow = engine.manager.stats().tiers[0]
    assert flow.saved_writes == flow.lost_hits == 0


def test_requests_that_choose_themselves_save_and_lose_nothing() -> None:
    """Blocks of requests with ``min_uses`` of their own count as stored, whatever the tier chooses for others."""
    engine = Engine(slots=8, capacity=128, policy={"min_uses": "auto"})
    for prompt in _returning(1300):
        _serve(engine, prompt, min_uses=1)
    flow = engine.manager.stats().tiers[0]
    assert flow.saved_writes == flow.lost_hits == 0
    _serve(engine, [key_of(9999)])
    assert key_of(9999) not in engine.tier.blocks


def test_an_empty_tier_stores_all_blocks_after_a_reset() -> None:
    """After a reset, blocks are stored at their first use until the tier is full again."""
    engine = _written(_popular(1500), "auto")[1]
    _serve(engine, [key_of(9998)])
    assert key_of(9998) not in engine.tier.blocks
    assert engine.manager.reset()
    _serve(engine, [key_of(9999)])
    assert key_of(9999) in engine.tier.blocks


def test_a_tier_of_unknown_room_stores_all_blocks() -> None:
    """A tier whose size is no longer known stores blocks at their first use, whatever it chose before."""
    engine = _written(_popular(1500), "auto")[1]
    engine.tier.capacity = None
    for prompt in _popular(1000):
        _serve(engine, prompt)
    _serve(engine, [key_of(20_000)])
    assert key_of(20_000) in engine.tier.blocks
