"""Offload policies: selective, lazy and admitted stores, lifetimes, pins, selective loads."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.errors import ConfigError
from kvstore.eviction import POLICY_NAMES
from kvstore.tiering import Backfill, TieringConfig
from kvstore.types import BlockKey, LookupResult, RemovalCause, RequestContext
from tests.tiering.engine import Engine, keys_of
from tests.tiering.fake_tier import payload

A, B = keys_of(1, 2, 3, 4), keys_of(11, 12, 13, 14)


def _prompt(engine: Engine, keys: list[BlockKey], **params: object) -> int:
    """Serve a prompt as an engine does; return the number of its blocks that were loaded instead of computed."""
    ctx = engine.request(keys, **params)
    hits = 0
    for key in keys:
        if engine.manager.lookup(key, ctx) is not LookupResult.HIT:
            break
        hits += 1
    if hits:
        engine.load(keys[:hits], ctx)
    plan = engine.manager.prepare_store(keys[hits:], ctx)
    if plan is not None:
        engine.fill(plan)
        engine.manager.complete_store(plan.keys, ctx)
    engine.manager.on_request_finished(ctx)
    engine.settle()
    return hits


def test_a_b_a_with_room_for_one() -> None:
    """If everything is offloaded, B evicts A; with ``store`` false for B, A is still there for its next request."""
    everything = Engine(slots=4, tiers=[])
    assert [_prompt(everything, prompt) for prompt in (A, B, A)] == [0, 0, 0]
    selective = Engine(slots=4, tiers=[])
    assert [_prompt(selective, A), _prompt(selective, B, store=False), _prompt(selective, A)] == [0, 0, 4]


@pytest.mark.parametrize(
    ("blocks", "fraction", "expected"), [(8, 0.5, 4), (7, 0.5, 3), (8, 0.3, 2), (8, 1.0, 8), (8, 0.0, 0)]
)
def test_a_fraction_stores_the_full_blocks_of_the_first_part(blocks: int, fraction: float, expected: int) -> None:
    """A fraction of 0.5 stores exactly the full blocks of the first half of the prompt, in every tier."""
    engine = Engine(slots=16, tokens_per_block=16)
    keys = keys_of(*range(blocks))
    plan = engine.store(keys, engine.request(keys, prompt_tokens=16 * blocks, store=fraction))
    assert list(plan.keys) == keys[:expected]
    engine.settle()
    assert list(engine.tier.blocks) == keys[:expected]


def test_a_part_of_the_last_block_counts() -> None:
    """The limit counts tokens of the prompt, not full blocks: half of 40 tokens is one block of 16."""
    engine = Engine(tokens_per_block=16)
    keys = keys_of(1, 2)
    assert list(engine.store(keys, engine.request(keys, prompt_tokens=40, store=0.5)).keys) == keys_of(1)


def test_a_number_of_tokens() -> None:
    """``{"tokens": n}`` stores the blocks that end within the first n tokens, and no generated blocks."""
    engine = Engine(tokens_per_block=16)
    keys = keys_of(1, 2, 3)
    ctx = engine.request(keys, store={"tokens": 47})
    assert list(engine.store([*keys, *keys_of(4)], ctx).keys) == keys_of(1, 2)


def test_positions_may_come_from_the_engine() -> None:
    """The engine gives the end of each block, so layer groups with different block ends are handled separately."""
    engine = Engine()
    ctx = RequestContext("hybrid", {"store": 0.5})
    engine.manager.on_new_request(ctx)
    engine.manager.set_keys(ctx, keys_of(1, 2, 3, 4, 11, 12), ends=[16, 32, 48, 64, 32, 64], prompt_tokens=70)
    assert list(engine.store(keys_of(1, 2, 3, 4, 11, 12), ctx).keys) == keys_of(1, 2, 11)


def test_tiers_are_chosen() -> None:
    """Only the named tiers get the blocks; a later request that may store to the other tiers stores them there."""
    engine = Engine(tiers=["disk", "far"])
    engine.store_and_forget(A, tiers=["far"])
    assert [list(tier.blocks) for tier in engine.tiers] == [[], A]
    _prompt(engine, A)
    assert [list(tier.blocks) for tier in engine.tiers] == [A, A]


def test_not_in_the_primary_tier() -> None:
    """With ``cpu`` false blocks pass through the primary tier, and leave it once the last tier has stored them."""
    engine = Engine(tiers=["disk", "far"])
    ctx = engine.request(A, cpu=False)
    engine.store(A, ctx)
    engine.tiers[0].run()
    engine.manager.on_step_end()
    assert engine.primary.stats().ready == 4, "the other tier still reads"
    engine.settle()
    assert engine.primary.stats().free == 8 and list(engine.tiers[1].blocks) == A
    assert engine.load(A, engine.request()) == [payload(key) for key in A]
    nowhere = engine.request(B, cpu=False, tiers=[])
    assert engine.store(B, nowhere).keys == (), "neither here nor there"


def test_a_passing_block_leaves_after_its_last_reader() -> None:
    """With ``cpu`` false a block whose last store ends while it is loaded leaves when the load ends."""
    engine = Engine()
    engine.store(A, engine.request(A, cpu=False))
    reader = engine.request(A, cpu=False)
    assert engine.look(A, reader) == ["hit"] * 4
    assert engine.manager.prepare_load(A, reader) is not None
    engine.settle_steps(2)
    assert list(engine.tier.blocks) == A and engine.primary.stats().pinned == 4
    engine.manager.complete_load(A, reader)
    assert engine.primary.stats().free == 8
    assert engine.look(A, engine.request()) == ["hit_pending"] * 4


def test_a_passing_block_that_another_request_uses_stays() -> None:
    """With ``cpu`` false a block stays once a request without this restriction has loaded it."""
    engine = Engine()
    engine.store(A, engine.request(A, cpu=False))
    engine.load(A[:2], engine.request())
    engine.settle()
    assert list(engine.tier.blocks) == A and engine.primary.stats().ready == 2
    assert not engine.parts.cascades.active, "nothing is left to do for these blocks"


def test_a_store_that_failed_is_made_up_for() -> None:
    """A block that a tier failed to store is stored there when a request uses it again."""
    engine = Engine()
    engine.store(A)
    engine.tier.run(failing=A[2:])
    engine.settle()
    assert list(engine.tier.blocks) == A[:2]
    engine.load(A, engine.request())
    engine.settle()
    assert list(engine.tier.blocks) == A


def test_a_passing_block_that_was_a_hit_leaves_at_the_end_of_the_step() -> None:
    """With ``cpu`` false a block whose last store ends in the step of its hit stays until that step ends."""
    engine = Engine(slots=4)
    engine.store(A, engine.request(A, cpu=False))
    assert engine.look(A[:2], engine.request()) == ["hit"] * 2
    engine.tier.run()
    plan = engine.manager.prepare_store(B[:2], engine.request())
    assert plan is not None and len(plan.keys) == 2, "the blocks that are no hits have made room"
    assert engine.primary.stats().pinned == 2
    engine.manager.on_step_end()
    assert engine.primary.stats().free == 2 and not engine.primary.stats().ready


def test_block_excluded_by_all_tiers_leaves_the_primary_tier() -> None:
    """With ``cpu`` false a block that is not admitted to any tier leaves the primary tier, too."""
    engine = Engine()
    engine.store_and_forget(A, cpu=False, min_uses=2)
    assert engine.primary.stats().free == 8 and not engine.tier.blocks


def test_loads_are_chosen() -> None:
    """``load`` false looks up no tier, not even the primary tier; a list gives the tiers to look up, in order."""
    engine = Engine(tiers=["disk", "far"])
    engine.store_and_forget(A)
    assert engine.look(A, engine.request(load=False)) == ["miss"] * 4
    engine.evict_all()
    del engine.tiers[1].blocks[A[1]]
    for tier in engine.tiers:
        tier.calls.clear()
    assert engine.look(A[:2], engine.request(load=["far"])) == ["hit_pending", "miss"]
    assert "lookup" not in [name for name, _ in engine.tiers[0].calls]


def test_admission_by_uses() -> None:
    """A block is stored in a tier from its n-th sighting on, whether it is new or already in the primary tier."""
    engine = Engine(policy={"min_uses": 2})
    _prompt(engine, A)
    assert not engine.tier.blocks
    _prompt(engine, A[:2])
    assert list(engine.tier.blocks) == A[:2]
    engine.evict_all()
    _prompt(engine, A)
    assert sorted(engine.tier.blocks) == A, "the second sighting of the rest, which was computed again"


def test_request_with_its_own_min_uses_counts_as_a_sighting() -> None:
    """A request that overrides the configured ``min_uses`` counts as a sighting, even the engine's first one."""
    engine = Engine(policy={"min_uses": 2})
    _prompt(engine, A, min_uses=1, tiers=[])
    _prompt(engine, A)
    assert list(engine.tier.blocks) == A


def test_one_request_is_one_sighting() -> None:
    """A request that offers its blocks repeatedly counts as one sighting of each."""
    engine = Engine(policy={"min_uses": 2})
    ctx = engine.request(A)
    for _ in range(3):
        engine.store(A, ctx)
    engine.settle()
    assert not engine.tier.blocks


def test_sightings_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks not seen for longest are forgotten first, and the end of a prefix before its start."""
    monkeypatch.setattr("kvstore.tiering.cascades._SIGHTINGS_MAX", 3)
    engine = Engine(policy={"min_uses": 2})
    _prompt(engine, A)
    for key in A:
        engine.primary.remove(key)
    _prompt(engine, A)
    assert list(engine.tier.blocks) == A[:3]


def test_blocks_expire_everywhere() -> None:
    """After its ``ttl`` a block is a miss immediately, and its removal from each tier is reported as an event."""
    engine = Engine(tiers=["disk", "far"])
    engine.store_and_forget(A, ttl=60)
    engine.store_and_forget(B)
    engine.manager.take_events()
    engine.clock.now += 59
    assert engine.look(A, engine.request()) == ["hit"] * 4
    engine.clock.now += 1
    assert engine.look(A + B, engine.request()) == ["miss"] * 4 + ["hit"] * 4
    engine.settle()
    assert [list(tier.blocks) for tier in engine.tiers] == [B, B] and engine.primary.stats().ready == 4
    expired = {
        (event.tier, key)
        for event in engine.manager.take_events()
        for key in event.keys
        if event.cause is RemovalCause.EXPIRED
    }
    assert expired == {(tier, key) for tier in ("cpu", "disk", "far") for key in A}
    assert engine.manager.stats().expired == 4


def test_longest_requested_lifetime_wins() -> None:
    """Another request that uses a block may extend its lifetime or disable its expiry; none shortens it."""
    engine = Engine()
    engine.store_and_forget(A, ttl=10)
    _prompt(engine, A[:3], ttl=30)
    _prompt(engine, A[:2], ttl=5)
    _prompt(engine, A[:1])
    engine.clock.now += 11
    assert engine.look(A, engine.request()) == ["hit", "hit", "hit", "miss"]
    engine.clock.now += 20
    assert engine.look(A, engine.request()) == ["hit", "miss", "miss", "miss"]


def test_expired_block_is_stored_again() -> None:
    """An expired block is computed and stored again, even if a reader held the old one at the time."""
    engine = Engine()
    engine.store_and_forget(A, ttl=10)
    reader = engine.request(ttl=1)
    assert engine.manager.prepare_load(A[:1], reader) is not None
    engine.clock.now += 10
    engine.settle()
    assert engine.look(A[:1], engine.request()) == ["miss"]
    engine.manager.complete_load(A[:1], reader)
    assert _prompt(engine, A) == 0
    assert _prompt(engine, A) == 4 and list(engine.tier.blocks) == A


def test_a_tier_that_gets_an_expired_block_late_drops_it() -> None:
    """A store that ends after its block has expired does not bring the block back."""
    engine = Engine()
    engine.store(A, ttl=10)
    engine.clock.now += 11
    engine.settle()
    engine.settle()
    assert not engine.tier.blocks
    assert engine.look(A, engine.request()) == ["miss"] * 4


def test_lazy_writes_a_fifth_at_most_where_everything_fits() -> None:
    """If the workload fits the primary tier, lazy stores write at most a fifth of the bytes of eager ones."""
    written = []
    for lazy in (False, True):
        engine = Engine(slots=64, policy={"lazy": lazy})
        for _ in range(3):
            for prompt in range(10):
                _prompt(engine, keys_of(*range(prompt * 5, prompt * 5 + 5)))
        written.append(engine.tier.bytes_stored)
    assert written[0] >= 5 * written[1] and written[0] > 0, written


@pytest.mark.parametrize("eviction", POLICY_NAMES)
def test_lazy_loses_nothing_where_it_does_not_fit(eviction: str) -> None:
    """With a workload ten times the primary tier, every block is there or written back, and is found again."""
    engine = Engine(slots=16, policy={"lazy": True}, eviction=eviction)
    prompts = [keys_of(*range(first, first + 4)) for first in range(0, 160, 4)]
    for prompt in prompts:
        ctx = engine.request(prompt)
        for _ in range(10):
            plan = engine.manager.prepare_store(prompt, ctx)
            if plan is not None:
                break
            engine.step()
        engine.manager.complete_store(engine.fill(plan).keys, ctx)
        engine.manager.on_request_finished(ctx)
        engine.step()
    assert engine.manager.stats().lost == 0
    for prompt in prompts:
        assert engine.load(prompt, engine.request()) == [payload(key) for key in prompt]
    assert engine.manager.close()
    assert len(engine.tier.blocks) == 160, "what was never evicted is written when the manager closes"


def test_lazy_blocks_of_a_tier_that_fails_do_not_jam_the_primary_tier() -> None:
    """Blocks that a tier rejects at write-back are lost and counted; new blocks find room."""
    engine = Engine(slots=8, policy={"lazy": True})
    for first in range(0, 40, 4):
        ctx = engine.request()
        for _ in range(10):
            plan = engine.manager.prepare_store(keys_of(*range(first, first + 4)), ctx)
            engine.manager.on_step_end()
            engine.tier.run(failing=keys_of(*range(40)))
            if plan is not None:
                break
        assert plan is not None, "jammed"
        engine.manager.complete_store(engine.fill(plan).keys, ctx)
        engine.manager.on_request_finished(ctx)
    assert engine.manager.stats().lost > 0


def test_a_prefix_longer_than_the_primary_tier_is_loaded_as_far_as_it_fits() -> None:
    """A lookup without room is a miss if only the request's own promotions take the slots: none becomes free."""
    engine = Engine(slots=4)
    keys = keys_of(*range(6))
    engine.tier.blocks.update((key, payload(key)) for key in keys)
    ctx = engine.request(keys)
    answers = [engine.manager.lookup(key, ctx) for key in keys]
    assert answers == [LookupResult.HIT_PENDING] * 4 + [LookupResult.MISS] * 2
    engine.manager.on_request_finished(ctx)
    engine.settle()


def test_room_is_being_made_until_the_last_write_back_has_ended() -> None:
    """A lookup without room waits for pending write-backs, and only while there are any."""
    engine = Engine(slots=4, policy={"lazy": True})
    engine.store(A)
    cascades = engine.parts.cascades
    assert cascades.making_room, "stores are pending"
    cascades.write_all()
    assert not cascades.unsent
    assert cascades.making_room, "write-backs are under way"
    engine.settle()
    assert not cascades.making_room
    assert list(engine.tier.blocks) == A


def test_lazy_blocks_of_a_dead_tier_are_lost_once_and_may_be_evicted() -> None:
    """A tier that raises gets no more write-backs: blocks owed to it are counted as lost, and their slots are free."""
    engine = Engine(slots=8, policy={"lazy": True})
    engine.store_and_forget(A)
    engine.parts.links[0].dead = True
    engine.parts.cascades.write_all()
    engine.settle()
    assert engine.manager.stats().lost == len(A)
    engine.parts.cascades.write_all()
    assert engine.manager.stats().lost == len(A)
    engine.evict_all()
    assert not engine.resident()


@pytest.mark.parametrize("policy", [{"min_uses": 2}, {"tiers": []}, {"cpu": False}])
def test_nothing_is_remembered_of_blocks_that_left_the_primary_tier(policy: dict[str, Any]) -> None:
    """Removed blocks leave no state: otherwise memory would grow, and a recomputed block would not be stored."""
    engine = Engine(slots=8)
    for first in range(0, 40, 4):
        engine.store_and_forget(keys_of(*range(first, first + 4)), **policy)
    engine.evict_all()
    engine.settle()
    assert not engine.parts.cascades.active


def test_nothing_is_remembered_of_blocks_of_the_fastest_tier() -> None:
    """No tier is faster, so no back-fill state is kept for these blocks while they are in the primary tier."""
    engine = Engine(tiers=["fast", "slow"])
    for key in A:
        engine.tiers[0].blocks[key] = payload(key)
    engine.load(A, engine.request(A))
    engine.settle()
    assert not engine.parts.cascades.active


@pytest.mark.parametrize(("slots", "ahead"), [(4, 1), (8, 1), (32, 4)])
def test_lazy_blocks_are_written_ahead_of_need(slots: int, ahead: int) -> None:
    """An eighth of the slots, at least one, can be evicted without waiting for writes."""
    engine = Engine(slots=slots, policy={"lazy": True})
    engine.store(keys_of(*range(slots)))
    engine.settle()
    assert len(engine.tier.blocks) == ahead


def test_lazy_blocks_without_room_are_offered_again() -> None:
    """A store that found no room is offered again in a later step, and all of its blocks fit by then."""
    engine = Engine(slots=8, policy={"lazy": True}, store_share=0.25)
    engine.store([*A, *B])
    engine.settle()
    others = keys_of(*range(21, 29))
    assert engine.manager.prepare_store(others, engine.request()) is None
    engine.settle_steps(10)
    assert set(engine.tier.blocks) == {*A, *B}
    assert engine.manager.prepare_store(others, engine.request()) is not None


def test_an_eager_request_makes_lazy_blocks_safe() -> None:
    """If a request without ``lazy`` uses blocks that are still owed, they are written immediately."""
    engine = Engine()
    engine.store_and_forget(A, lazy=True)
    assert not engine.tier.blocks
    _prompt(engine, A)
    assert list(engine.tier.blocks) == A


def test_a_reset_ends_write_backs_that_lacked_room() -> None:
    """Lazy blocks stored again after a reset are written back only when their slots are needed again."""
    engine = Engine(slots=8, store_share=0.125)
    engine.store([*A, *B], lazy=True)
    assert engine.manager.prepare_store(keys_of(20, 21, 22), engine.request()) is None
    assert len(engine.tier.submitted(is_load=False)) == 1
    engine.manager.reset()
    engine.tier.blocks.clear()
    engine.store([*A, *B][:7], lazy=True)
    engine.settle_steps(2)
    assert not engine.tier.blocks


def test_a_waiting_block_that_is_offered_in_the_meantime_is_stored_once() -> None:
    """Blocks that wait for room in a tier are not stored again if they were offered to it once there was room."""
    engine = Engine(tiers=["disk", "far"], store_share=0.25)
    engine.store(A, tiers=["disk"])
    engine.step()
    ctx = engine.request(A, tiers=["disk"])
    assert engine.look(A, ctx) == ["hit"] * 4
    assert engine.manager.offer(engine.tier, A[2:], ctx) == []
    engine.settle()
    assert [list(keys) for name, keys in engine.tier.calls if name == "submit_store"] == [A[:2], A[2:]]


def test_the_start_of_an_offer_without_room_is_evicted_last() -> None:
    """Blocks that were pinned for an offer that found no room make room from the end of the prefix."""
    engine = Engine(slots=4, tiers=())
    engine.store_and_forget(A[:2])
    engine.store_and_forget(B[:2])
    reader = engine.request()
    assert engine.look(B[:2], reader) == ["hit", "hit"] and engine.manager.prepare_load(B[:2], reader)
    assert engine.manager.prepare_store([*A[:2], A[2]], engine.request()) is None
    engine.store(keys_of(20))
    assert engine.primary.missing(A[:2]) == [A[1]]


def test_no_hole_behind_a_block_that_found_no_room() -> None:
    """If a tier has no room for a block of a prefix, the blocks after it queue behind it."""
    engine = Engine(slots=16, store_share=0.25)
    keys = keys_of(*range(10))
    ctx = engine.request(keys)
    engine.store(keys[:3], ctx)
    engine.store(keys[3:6], ctx)
    engine.store(keys[6:8], ctx)
    engine.manager.on_step_end()
    for count in (4, 8):
        engine.tier.run()
        assert list(engine.tier.blocks) == keys[:count]
        engine.manager.on_step_end()
    engine.manager.on_request_finished(ctx)
    engine.settle()
    assert engine.manager.stats().tiers[0].dropped == 0


def test_a_block_that_waits_and_is_used_again_is_stored_once() -> None:
    """If a block waiting for room is used again, it is stored once there is room, and only once."""
    engine = Engine(slots=16, store_share=0.25)
    keys = keys_of(*range(6))
    engine.store(keys)
    engine.tier.run()
    engine.parts.poll()
    assert engine.load(keys, engine.request()) == [payload(key) for key in keys]
    engine.settle()
    assert list(engine.tier.blocks) == keys
    assert engine.manager.stats().tiers[0].stored == 6


def test_later_blocks_wait_behind_those_of_an_earlier_request() -> None:
    """The next turn's blocks don't take the room that its own prefix waits for."""
    engine = Engine(slots=32, store_share=2 / 32)
    stored: list[BlockKey] = []
    engine.tier.on_submit = lambda _tier, is_load, job: None if is_load else stored.extend(job.keys)
    engine.store(keys_of(*range(6)))
    engine.step()
    ctx = engine.request(keys_of(*range(10)))
    engine.load(keys_of(*range(6)), ctx)
    for first in (6, 8):
        engine.store(keys_of(first, first + 1), ctx)
        engine.step()
    engine.settle()
    assert stored == keys_of(*range(10))


def test_a_request_that_uses_a_waiting_block_stores_its_own_later() -> None:
    """Blocks that don't stay in the primary tier are not dropped because an earlier block waited when it was used."""
    engine = Engine(slots=16, store_share=4 / 16)
    engine.store(keys_of(*range(6)))
    ctx = engine.request(keys_of(*range(10)), cpu=False)
    engine.load(keys_of(*range(6)), ctx)
    engine.settle()
    for first in (6, 8):
        engine.store(keys_of(first, first + 1), ctx)
        engine.settle()
    assert list(engine.tier.blocks) == keys_of(*range(10))


def test_a_block_that_waits_for_one_tier_is_stored_to_another() -> None:
    """A block that waits for room in one tier is stored to another tier when a request that may do so uses it."""
    engine = Engine(slots=16, tiers=["slow", "fast"], store_share=2 / 16)
    engine.store(keys_of(*range(4)), tiers=["slow"])
    assert engine.manager.stats().tiers[0].waiting == 2
    engine.load(keys_of(2, 3), engine.request(keys_of(2, 3)))
    assert engine.tiers[1].submitted(False) == keys_of(2, 3)


@pytest.mark.parametrize(("backfill", "uses"), [(True, 2), ({"min_uses": 1}, 1), ({"min_uses": 3}, 3), (False, None)])
def test_a_block_of_a_slow_tier_is_copied_to_the_faster_ones(backfill: Any, uses: int | None) -> None:
    """From the configured use on, a block that only the slow tier has is copied to the faster tiers."""
    option = backfill if isinstance(backfill, bool) else Backfill(**backfill)
    engine = Engine(tiers=["one", "two", "slow"], backfill=option)
    keys = keys_of(1, 2, 3)
    for key in keys:
        engine.tiers[2].blocks[key] = payload(key)
    for use in range(1, 5):
        engine.use(keys)
        engine.settle()
        filled = uses is not None and use >= uses
        assert [set(tier.blocks) for tier in engine.tiers[:2]] == [set(keys) if filled else set()] * 2
        engine.evict_all()
    assert engine.manager.stats().tiers[2].loaded == 3 * (uses or 4)
    assert engine.tiers[2].bytes_stored == 0


def test_back_fill_keeps_to_the_policy_of_the_request() -> None:
    """A request copies no blocks to a tier that it may not store to, and none at all if it may not store."""
    engine = Engine(tiers=["one", "two", "slow"], backfill=Backfill(min_uses=1))
    keys = keys_of(1, 2)
    for key in keys:
        engine.tiers[2].blocks[key] = payload(key)
    for params, expected in (({"store": False}, [0, 0]), ({"tiers": ["two"]}, [0, 2])):
        engine.use(keys, **params)
        engine.settle()
        engine.evict_all()
        assert [len(tier.blocks) for tier in engine.tiers[:2]] == expected


def test_back_fill_is_asked_of_promoted_blocks_only() -> None:
    """A promoted block that was evicted and recomputed is not back-filled: its first use stores it in the fast tier."""
    engine = Engine(tiers=["fast", "slow"], backfill=Backfill(min_uses=9))
    fast, slow = engine.tiers
    [key] = keys_of(1)
    slow.blocks[key] = payload(key)
    engine.load(keys_of(1), engine.request())
    engine.settle()
    assert not fast.blocks, "below min_uses"
    engine.evict_all()
    engine.store_and_forget(keys_of(1), tiers=["slow"])
    assert not fast.blocks
    engine.load(keys_of(1), engine.request())
    engine.settle()
    assert set(fast.blocks) == {key}


@pytest.mark.parametrize("options", [{"retain_share": -0.1}, {"retain_share": 1.1}, {"retain_s_max": -1}], ids=str)
def test_numbers_of_retention_and_backfill_are_checked(options: dict[str, Any]) -> None:
    """Values out of range are errors at startup."""
    with pytest.raises(ConfigError):
        TieringConfig(**options)
    with pytest.raises(ConfigError):
        Backfill(min_uses=0)
