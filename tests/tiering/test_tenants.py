"""Tenants of the manager: shares of the primary tier, rates of stores and loads, counts."""

from __future__ import annotations

import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstore.errors import ConfigError
from kvstore.eviction import POLICY_NAMES
from kvstore.namespace import Namespace
from kvstore.primary.tier import PrimaryTier, SlotState
from kvstore.tenants import OTHERS, Accounts, Tenants, tag_of
from kvstore.testing.faults import Fault, FaultKind, FaultPlan, FaultyBackend
from kvstore.tiering import TieringConfig, TieringManager
from kvstore.tiering.config import engine_tiering
from kvstore.tiers import open_tier
from kvstore.types import BlockKey, LookupResult, MissCause, RequestContext
from tests.tiering.engine import Engine
from tests.tiering.fake_tier import ROW_BYTES, FakeTier


def configured(**options: Any) -> Tenants:
    """Return tenants as configured by an operator."""
    return msgspec.convert({"by": "parameter", **options}, Tenants)


def keys(name: str, *numbers: int, named: bool = True) -> list[BlockKey]:
    """Return keys of a tenant's blocks."""
    return [tag_of(name, named=named) + b"%04d" % number for number in numbers]


def stored(engine: Engine, name: str) -> int:
    """Return the number of a tenant's blocks in the tier below."""
    return sum(key.startswith(tag_of(name, named=True)) for key in engine.tier.blocks)


def test_neighbour_displaces_no_guaranteed_block() -> None:
    """A neighbour displaces no guaranteed block, however much it stores, but it may use free slots."""
    engine = Engine(slots=10, tenants=configured(named={"quiet": {"guaranteed": 0.4}, "noisy": {}}))
    engine.store_and_forget(keys("noisy", *range(10)))
    engine.store_and_forget(keys("quiet", 1, 2, 3, 4))
    for number in range(20, 60, 5):
        engine.store_and_forget(keys("noisy", *range(number, number + 5)))
    assert not engine.primary.missing(keys("quiet", 1, 2, 3, 4))
    assert len(engine.primary) == 10
    counts = engine.manager.stats().tenants
    assert counts["quiet"].evicted == 0 and counts["noisy"].evicted == 10 + 40 - 6
    assert (counts["quiet"].blocks, counts["noisy"].blocks, counts[OTHERS].blocks) == (4, 6, 0)
    assert (counts["quiet"].stored, counts["noisy"].stored) == (4, 50)


def test_tenants_without_names_come_to_have_equally_much() -> None:
    """A tenant with ten times the traffic of another gets no more than half."""
    engine = Engine(slots=20, tenants=configured())
    for number in range(10):
        engine.store_and_forget(keys("a", *range(number * 20, number * 20 + 10), named=False))
        engine.store_and_forget(keys("b", number, named=False))
    assert not engine.primary.missing(keys("b", *range(10), named=False))


def test_clients_name_their_tenant_only_if_the_operator_allows_it() -> None:
    """A rule by parameter is refused unless ``allow`` contains it, because a client could name any tenant."""
    tenants = {"tenants": {"by": "parameter"}}
    for refused in ({}, {"allow": ["store"]}):
        with pytest.raises(ConfigError, match="Add 'tenant' to 'allow' if a gateway sets it"):
            engine_tiering({**tenants, **refused}, [])
    assert engine_tiering({**tenants, "allow": ["tenant"]}, []).tenants == configured()
    assert engine_tiering({"tenants": {"by": "cache_salt"}}, []).tenants is not None


def test_within_a_share_the_policy_decides() -> None:
    """The tenant's own least recently used block is evicted."""
    engine = Engine(slots=6, tenants=configured(named={"a": {"guaranteed": 0.5}, "b": {"guaranteed": 0.5}}))
    engine.store_and_forget(keys("a", 1, 2, 3))
    engine.store_and_forget(keys("b", 1, 2, 3))
    engine.use(keys("a", 3))
    engine.step()
    engine.store_and_forget(keys("a", 4))
    assert engine.primary.missing(keys("a", 1, 2, 3, 4)) == keys("a", 2)
    assert not engine.primary.missing(keys("b", 1, 2, 3))


def test_a_priority_counts_within_ones_own_share() -> None:
    """A tenant that retains everything at the highest priority takes no slots from the others."""
    engine = Engine(slots=8, tenants=configured(named={"quiet": {"guaranteed": 0.5}}))
    engine.store_and_forget(keys("quiet", 1, 2, 3, 4))
    for number in range(0, 40, 4):
        engine.store_and_forget(keys("greedy", *range(number, number + 4), named=False), retain=100)
    assert not engine.primary.missing(keys("quiet", 1, 2, 3, 4))


def test_an_idle_tenant_costs_the_others_nothing() -> None:
    """After ``idle_s`` the others may use the whole tier; once the tenant is active again, its guarantee holds."""
    options = configured(named={"idle": {"guaranteed": 0.5}, "busy": {"guaranteed": 0.5}}, idle_s=60)
    engine = Engine(slots=8, tenants=options)
    engine.store_and_forget(keys("idle", 1, 2, 3, 4))
    engine.clock.now += 61
    engine.store_and_forget(keys("busy", *range(8)))
    assert not engine.primary.missing(keys("busy", *range(8)))
    engine.store_and_forget(keys("idle", 5, 6, 7, 8))
    engine.store_and_forget(keys("busy", *range(20, 28, 1))[:4])
    assert not engine.primary.missing(keys("idle", 5, 6, 7, 8))


def test_store_waits_instead_of_taking_guaranteed_slots() -> None:
    """All of the tenant's own blocks are being read, and the rest is guaranteed to another."""
    engine = Engine(slots=4, tenants=configured(named={"a": {"guaranteed": 0.5}, "b": {"guaranteed": 0.5}}))
    engine.store_and_forget(keys("a", 1, 2))
    engine.store_and_forget(keys("b", 1, 2))
    reader = engine.request()
    engine.look(keys("b", 1, 2), reader)
    assert engine.manager.prepare_load(keys("b", 1, 2), reader) is not None
    writer = engine.request()
    assert engine.manager.prepare_store(keys("b", 3), writer) is None
    assert not engine.primary.missing(keys("a", 1, 2) + keys("b", 1, 2))
    engine.manager.complete_load(keys("b", 1, 2), reader)
    engine.step()
    assert engine.manager.prepare_store(keys("b", 3), writer) is not None
    assert not engine.primary.missing(keys("a", 1, 2))


def test_a_promotion_takes_from_its_own_tenant() -> None:
    """Loads from below make room in the same way as stores."""
    engine = Engine(slots=4, tenants=configured(named={"a": {"guaranteed": 0.5}, "b": {"guaranteed": 0.5}}))
    engine.store_and_forget(keys("b", 1, 2))
    engine.store_and_forget(keys("b", 3, 4))
    engine.store_and_forget(keys("a", 1, 2))
    ctx = engine.request(keys("b", 1, 2))
    engine.load(keys("b", 1, 2), ctx)
    assert not engine.primary.missing(keys("a", 1, 2) + keys("b", 1, 2))
    assert engine.manager.stats().tenants["b"].loaded == 2


def test_a_store_rate_is_kept_over_time() -> None:
    """Two blocks a second: two immediately, then two for each second; the rest is stored at a later use."""
    rate = {"store_rate": 2 * ROW_BYTES}
    engine = Engine(slots=16, tenants=configured(named={"slow": rate, "fast": {}}))
    engine.store_and_forget(keys("slow", *range(6)))
    engine.store_and_forget(keys("fast", *range(6)))
    assert (stored(engine, "slow"), stored(engine, "fast")) == (2, 6)
    assert not engine.primary.missing(keys("slow", *range(6)))
    counts = engine.manager.stats().tenants
    assert (counts["slow"].unsaved, counts["fast"].unsaved) == (4, 0)
    for seconds in (0.4, 1.0, 1.0):
        engine.clock.now += seconds
        engine.use(keys("slow", *range(6)))
        engine.settle()
    assert stored(engine, "slow") == 2 + 0 + 2 + 2
    engine.clock.now += 3600
    engine.store_and_forget(keys("slow", *range(10, 16)))
    assert stored(engine, "slow") == 6 + 2, "no more than a second's worth is saved up"


def test_after_a_gap_a_request_stores_nothing_more() -> None:
    """No lookup would find blocks after the gap; the next request that uses the blocks fills it in order."""
    engine = Engine(slots=16, tenants=configured(named={"slow": {"store_rate": 2 * ROW_BYTES}}))
    ctx = engine.request(keys("slow", *range(8)))
    engine.store(keys("slow", *range(4)), ctx)
    engine.clock.now += 1.0
    engine.store(keys("slow", *range(4, 8)), ctx)
    engine.manager.on_request_finished(ctx)
    engine.settle()
    assert sorted(engine.tier.blocks) == sorted(keys("slow", 0, 1))


def test_a_gap_ends_with_a_reset() -> None:
    """A request that computes its blocks again stores them from the first one on, as far as the rate allows."""
    engine = Engine(slots=16, tenants=configured(named={"slow": {"store_rate": 2 * ROW_BYTES}}))
    ctx = engine.request(keys("slow", *range(4)))
    engine.store(keys("slow", 2, 3, 0), ctx)
    engine.settle()
    engine.manager.reset()
    engine.clock.now += 1.0
    engine.store(keys("slow", 0, 1), ctx)
    engine.settle()
    assert set(keys("slow", 0, 1)) <= set(engine.tier.blocks)


def test_a_slow_rate_lets_single_blocks_pass() -> None:
    """A rate below one block per second stores one block every few seconds."""
    engine = Engine(slots=16, tenants=configured(named={"slow": {"store_rate": ROW_BYTES // 4}}))
    for _ in range(9):
        engine.store_and_forget(keys("slow", int(engine.clock.now)))
        engine.clock.now += 1.0
    assert stored(engine, "slow") == 3


def test_a_load_rate_is_kept_over_time() -> None:
    """A tenant loads no more than its rate over time; other blocks are computed."""
    engine = Engine(slots=4, tenants=configured(named={"slow": {"load_rate": 2 * ROW_BYTES}, "fast": {}}))
    for name in ("slow", "fast"):
        engine.store_and_forget(keys(name, 1, 2, 3))
    engine.evict_all()
    slow, fast = (engine.request(keys(name, 1, 2, 3)) for name in ("slow", "fast"))
    assert engine.look(keys("slow", 1, 2, 3), slow) == ["hit_pending", "hit_pending", "miss"]
    assert engine.look(keys("fast", 1, 2), fast) == ["hit_pending", "hit_pending"]
    engine.settle_steps(2)
    assert engine.look(keys("slow", 1, 2, 3), slow) == ["hit", "hit", "miss"]
    assert engine.manager.stats().tenants["slow"].declined == 2
    engine.clock.now += 0.5
    engine.step()
    again = engine.request(keys("slow", 3))
    engine.manager.on_request_finished(slow)
    engine.manager.on_request_finished(fast)
    assert engine.look(keys("slow", 3), again) == ["hit_pending"]


def test_blocks_beyond_a_load_rate_count_as_misses_of_it() -> None:
    """The blocks that a tenant computes because its rate is used up are missed because of the rate."""
    engine = Engine(slots=4, tenants=configured(named={"slow": {"load_rate": 2 * ROW_BYTES}}))
    engine.store_and_forget(keys("slow", 1, 2, 3))
    engine.evict_all()
    ctx = engine.request(keys("slow", 1, 2, 3))
    assert engine.look(keys("slow", 1, 2, 3), ctx) == ["hit_pending", "hit_pending", "miss"]
    engine.settle_steps(2)
    assert engine.manager.prepare_load(keys("slow", 1, 2), ctx) is not None
    engine.manager.on_step_end([ctx.request_id])
    assert engine.manager.stats().missed["disk"] == {MissCause.RATE: 1}


def test_blocks_beyond_a_store_rate_count_as_misses_of_it() -> None:
    """Blocks that were not stored because of the rate are missed because of it when their prompt returns."""
    engine = Engine(slots=4, tenants=configured(named={"slow": {"store_rate": 2 * ROW_BYTES}}))
    engine.store_and_forget(keys("slow", 1, 2, 3))
    engine.evict_all()
    ctx = engine.request(keys("slow", 3))
    assert engine.look(keys("slow", 3), ctx) == ["miss"]
    engine.manager.on_step_end([ctx.request_id])
    assert engine.manager.stats().missed["disk"] == {MissCause.RATE: 1}


def test_block_without_room_uses_no_load_rate() -> None:
    """A block without room uses up no load rate, however often it is looked up."""
    engine = Engine(slots=4, tenants=configured(named={"slow": {"load_rate": 2 * ROW_BYTES}}), wait_s_max=60)
    engine.store_and_forget(keys("slow", 1, 2))
    busy = engine.request()
    assert engine.manager.prepare_store(keys("other", 1, 2, 3, 4), busy) is not None
    ctx = engine.request(keys("slow", 1, 2))
    for _ in range(5):
        assert engine.look(keys("slow", 1, 2), ctx) == ["retry", "retry"]
        engine.step()
    engine.manager.complete_store(keys("other", 1, 2, 3, 4), busy, success=False)
    engine.step()
    assert engine.look(keys("slow", 1, 2), ctx) == ["hit_pending"] * 2


def test_lazy_blocks_are_due_within_a_share() -> None:
    """Unwritten blocks are evicted by share, too, and are stored in the tier first."""
    engine = Engine(slots=8, tenants=configured(named={"a": {"guaranteed": 0.5}, "b": {"guaranteed": 0.5}}))
    engine.store_and_forget(keys("a", 1, 2, 3, 4), lazy=True)
    engine.store_and_forget(keys("b", 1, 2, 3, 4))
    assert engine.manager.stats().primary.dirty > 0
    ctx = engine.request()
    for _ in range(20):
        plan = engine.manager.prepare_store(keys("a", 5, 6), ctx)
        if plan is not None:
            break
        engine.step()
    assert plan is not None
    assert not engine.primary.missing(keys("b", 1, 2, 3, 4))
    gone = engine.primary.missing(keys("a", 1, 2, 3, 4))
    assert gone and set(gone) <= set(engine.tier.blocks)


def test_a_reset_empties_the_accounts() -> None:
    """A reset empties the accounts, and counting restarts from zero."""
    engine = Engine(slots=4, tenants=configured(named={"a": {}}))
    engine.store_and_forget(keys("a", 1, 2, 3))
    engine.manager.reset()
    assert engine.manager.stats().tenants["a"].blocks == 0
    engine.store_and_forget(keys("a", 1, 2))
    assert engine.manager.stats().tenants["a"].blocks == 2 == engine.manager.stats().primary.ready


def test_a_tier_with_blocks_cannot_be_shared() -> None:
    """Tenants require an empty tier, because existing blocks would belong to no tenant."""
    primary = PrimaryTier(memoryview(bytearray(4 * ROW_BYTES)), ROW_BYTES)
    assert primary.allocate(keys("a", 1)) is not None
    with pytest.raises(ConfigError, match="has 1 blocks"):
        TieringManager(primary, [], TieringConfig(tenants=configured()))


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_the_accounts_agree_with_the_slots(policy: str) -> None:
    """After any calls each account equals the actual number of blocks, and every guarantee holds."""
    rng = random.Random(f"tenants-{policy}")
    options = configured(named={"a": {"guaranteed": 0.3}, "b": {"guaranteed": 0.2, "maximum": 0.5}})
    now = 0.0
    accounts = Accounts(options, 40, lambda: now)
    primary = PrimaryTier(memoryview(bytearray(40)), 1, policy=policy)
    primary.share(accounts)
    universe = {name: keys(name, *range(60)) for name in ("a", "b", "c")}
    pinned: list[BlockKey] = []
    spare: list[int] = []
    for _ in range(6000):
        name = rng.choice("abc")
        some = rng.sample(universe[name], rng.randint(1, 6))
        ready = [key for key in some if primary.lookup(key) is SlotState.READY]
        match rng.randrange(12):
            case 0 | 1 | 2:
                before = {other: accounts.of(universe[other][0]).blocks for other in "abc"}
                new = primary.missing(some)
                if new and primary.allocate(new) is not None:
                    for other, floor in (("a", 12), ("b", 8)):
                        left = accounts.of(universe[other][0]).blocks
                        assert other == name or left >= min(before[other], floor)
                    if rng.random() < 0.2:
                        primary.abort(new)
                    elif rng.random() < 0.2:
                        for key in new:
                            primary.abandon(key)
                    elif rng.random() < 0.2 and (found := primary.allocate_spare(1)):
                        primary.exchange(new[0], found[0])
                        spare.append(found[0])
                        primary.commit(new)
                    else:
                        primary.commit(new)
            case 3:
                primary.touch(some)
            case 4:
                primary.pin(ready)
                pinned += ready
            case 5:
                rng.shuffle(pinned)
                primary.unpin(pinned[:8])
                del pinned[:8]
            case 6:
                for key in ready:
                    primary.retain(key, (rng.randint(0, 3), 1))
            case 7:
                primary.demote(ready)
            case 8:
                for key in ready:
                    primary.remove(key)
            case 9:
                primary.mark_dirty(ready)
            case 10:
                primary.mark_clean([*some, *rng.sample(sorted(primary.marks.dirty), len(primary.marks.dirty) // 2)])
            case _:
                primary.prepare_eviction(rng.randint(0, 12))
        for slot, _ in enumerate(range(40)):
            if primary.state_of(slot) is SlotState.ABANDONED:
                primary.reclaim(slot)
        for other in "abc":
            count = sum(key in primary for key in universe[other])
            assert accounts.of(universe[other][0]).blocks == count
        assert primary.stats().ready == len(primary)


def test_forgotten_tenant_leaves_every_tier() -> None:
    """The tenant leaves every tier at the end of the request that asks for it; others keep their blocks."""
    engine = Engine(slots=16, tiers=("a", "b"), tenants=configured(named={"left": {}, "stays": {}}))
    for name in ("left", "stays"):
        engine.store_and_forget(keys(name, 1, 2, 3))
    engine.evict_all()
    engine.use(keys("left", 1, 2), forget="tenant")
    assert engine.look(keys("left", 1, 2, 3), engine.request()) == ["miss"] * 3
    engine.settle()
    assert not any(key in tier.blocks for tier in engine.tiers for key in keys("left", 1, 2, 3))
    assert engine.look(keys("left", 1, 2, 3), engine.request()) == ["miss"] * 3
    assert engine.manager.stats().forgetting == 0
    other = engine.request(keys("stays", 1, 2, 3))
    assert len(engine.load(keys("stays", 1, 2, 3), other)) == 3
    engine.store_and_forget(keys("left", 1, 2, 3))
    assert engine.look(keys("left", 1, 2, 3), engine.request()) == ["hit"] * 3
    assert stored(engine, "left") == 3


def test_a_tenant_that_is_being_forgotten_finds_and_stores_nothing() -> None:
    """The tenant has no hits and stores until the last tier has finished, after all running stores."""
    engine = Engine(slots=16, tenants=configured(named={"left": {}, "stays": {}}))
    tag = tag_of("left", named=True)
    engine.store(keys("left", 1, 2))
    engine.manager.on_step_end()
    begun = engine.request()
    plan = engine.manager.prepare_store(keys("left", 3, 4), begun)
    assert plan is not None
    reader = engine.request()
    assert engine.look(keys("left", 1, 2), reader) == ["hit", "hit"]
    assert engine.manager.prepare_load(keys("left", 1, 2), reader) is not None
    engine.tier.forgets = False
    engine.manager.forget_tenant(tag)
    engine.manager.forget_tenant(tag)
    engine.manager.complete_store(plan.keys, begun)
    engine.manager.on_step_end()
    assert ("forget", tag) not in engine.tier.calls, "its store is under way"
    assert not engine.primary.missing(keys("left", 1, 2)), "they are being read"
    engine.settle_steps(3)
    assert ("forget", tag) in engine.tier.calls
    assert engine.look(keys("left", 1, 2, 3, 4), engine.request()) == ["miss"] * 4
    again = engine.manager.prepare_store(keys("left", 5), engine.request())
    assert again is not None and not again.keys
    engine.tier.forgets = True
    engine.settle_steps(3)
    assert engine.manager.stats().forgetting == 1, "its blocks are still being read"
    engine.manager.complete_load(keys("left", 1, 2), reader)
    engine.settle_steps(3)
    assert engine.manager.stats().forgetting == 0 == engine.manager.stats().tenants["left"].blocks
    assert engine.look(keys("left", 1, 2, 3, 4), engine.request()) == ["miss"] * 4
    assert not engine.tier.blocks
    engine.store_and_forget(keys("left", 5))
    assert engine.look(keys("left", 5), engine.request()) == ["hit"]


def test_a_tier_that_has_forgotten_a_tenant_gets_no_more_of_its_blocks() -> None:
    """Blocks in use that wait for room in the tier, or are lazy, are not stored to it any more, even when it closes."""
    engine = Engine(slots=16, tiers=["slow", "disk"], store_share=2 / 16, tenants=configured(named={"left": {}}))
    slow, disk = engine.tiers
    stored: list[BlockKey] = []
    disk.on_submit = lambda _tier, _is_load, job: stored.extend(job.keys)
    engine.store(keys("stays", 1, 2))
    slow.run()
    engine.manager.on_step_end()
    engine.store(keys("left", 1, 2))  # To the slow tier; the other one has no room.
    engine.store(keys("left", 3), lazy=True)
    reader = engine.request(lazy=True)
    assert engine.look(keys("left", 3), reader) == ["hit"]
    assert engine.manager.prepare_load(keys("left", 3), reader) is not None
    engine.manager.forget_tenant(tag_of("left", named=True))
    engine.manager.on_step_end()
    assert ("forget", tag_of("left", named=True)) in disk.calls
    disk.run()
    engine.manager.on_step_end()
    engine.manager.close()
    assert stored == keys("stays", 1, 2)


@pytest.mark.parametrize("how", ["forgotten", "removed", "expired"])
def test_blocks_that_no_tier_may_get_keep_no_others_from_it(how: str) -> None:
    """Closing stores the blocks that wait behind a roomful of forbidden ones, and none of these."""
    engine = Engine(slots=32, store_share=2 / 32, tenants=configured(named={"left": {}, "stays": {}}))
    stored: list[BlockKey] = []
    engine.tier.on_submit = lambda _tier, _is_load, job: stored.extend(job.keys)
    engine.store(keys("stays", 1, 2))
    reader = engine.request(keys("left", *range(4)), **({"ttl": 5} if how == "expired" else {}))
    engine.store(keys("left", *range(4)), reader)
    assert engine.manager.prepare_load(keys("left", *range(4)), reader) is not None
    engine.store(keys("stays", *range(3, 9)))
    if how == "forgotten":
        engine.manager.forget_tenant(tag_of("left", named=True))
    elif how == "removed":
        engine.manager.remove(keys("left", *range(4)))
    engine.clock.now += 6
    engine.manager.close()
    assert stored == keys("stays", *range(1, 9))


@pytest.mark.parametrize("params", [{}, {"ttl": 0.1}], ids=["forgotten", "expired"])
def test_blocks_are_removed_before_the_engine_ends(tmp_path: Path, params: dict[str, float]) -> None:
    """Forbidden blocks that were being stored when the engine ended are not found after a restart."""
    config = {"type": "file", "path": str(tmp_path), "capacity": "8MiB", "reserve": 0}
    memory = memoryview(bytearray(16 * 4096))
    plan = FaultPlan([Fault("put", FaultKind.DELAY, seconds=0.3, times=None)])
    opened = partial(open_tier, config, primary=memory, slot_bytes=4096, namespace=Namespace({}))
    stored = keys("left", 1, 2)
    with opened(wrap_backend=partial(FaultyBackend, plan=plan)) as tier:
        options = TieringConfig(store_share=1.0, allow=("ttl",), tenants=configured(named={"left": {}}))
        manager = TieringManager(PrimaryTier(memory, 4096), [tier], options)
        ctx = RequestContext("request", params)
        manager.on_new_request(ctx, stored)
        planned = manager.prepare_store(stored, ctx)
        assert planned is not None
        manager.complete_store(planned.keys, ctx)
        manager.on_request_finished(ctx)
        if not params:
            manager.forget_tenant(tag_of("left", named=True))
        manager.on_step_end()
        assert manager.close(30)
    with opened() as tier:
        assert tier.wait_recovered(30)
        assert [tier.lookup(key, ctx) for key in stored] == [LookupResult.MISS] * 2


def test_a_close_waits_for_no_reader_of_a_forgotten_tenant() -> None:
    """Only the tiers' removals are waited for, not the engine's unfinished loads."""
    engine = Engine(slots=16, tenants=configured(named={"left": {}}))
    engine.store_and_forget(keys("left", 1))
    reader = engine.request(keys("left", 1))
    engine.look(keys("left", 1), reader)
    assert engine.manager.prepare_load(keys("left", 1), reader) is not None
    engine.manager.forget_tenant(tag_of("left", named=True))
    began = time.monotonic()
    engine.manager.close(120)
    assert time.monotonic() - began < 30 and not engine.tier.blocks


def test_a_close_waits_while_a_tier_forgets_but_not_for_one_that_cannot() -> None:
    """A tier that needs time has forgotten a tenant when the close ends; one that never does so only delays it."""
    engine = Engine(slots=16, tiers=["slow", "never"], tenants=configured(named={"left": {}}))
    engine.store_and_forget(keys("left", 1))
    slow, never = engine.tiers
    answers = iter([False, False, True])

    def forget(prefix: bytes) -> bool | None:
        slow.forgets = next(answers)
        return FakeTier.forget(slow, prefix)

    slow.forget, never.forgets = forget, False  # type: ignore[method-assign]
    engine.manager.forget_tenant(tag_of("left", named=True))
    engine.manager.close(1.0)
    assert not slow.blocks and never.blocks


def test_blocks_that_wait_are_counted_once_by_the_rate() -> None:
    """Blocks that requests use again while they wait for room in a tier take nothing from their tenant's rate."""
    tenants = configured(named={"one": {"store_rate": 20 * ROW_BYTES}})
    engine = Engine(slots=64, store_share=1 / 64, tenants=tenants)
    engine.store(keys("one", *range(6)))
    for _ in range(5):
        assert len(engine.load(keys("one", *range(6)), engine.request(keys("one", *range(6))))) == 6
    engine.store(keys("one", *range(6, 12)))
    engine.settle_steps(20)
    assert engine.manager.stats().tenants["one"].unsaved == 0
    assert list(engine.tier.blocks) == keys("one", *range(12))


def test_load_for_a_forgotten_tenant_is_dropped() -> None:
    """Blocks that arrive for a tenant being forgotten are dropped."""
    engine = Engine(slots=16, tenants=configured(named={"left": {}}))
    engine.store_and_forget(keys("left", 1, 2))
    engine.evict_all()
    ctx = engine.request(keys("left", 1, 2))
    assert engine.look(keys("left", 1, 2), ctx) == ["hit_pending"] * 2
    engine.manager.on_step_end()
    engine.manager.forget_tenant(tag_of("left", named=True))
    engine.settle_steps(2)
    assert engine.look(keys("left", 1, 2), ctx) == ["miss"] * 2
    engine.manager.on_request_finished(ctx)
    engine.settle()
    assert engine.manager.stats().forgetting == 0 and not len(engine.primary)


@pytest.mark.parametrize("fault", ["cannot", "raises", "takes long"])
def test_a_tier_that_does_not_forget(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    """A tier without support, or one that fails, is not waited for, with a log message; a slow one is waited for."""
    engine = Engine(slots=16, tenants=configured(named={"left": {}}))
    engine.store_and_forget(keys("left", 1))
    engine.tier.forgets = None if fault == "cannot" else False
    engine.tier.raising = {"forget"} if fault == "raises" else set()
    engine.manager.forget_tenant(tag_of("left", named=True))
    engine.settle_steps(8)
    waits = fault == "takes long"
    assert engine.manager.stats().forgetting == waits
    assert engine.manager.has_pending_work == waits
    engine.clock.now += 61
    assert not engine.manager.has_pending_work, "an idle engine does not wait for a medium that is down"
    engine.tier.forgets = True
    engine.settle_steps(2)
    assert engine.manager.stats().forgetting == 0
    assert bool(caplog.records) == (not waits)


def test_without_tenants_a_request_forgets_its_own_blocks() -> None:
    """Without tenants the request forgets its own blocks, instead of no blocks or those of all requests."""
    engine = Engine(slots=16)
    engine.store_and_forget(keys("a", 1, 2))
    engine.store_and_forget(keys("b", 1, 2), forget="tenant")
    assert engine.look(keys("a", 1, 2) + keys("b", 1, 2), engine.request()) == ["hit"] * 2 + ["miss"] * 2


def test_the_order_within_a_share_is_that_of_the_prompt() -> None:
    """A prompt stored in pieces is evicted from its end, and a block that lost its priority before the others."""
    engine = Engine(slots=6, tenants=configured(named={"a": {}}))
    ctx = engine.request(keys("a", 1, 2, 3, 4))
    for piece in (keys("a", 1, 2), keys("a", 3, 4)):
        engine.store(piece, ctx)
    engine.manager.on_request_finished(ctx)
    engine.settle()
    engine.store_and_forget(keys("a", 5, 6, 7))
    assert engine.primary.missing(keys("a", 1, 2, 3, 4)) == keys("a", 4)
    engine.store_and_forget(keys("a", 1, 2, 3), retain=50)
    engine.store_and_forget(keys("a", 1), retain=0)
    engine.store_and_forget(keys("a", 11, 12, 13, 14))
    assert engine.primary.missing(keys("a", 1, 2, 3)) == keys("a", 1)
    assert engine.manager.stats().primary.retained == 2
