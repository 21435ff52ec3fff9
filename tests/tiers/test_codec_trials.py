"""Codec trials: how long nothing is tried after a failure, and what is learnt of a link from a change."""

from __future__ import annotations

import pytest

from kvstore.tiers.codec_trials import Busy, Delay, Trials

MIB = 1 << 20
GB = 1e9


def failed_trial(trials: Trials, link: float = GB, *, seconds: float = 2.0, end_link: float = GB) -> None:
    """Encode ten MiB and find that it does not pay."""
    trials.begin(link)
    trials.note_encoded(10 * MIB)
    trials.end(end_link, seconds)


def raw_until_next(trials: Trials) -> int:
    """Store raw, a MiB at a time, until the next trial may begin over the same link; return how many that took."""
    stored = 0
    while trials.bars(GB):
        trials.note_raw(MIB)
        stored += 1
    assert trials.expire() and not trials.expire()
    return stored


def test_failures_make_trials_rarer() -> None:
    """After a failure two hundred times its bytes are stored raw, then twice as many, up to 3,200 times."""
    trials = Trials()
    for times in (200, 400, 800, 1600, 3200, 3200):
        failed_trial(trials)
        assert raw_until_next(trials) == 10 * times
    assert trials.explored < 0.005


def test_only_a_mistake_bars_the_next_trial() -> None:
    """Encoding that paid for ten seconds, or that ended because the link changed, was none."""
    trials = Trials()
    failed_trial(trials, seconds=11)
    assert not trials.bars(GB) and trials.explored == 0
    failed_trial(trials, end_link=2 * GB)
    assert not trials.bars(2 * GB) and not trials.bars(GB) and trials.explored > 0
    failed_trial(trials)
    failed_trial(trials)
    failed_trial(trials, seconds=11)
    failed_trial(trials)
    assert raw_until_next(trials) == 2000, "what paid in between makes it trust again"


@pytest.mark.parametrize(("link", "barred"), [(1.3, True), (1.4, False), (0.77, True), (0.7, False)])
def test_another_link_is_tried_at_once(link: float, barred: bool) -> None:
    """A link that is a third quicker or slower than the one of the failure is not barred."""
    trials = Trials()
    failed_trial(trials)
    assert trials.bars(link * GB) == barred


def load(delay: Delay, now: float, seconds: float, size_bytes: int, plain_bytes: int) -> float:
    """Load so many bytes and decode what is encoded of them; return the time after it."""
    delay.link.start(now)
    delay.link.end(now + seconds, size_bytes)
    delay.note_decoded(now + seconds, plain_bytes)
    return now + seconds


def test_the_delay_is_the_difference_between_two_links() -> None:
    """What a byte takes longer after encoding has begun is learnt once, from loads of encoded blocks alone."""
    delay, now = Delay(), 100.0
    for _ in range(20):
        now = load(delay, now, 0.1, int(0.1 * GB), 0)
    assert delay.knows_raw(now + 1e5, 0.5), "an idle link is the same link"
    delay.note_begin(now, 0.5, GB)
    for _ in range(20):
        now = load(delay, now, 0.1, int(0.1 * GB), 0)
        delay.learn(now, 0.5)
    assert delay.seconds == 0, "blocks from before the change say nothing"
    for _ in range(60):
        now = load(delay, now, 0.1, int(0.08 * GB), int(0.16 * GB))
    delay.learn(now, 0.5)
    # 1.25 s for a GB, and 1 s before.
    assert delay.seconds * GB == pytest.approx(0.25, abs=0.01)
    assert delay.link_if_raw(0.8 * GB, 1.0) == pytest.approx(GB, rel=0.02)
    assert delay.link_if_raw(0.8 * GB, 0.0) == pytest.approx(0.8 * GB)


def test_nothing_is_learnt_of_a_link_that_changes() -> None:
    """Where the link was another one a while ago, its change is not taken for what encoding does."""
    delay, now = Delay(), 100.0
    for _ in range(20):
        now = load(delay, now, 0.1, int(0.1 * GB), 0)
    delay.note_begin(now, 0.5, 2 * GB)
    for _ in range(60):
        now = load(delay, now, 0.1, int(0.05 * GB), int(0.1 * GB))
    delay.learn(now, 0.5)
    assert delay.seconds == 0


def test_only_one_of_two_fades_while_nothing_happens() -> None:
    """Busy time fades with the clock, or with busy time only, and the rate is the same."""
    by_clock, by_use = Busy(1.0), Busy(1.0, idle_fades=False)
    for busy in (by_clock, by_use):
        busy.start(0.0)
        busy.end(1.0, 1000)
        assert busy.busy_s(11.0) == pytest.approx(1 / 1024 if busy is by_clock else 1.0)
        assert busy.rate(11.0) == pytest.approx(1000)
