"""Engine copies that outlive a reset: no slot is reused while such a copy may still touch it."""

from __future__ import annotations

import logging

import pytest

from kvstore.types import RequestContext
from tests.tiering.engine import Engine, key_of, keys_of
from tests.tiering.fake_tier import payload

A = keys_of(1, 2, 3)
ON_DISK = keys_of(*range(10, 18))


class Reports:
    """Reports of an engine that copies late: ended loads and stores, by lane."""

    def __init__(self, lanes: int = 3) -> None:
        self.lanes = lanes
        self.counts = [[0, 0] for _ in range(lanes)]

    def end_load(self, lane: int) -> None:
        self.counts[lane][0] += 1

    def end_store(self, lane: int) -> None:
        self.counts[lane][1] += 1

    def ended(self, lane: int, loads: int, stores: int) -> bool:
        """Return whether exactly this many copies have ended."""
        return self.counts[lane] == [loads, stores]


def busy_engine(slots: int = 8, **options: object) -> Engine:
    """Return an engine whose tier holds more blocks than there are slots."""
    engine = Engine(slots=slots, **options)
    engine.tier.blocks.update({key: payload(key) for key in ON_DISK})
    return engine


def use_every_slot(engine: Engine) -> set[int]:
    """Promote as many blocks as fit; return the slots used."""
    ctx = engine.request()
    for _ in range(3):
        engine.look(ON_DISK, ctx)
        engine.step()
    engine.manager.on_request_finished(ctx)
    return {slot for key in ON_DISK if (slot := engine.primary.slot_of(key)) is not None}


def overwrite(engine: Engine, slots: set[int]) -> None:
    """Write like a late store, and check that no block changes."""
    for slot in slots:
        engine.primary.row(slot)[:] = payload(key_of(99))
    for key in ON_DISK:
        slot = engine.primary.slot_of(key)
        assert slot is None or engine.primary.row(slot) == payload(key)


def test_a_late_store_overwrites_nothing() -> None:
    """Slots of a store voided by a reset are not reused until the engine reports that its copies have ended."""
    engine = busy_engine()
    plan = engine.manager.prepare_store(A, engine.request())
    assert plan is not None and engine.manager.reset(0.0)
    late = set(plan.slots)
    assert not late & use_every_slot(engine) and engine.primary.stats().abandoned == 3
    overwrite(engine, late)
    engine.manager.on_copies_ended()
    assert engine.primary.stats().abandoned == 0
    assert late <= use_every_slot(engine)


def test_a_late_load_reads_what_it_was_given() -> None:
    """Slots that the engine still reads at a reset keep their bytes until its copies have ended."""
    engine = busy_engine()
    ctx = engine.request()
    engine.store(A, ctx)
    engine.settle()
    slots = engine.manager.prepare_load(A, ctx)
    again = engine.manager.prepare_load(A[:1], engine.request())
    assert slots is not None and again == slots[:1] and engine.manager.reset(0.0)
    assert not set(slots) & use_every_slot(engine) and engine.primary.stats().abandoned == 3
    assert [bytes(engine.primary.row(slot)) for slot in slots] == [payload(key) for key in A]
    engine.manager.on_copies_ended()
    assert engine.primary.stats().abandoned == 0


def test_reports_of_older_copies_prove_nothing_of_newer_ones() -> None:
    """Copies are counted by lane: copies prepared after a reset don't stand in for those before it."""
    reports = Reports()
    engine = busy_engine(slots=6, reports=reports)
    ctx = engine.request()
    engine.store(A[:1], ctx)
    reports.end_store(0)
    assert engine.manager.prepare_store(A[1:], ctx) is not None
    engine.settle()
    assert engine.manager.reset(0.0) and engine.manager.copy_lane == 1
    assert engine.primary.stats().abandoned == 2
    engine.store(A[:1], ctx)
    reports.end_store(1)
    engine.settle()
    assert engine.primary.stats().abandoned == 2, "the store of before has not ended"
    reports.end_load(0)
    engine.settle()
    assert engine.primary.stats().abandoned == 2, "nobody had prepared a load"
    reports.counts[0] = [0, 2]
    engine.settle()
    assert engine.primary.stats().abandoned == 0


def test_a_reset_without_copies_changes_no_lane() -> None:
    """Completed copies are not waited for, whatever the reports contain."""
    engine = busy_engine(reports=Reports())
    engine.store(A)
    engine.settle()
    assert engine.manager.reset(0.0)
    assert engine.manager.copy_lane == 0 and engine.primary.stats().abandoned == 0


def test_more_resets_than_lanes() -> None:
    """If every lane waits for late copies, later copies share one of them, and every slot is returned."""
    reports = Reports(lanes=2)
    engine = busy_engine(reports=reports)
    prepared: list[int] = []
    for number in range(4):
        assert engine.manager.prepare_store(keys_of(number), engine.request()) is not None
        prepared.append(engine.manager.copy_lane)
        assert engine.manager.reset(0.0)
    assert prepared == [0, 1, 1, 1] and engine.primary.stats().abandoned == 4
    reports.end_store(0)
    engine.settle()
    assert engine.primary.stats().abandoned == 3 and engine.manager.copy_lane == 1
    for number in range(3):
        assert engine.primary.stats().abandoned == 3, number
        reports.end_store(1)
        engine.settle()
    assert engine.primary.stats().abandoned == 0


def test_a_lane_whose_copies_are_not_reported_is_not_taken_anew() -> None:
    """If the engine reports that all copies have ended and the reports lag, later copies stay distinguishable."""
    reports = Reports(lanes=3)
    engine = busy_engine(reports=reports)
    for expected in (0, 1, 2):
        assert engine.manager.copy_lane == expected
        assert engine.manager.prepare_store(keys_of(expected), engine.request()) is not None
        assert engine.manager.reset(0.0)
        engine.manager.on_copies_ended()
    assert engine.manager.copy_lane == 2, "no lane is free by the reports"
    assert engine.manager.prepare_store(keys_of(3), engine.request()) is not None
    reports.end_store(0)
    assert engine.manager.reset(0.0)
    assert engine.manager.copy_lane == 0
    assert engine.primary.stats().abandoned == 1


def test_one_block_loaded_twice_by_one_request() -> None:
    """Each load of a block pins it, and each end removes one pin."""
    engine = Engine()
    engine.store_and_forget(A)
    ctx = engine.request()
    engine.look(A, ctx)
    for _ in range(2):
        assert engine.manager.prepare_load(A, ctx) is not None
    engine.manager.on_step_end()
    for pinned in (3, 0, 0):
        engine.manager.complete_load(A, ctx)
        assert engine.primary.stats().pinned == pinned


def test_a_tier_and_the_engine_touch_one_slot() -> None:
    """A slot read by both a tier's store and the engine's load at a reset is free once both have ended."""
    engine = busy_engine()
    ctx = engine.request()
    engine.store(A[:1], ctx)
    assert engine.look(A[:1], ctx) == ["hit"] and engine.manager.prepare_load(A[:1], ctx) is not None
    engine.tier.drains = False
    assert not engine.manager.reset(0.0)
    engine.manager.on_copies_ended()
    assert engine.primary.stats().abandoned == 1, "the tier still reads it"
    engine.tier.run()
    engine.step()
    assert engine.primary.stats().abandoned == 0


def test_slots_that_stay_away_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Slots whose copies are not known to have ended are counted, and one warning is logged after a while."""
    engine = busy_engine()
    assert engine.manager.prepare_store(A, engine.request()) is not None
    assert engine.manager.reset(0.0)
    with caplog.at_level(logging.WARNING, "kvstore.tiering"):
        for _ in range(4):
            engine.clock.now += 20.0
            engine.step()
    assert [record.getMessage().split(" of the")[0] for record in caplog.records] == ["3 slots"]
    assert engine.manager.stats().primary.abandoned == 3


def test_hits_stay_until_the_step_ends() -> None:
    """A block answered with HIT can be loaded in the same step, whatever is promoted, stored or removed meanwhile."""
    for policy in ("lru", "s3fifo", "arc"):
        engine = busy_engine(slots=6, eviction=policy)
        ctx, other = engine.request(), engine.request(cpu=False)
        engine.store_and_forget(A)
        assert engine.look(A, ctx) == ["hit"] * 3
        assert engine.look(ON_DISK[:4], other) == ["hit_pending"] * 3 + ["miss"], "there is room for three more"
        assert engine.manager.prepare_store(keys_of(50), other) is None
        engine.manager.remove(A)
        assert engine.primary.stats().pinned == 3
        assert engine.manager.prepare_load(A, ctx) is not None
        engine.manager.complete_load(A, ctx)
        engine.step()
        assert engine.primary.stats().pinned == 0


def test_a_request_id_that_comes_again() -> None:
    """If a request's id is used again before it ended, the first leaves no claims, pins or promotions behind."""
    engine = busy_engine(slots=8, promotion_share=0.5)
    for number, key in enumerate(ON_DISK[:6]):
        ctx = RequestContext("same")
        engine.manager.on_new_request(ctx)
        assert engine.look([key], ctx) == ["hit_pending"]
        if number % 2:
            engine.step()
            assert engine.look([key], ctx) == ["hit"]
    engine.manager.on_request_finished(ctx)
    engine.settle()
    stats = engine.manager.stats()
    assert (stats.promoting, stats.primary.pinned, stats.requests) == (0, 0, 0)


def test_claims_end_when_a_request_computes() -> None:
    """A request that is scheduled, or offers blocks although it may not store, withholds no promoted block."""
    for scheduled in (True, False):
        engine = busy_engine(slots=4)
        ctx = engine.request(store=False)
        engine.look(ON_DISK[:4], ctx)
        engine.step()
        assert engine.look(ON_DISK[:4], ctx) == ["hit"] * 4 and engine.manager.stats().promoting == 4
        if scheduled:
            engine.manager.on_step_end([ctx.request_id, "unknown"])
        else:
            engine.manager.prepare_store(ON_DISK[:4], ctx)
        assert engine.manager.stats().promoting == 0


def test_a_hit_is_neither_evicted_for_a_store_nor_removed() -> None:
    """Stores and removals without a promotion before them respect the hits of the step, too."""
    engine = busy_engine(slots=4)
    ctx = engine.request()
    engine.store_and_forget(A)
    assert engine.look(A, ctx) == ["hit"] * 3
    assert engine.manager.prepare_store(keys_of(50, 51), engine.request()) is None
    engine.step()
    assert engine.look(A, ctx) == ["hit"] * 3
    engine.manager.remove(A)
    assert engine.manager.prepare_load(A, ctx) is not None


def test_a_load_is_waited_for_by_its_own_count() -> None:
    """Slots that are read at a reset are freed when that load is reported, and not before."""
    reports = Reports()
    engine = busy_engine(reports=reports)
    ctx = engine.request()
    engine.store(A, ctx)
    reports.end_store(0)
    engine.settle()
    nothing = engine.manager.prepare_store(A, ctx)
    assert nothing is not None and not nothing.keys, "no copy: nobody will report it"
    assert engine.manager.prepare_load(A, ctx) is not None and engine.manager.reset(0.0)
    engine.settle()
    assert engine.primary.stats().abandoned == len(A), "the load has not ended"
    reports.end_load(0)
    engine.settle()
    assert engine.primary.stats().abandoned == 0


def test_what_is_not_whole_is_not_loaded() -> None:
    """A load of a missing or incomplete block pins nothing and does not count as a copy."""
    reports = Reports()
    engine = Engine(reports=reports)
    ctx = engine.request()
    engine.store(A[:1], ctx)
    reports.end_store(0)
    engine.settle()
    assert engine.manager.prepare_load(A[:2], ctx) is None
    assert engine.manager.prepare_store(A[1:2], ctx) is not None
    assert engine.manager.prepare_load(A[:2], ctx) is None
    assert engine.primary.stats().pinned == 0
    engine.manager.complete_store(A[1:2], ctx)
    reports.end_store(0)
    assert engine.manager.prepare_load(A[:2], ctx) is not None
    reports.end_load(0)
    assert engine.manager.reset(0.0)
    engine.settle()
    assert engine.primary.stats().abandoned == 0


def test_a_reused_id_keeps_the_copies_of_before() -> None:
    """Copies for a request continue when another request starts under its id, and a reset accounts for them."""
    engine = Engine()
    ctx = engine.request()
    engine.store(A[:1], ctx)
    engine.settle()
    assert engine.manager.prepare_load(A[:1], ctx) is not None
    assert engine.manager.prepare_store(A[1:], ctx) is not None
    engine.manager.on_new_request(RequestContext(ctx.request_id))
    engine.manager.complete_store(A[1:2], ctx)
    assert engine.look(A[:2], engine.request()) == ["hit", "hit"]
    assert engine.manager.reset(0.0)
    assert engine.primary.stats().abandoned == 2, "one is read, and one is filled"
