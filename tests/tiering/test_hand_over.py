"""Hand-overs in the computing engine: the promised blocks, and how long computed blocks are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvstore.primary.lending import Lender
from kvstore.tiering.policy import OWN_PARAMETERS, PRIORITY_MAX
from kvstore.types import BlockKey, RequestContext
from tests.tiering.engine import Engine, keys_of

KEYS = keys_of(1, 2, 3, 4)


def handed_over(engine: Engine, name: str = "r", **params: Any) -> RequestContext:
    """Start a request whose blocks another engine will fetch."""
    ctx = RequestContext(name, params, hand_over_s=60.0, hand_over=name.encode())
    engine.manager.on_new_request(ctx, KEYS)
    return ctx


def coming(engine: Engine) -> list[BlockKey]:
    """Return the blocks that the other engine should wait for."""
    return [key for key in KEYS if engine.primary.hand_overs.is_coming(key)]


def kept(engine: Engine) -> set[BlockKey]:
    """Return the blocks that are kept until other engines have fetched them."""
    return {key for key, (priority, _) in engine.primary.marks.ranks.items() if priority > PRIORITY_MAX}


def fetch(engine: Engine, keys: Sequence[BlockKey] = KEYS) -> None:
    """Send blocks to another engine, and let the manager note it: in the next step, if it has polled in this one."""
    for key in keys:
        Lender(engine.primary).note_sent(key)
    engine.settle_steps(2)


def test_computed_blocks_are_kept_until_they_are_fetched() -> None:
    """Each block is held from its store to its fetch, beyond the end of its request."""
    engine = Engine(retain_share=0.5)
    ctx = handed_over(engine)
    engine.store(KEYS, ctx)
    engine.manager.on_request_finished(ctx)
    engine.settle()
    assert kept(engine) == set(KEYS)
    fetch(engine, KEYS[:3])
    assert kept(engine) == {KEYS[3]}
    fetch(engine, KEYS[3:])
    assert kept(engine) == set()


def test_a_hand_over_needs_the_permission_of_the_operator() -> None:
    """Without it a request promises and holds nothing, because anyone who may send requests could hold the memory."""
    engine = Engine(allow=OWN_PARAMETERS)
    ctx = handed_over(engine)
    assert coming(engine) == [] and not engine.primary.hand_overs.is_waiting(b"r")
    engine.store(KEYS, ctx)
    engine.manager.on_request_finished(ctx)
    engine.settle()
    assert kept(engine) == set() and engine.manager.stats().policy_refused == 1


@pytest.mark.parametrize("hint", [{"retain": 0}, {"retain": 50}, {"demote": True}], ids=str)
def test_hints_leave_blocks_that_are_kept_for_an_engine(hint: dict[str, Any]) -> None:
    """The block stays, whatever priority other requests give it, until it is fetched, and has no priority then."""
    engine = Engine(retain_share=0.5)
    engine.store(KEYS, handed_over(engine))
    engine.use(KEYS, **hint)
    engine.settle()
    assert kept(engine) == set(KEYS)
    for number in range(20, 40):
        engine.store_and_forget(keys_of(number))
    assert not engine.primary.missing(KEYS)
    fetch(engine)
    assert not engine.primary.marks.ranks


def test_blocks_are_kept_for_a_limited_time() -> None:
    """An engine that never fetches costs the memory for a minute."""
    engine = Engine(retain_share=0.5)
    engine.store(KEYS, handed_over(engine))
    engine.clock.now += 59
    engine.step()
    assert kept(engine) == set(KEYS)
    engine.clock.now += 2
    engine.step()
    assert not engine.primary.marks.ranks


def test_blocks_are_kept_for_as_many_fetches_as_requests() -> None:
    """Two requests allow two fetches; a request that uses its blocks again adds none."""
    engine = Engine(retain_share=0.5)
    one, two = handed_over(engine, "one"), handed_over(engine, "two")
    engine.store(KEYS, one)
    engine.step()
    engine.load(KEYS, one)
    engine.load(KEYS, two)
    fetch(engine)
    assert kept(engine) == set(KEYS), "the second fetch is due"
    fetch(engine)
    assert kept(engine) == set()
    engine.use(KEYS, retain=50)
    assert len(engine.primary.marks.ranks) == len(KEYS), "hints apply again"


@pytest.mark.parametrize("way", ["remove", "reset"])
def test_blocks_that_left_and_came_back_are_not_kept_for_an_engine(way: str) -> None:
    """Otherwise hints would never apply to them again."""
    engine = Engine()
    ctx = handed_over(engine)
    engine.store(KEYS, ctx)
    engine.manager.on_request_finished(ctx)
    engine.settle()
    engine.manager.remove(KEYS) if way == "remove" else engine.manager.reset()
    assert engine.store(KEYS, retain=50).keys == KEYS and not kept(engine)
    assert len(engine.primary.marks.ranks) == len(KEYS)


def test_the_end_of_a_prefix_is_the_first_to_make_room() -> None:
    """The other engine can use the start without the end, also of blocks that had a priority before."""
    engine = Engine(slots=6, retain_share=0.5)
    engine.store_and_forget(KEYS, retain=50)
    for number in (20, 21, 22):
        engine.store_and_forget(keys_of(number))
    handed_over(engine)
    engine.store_and_forget(keys_of(23))
    assert engine.primary.missing(KEYS) == KEYS[3:]


def test_blocks_that_are_stored_again_after_a_reset_are_kept() -> None:
    """A request that computes its blocks again after a reset is still handed over."""
    engine = Engine()
    ctx = handed_over(engine)
    engine.store(KEYS, ctx)
    engine.manager.reset()
    engine.store(KEYS, ctx)
    assert kept(engine) == set(KEYS)


def test_only_admitted_blocks_are_promised() -> None:
    """The other engine must not wait for blocks that the policy does not store."""
    for store, expected in ((True, KEYS), (0.5, KEYS[:2]), (False, [])):
        engine = Engine()
        handed_over(engine, store=store)
        assert coming(engine) == expected


def test_a_request_that_has_ended_promises_nothing() -> None:
    """Neither an ended request nor one with unknown blocks promises blocks; during a copy they may still be stored."""
    engine = Engine()
    ctx = handed_over(engine)
    unknown = RequestContext("unknown", hand_over_s=60.0, hand_over=b"unknown")
    engine.manager.on_new_request(unknown)
    plan = engine.manager.prepare_store(KEYS, ctx)
    assert plan is not None
    assert engine.primary.hand_overs.is_waiting(b"unknown")
    for request in (ctx, unknown):
        engine.manager.on_request_finished(request)
    assert coming(engine) == KEYS and not engine.primary.hand_overs.is_waiting(b"unknown")
    engine.manager.complete_store(plan.keys, ctx)
    assert coming(engine) == []


def test_a_request_id_that_starts_over_ends_the_former_hand_over() -> None:
    """Other engines would wait forever for blocks of a request that no longer exists, known or unknown."""
    for blocks in (KEYS, []):
        engine = Engine()
        engine.manager.on_new_request(RequestContext("r", hand_over_s=60.0, hand_over=b"r"), blocks)
        assert coming(engine) == blocks and engine.primary.hand_overs.is_waiting(b"r") is not bool(blocks)
        engine.manager.on_new_request(RequestContext("r"), KEYS)
        assert not coming(engine) and not engine.primary.hand_overs.is_waiting(b"r")
