"""Hints of requests: blocks that are retained, demoted and forgotten."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.errors import ConfigError
from kvstore.eviction import POLICY_NAMES
from kvstore.tiering import TieringConfig
from kvstore.tiering.policy import PARAMETERS, PolicyParser
from kvstore.types import LookupResult, RemovalCause, RequestContext
from tests.tiering.engine import Engine, deadlines_of, keys_of


@pytest.mark.parametrize("eviction", POLICY_NAMES)
def test_blocks_of_higher_priority_are_evicted_later(eviction: str) -> None:
    """Blocks without a priority go first, then by priority; the order of use decides only among equals."""
    engine = Engine(slots=6, eviction=eviction)
    engine.store_and_forget(keys_of(1), retain=80)
    engine.store_and_forget(keys_of(2), retain=20)
    engine.store_and_forget(keys_of(3))
    engine.store_and_forget(keys_of(4), retain=80)
    engine.store_and_forget(keys_of(5, 6))
    for number, expected in ((11, 2), (12, 2), (13, 2)):
        engine.store_and_forget(keys_of(number), retain=100)
        assert {*keys_of(1, 4), *keys_of(expected)} <= set(engine.resident()), number
    engine.store_and_forget(keys_of(14), retain=100)
    assert engine.resident() == keys_of(1, 4, 11, 12, 13, 14)
    engine.store_and_forget(keys_of(15), retain=100)
    assert len(set(keys_of(1, 4)) & set(engine.resident())) == 1
    assert engine.manager.stats().primary.retained == 6


def test_a_priority_lasts_for_its_duration_from_the_end_of_the_request() -> None:
    """The duration does not run out during a long request."""
    engine = Engine(slots=4)
    ctx = engine.request(keys_of(1, 2), retain={"priority": 50, "duration": "30s"})
    engine.store(keys_of(1, 2), ctx)
    engine.settle()
    engine.clock.now += 100
    engine.manager.on_request_finished(ctx)
    engine.clock.now += 29
    engine.step()
    engine.store_and_forget(keys_of(3, 4))
    engine.store_and_forget(keys_of(5, 6))
    assert engine.resident() == keys_of(1, 2, 5, 6)
    engine.clock.now += 2
    engine.step()
    engine.store_and_forget(keys_of(7, 8))
    assert engine.resident() == keys_of(5, 6, 7, 8), "once its time is over, what was passed over goes first"
    assert engine.manager.stats().primary.retained == 0


def test_no_priority_lasts_longer_than_the_lease() -> None:
    """The lease limits each priority, so that a client can't keep blocks forever."""
    engine = Engine(slots=4, retain_s_max=60)
    engine.store_and_forget(keys_of(1), retain={"priority": 100, "duration": "30d"})
    engine.store_and_forget(keys_of(2), retain=100)
    assert engine.manager.stats().primary.retained == 2
    engine.clock.now += 61
    engine.step()
    assert engine.manager.stats().primary.retained == 0


def test_retained_blocks_leave_half_of_the_tier_to_other_requests() -> None:
    """However many blocks have a priority, those above their share are evicted before other requests' blocks."""
    engine = Engine(slots=64, tiers=(), retain_share=0.25)
    for number in range(100, 160):
        engine.store_and_forget(keys_of(number), retain=100)
    mine = keys_of(*range(32))
    engine.store_and_forget(mine)
    for number in range(160, 200):
        engine.store_and_forget(keys_of(number), retain=100)
        assert set(engine.look(mine, engine.request(mine))) == {"hit"}
        engine.manager.touch(mine)
    assert engine.manager.stats().primary.retained >= 16


@pytest.mark.parametrize("blocks", [1, 10, 30])
def test_retained_blocks_above_their_share_make_room_for_prompts_of_any_length(blocks: int) -> None:
    """They are evicted before blocks without priority, except one, at which their number is noticed."""
    engine = Engine(slots=100, tiers=(), retain_share=0.25)
    engine.store_and_forget(keys_of(*range(60)), retain=50)
    engine.store_and_forget(keys_of(*range(60, 100)))
    for first in range(100, 130, blocks):
        engine.store_and_forget(keys_of(*range(first, first + blocks)))
    assert sum(key in engine.primary for key in keys_of(*range(60, 100))) >= 39


def test_a_request_can_end_the_priority_of_its_blocks() -> None:
    """A priority of 0 ends it; without the parameter it stays."""
    engine = Engine(slots=4)
    engine.store_and_forget(keys_of(1, 2), retain=10)
    engine.use(keys_of(1, 2))
    assert engine.manager.stats().primary.retained == 2
    engine.use(keys_of(1), retain=0)
    assert engine.manager.stats().primary.retained == 1


@pytest.mark.parametrize("eviction", POLICY_NAMES)
def test_demoted_blocks_are_evicted_next_and_stay_in_the_tiers(eviction: str) -> None:
    """Demotion starts at the request's end with the last block, unless reused; the shared beginning is not demoted."""
    engine = Engine(slots=6, eviction=eviction)
    engine.store_and_forget(keys_of(1, 2))
    engine.store_and_forget(keys_of(3, 4, 5, 6), demote={"after": 1}, retain=90)
    engine.store_and_forget(keys_of(7))
    engine.store_and_forget(keys_of(8))
    assert engine.resident() == keys_of(1, 2, 3, 4, 7, 8)
    engine.load(keys_of(4), engine.request())
    engine.store_and_forget(keys_of(9))
    assert set(keys_of(3, 4)) <= set(engine.resident()), "one was used again, the other is not after the first token"
    assert set(keys_of(3, 4, 5, 6)) <= set(engine.tier.blocks)
    assert engine.load(keys_of(5), engine.request())


def test_parts_of_a_prompt_have_priorities_of_their_own() -> None:
    """The shared beginning outlives the blocks after it; the last part that contains a block counts."""
    engine = Engine(slots=6)
    parts = [{"priority": 20, "after": 1}, 90, {"priority": 0, "after": 3}]
    engine.store_and_forget(keys_of(1, 2, 3, 4), retain=parts)
    assert engine.manager.stats().primary.retained == 3
    engine.store_and_forget(keys_of(5, 6, 7), retain=50)
    assert engine.resident() == keys_of(1, 2, 3, 5, 6, 7)
    engine.store_and_forget(keys_of(8, 9), retain=50)
    assert engine.resident() == keys_of(1, 5, 6, 7, 8, 9)


def test_equal_priorities_evict_the_latest_next_use_first() -> None:
    """The duration is the expected time until the next use: the block to be used last is evicted first."""
    engine = Engine(slots=3)
    for number, duration in ((1, 20), (2, 300), (3, 100)):
        engine.store_and_forget(keys_of(number), retain={"priority": 50, "duration": duration})
    for number, expected in ((4, 2), (5, 3)):
        engine.store_and_forget(keys_of(number), retain={"priority": 50, "duration": 10})
        assert not set(keys_of(expected)) & set(engine.resident())
    assert engine.resident() == keys_of(1, 4, 5)


def test_demotion_waits_for_the_end_of_the_request() -> None:
    """While a request runs, its blocks keep their positions."""
    engine = Engine(slots=4)
    ctx = engine.request(keys_of(3, 4), demote=True)
    engine.store_and_forget(keys_of(1, 2))
    engine.store(keys_of(3, 4), ctx)
    engine.settle()
    engine.store_and_forget(keys_of(5))
    assert set(keys_of(3, 4)) <= set(engine.resident())
    engine.manager.on_request_finished(ctx)
    engine.store_and_forget(keys_of(6))
    assert engine.resident() == keys_of(1, 3, 5, 6)


def test_unwritten_blocks_are_written_when_they_are_demoted() -> None:
    """Lazy blocks are written to the tiers before they are evicted."""
    engine = Engine(slots=8)
    ctx = engine.request(keys_of(1, 2), lazy=True, demote=True)
    engine.store(keys_of(1, 2), ctx)
    engine.settle()
    assert not engine.tier.blocks
    engine.manager.on_request_finished(ctx)
    engine.settle()
    assert sorted(engine.tier.blocks) == keys_of(1, 2)
    engine.store_and_forget(keys_of(*range(3, 9)))
    engine.store_and_forget(keys_of(9, 10))
    assert engine.resident() == keys_of(*range(3, 11))


def test_forgotten_blocks_leave_every_tier() -> None:
    """From the end of the request on they are a miss in every tier, until they are stored again."""
    engine = Engine(slots=6, tiers=("disk", "far"))
    engine.store_and_forget(keys_of(1, 2, 3), forget={"after": 1})
    engine.settle()
    assert engine.resident() == keys_of(1)
    for tier in engine.tiers:
        assert sorted(tier.blocks) == keys_of(1)
    ctx = engine.request()
    assert [engine.manager.lookup(key, ctx) for key in keys_of(2, 3)] == [LookupResult.MISS] * 2
    engine.store_and_forget(keys_of(2))
    assert engine.load(keys_of(2), engine.request())


def test_block_forgotten_during_its_store_is_removed() -> None:
    """A store that ends after the request leaves no block behind, neither in memory nor in the tier."""
    engine = Engine(slots=4)
    ctx = engine.request(keys_of(1, 2), forget=True)
    engine.store(keys_of(1, 2), ctx)
    engine.manager.on_step_end()
    engine.manager.on_request_finished(ctx)
    assert engine.primary.stats().pinned == 2, "the tier is reading them"
    engine.settle()
    assert not engine.tier.blocks and not engine.resident()


def test_blocks_are_forgotten_although_the_request_id_starts_over() -> None:
    """An engine may reuse the id of an ended request whose copies are still running."""
    engine = Engine(slots=4)
    engine.store_and_forget(keys_of(1, 2))
    ctx = engine.request(keys_of(1, 2), forget=True)
    assert engine.look(keys_of(1, 2), ctx) == ["hit", "hit"] and engine.manager.prepare_load(keys_of(1, 2), ctx)
    engine.manager.on_request_finished(ctx)
    engine.manager.on_new_request(RequestContext(ctx.request_id))
    engine.manager.complete_load(keys_of(1, 2), ctx)
    engine.settle()
    assert not engine.tier.blocks and engine.look(keys_of(1, 2), engine.request()) == ["miss", "miss"]


def test_blocks_that_a_request_generated_follow_its_hints() -> None:
    """Generated blocks follow the prompt's hints; only the prompt's length is known in advance."""
    engine = Engine(slots=8)
    ctx = engine.request(keys_of(1, 2), forget={"after": 2})
    engine.store(keys_of(1, 2), ctx)
    engine.store(keys_of(3, 4), ctx)
    engine.manager.on_request_finished(ctx)
    engine.settle()
    assert engine.resident() == keys_of(1, 2) == sorted(engine.tier.blocks)


def test_a_reset_ends_all_priorities() -> None:
    """A block that is stored again afterwards has none."""
    engine = Engine(slots=4)
    engine.store_and_forget(keys_of(1), retain=50)
    engine.manager.reset()
    assert not engine.parts.retention.active and deadlines_of(engine.parts.retention) == (0, 0)
    engine.store_and_forget(keys_of(1))
    assert engine.manager.stats().primary.retained == 0


def test_state_of_priorities_is_bounded() -> None:
    """Evicted and removed blocks leave no more entries than there are slots."""
    engine = Engine(slots=4)
    for number in range(400):
        engine.store_and_forget(keys_of(number), retain=1 + number % 100)
        if number % 2:
            engine.manager.remove(keys_of(number), RemovalCause.REMOVED)
        engine.step()
    retention, order = engine.parts.retention, engine.primary._order
    assert deadlines_of(retention)[0] <= 4 and len(order.marks.ranks) <= 4
    shelves = order._shelves.values()
    assert all(shelves) and sum(map(len, shelves)) <= 4
    assert order.marks.ranks
    engine.clock.now += 3601
    engine.step()
    assert not order.marks.ranks, "of those that are there, all deadlines are known"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("retain", -1), ("retain", 101), ("retain", True), ("retain", {"duration": "5s"}), ("retain", 0.5),
        ("retain", {"priority": 3, "duration": 0}), ("retain", [1] * 9), ("retain", [{"priority": 1, "until": 3}]),
        ("retain", {"priority": 3, "after": -1}), ("demote", 1), ("demote", {"after": -1}), ("forget", "yes"),
        ("forget", {"tokens": 5}),
    ],
)  # fmt: skip
def test_invalid_hints_are_errors_as_defaults(name: str, value: Any) -> None:
    """The error states the expected values."""
    with pytest.raises(ConfigError, match="Expected"):
        PolicyParser((), {name: value})
    parser = PolicyParser((), {}, PARAMETERS)
    policy = parser.parse({name: value})
    assert parser.mistakes == 1
    assert (policy.forget_tokens == 0) is (name == "forget"), "a mistake in it forgets everything"
    assert policy.retain == () and policy.demote_tokens is None


def test_hints_can_be_forbidden() -> None:
    """A hint that is not allowed is ignored, and counted."""
    parser = PolicyParser((), {}, TieringConfig(allow=["store"]).allow)
    policy = parser.parse({"forget": True, "demote": True, "retain": 5})
    assert not policy.acts_at_end and parser.refused == 3
