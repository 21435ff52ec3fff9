"""The breaker opens, pauses longer each time, and closes."""

from __future__ import annotations

from kvstore.runtime.breaker import Breaker, BreakerState


def test_only_consecutive_failures_open_it() -> None:
    """A success in between resets the count."""
    breaker = Breaker(3, 1, 30)
    for outcome in (False, False, True, False, False):
        if outcome:
            breaker.record_success()
        else:
            assert not breaker.record_failure(0)
    assert breaker.closed
    assert breaker.record_failure(0)
    assert breaker.state is BreakerState.OPEN


def test_one_trial_passes_after_the_pause() -> None:
    """After the cooldown exactly one caller gets through until it reports; a closed breaker needs no trial."""
    breaker = Breaker(1, 1, 30)
    assert not breaker.admit_trial(10) and breaker.closed
    breaker.record_failure(10)
    assert not breaker.admit_trial(10.9)
    assert breaker.admit_trial(11.0)
    assert not breaker.admit_trial(11.0)
    assert breaker.record_success()
    assert breaker.closed


def test_a_trial_that_never_reports_is_followed_by_another() -> None:
    """A cancelled trial does not block the next one for ever."""
    breaker = Breaker(1, 1, 30, trial_s=5)
    breaker.record_failure(0)
    assert breaker.admit_trial(1)
    assert not breaker.admit_trial(5.9)
    assert breaker.admit_trial(6)


def test_pauses_double_to_their_limit_and_reset_after_a_success() -> None:
    """Each failed trial doubles the pause; a success resets it."""
    breaker = Breaker(1, 1, 5)
    now, pauses = 0.0, []
    for _ in range(5):
        breaker.record_failure(now)
        pauses.append(breaker.pause_s)
        now = breaker.retry_at
        assert breaker.admit_trial(now)
    assert pauses == [1, 2, 4, 5, 5]
    breaker.record_success()
    breaker.record_failure(now)
    assert breaker.pause_s == 1


def test_stragglers_do_not_prolong_the_pause() -> None:
    """Failures that arrive while it is open have no effect."""
    breaker = Breaker(1, 1, 30)
    breaker.record_failure(0)
    assert not breaker.record_failure(0.9)
    assert breaker.retry_at == 1
