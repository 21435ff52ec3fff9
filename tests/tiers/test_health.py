"""The breaker of a tier's loads and lookups: causes that open and close it."""

from __future__ import annotations

import logging

import pytest

from kvstore.config import TierConfig
from kvstore.runtime.messages import JobKind, Probe
from kvstore.tiers.health import TierHealth
from kvstore.types import Outcome

FAILED, FOUND = [Outcome.TIMEOUT], [Outcome.OK]


def health() -> TierHealth:
    """Return a health that three consecutive failures open, for 1 to 8 seconds."""
    config = TierConfig(breaker_failures=3, breaker_cooldown=1, breaker_cooldown_max=8)  # type: ignore[arg-type]
    return TierHealth("tier", config)


def load(tier: TierHealth, outcomes: list[Outcome]) -> Probe | None:
    """Judge a load."""
    return tier.judge(JobKind.LOAD, outcomes, "late", 0.0)


def test_answered_lookups_do_not_hide_failed_loads() -> None:
    """A medium that answers every lookup and fails every load is not used, for longer each time."""
    tier = health()
    for _ in range(2):
        tier.note_lookup()
        assert load(tier, FAILED) is None
    tier.note_lookup()
    probe = load(tier, FAILED)
    assert probe is not None and probe.pause_s == 1 and not tier.loads_pass
    for pause_s in (2, 4, 8, 8):
        tier.note_probed(1)
        assert tier.loads_pass
        tier.note_lookup()
        probe = load(tier, FAILED)
        assert probe is not None and probe.pause_s == pause_s and not tier.loads_pass


def test_a_load_that_succeeds_ends_the_probation() -> None:
    """Afterwards three consecutive failures are needed again, and the first pause is the shortest."""
    tier = health()
    for _ in range(3):
        load(tier, FAILED)
    tier.note_probed(1)
    assert load(tier, FOUND) is None
    assert [load(tier, FAILED) is None for _ in range(3)] == [True, True, False]
    tier.note_probed(1)
    assert load(tier, [Outcome.MISS, Outcome.OK]) is None
    assert tier.loads_pass


def test_a_late_success_does_not_close_the_breaker() -> None:
    """The success of a load from before the opening is outdated information; the probe decides."""
    tier = health()
    for _ in range(3):
        load(tier, FAILED)
    assert load(tier, FOUND) is None and not tier.loads_pass
    tier.note_probed(1)
    assert tier.loads_pass


def test_failed_lookups_in_a_row_open_it() -> None:
    """Without failed loads, an answered lookup resets the count, and a probe closes the breaker for good."""
    tier = health()
    for _ in range(5):
        assert tier.note_failure(JobKind.LOAD, "late", 0.0) is None
        assert tier.note_failure(JobKind.LOAD, "late", 0.0) is None
        tier.note_lookup()
    for expected in (True, True, False):
        assert (tier.note_failure(JobKind.LOAD, "late", 0.0) is None) is expected
    tier.note_probed(1)
    assert [tier.note_failure(JobKind.LOAD, "late", 0.0) is None for _ in range(3)] == [True, True, False]


def test_failed_stores_cause_no_probe() -> None:
    """A probe only looks up blocks: it would not test stores, and would close the breaker of loads."""
    tier = health()
    for _ in range(4):
        assert tier.judge(JobKind.STORE, FAILED, "full", 0.0) is None
    assert tier.loads_pass and not tier.admits_store(0.5)


def test_only_the_first_opening_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Failed trials repeat as long as a disk is full, and would fill the log."""
    tier = health()
    with caplog.at_level(logging.INFO, "kvstore.tiers"):
        for now in (0.0, 0.0, 0.0, 10.0, 100.0):
            tier.admits_store(now)
            tier.judge(JobKind.STORE, FAILED, "full", now)
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.INFO, logging.INFO]
