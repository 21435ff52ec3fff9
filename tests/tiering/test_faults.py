"""The manager with tiers that fail, return nonsense, raise, hang or never answer; reset and close."""

from __future__ import annotations

import time
import types
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from kvstore.errors import ConfigError
from kvstore.namespace import Namespace
from kvstore.primary.tier import PrimaryTier
from kvstore.testing import eventually
from kvstore.testing.faults import Fault, FaultKind, FaultPlan, FaultyBackend
from kvstore.tiering import TieringConfig, TieringManager
from kvstore.tiering.jobs import JobTable, OpenJob
from kvstore.tiering.link import TierLink
from kvstore.tiers import open_tier
from kvstore.types import BlockKey, JobResult, LookupResult, RequestContext, TransferJob
from tests.tiering.engine import Engine, deadlines_of, key_of, keys_of
from tests.tiering.fake_tier import payload

A = keys_of(1, 2, 3, 4)
CALLS = ["lookup", "submit_store", "submit_load", "get_finished", "flush", "touch", "remove", "on_request_finished"]
CALLS += ["take_events", "stats", "drain", "close"]


def test_a_result_without_keys_fails_all_of_them() -> None:
    """A failed load that names no successful block makes no block readable."""
    engine = Engine()
    engine.store_and_forget(A)
    engine.evict_all()
    ctx = engine.request()
    engine.look(A, ctx)
    engine.manager.on_step_end()
    engine.tier.run(failing=A[:1], truthful=False)
    assert engine.look(A, ctx) == ["miss"] * 4
    assert engine.primary.stats().free == 8


@pytest.mark.parametrize("method", CALLS)
def test_no_exception_gets_out(method: str) -> None:
    """Whichever method of a tier raises, every call of the manager returns, and the other tier serves."""
    engine = Engine(tiers=["disk", "far"])
    engine.store_and_forget(A)
    engine.evict_all()
    engine.tiers[0].raising = {method}
    for number in range(5):
        ctx = engine.request()
        engine.store(keys_of(10 + number), ctx)
        engine.manager.touch(A)
        for _ in range(10):
            answers = engine.look(A[:2], ctx)
            engine.step()
            engine.manager.take_events()
            if answers == ["hit", "hit"]:
                break
        # A tier that accepted a load and never reports it keeps its requests waiting until their deadline.
        if method != "get_finished":
            assert engine.load(A[:2], ctx) == [payload(key) for key in A[:2]]
        engine.manager.remove(keys_of(10 + number))
        engine.manager.on_request_finished(ctx)
    engine.manager.stats()
    engine.manager.tier_stats()
    engine.manager.reset(0.0)
    engine.manager.close(0.1)
    assert engine.manager.stats().tiers[0].errors > 0


def test_a_tier_that_raises_again_and_again_gets_no_more_work() -> None:
    """After three consecutive exceptions from one method a tier gets no more work until a reset clears the count."""
    engine = Engine(tiers=["disk", "far"])
    engine.store_and_forget(A)
    engine.evict_all()
    engine.tiers[0].raising = {"lookup"}
    engine.look(A, engine.request())
    assert engine.manager.stats().tiers[0].dead
    assert [stats.ready for stats in engine.manager.tier_stats()] == [False, True]
    engine.tiers[0].calls.clear()
    engine.look(keys_of(7), engine.request())
    assert ("lookup", key_of(7)) not in engine.tiers[0].calls
    engine.tiers[0].raising.clear()
    engine.manager.reset()
    assert not engine.manager.stats().tiers[0].dead
    assert all(stats.ready for stats in engine.manager.tier_stats())
    engine.tiers[0].raising = {"lookup"}
    for number in range(3):
        assert not engine.manager.stats().tiers[0].dead, f"{number} exceptions since the reset"
        engine.look(keys_of(7), engine.request())
    assert engine.manager.stats().tiers[0].dead


@pytest.mark.parametrize(
    "nonsense",
    [
        lambda job: JobResult(job + 1000, True, ()),
        lambda job: JobResult(job, False, None),  # type: ignore[arg-type]
        lambda job: JobResult(job, False, [b"another key"]),
    ],
)
def test_results_that_make_no_sense(nonsense: Callable[[int], JobResult]) -> None:
    """Results for unknown jobs, duplicate results and results for other blocks do no harm."""
    engine = Engine()
    engine.store_and_forget(A)
    engine.evict_all()
    ctx = engine.request()
    engine.look(A, ctx)
    engine.manager.on_step_end()
    (_, job), *_ = engine.tier.open
    good = engine.tier.open.copy()
    engine.tier.done.append((True, job, nonsense(job.job_id)))
    engine.look(A, ctx)
    engine.tier.open = good
    engine.tier.run()
    engine.tier.done *= 2
    engine.settle_steps(2)
    assert engine.manager.stats().tiers[0].errors >= 1
    assert all(engine.primary.row(slot) == payload(key) for key, slot in _readable(engine))


def test_unreported_load_is_abandoned_at_its_deadline() -> None:
    """After its deadline a load's blocks are a miss, and its slots stay out of use until the tier reports."""
    engine = Engine(load_s_max=60.0)
    engine.store_and_forget(A)
    engine.evict_all()
    engine.manager.take_unfilled()
    ctx = engine.request()
    engine.look(A, ctx)
    engine.manager.on_step_end()
    engine.clock.now += 61
    assert engine.look(A, ctx) == ["miss"] * 4
    stats = engine.manager.stats()
    assert (stats.primary.abandoned, stats.primary.free, stats.promoting) == (4, 4, 0)
    assert len(engine.manager.take_unfilled()) == 4
    engine.store(A, ctx)
    engine.settle()
    assert engine.primary.stats().abandoned == 0
    assert all(engine.primary.row(slot) == payload(key) for key, slot in _readable(engine))


def test_a_slow_tier_pins_its_share_only() -> None:
    """Stores beyond a tier's share wait for room without a pin and follow later; the other tier gets them at once."""
    engine = Engine(slots=16, tiers=["disk", "far"], store_share=0.25)
    for number in range(10):
        engine.store(keys_of(number))
        engine.tiers[1].run()
        engine.manager.on_step_end()
    flows = engine.manager.stats().tiers
    assert (flows[0].storing, flows[0].waiting, flows[1].waiting) == (4, 6, 0)
    assert engine.primary.stats().pinned <= 5
    engine.settle()
    assert list(engine.tier.blocks) == keys_of(*range(10))
    flows = engine.manager.stats().tiers
    assert (flows[0].stored, flows[0].waiting, flows[0].dropped) == (10, 0, 0)


def test_blocks_that_wait_keep_an_idle_engine_stepping() -> None:
    """Blocks queued behind others need a step although there is room by now, and the idle engine makes that step."""
    engine = Engine(slots=16, store_share=0.25)
    ctx = engine.request(keys_of(*range(8)))
    engine.store(keys_of(*range(6)), ctx)
    engine.settle()
    engine.store(keys_of(6, 7), ctx)
    assert engine.manager.stats().jobs == 0 and engine.manager.has_pending_work
    engine.settle()
    assert list(engine.tier.blocks) == keys_of(*range(8)) and not engine.manager.has_pending_work


def test_blocks_that_wait_for_a_slow_tier_may_be_evicted() -> None:
    """A block evicted while it waits for room in a tier's share is counted, and never stored there."""
    engine = Engine(slots=16, store_share=0.25)
    engine.store(keys_of(*range(10)))
    assert engine.manager.stats().tiers[0].waiting == 6
    engine.store(keys_of(*range(20, 32)), tiers=[])
    flow = engine.manager.stats().tiers[0]
    assert (flow.waiting, flow.dropped) == (0, 6)
    engine.settle()
    assert list(engine.tier.blocks) == keys_of(*range(4))


def test_close_stores_the_blocks_waiting_for_room() -> None:
    """Closing stores the blocks that still wait for room; a reset or the failure of their tier drops them."""
    engine = Engine(slots=16, store_share=0.25)
    engine.store(keys_of(*range(10)))
    engine.manager.reset()
    assert engine.manager.stats().tiers[0].waiting == 0
    engine.settle()
    engine.store(keys_of(*range(20, 30)))
    engine.tier.raising = {"get_finished"}
    for _ in range(4):
        engine.manager.on_step_end()
    flow = engine.manager.stats().tiers[0]
    assert flow.dead and (flow.waiting, flow.dropped) == (0, 6)
    other = Engine(slots=16, store_share=0.25)
    other.store(keys_of(*range(10)))
    other.manager.close()
    assert list(other.tier.blocks) == keys_of(*range(10))


def test_room_that_jobs_from_before_a_reset_take_is_used_again_at_the_end() -> None:
    """Closing stores waiting and lazy blocks although the room was taken by jobs that the reset abandoned."""
    engine = Engine(slots=16, store_share=0.25)
    engine.tier.drains = False
    engine.store(keys_of(*range(4)))
    assert not engine.manager.reset(0.01)
    engine.store(keys_of(*range(10, 14)), lazy=True)
    engine.store(keys_of(*range(20, 24)))
    engine.tier.drains = True
    engine.manager.close()
    assert set(engine.tier.blocks) >= set(keys_of(*range(10, 14), *range(20, 24)))


def test_close_stores_lazy_blocks_beside_a_hung_tier() -> None:
    """Closing stores all lazy blocks of one tier, roomful by roomful, although another tier never ends a store."""
    engine = Engine(slots=16, tiers=["stuck", "well"], store_share=2 / 16)
    stuck, well = engine.tiers
    stuck.drains = False
    engine.store(keys_of(*range(8)), lazy=True)
    assert not engine.manager.close()
    assert list(well.blocks) == keys_of(*range(8))


@pytest.mark.parametrize("is_lazy", [False, True])
@pytest.mark.parametrize(("backlog_bytes", "accepted"), [(4 * 4096, 4), (1, 1)])
def test_a_tier_gets_no_more_blocks_than_it_accepts(
    backlog_bytes: int, accepted: int, is_lazy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks beyond the backlog of a tier wait for it in the primary tier; the tier sheds none of them."""
    slot_bytes, memory = 4096, memoryview(bytearray(16 * 4096))
    config = {"backend": "memory", "store_backlog_bytes": backlog_bytes}
    with open_tier(config, primary=memory, slot_bytes=slot_bytes, namespace=Namespace({})) as tier:
        sizes: list[int] = []
        submit = tier.submit_store
        monkeypatch.setattr(tier, "submit_store", lambda job: (sizes.append(len(job.keys)), submit(job)))
        options = TieringConfig(store_share=1.0, policy={"lazy": is_lazy})
        manager = TieringManager(PrimaryTier(memory, slot_bytes), [tier], options)
        ctx = RequestContext("request")
        manager.on_new_request(ctx, keys_of(*range(12)))
        for first in (0, 6):
            plan = manager.prepare_store(keys_of(*range(first, first + 6)), ctx)
            assert plan is not None
            manager.complete_store(plan.keys, ctx)
        expected = (0, 0) if is_lazy else (accepted, 12 - accepted)
        assert (manager.stats().tiers[0].storing, manager.stats().tiers[0].waiting) == expected
        manager.on_request_finished(ctx)

        def is_idle() -> bool:
            manager.on_step_end()
            return not manager.has_pending_work

        eventually(is_idle, 30, "the end of all stores")
        assert tier.stats().outcomes == ({} if is_lazy else {"store.ok": 12})
        assert manager.close(30)
        assert tier.stats().outcomes == {"store.ok": 12}
        assert max(sizes) == accepted


def test_close_stores_several_roomfuls_beside_a_hung_tier() -> None:
    """Closing stores more than one roomful of blocks to a tier while another one uses the whole time."""
    slot_bytes, memory = 4096, memoryview(bytearray(64 * 4096))
    open_one = partial(open_tier, primary=memory, slot_bytes=slot_bytes, namespace=Namespace({}))
    plan = FaultPlan([Fault("put", FaultKind.STALL, times=None)])
    with ExitStack() as stack:
        stack.callback(plan.release)
        hangs = stack.enter_context(
            open_one(
                {"backend": "memory", "label": "hangs", "store_backlog_bytes": 4 * slot_bytes},
                wrap_backend=partial(FaultyBackend, plan=plan),
            )
        )
        well = stack.enter_context(open_one({"backend": "memory", "store_backlog_bytes": 4 * slot_bytes}))
        manager = TieringManager(PrimaryTier(memory, slot_bytes), [hangs, well], TieringConfig(store_share=1.0))
        ctx = RequestContext("request")
        manager.on_new_request(ctx, keys_of(*range(32)))
        planned = manager.prepare_store(keys_of(*range(32)), ctx)
        assert planned is not None
        manager.complete_store(planned.keys, ctx)
        manager.on_request_finished(ctx)
        began = time.monotonic()
        manager.close(3)
        assert time.monotonic() - began < 30
        assert well.stats().outcomes == {"store.ok": 32}


def test_a_request_is_not_alone_while_another_waits() -> None:
    """A lone request may use the whole tier until another finds no room, and again once that other has ended."""
    engine = Engine(slots=8, promotion_share=0.5)
    engine.tier.blocks.update({key: payload(key) for key in keys_of(*range(12))})
    alone, second = engine.request(), engine.request()
    assert engine.look(keys_of(0, 1, 2, 3, 4), alone) == ["hit_pending"] * 5
    assert engine.look(keys_of(10), second) == ["retry"]
    assert engine.look(keys_of(5), alone) == ["miss"]
    engine.manager.on_request_finished(second)
    assert engine.look(keys_of(5), alone) == ["hit_pending"]


def lone_request_after(engine: Engine, other: RequestContext, keys: Sequence[BlockKey]) -> list[str]:
    """Let a request's promotions fail; return the answers to a lone request that needs more than the share."""
    engine.manager.on_step_end()
    engine.tier.run(failing=engine.tier.submitted(True))
    engine.settle_steps(2)
    assert engine.manager.stats().promoting == 0 and other.request_id in engine.parts.requests.by_id
    return engine.look(keys, engine.request())


def test_a_request_that_found_room_waits_no_longer() -> None:
    """A request that waited, got room and whose promotion failed limits other requests no longer."""
    engine = Engine(slots=8, promotion_share=0.5)
    engine.tier.blocks.update({key: payload(key) for key in keys_of(*range(12))})
    first, waited = engine.request(), engine.request()
    engine.look(keys_of(0, 1, 2, 3), first)
    assert engine.look(keys_of(10), waited) == ["retry"]
    engine.manager.on_request_finished(first)
    assert engine.look(keys_of(10), waited) == ["hit_pending"]
    assert lone_request_after(engine, waited, keys_of(*range(6))) == ["hit_pending"] * 6


def test_a_request_that_goes_without_the_rest_does_not_wait_for_it() -> None:
    """A request that got room for a part, and whose promotions then failed, limits other requests no longer."""
    engine = Engine(slots=8, promotion_share=0.5)
    engine.tier.blocks.update({key: payload(key) for key in keys_of(*range(12))})
    first, part = engine.request(), engine.request()
    engine.look(keys_of(0), first)
    assert engine.look(keys_of(8, 9, 10, 11), part) == ["hit_pending"] * 3 + ["miss"]
    engine.manager.on_request_finished(first)
    assert lone_request_after(engine, part, keys_of(*range(6))) == ["hit_pending"] * 6


def test_a_store_without_room_leaves_no_trace_of_the_blocks_evicted_for_it() -> None:
    """Lent slots stay in use after their blocks are evicted; blocks that waited for a tier are waited for no longer."""
    engine = Engine(slots=4, store_share=0.25)
    ctx = engine.request(keys_of(1, 2, 3, 4))
    engine.store(keys_of(1, 2, 3, 4), ctx)
    for key in keys_of(2, 3, 4):
        slot = engine.primary.slot_of(key)
        assert slot is not None
        engine.primary.loans.begin(slot)
    engine.manager.take_events()
    assert engine.manager.prepare_store(keys_of(5), engine.request()) is None
    assert engine.resident() == keys_of(1)
    assert {key for event in engine.manager.take_events() if event.cause for key in event.keys} == {*keys_of(2, 3, 4)}
    engine.settle()
    assert engine.tier.blocks.keys() == {*keys_of(1)}


def test_expired_wait_for_room_limits_no_other_request() -> None:
    """Once its wait has ended in a miss, a request that found no room limits other requests no longer."""
    engine = Engine(slots=8, promotion_share=0.5, wait_s_max=2.0)
    engine.tier.blocks.update({key: payload(key) for key in keys_of(*range(12))})
    alone, second = engine.request(), engine.request()
    engine.look(keys_of(0, 1, 2, 3), alone)
    assert engine.look(keys_of(10), second) == ["retry"]
    assert engine.look(keys_of(4), alone) == ["miss"]
    engine.clock.now += 2
    assert engine.look(keys_of(10), second) == ["miss"]
    assert engine.look(keys_of(4), alone) == ["hit_pending"]


def test_a_block_that_failed_to_come_has_no_source() -> None:
    """A block computed after its promotion failed is not attributed to the tier."""
    engine = Engine()
    engine.tier.blocks.update({key: payload(key) for key in keys_of(1, 2)})
    ctx = engine.request()
    assert engine.look(keys_of(1, 2), ctx) == ["hit_pending"] * 2
    engine.manager.on_step_end()
    engine.tier.run(failing=keys_of(2))
    assert engine.look(keys_of(1, 2), ctx) == ["hit", "miss"]
    engine.store(keys_of(2), ctx)
    sources = [engine.manager.source_of(key, ctx) for key in keys_of(1, 2)]
    assert sources == [engine.tier, None]
    engine.manager.reset()
    engine.store(keys_of(1), ctx)
    assert engine.manager.source_of(key_of(1), ctx) is None, "it was computed after the reset"


def test_deadlines_of_reported_loads_are_forgotten() -> None:
    """Reported loads drop their deadlines at once; otherwise each would take memory until its deadline."""
    engine = Engine()
    jobs, link = JobTable(), engine.parts.links[0]
    for number in range(2000):
        job = OpenJob(TransferJob(jobs.new_id(), A, range(4)), link, True, None, deadline=1e9 + number)
        jobs.add(job)
        assert jobs.report(link, JobResult(job.transfer.job_id, True, A)) is job
        assert deadlines_of(jobs)[1] < 1000
    assert jobs.take_overdue_loads(2e9) == []


def test_load_with_a_failed_submission_is_abandoned_once() -> None:
    """The tier may have accepted the job, so its slot stays abandoned; its deadline affects no other slot."""
    engine = Engine(load_s_max=60.0)
    engine.tier.blocks.update({key: payload(key) for key in keys_of(1)})
    engine.tier.raising = {"submit_load"}
    ctx = engine.request()
    engine.look(keys_of(1), ctx)
    engine.manager.on_step_end()
    assert engine.look(keys_of(1), ctx) == ["miss"]
    engine.fill(engine.manager.prepare_store(keys_of(1), ctx))
    engine.clock.now += 61
    for _ in range(2):
        engine.manager.on_step_end()
    stats = engine.manager.stats()
    assert (stats.primary.abandoned, stats.primary.writing, stats.promoting) == (1, 1, 0)


def test_a_tier_reports_its_own_jobs_only() -> None:
    """A result for another tier's job is ignored: that job continues."""
    engine = Engine(tiers=["disk", "far"])
    engine.tier.blocks.update({key: payload(key) for key in keys_of(1)})
    ctx = engine.request()
    engine.look(keys_of(1), ctx)
    engine.manager.on_step_end()
    [(_, job)] = engine.tier.open
    engine.tiers[1].done.append((True, job, JobResult(job.job_id, True, job.keys)))
    assert engine.look(keys_of(1), ctx) == ["hit_pending"]
    assert [flow.errors for flow in engine.manager.stats().tiers] == [0, 1]
    assert engine.load(keys_of(1), ctx) == [payload(key_of(1))]


def test_copy_from_before_a_reset_makes_no_block_readable() -> None:
    """A copy confirmed after a reset makes no block readable that has not been stored again since."""
    engine = Engine(slots=16)
    ctx, reader = engine.request(), engine.request()
    engine.store(A, reader)
    engine.settle()
    assert engine.manager.prepare_load(A, reader) is not None
    assert engine.manager.prepare_store(keys_of(5), ctx) is not None
    engine.manager.reset()
    other = engine.request()
    assert engine.manager.prepare_store([*A, *keys_of(5)], other) is not None
    engine.manager.complete_store(keys_of(5), ctx)
    engine.manager.complete_load(A, reader)
    assert engine.look([*A, *keys_of(5)], ctx) == ["hit_pending"] * 5


def test_a_promotion_of_before_a_reset_is_not_submitted_after_it() -> None:
    """A promotion from before a reset is not submitted, because its slots hold other blocks by then."""
    engine = Engine(slots=4)
    for key in A:
        engine.tier.blocks[key] = payload(key)
    ctx = engine.request(A)
    assert engine.look(A, ctx) == ["hit_pending"] * 4
    assert engine.manager.has_pending_work, "they must be submitted"
    engine.manager.reset()
    assert not engine.manager.has_pending_work
    others = keys_of(11, 12, 13, 14)
    engine.store(others, engine.request(others))
    engine.settle()
    assert "submit_load" not in [name for name, _ in engine.tier.calls]
    assert engine.load(others, engine.request()) == [payload(key) for key in others]


def test_reset_clears_the_waits_for_room() -> None:
    """A reset clears the note that a tier had no room for a block: no block waits for room any more."""
    engine = Engine(slots=16, store_share=0.25)
    keys = keys_of(*range(6))
    ctx = engine.request(keys)
    engine.store(keys, ctx)
    assert engine.manager.stats().tiers[0].waiting == 2
    engine.manager.reset()
    engine.store(keys[4:], ctx)
    assert engine.tier.submitted(is_load=False) == keys[4:]


def test_close_writes_back_and_ends() -> None:
    """Closing writes owed blocks and waits for the tiers; afterwards lookups miss, and nothing is stored."""
    engine = Engine(slots=16)
    keys = keys_of(*range(12))
    engine.store_and_forget(keys, lazy=True)
    assert not engine.tier.blocks
    assert engine.manager.close(5.0) and engine.manager.close(5.0)
    assert sorted(engine.tier.blocks) == keys and engine.tier.calls[-2][0] == "close"
    ctx = engine.request()
    engine.tier.blocks.update({key: payload(key) for key in keys_of(50)})
    assert engine.look(keys_of(50), ctx) == ["miss"]
    assert engine.manager.prepare_store(keys_of(50), ctx) == engine.manager.prepare_store([], ctx)


def test_tiers_need_names_of_their_own() -> None:
    """Duplicate tier names, and those that stand for the primary tier or for all tiers in metrics, are refused."""
    for names in (["disk", "disk"], ["cpu"], ["disk", "all"]):
        with pytest.raises(ConfigError, match="different names"):
            Engine(tiers=names)


def test_object_of_another_kind_is_no_tier() -> None:
    """A class of one's own that lacks the interface is refused at the start, not at its first missing method."""
    tier: Any = types.SimpleNamespace(name="mine", takes_stores=True, store_blocks_max=8, lookup=lambda *_: None)
    with pytest.raises(ConfigError, match="Expected a SecondaryTierManager"):
        TieringManager(PrimaryTier(memoryview(bytearray(64)), 16), [tier])


@pytest.mark.parametrize(
    "option", [{"promotion_share": 0.0}, {"store_share": 1.5}, {"tokens_per_block": 0}, {"wait_s_max": -1}]
)
def test_numbers_out_of_range_are_refused(option: dict[str, Any]) -> None:
    """A share or time out of range is an error at startup that names the option."""
    with pytest.raises(ConfigError, match=next(iter(option))):
        Engine(**option)


def _readable(engine: Engine) -> list[tuple[bytes, int]]:
    ctx = engine.request()
    keys = [key for key in engine.resident() if engine.manager.lookup(key, ctx) is LookupResult.HIT]
    return [(key, slot) for key in keys if (slot := engine.primary.slot_of(key)) is not None]


def test_a_tier_that_can_not_begin_an_epoch_is_left_alone_until_it_can(caplog: pytest.LogCaptureFixture) -> None:
    """After a reset such a tier could return blocks of other weights: it gets no work, and the others continue."""
    engine = Engine(tiers=["old", "new"])
    engine.store_and_forget(A)
    engine.tiers[0].begins_epochs = False
    assert engine.manager.reset()
    assert [flow.dead for flow in engine.manager.stats().tiers] == [True, False]
    assert "old gets no more work" in caplog.text
    del engine.tiers[1].blocks[A[0]]
    assert engine.look(A[:2], engine.request()) == ["miss", "hit_pending"]
    engine.tiers[0].raising.add("begin_epoch")
    engine.tiers[0].begins_epochs = True
    engine.manager.reset()
    assert engine.manager.stats().tiers[0].dead
    engine.tiers[0].raising.clear()
    engine.manager.reset()
    assert engine.look(A[:1], engine.request()) == ["hit_pending"]


def test_a_reset_begins_an_epoch_in_every_tier_after_its_io() -> None:
    """Tiers are drained first; jobs submitted earlier are not part of the new epoch."""
    engine = Engine(tiers=["one", "two"])
    engine.store(A)
    assert engine.manager.reset()
    for tier in engine.tiers:
        names = [name for name, _ in tier.calls]
        assert names.count("begin_epoch") == 1 and names.index("drain") < names.index("begin_epoch")


@pytest.mark.parametrize("method", ["flush", "lookup"])
def test_only_exceptions_in_a_row_end_a_tier(method: str) -> None:
    """A success between two exceptions resets the count; three in a row, and the tier gets no more work."""
    tier = Engine().tier
    link = TierLink(tier, 0)
    call = (
        partial(link.call, tier.flush, otherwise=None)
        if method == "flush"
        else partial(link.lookup, b"k", RequestContext("r"))
    )
    for _ in range(3):
        tier.raising = {method}
        call()
        call()
        tier.raising = set()
        call()
    assert not link.dead and link.errors == 6
    tier.raising = {method}
    for _ in range(3):
        call()
    assert link.dead


@pytest.mark.parametrize(
    ("method", "value"),
    [
        ("flush", partial(int, "no number")),  # A callable without a name.
        ("restate_events", None),  # Not a method.
        ("drain", lambda timeout_s: None),
    ],
)
def test_a_tier_with_a_defective_method_stops_nothing(method: str, value: Any) -> None:
    """A method that can't be called, has no name or returns None is a defect of its tier, and the manager continues."""
    engine = Engine()
    engine.store(A)
    setattr(engine.tier, method, value)
    engine.step()
    engine.manager.restate_events()
    engine.manager.reset()
    engine.manager.close()


def test_a_store_that_raised_is_counted_until_it_is_reported() -> None:
    """The tier may have accepted the job, so its blocks count as being stored."""
    tier = Engine().tier
    jobs, link = JobTable(), TierLink(tier, 0)
    tier.raising = {"submit_store", "submit_load"}
    for job_id, is_load in ((1, False), (2, True)):
        assert not jobs.submit(OpenJob(TransferJob(job_id, [b"a", b"b"], [0, 1]), link, is_load, None))
    assert link.storing == link.loading == 2
    for job_id in (1, 2):
        jobs.report(link, JobResult(job_id, True, [b"a", b"b"]))
    assert link.storing == link.loading == 0


def test_finished_request_with_a_raised_load_is_forgotten() -> None:
    """The tier may never report the load, so the request does not wait for the report."""
    engine = Engine()
    engine.tier.blocks.update({key: payload(key) for key in A})
    engine.tier.raising = {"submit_load"}
    ctx = engine.request(A)
    assert engine.look(A[:1], ctx) == ["hit_pending"]
    engine.manager.on_request_finished(ctx)
    assert engine.manager.stats().requests == 0, "what was not submitted is dropped"
    again = engine.request(A)
    assert engine.look(A[:1], again) == ["hit_pending"]
    engine.tier.on_submit = lambda *_: engine.manager.on_request_finished(again)
    engine.manager.on_step_end()
    stats = engine.manager.stats()
    assert (stats.requests, stats.jobs, stats.promoting) == (0, 1, 0)
    assert "on_request_finished" in {name for name, _ in engine.tier.calls}


def test_finished_request_with_an_overdue_load_is_forgotten() -> None:
    """The load is abandoned, and its report may never come."""
    engine = Engine(load_s_max=10.0)
    engine.tier.blocks.update({key: payload(key) for key in A})
    ctx = engine.request()
    assert engine.look(A, ctx) == ["hit_pending"] * 4
    engine.manager.on_step_end()
    engine.manager.on_request_finished(ctx)
    assert engine.manager.stats().requests == 1
    engine.clock.now += 11
    engine.manager.on_step_end()
    stats = engine.manager.stats()
    assert (stats.requests, stats.jobs, stats.promoting, stats.primary.abandoned) == (0, 1, 0, 4)


@pytest.mark.parametrize("reported", [False, True])
def test_a_lost_report_does_not_count_as_load_for_good(reported: bool) -> None:
    """After ``load_s_max`` the tier counts as free of the load; its slots wait for the report."""
    engine = Engine(load_s_max=10.0)
    engine.tier.blocks.update({key: payload(key) for key in A})
    assert engine.look(A, engine.request()) == ["hit_pending"] * 4
    engine.manager.on_step_end()
    engine.clock.now += 9
    engine.manager.on_step_end()
    assert engine.manager.stats().tiers[0].loading == 4
    engine.clock.now += 1
    engine.manager.on_step_end()
    stats = engine.manager.stats()
    assert (stats.tiers[0].loading, stats.primary.abandoned, stats.jobs) == (0, 4, 1)
    if reported:
        engine.settle()
        stats = engine.manager.stats()
        assert (stats.tiers[0].loading, stats.primary.abandoned, stats.jobs) == (0, 0, 0)
