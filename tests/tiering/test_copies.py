"""Engine copies that outlive a reset: no slot is reused while such a copy may still touch it."""

from __future__ import annotations

import logging

import pytest

from tests.tiering.engine import Engine, keys_of

A = keys_of(1, 2, 3)


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


def test_reports_of_older_copies_prove_nothing_of_newer_ones() -> None:
    """Copies are counted by lane: copies prepared after a reset don't stand in for those before it."""
    reports = Reports()
    engine = Engine(slots=6, reports=reports)
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
    engine = Engine(reports=Reports())
    engine.store(A)
    engine.settle()
    assert engine.manager.reset(0.0)
    assert engine.manager.copy_lane == 0 and engine.primary.stats().abandoned == 0


def test_lane_with_unreported_copies_is_not_reused() -> None:
    """If the engine reports that all copies have ended and the reports lag, later copies stay distinguishable."""
    reports = Reports(lanes=3)
    engine = Engine(reports=reports)
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


def test_slots_that_stay_away_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Slots whose copies are not known to have ended are counted, and one warning is logged after a while."""
    engine = Engine()
    assert engine.manager.prepare_store(A, engine.request()) is not None
    assert engine.manager.reset(0.0)
    with caplog.at_level(logging.WARNING, "kvstore.tiering"):
        for _ in range(4):
            engine.clock.now += 20.0
            engine.step()
    assert [record.getMessage().split(" of the")[0] for record in caplog.records] == ["3 slots"]
    assert engine.manager.stats().primary.abandoned == 3


def test_incomplete_block_is_not_loaded() -> None:
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
