"""Behaviour of the tier manager, one property per test (the list follows the multi-tier framework's own tests)."""

from __future__ import annotations

import pytest

from kvstore.tiering.events import BlockEvent
from kvstore.types import Locality, LookupResult, Medium, RemovalCause, RequestContext
from tests.tiering.engine import Engine, key_of, keys_of
from tests.tiering.fake_tier import payload


def test_eviction_inside_a_tier() -> None:
    """A block evicted by a tier is a miss there, and reported as an event; the primary tier is not affected."""
    engine = Engine(capacity=2)
    engine.store_and_forget(keys_of(1, 2, 3))
    assert engine.look(keys_of(1, 2, 3), engine.request()) == ["hit"] * 3
    events = [event for event in engine.manager.take_events() if event.tier == "disk"]
    assert BlockEvent("disk", Medium.STORAGE, Locality.LOCAL, tuple(keys_of(1)), RemovalCause.EVICTED) in events
    engine.evict_all()
    assert engine.look(keys_of(1, 2), engine.request()) == ["miss", "hit_pending"]


def test_a_promotion_makes_the_start_of_its_prefix_recent() -> None:
    """A later step evicts newer blocks of other requests first: without its start the promoted end is useless."""
    engine = Engine(slots=4)
    engine.store_and_forget(keys_of(5))
    engine.evict_all()
    engine.store_and_forget(keys_of(1, 2))
    engine.store_and_forget(keys_of(3, 4))
    assert engine.look(keys_of(1, 2, 5), engine.request()) == ["hit", "hit", "hit_pending"]
    engine.manager.on_step_end()
    engine.store(keys_of(9))
    assert engine.resident() == keys_of(1, 2, 5, 9)


def test_lookup_from_primary() -> None:
    """A block in the primary tier is a hit without a lookup in any tier."""
    engine = Engine()
    engine.store(keys_of(1))
    engine.tier.calls.clear()
    assert engine.look(keys_of(1), engine.request()) == ["hit"]
    assert "lookup" not in [name for name, _ in engine.tier.calls]


def test_a_request_need_not_be_announced() -> None:
    """A load, store or lookup may be the first mention of a request, which ends as any other."""
    engine = Engine()
    manager = engine.manager
    engine.store_and_forget(keys_of(1))
    loads, stores, looks = (RequestContext(name) for name in ("loads", "stores", "looks"))
    assert manager.prepare_load(keys_of(1), loads) == [engine.primary.slot_of(key_of(1))]
    manager.complete_load(keys_of(1), loads)
    assert engine.store(keys_of(2), stores).keys == keys_of(2)
    assert engine.look(keys_of(1), looks) == ["hit"]
    assert manager.stats().requests == 3
    for ctx in (loads, stores, looks):
        manager.on_request_finished(ctx)
    engine.settle()
    assert manager.stats().requests == 0 == engine.primary.stats().pinned


def test_promotion() -> None:
    """A block that only a tier has is promoted byte for byte; the blocks of a step share one job."""
    engine = Engine()
    engine.store_and_forget(keys_of(1, 2, 3))
    engine.evict_all()
    ctx = engine.request()
    engine.look(keys_of(1, 2, 3), ctx)
    engine.manager.on_step_end()
    assert [job.keys for is_load, job in engine.tier.open if is_load] == [keys_of(1, 2, 3)]
    assert engine.load(keys_of(1, 2, 3), ctx) == [payload(key) for key in keys_of(1, 2, 3)]
    assert engine.manager.stats().promoting == 0


def test_eviction_in_primary() -> None:
    """A full primary tier evicts the least recently used block, and reports it."""
    engine = Engine(slots=3)
    for number in (1, 2, 3):
        engine.store_and_forget(keys_of(number))
    ctx = engine.request()
    engine.load(keys_of(1), ctx)
    engine.manager.take_events()
    plan = engine.store(keys_of(4), ctx)
    assert list(plan.evicted) == keys_of(2)
    events = [event for event in engine.manager.take_events() if event.cause is RemovalCause.EVICTED]
    assert [(event.tier, event.medium, list(event.keys)) for event in events] == [("cpu", Medium.CPU, keys_of(2))]


@pytest.mark.parametrize("has_ended", [False, True])
def test_each_group_of_layers_keeps_its_start(has_ended: bool) -> None:
    """Of a model with two groups of layers, the last blocks of both leave first: a load needs those of each group."""
    engine = Engine(slots=8, tiers=[])
    ctx, groups = RequestContext("r"), keys_of(1, 2, 3, 11, 12, 13)
    engine.manager.on_new_request(ctx, groups, ends=[16, 32, 48] * 2)
    generated = keys_of(50, 60)
    engine.store(groups[3:] if has_ended else [*generated, *groups], ctx)
    if has_ended:
        engine.store(generated, ctx)
        engine.store(groups[:3], ctx)
        engine.manager.on_request_finished(ctx)
    engine.settle()
    # Blocks without a known position were generated after the prompt.
    for left in ({50, 60}, {3, 13}, {2, 12}):
        assert set(engine.store(keys_of(*(100 + number for number in left))).evicted) == set(keys_of(*left))


def test_reads_of_the_primary_tier_are_events_if_asked_for() -> None:
    """One event per load, with its blocks; a store or a lookup is no access."""
    for wanted in (True, False):
        engine = Engine(access_events=wanted)
        engine.store_and_forget(keys_of(1, 2))
        engine.load(keys_of(1, 2), engine.request())
        reads = [event for event in engine.manager.take_events() if event.accessed]
        assert [(event.tier, list(event.keys), event.cause) for event in reads] == [
            ("cpu", keys_of(1, 2), None)
        ] * wanted


def test_a_request_ends_once() -> None:
    """A second report of a request's end does not count as a second use, even if one of its copies is running."""
    engine = Engine(slots=3)
    ctx = engine.request(keys_of(1, 3))
    engine.store(keys_of(1), ctx)
    assert engine.manager.prepare_store(keys_of(3), ctx) is not None
    engine.manager.on_request_finished(ctx)
    engine.store_and_forget(keys_of(2))
    engine.manager.on_request_finished(ctx)
    assert list(engine.store(keys_of(4)).evicted) == keys_of(1)


def test_touch_reaches_all_tiers() -> None:
    """A use that the engine reports counts in every tier, once per step, and so does a load."""
    engine = Engine(slots=2, tiers=["disk", "far"])
    engine.store_and_forget(keys_of(1))
    engine.store_and_forget(keys_of(2))
    engine.manager.touch(keys_of(1))
    engine.manager.touch(keys_of(1))
    engine.manager.on_step_end()
    touched = [[keys for name, keys in tier.calls if name == "touch"] for tier in engine.tiers]
    assert touched == [[tuple(keys_of(1))]] * 2
    ctx = engine.request()
    assert list(engine.store(keys_of(3), ctx).evicted) == keys_of(2), "touched in the primary tier, too"
    engine.load(keys_of(1), ctx)
    engine.step()
    assert all(("touch", tuple(keys_of(1))) in tier.calls[-4:] for tier in engine.tiers)


def test_blocks_that_were_never_complete_are_reported() -> None:
    """After a failed store or load, unless the block has a slot again: an engine may drop its record of the block."""
    engine = Engine()
    engine.store_and_forget(keys_of(1, 2))
    engine.evict_all()
    assert engine.manager.take_unfilled() == []
    ctx = engine.request()
    assert engine.manager.prepare_store(keys_of(3, 4, 5), ctx) is not None
    engine.manager.complete_store(keys_of(3, 4), ctx, success=False)
    engine.store(keys_of(4))
    engine.look(keys_of(1, 2), engine.request())
    engine.manager.on_step_end()
    engine.tier.run(failing=keys_of(1))
    engine.settle()
    assert engine.manager.take_unfilled() == keys_of(3, 1)
    assert engine.manager.take_unfilled() == []


def test_finished_jobs_are_processed_before_a_store_is_prepared() -> None:
    """A store may use slots freed by a job that has just ended, even in a step that polled before."""
    engine = Engine(slots=2)
    engine.store(keys_of(1, 2))
    ctx = engine.request()
    assert engine.look(keys_of(5), ctx) == ["miss"], "the poll of this step"
    engine.tier.run()
    plan = engine.manager.prepare_store(keys_of(3, 4), ctx)
    assert plan is not None and sorted(plan.evicted) == keys_of(1, 2)


def test_no_secondary_tiers_at_all() -> None:
    """The primary tier alone stores, evicts, misses and closes."""
    engine = Engine(slots=2, tiers=[])
    engine.store_and_forget(keys_of(1, 2))
    ctx = engine.request()
    assert engine.load(keys_of(1, 2), ctx) == [payload(key) for key in keys_of(1, 2)]
    engine.step()
    assert list(engine.store(keys_of(3), ctx).evicted) == keys_of(2)
    assert engine.manager.lookup(key_of(2), ctx) is LookupResult.MISS
    assert engine.manager.reset() and engine.manager.close()


def test_a_misspelt_restriction_reaches_no_tier() -> None:
    """A request that names an unknown tier stores to none; the primary tier still has its blocks."""
    engine = Engine(tiers=["near", "far"])
    for number, params in enumerate(({"tiers": ["nosuch"]}, {"tires": ["near"]}, {"min_uses": "two"})):
        engine.store_and_forget(keys_of(number), **params)
    assert [len(tier.blocks) for tier in engine.tiers] == [0, 0]
    assert len(engine.primary) == 3
    assert engine.manager.stats().policy_mistakes == 3


def test_engine_restriction_overrides_the_request() -> None:
    """If the engine excludes tiers for a request, they are not used, even if the request's policy names them."""
    engine = Engine(tiers=["near", "far"])
    for tier in engine.tiers:
        tier.blocks[key_of(1)] = payload(key_of(1))
    ctx = RequestContext("r", {"load": ["near", "far"]}, ("far",))
    assert engine.load([key_of(1)], ctx) == [payload(key_of(1))]
    assert "lookup" not in [name for name, _ in engine.tiers[0].calls]
    assert engine.look(keys_of(2), RequestContext("s", {}, ())) == ["miss"]
