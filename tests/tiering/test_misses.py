"""Causes of misses: counted once per request by tier and cause, and told to a request that asks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest

from kvstore.types import BlockKey, Outcome, RequestContext
from tests.tiering.engine import Engine, keys_of


def missed(engine: Engine) -> dict[tuple[str, str], int]:
    """Return the counts of misses by tier and cause."""
    counts = engine.manager.stats().missed
    return {(tier, cause.value): count for tier, causes in counts.items() for cause, count in causes.items()}


def ask(engine: Engine, keys: Sequence[BlockKey], **params: Any) -> tuple[RequestContext, int]:
    """Start a request with these blocks, load its prefix as vLLM does, and begin to compute the rest."""
    ctx = engine.request(keys, **params)
    for _ in range(100):
        answers = []
        for key in keys:
            answers += engine.look([key], ctx)
            if answers[-1] == "miss":
                break
        hits = answers.index("miss") if "miss" in answers else len(keys)
        if set(answers[:hits]) <= {"hit"}:
            break
        engine.step()
    if hits:
        engine.manager.prepare_load(keys[:hits], ctx)
        engine.manager.complete_load(keys[:hits], ctx)
    engine.manager.on_step_end([ctx.request_id])
    return ctx, hits


def test_all_blocks_behind_the_first_miss_count_once_with_its_cause() -> None:
    """A request counts all blocks that it computes, once for each tier, however often it looks them up."""
    engine = Engine(tiers=["disk", "far"])
    engine.store_and_forget(keys_of(1, 2), tiers=["far"])
    engine.evict_all()
    ctx, hits = ask(engine, keys_of(1, 2, 3, 4, 5))
    assert hits == 2
    engine.look(keys_of(3, 4), ctx)
    engine.manager.on_step_end([ctx.request_id])
    engine.manager.prepare_store(keys_of(3, 4, 5), ctx)
    assert missed(engine) == {("disk", "absent"): 3, ("far", "absent"): 3}


def test_a_request_that_finds_everything_counts_nothing() -> None:
    """Misses of one tier do not count if another delivers all blocks."""
    engine = Engine(tiers=["disk", "far"])
    engine.store_and_forget(keys_of(1, 2), tiers=["far"])
    engine.evict_all()
    assert ask(engine, keys_of(1, 2))[1] == 2
    assert missed(engine) == {}


def test_an_aborted_request_counts_nothing() -> None:
    """A request that ends before it computes has computed nothing."""
    engine = Engine()
    ctx = engine.request(keys_of(1, 2))
    engine.look(keys_of(1), ctx)
    engine.manager.on_request_finished(ctx)
    assert missed(engine) == {}


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"load": False}, {("all", "policy"): 2}),
        ({"load": ["far"]}, {("disk", "policy"): 2, ("far", "store_policy"): 2}),
        ({}, {("far", "absent"): 2, ("disk", "absent"): 2}),
    ],
)
def test_a_policy_that_does_not_load_is_a_cause(params: dict[str, Any], expected: dict[Any, int]) -> None:
    """``load: false`` concerns all tiers, and a list of tiers those that it leaves out."""
    engine = Engine(tiers=["disk", "far"])
    if params:
        engine.store_and_forget(keys_of(1, 2), tiers=["disk"])
        engine.evict_all()
    ask(engine, keys_of(1, 2), **params)
    assert missed(engine) == expected


def test_blocks_below_their_number_of_uses_have_that_cause() -> None:
    """With ``min_uses``, the repetitions before the first store have that cause; a new prompt is absent."""
    engine = Engine(policy={"min_uses": 3})
    for _ in range(4):
        ctx, _ = ask(engine, keys_of(1, 2))
        engine.store(keys_of(1, 2), ctx)
        engine.manager.on_request_finished(ctx)
        engine.settle()
        engine.evict_all()
    assert missed(engine) == {("disk", "absent"): 2, ("disk", "min_uses"): 4}


@pytest.mark.parametrize(
    "params", [{"store": False}, {"store": {"tokens": 0}}, {"tiers": []}, {"tiers": [], "cpu": False}, {"store": "?"}]
)
@pytest.mark.parametrize("is_default", [False, True])
def test_blocks_that_a_policy_did_not_store_have_that_cause(params: dict[str, Any], is_default: bool) -> None:
    """The repetition of a prompt says that an earlier request's policy, or the default, kept it out of the tiers."""
    if is_default and params == {"store": "?"}:
        params = {"store": False}
    engine = Engine(**({"policy": params} if is_default else {}))
    for _ in range(2):
        ctx, _ = ask(engine, keys_of(1, 2), **({} if is_default else params))
        engine.store(keys_of(1, 2), ctx)
        engine.manager.on_request_finished(ctx)
        engine.settle()
        engine.evict_all()
    assert missed(engine) == {("disk", "absent"): 2, ("disk", "store_policy"): 2}


def test_each_tier_has_its_own_cause_and_each_block() -> None:
    """Behind its stored part, a prompt is missed because of its policy; a block that left one tier is absent there."""
    engine = Engine(tiers=["disk", "far"])
    engine.store_and_forget(keys_of(1, 2, 3, 4), store=0.5, tiers=["far"])
    engine.store_and_forget(keys_of(5), tiers=["far"])
    engine.evict_all()
    del engine.tiers[1].blocks[keys_of(5)[0]]
    assert ask(engine, keys_of(1, 2, 3, 4))[1] == 2
    assert missed(engine) == {("disk", "store_policy"): 2, ("far", "store_policy"): 2}
    ask(engine, keys_of(5))
    assert missed(engine) == {("disk", "store_policy"): 3, ("far", "store_policy"): 2, ("far", "absent"): 1}


@pytest.mark.parametrize(
    ("outcome", "cause"),
    [
        (None, "store_failed"),
        (Outcome.IO_ERROR, "store_failed"),
        (Outcome.SHED, "shed"),
        (Outcome.NO_SPACE, "no_space"),
    ],
)
def test_a_failed_store_is_the_cause_until_another_succeeds(outcome: Outcome | None, cause: str) -> None:
    """Blocks whose store failed are missed for that reason; once stored, their later absence has another."""
    engine = Engine()
    for _ in range(2):
        engine.store(keys_of(1, 2))
        engine.manager.on_step_end()
        engine.tier.run(failing=keys_of(1, 2), outcome=outcome)
        engine.manager.on_step_end()
        engine.evict_all()
        ask(engine, keys_of(1, 2))
    assert missed(engine) == {("disk", cause): 4}
    engine.store_and_forget(keys_of(1, 2))
    engine.evict_all()
    engine.tier.blocks.clear()
    ask(engine, keys_of(1, 2))
    assert missed(engine) == {("disk", cause): 4, ("disk", "absent"): 2}


def test_blocks_that_left_before_a_busy_tier_had_room_are_shed() -> None:
    """Blocks that the primary tier evicts while they wait for the tier count as shed when they are missed."""
    engine = Engine(store_share=0.25)
    ctx = engine.request(keys_of(1, 2, 3, 4))
    engine.store(keys_of(1, 2, 3, 4), ctx)
    engine.manager.on_request_finished(ctx)
    plan = engine.manager.prepare_store([b"crowd-%d" % n for n in range(6)], engine.request(tiers=[]))
    assert plan is not None
    engine.settle()
    assert engine.manager.stats().tiers[0].dropped == 2
    ask(engine, keys_of(3, 4))
    assert missed(engine) == {("disk", "shed"): 2}


@pytest.mark.parametrize(("tiers", "name"), [(["disk"], "disk"), ([], "all")], ids=["tier", "primary tier alone"])
def test_blocks_that_the_primary_tier_had_no_slot_for_have_that_cause(tiers: list[str], name: str) -> None:
    """A prompt that could not be stored because all slots were in use is missed for lack of room."""
    engine = Engine(slots=2, tiers=tiers)
    other = engine.request()
    plan = engine.manager.prepare_store(keys_of(8, 9), other)
    assert plan is not None
    assert engine.manager.prepare_store(keys_of(1, 2), engine.request()) is None
    engine.manager.complete_store(plan.keys, other)
    ask(engine, keys_of(1, 2))
    assert missed(engine) == {(name, "no_room"): 2}


def test_reasons_of_old_blocks_are_forgotten() -> None:
    """The number of remembered blocks is bounded; the oldest are absent without a reason."""
    engine = Engine()
    keys = [b"%08d" % number for number in range((1 << 16) + 1)]
    engine.manager.prepare_store(keys, engine.request(store=False))
    ask(engine, keys[:1])
    ask(engine, keys[1:2])
    assert missed(engine) == {("disk", "absent"): 1, ("disk", "store_policy"): 1}


@pytest.mark.parametrize(
    ("outcome", "cause"),
    [
        (None, "failed"),
        (Outcome.IO_ERROR, "failed"),
        (Outcome.CORRUPT, "corrupt"),
        (Outcome.MISS, "lost"),
        (Outcome.TIMEOUT, "timeout"),
    ],
)
def test_a_failed_load_is_the_cause_for_its_request(outcome: Outcome | None, cause: str) -> None:
    """The blocks of a failed load, and those behind them, are missed because of the outcome of the first of them."""
    engine = Engine()
    engine.store_and_forget(keys_of(1, 2, 3))
    engine.evict_all()
    ctx = engine.request(keys_of(1, 2, 3))
    assert engine.look(keys_of(1, 2, 3), ctx) == ["hit_pending"] * 3
    engine.manager.on_step_end()
    engine.tier.run(failing=keys_of(2), outcome=outcome)
    engine.manager.on_step_end()
    assert engine.look(keys_of(1, 2), ctx) == ["hit", "miss"]
    engine.manager.prepare_load(keys_of(1), ctx)
    engine.manager.prepare_store(keys_of(2, 3), ctx)
    assert missed(engine) == {("disk", cause): 2}


def test_a_load_without_an_end_is_late_for_its_request() -> None:
    """A tier that does not end a load within ``load_s_max`` has not answered in time."""
    engine = Engine(load_s_max=5)
    engine.store_and_forget(keys_of(1, 2))
    engine.evict_all()
    ctx = engine.request(keys_of(1, 2))
    assert engine.look(keys_of(1, 2), ctx) == ["hit_pending"] * 2
    engine.manager.on_step_end()
    engine.clock.now += 6
    engine.manager.on_step_end()
    assert engine.look(keys_of(1), ctx) == ["miss"]
    engine.manager.prepare_store(keys_of(1, 2), ctx)
    assert missed(engine) == {("disk", "timeout"): 2}


def test_a_tier_that_does_not_answer_in_time_is_a_cause() -> None:
    """A wait that ends without an answer is late, and a tier that raises has failed until it is dead."""
    engine = Engine(tiers=["mute", "broken"], wait_s_max=1.0)
    engine.tiers[0].unknown.update(keys_of(1))
    engine.tiers[1].raising.add("lookup")
    ctx = engine.request(keys_of(1))
    assert engine.look(keys_of(1), ctx) == ["retry"]
    engine.clock.now += 1.5
    assert engine.look(keys_of(1), ctx) == ["miss"]
    engine.manager.prepare_store(keys_of(1), ctx)
    assert missed(engine) == {("mute", "timeout"): 1, ("broken", "failed"): 1}
    for number in (2, 3):
        ask(engine, keys_of(number))
    assert missed(engine)["broken", "down"] == 1


def test_a_primary_tier_without_room_is_a_cause() -> None:
    """A block that no slot is free for is missed after the wait, with the tier that holds it."""
    engine = Engine(slots=2, wait_s_max=1.0)
    engine.store_and_forget(keys_of(1))
    engine.evict_all()
    other = engine.request()
    assert engine.manager.prepare_store(keys_of(8, 9), other) is not None
    ctx = engine.request(keys_of(1))
    assert engine.look(keys_of(1), ctx) == ["retry"]
    engine.clock.now += 1.5
    assert engine.look(keys_of(1), ctx) == ["miss"]
    engine.manager.on_step_end([ctx.request_id])
    assert missed(engine) == {("disk", "no_room"): 1}


@pytest.mark.parametrize(("params", "cause"), [({"ttl": 10}, "expired"), ({"forget": True}, "removed")])
def test_an_expired_or_forgotten_block_concerns_all_tiers(params: dict[str, object], cause: str) -> None:
    """A block whose lifetime has ended, or that a request has forgotten, is missed in every tier for that reason."""
    engine = Engine()
    engine.store_and_forget(keys_of(1), **params)
    engine.clock.now += 11
    ask(engine, keys_of(1))
    assert missed(engine) == {("all", cause): 1}


@pytest.mark.parametrize("cause", ["evicted", "expired", "removed", "store_policy"])
def test_without_tiers_misses_have_the_cause_of_the_primary_tier(cause: str) -> None:
    """An engine with the primary tier alone names why a block left it, or did not enter it."""
    engine = Engine(tiers=[])
    ask(engine, keys_of(1, 2, 3))
    assert missed(engine) == {("all", "absent"): 3}
    params = {"expired": {"ttl": 10}, "store_policy": {"store": False}}.get(cause, {})
    engine.store_and_forget(keys_of(1, 2, 3), **params)
    if cause == "evicted":
        engine.evict_all()
    elif cause == "expired":
        engine.clock.now += 11
        engine.settle_steps(2)
    elif cause == "removed":
        engine.manager.reset()
    ask(engine, keys_of(1, 2, 3))
    assert missed(engine) == {("all", "absent"): 3, ("all", cause): 3}


def test_an_unproven_request_counts_its_blocks_once() -> None:
    """Blocks that are not looked up, because their keys may be wrong, are missed in every tier."""
    engine = Engine()
    ctx = engine.request(explain=True)
    for _ in range(2):
        engine.manager.exclude(ctx, 7)
    assert missed(engine) == {("all", "unproven"): 7}
    account = engine.manager.account(ctx)
    assert account is not None and (account["blocks"], account["computed"]) == (7, 7), "its keys are unknown"


def test_other_groups_of_layers_do_not_count() -> None:
    """Blocks of layers with a window are loaded as far as the others, so these alone count."""
    engine = Engine()
    keys = keys_of(1, 2, 3, 11, 12, 13)
    ctx = engine.request()
    engine.manager.set_keys(ctx, keys, ends=[16, 32, 48] * 2, weighed=frozenset(keys[:3]))
    assert engine.look([keys[0]], ctx) == ["miss"]
    engine.manager.prepare_store(keys, ctx)
    assert missed(engine) == {("disk", "absent"): 3}


def test_a_prompt_that_is_computed_again_is_counted() -> None:
    """A request counts as repeated if it computes the same first block as an earlier one; a served prefix does not."""
    engine = Engine()
    ask(engine, keys_of(1, 2))
    ask(engine, keys_of(3))
    assert engine.manager.stats().repeated == 0
    ask(engine, keys_of(1, 2, 4))
    assert engine.manager.stats().repeated == 1
    engine.store_and_forget(keys_of(1, 2))
    assert ask(engine, keys_of(1, 2, 5))[1] == 2
    assert engine.manager.stats().repeated == 1


def test_a_request_gets_an_account_of_its_blocks() -> None:
    """The account names blocks and time of each tier, and the cause for those computed; others get none."""
    engine = Engine(tiers=["disk", "far"])
    engine.store_and_forget(keys_of(2, 3), tiers=["far"])
    engine.evict_all()
    engine.store_and_forget(keys_of(1), tiers=[])
    keys = keys_of(1, 2, 3, 4, 5)
    ctx = engine.request(keys, explain=True)
    assert engine.look(keys[:4], ctx) == ["hit", "hit_pending", "hit_pending", "miss"]
    engine.manager.on_step_end()
    engine.clock.now += 0.25
    engine.tiers[1].run()
    engine.manager.on_step_end()
    engine.manager.prepare_load(keys[:3], ctx)
    engine.manager.complete_load(keys[:3], ctx)
    engine.manager.on_step_end([ctx.request_id])
    assert engine.manager.account(ctx) == {
        "blocks": 5,
        "computed": 2,
        "tiers": {
            "cpu": {"blocks": 1},
            "disk": {"blocks": 0, "missed": "absent"},
            "far": {"blocks": 2, "seconds": 0.25, "missed": "absent"},
        },
    }
    assert engine.manager.account(engine.request(keys)) is None
    other, _ = ask(engine, keys_of(9), explain=True, load=False)
    told = {"blocks": 1, "computed": 1, "missed": "policy", "tiers": {"disk": {"blocks": 0}, "far": {"blocks": 0}}}
    assert engine.manager.account(other) == told


def test_an_account_of_found_blocks_has_no_cause() -> None:
    """A tier that lacked what another one delivered is no cause, because nothing is computed."""
    engine = Engine(tiers=["disk", "far"])
    engine.store_and_forget(keys_of(1, 2), tiers=["far"])
    engine.evict_all()
    ctx, _ = ask(engine, keys_of(1, 2), explain=True)
    account = engine.manager.account(ctx)
    assert account is not None and account["tiers"]["far"].pop("seconds") >= 0
    assert account == {"blocks": 2, "computed": 0, "tiers": {"disk": {"blocks": 0}, "far": {"blocks": 2}}}


def test_each_request_has_a_line_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    """The line has the account, also of a request that did not ask for it."""
    engine = Engine()
    with caplog.at_level(logging.DEBUG, "kvstore.tiering"):
        ctx, _ = ask(engine, keys_of(1, 2))
        ask(engine, keys_of(3), load=False)
    lines = [line for line in caplog.messages if line.startswith("Request")]
    account = {"blocks": 2, "computed": 2, "tiers": {"disk": {"blocks": 0, "missed": "absent"}}}
    assert lines[0] == f"Request {ctx.request_id}: {account}"
    assert len(lines) == 2 and "'missed': 'policy'" in lines[1]
