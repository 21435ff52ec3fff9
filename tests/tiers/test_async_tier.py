"""The scheduler half alone, with a channel and a clock controlled by the test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.runtime.messages import (
    AskExistence,
    Drain,
    Drained,
    ExistsDone,
    Forget,
    Forgotten,
    HostDown,
    HostUp,
    JobDone,
    PresenceAdded,
    PresenceComplete,
    PresenceRemoved,
    Probe,
    ProbeDone,
    StatsReport,
    SubmitJob,
    ToIO,
)
from kvstore.tiers.presence import Presence
from kvstore.types import (
    Found,
    LookupResult,
    MissCause,
    Outcome,
    RemovalCause,
    RequestContext,
    Source,
    TierEvent,
    TransferJob,
)
from tests.tiers.bench import SLOT, Bench, FakeChannel, job


def test_an_authoritative_tier_answers_in_the_same_call() -> None:
    """After recovery, a lookup is HIT or MISS without a query."""
    bench = Bench()
    bench.hold(b"a")
    assert bench.tier.lookup(b"a") is LookupResult.HIT
    assert bench.tier.lookup(b"b") is LookupResult.MISS
    bench.tier.flush()
    assert bench.channel.sent == []


def test_the_keys_of_a_step_go_over_in_one_question_and_one_wake_up() -> None:
    """A shared tier's unknown keys and the step's jobs are sent in one message."""
    bench = Bench(authoritative=False)
    for key in (b"a", b"b", b"c", b"a"):
        assert bench.tier.lookup(key) is LookupResult.RETRY
    bench.tier.submit_store(job(1, [b"s"]))
    bench.tier.submit_load(job(2, [b"l"]))
    sends = bench.channel.sends
    bench.tier.flush()
    bench.tier.flush()
    assert bench.channel.sends == sends + 1
    [question] = bench.channel.of(AskExistence)
    assert question.keys == (b"a", b"b", b"c")
    bench.answer(ExistsDone(question.question_id, b"\1\0\1", ""))
    assert [bench.tier.lookup(k) for k in (b"a", b"b", b"c")] == [
        LookupResult.HIT,
        LookupResult.MISS,
        LookupResult.HIT,
    ]


def test_an_unanswered_lookup_becomes_a_miss_at_its_deadline() -> None:
    """RETRY ends after the lookup timeout, whatever the medium does."""
    bench = Bench(authoritative=False, lookup_timeout="1s")
    assert bench.tier.lookup(b"a") is LookupResult.RETRY
    bench.tier.flush()
    bench.now += 0.9
    assert bench.tier.lookup(b"a") is LookupResult.RETRY
    bench.now += 0.2
    assert bench.tier.lookup(b"a") is LookupResult.MISS


def test_unknown_block_is_queried_again_after_a_pause() -> None:
    """Without the pause, one failing node would cause a query in every step; unknown is not absent."""
    bench = Bench(authoritative=False, negative_ttl="5s")
    bench.tier.lookup(b"a")
    bench.tier.lookup(b"b")
    bench.tier.flush()
    answers = bytes([Found.UNKNOWN, Found.THERE])
    bench.answer(ExistsDone(bench.channel.of(AskExistence)[0].question_id, answers, ""))
    assert [bench.tier.lookup(key) for key in (b"a", b"b")] == [LookupResult.MISS, LookupResult.HIT]
    bench.tier.flush()
    assert len(bench.channel.of(AskExistence)) == 1
    bench.now += 5.1
    assert bench.tier.lookup(b"a") is LookupResult.RETRY


def test_request_with_a_source_waits_for_no_other_part_of_the_medium() -> None:
    """If its source lacks the block and another part can't say, the lookup is a miss, repeated after a pause."""
    bench = Bench(authoritative=False, breaker_cooldown="1s")
    ctx = RequestContext("r", source=Source("one"))
    assert bench.tier.lookup(b"a", ctx) is LookupResult.RETRY
    bench.tier.flush()
    [question] = bench.channel.of(AskExistence)
    bench.answer(ExistsDone(question.question_id, bytes([Found.UNKNOWN]), "", bytes([Found.ABSENT])))
    bench.now += 0.9
    assert bench.tier.lookup(b"a", ctx) is LookupResult.MISS
    bench.now += 0.2
    assert bench.tier.lookup(b"a", ctx) is LookupResult.RETRY


@pytest.mark.parametrize("found", [Found.THERE, Found.ABSENT])
def test_an_answer_is_read_once_however_late(found: Found) -> None:
    """Without a time to live each lookup queries the medium, and the next lookup has the answer, if nothing changed."""
    right = LookupResult.HIT if found is Found.THERE else LookupResult.MISS
    bench = Bench(authoritative=False, positive_ttl=0, negative_ttl=0)
    for number in range(3):
        assert bench.tier.lookup(b"a") is LookupResult.RETRY
        bench.tier.flush()
        bench.answer(ExistsDone(bench.channel.of(AskExistence)[number].question_id, bytes([found]), ""))
        bench.now += 5
        if number < 2:
            assert bench.tier.lookup(b"a") is right
    bench.now += 60
    assert bench.tier.lookup(b"a") is LookupResult.RETRY


def test_a_removal_wins_over_an_answer_that_was_not_read() -> None:
    """A block that left after its query is no hit."""
    bench = Bench(authoritative=False, positive_ttl=0, negative_ttl=0)
    bench.tier.lookup(b"a")
    bench.tier.flush()
    bench.answer(ExistsDone(bench.channel.of(AskExistence)[0].question_id, bytes([Found.THERE]), ""))
    bench.tier.remove([b"a"])
    assert bench.tier.lookup(b"a") is not LookupResult.HIT


def test_blocks_that_are_there_are_not_written_again() -> None:
    """A store sends only blocks that the tier does not hold, and reports all of them."""
    bench = Bench()
    bench.hold(b"a", b"c")
    bench.tier.submit_store(job(1, [b"a", b"b", b"c"]))
    bench.tier.flush()
    [message] = bench.channel.of(SubmitJob)
    assert (message.keys, message.slots) == ((b"b",), (1,))
    [result] = bench.finish(1, Outcome.OK)
    assert result.success
    assert result.successful_keys == (b"a", b"b", b"c")
    bench.tier.submit_store(job(2, [b"a"]))
    [result] = bench.tier.get_finished()
    assert result.success
    assert result.outcomes == (Outcome.EXISTS,)


def test_a_failed_load_is_never_offered_to_its_request_again() -> None:
    """After HIT and a failed load, the block is MISS for that request until the request ends (vLLM #49176)."""
    bench = Bench(negative_ttl="5s")
    ctx = RequestContext("r")
    bench.hold(b"a")
    assert bench.tier.lookup(b"a", ctx) is LookupResult.HIT
    bench.tier.submit_load(job(1, [b"a"], ctx))
    bench.finish(1, Outcome.IO_ERROR)
    bench.now += 100
    bench.hold(b"a")
    assert bench.tier.lookup(b"a", ctx) is LookupResult.MISS
    assert bench.tier.lookup(b"a", RequestContext("other")) is LookupResult.HIT
    bench.tier.on_request_finished(ctx)
    assert bench.tier.lookup(b"a", RequestContext("r")) is LookupResult.HIT


@pytest.mark.parametrize("outcome", [Outcome.MISS, Outcome.CORRUPT])
def test_a_block_that_was_not_there_leaves_presence_with_an_event(outcome: Outcome) -> None:
    """A load that misses or fails verification removes the block, with the cause."""
    bench = Bench()
    bench.hold(b"a")
    bench.tier.take_events()
    bench.tier.submit_load(job(1, [b"a"]))
    bench.finish(1, outcome)
    bench.now += 1e6
    assert bench.tier.lookup(b"a") is LookupResult.MISS
    cause = RemovalCause.LOST if outcome is Outcome.MISS else RemovalCause.CORRUPT
    assert bench.tier.take_events() == [TierEvent((b"a",), cause)]


def test_stores_beyond_the_backlog_are_shed_and_loads_never() -> None:
    """Over the bound a store is reported as failed immediately; a load is submitted."""
    bench = Bench(store_backlog_bytes=3 * SLOT)
    bench.tier.submit_store(job(1, [b"a", b"b"]))
    bench.tier.submit_store(job(2, [b"c", b"d"]))
    bench.tier.submit_load(job(3, [b"e"] * 1))
    [result] = bench.tier.get_finished()
    assert (result.job_id, result.outcomes) == (2, (Outcome.SHED, Outcome.SHED))
    assert [m.job_id for m in bench.channel.of(SubmitJob)] == [bench.number_of(1), bench.number_of(3)]
    assert bench.tier.stats().shed_blocks == 2
    bench.finish(1, Outcome.OK, Outcome.OK)
    bench.tier.submit_store(job(4, [b"c", b"d"]))
    bench.tier.flush()
    assert bench.channel.of(SubmitJob)[-1].job_id == bench.number_of(4)


def test_a_store_larger_than_the_backlog_is_taken_when_nothing_waits() -> None:
    """The bound limits queues; it does not prevent a large job."""
    bench = Bench(store_backlog_bytes=SLOT)
    bench.tier.submit_store(job(1, [b"a", b"b"]))
    assert bench.tier.get_finished() == []


def test_a_store_that_the_medium_sits_on_is_reported_at_its_deadline() -> None:
    """Slots are not pinned forever; the late answer is not reported again."""
    bench = Bench(store_timeout="2s", bytes_per_second_min="1GiB")
    bench.tier.submit_store(job(1, [b"a"]))
    bench.tier.flush()
    assert bench.channel.of(SubmitJob)[0].deadline == pytest.approx(bench.now + 2, abs=0.01)
    bench.now += 2.05
    assert bench.tier.get_finished() == []
    bench.now += 0.1
    [result] = bench.tier.get_finished()
    assert result.outcomes == (Outcome.TIMEOUT,)
    assert bench.finish(1, Outcome.OK) == []


def test_a_load_is_reported_only_when_the_medium_has_let_go() -> None:
    """A slot that the medium may still write to is never freed early."""
    bench = Bench(load_timeout="1s")
    bench.tier.submit_load(job(1, [b"a"]))
    bench.now += 1000
    assert bench.tier.get_finished() == []
    [result] = bench.finish(1, Outcome.TIMEOUT)
    assert not result.success


def test_failing_loads_open_the_breaker_and_a_probe_closes_it() -> None:
    """With the breaker open lookups miss and loads fail immediately; a successful probe closes it."""
    bench = Bench(breaker_failures=3)
    bench.hold(b"a")
    bench.fail_loads(3)
    assert (bench.tier.stats().load_breaker, bench.tier.stats().ready) == ("open", False)
    assert bench.tier.stats().last_error == "disk on fire"
    assert bench.tier.lookup(b"a") is LookupResult.MISS
    bench.tier.submit_load(job(1, [b"a"]))
    assert [r.success for r in bench.tier.get_finished()] == [False]
    assert len(bench.channel.of(Probe)) == 1
    bench.answer(ProbeDone(2))
    assert (bench.tier.stats().load_breaker, bench.tier.stats().ready) == ("closed", True)
    assert bench.tier.lookup(b"a") is LookupResult.HIT


def test_failed_lookups_open_the_breaker_only_in_a_row() -> None:
    """A lookup that the medium answers resets the count of failures."""
    bench = Bench(authoritative=False, breaker_failures=2, breaker_cooldown="1s")
    for number, error in enumerate(["late", "", "late", "late"]):
        assert bench.tier.stats().load_breaker == "closed"
        assert bench.tier.lookup(b"%d" % number) is LookupResult.RETRY
        bench.tier.flush()
        answers = b"" if error else bytes([Found.ABSENT])
        bench.answer(ExistsDone(bench.channel.of(AskExistence)[-1].question_id, answers, error))
        bench.now += 1.1
    assert bench.tier.stats().load_breaker == "open"


def test_failing_stores_do_not_stop_loads() -> None:
    """Each direction has its own breaker, and a single trial store closes that of stores."""
    bench = Bench(breaker_failures=2, breaker_cooldown="1s")
    bench.hold(b"a")
    for i in (1, 2):
        bench.tier.submit_store(job(i, [b"s%d" % i]))
        bench.finish(i, Outcome.REFUSED, error="read-only")
    assert bench.tier.lookup(b"a") is LookupResult.HIT
    bench.tier.submit_store(job(3, [b"s3"]))
    assert [r.outcomes for r in bench.tier.get_finished()] == [(Outcome.SHED,)]
    bench.now += 1.1
    bench.tier.submit_store(job(4, [b"s4"]))
    bench.tier.submit_store(job(5, [b"s5"]))
    assert [r.job_id for r in bench.tier.get_finished()] == [5]
    bench.finish(4, Outcome.OK)
    assert bench.tier.stats().store_breaker == "closed"


def test_a_trial_that_half_succeeds_is_a_success() -> None:
    """A trial store closes the breaker if the medium stored any block, and its result is always recorded."""
    bench = Bench(breaker_failures=1, breaker_cooldown="1s")
    bench.tier.submit_store(job(1, [b"a"]))
    bench.finish(1, Outcome.IO_ERROR)
    bench.now += 1.1
    bench.tier.submit_store(job(2, [b"b", b"c"]))
    bench.finish(2, Outcome.OK, Outcome.IO_ERROR)
    assert bench.tier.stats().store_breaker == "closed"


def test_a_new_process_begins_with_nothing() -> None:
    """If the I/O process ends, its jobs fail and presence is cleared; the new process starts with a closed breaker."""
    bench = Bench(breaker_failures=1)
    bench.hold(b"a")
    bench.hold(b"lost")
    bench.fail_loads(1)
    bench.tier.submit_store(job(1, [b"s"]))
    [result] = bench.answer(HostDown("killed"))
    assert result.outcomes == (Outcome.IO_ERROR,)
    assert bench.tier.lookup(b"a") is LookupResult.MISS
    bench.tier.submit_load(job(2, [b"a"]))
    assert [r.job_id for r in bench.tier.get_finished()] == [2]
    bench.answer(HostUp(), PresenceAdded((b"a",), recovered=True), PresenceComplete(True, 1, 0.0))
    assert bench.tier.lookup(b"a") is LookupResult.HIT
    assert bench.tier.lookup(b"lost") is LookupResult.MISS
    assert bench.tier.stats().load_breaker == "closed"


def test_a_job_that_was_not_sent_when_the_process_ended_is_never_sent() -> None:
    """The job was reported as failed, so its slots may hold other blocks when the next process runs."""
    bench = Bench(recovered=False)
    bench.tier.submit_load(job(1, [b"a"]))
    bench.channel.answers.extend([HostDown("killed"), HostUp(), PresenceComplete(True, 0, 0.0)])
    assert bench.tier.wait_recovered(1.0)
    (result,) = bench.tier.get_finished()
    assert result.outcomes == (Outcome.IO_ERROR,)
    assert not bench.channel.of(SubmitJob)


def test_a_tenant_is_forgotten_by_the_next_process() -> None:
    """Without an I/O process nothing is asked to forget; the next one is asked, and its answer counts."""
    bench = Bench()
    bench.answer(HostDown("killed"))
    assert not bench.tier.forget(b"tenant")
    bench.tier.flush()
    assert not bench.channel.of(Forget)
    bench.answer(HostUp(), PresenceComplete(True, 0, 0.0))
    assert not bench.tier.forget(b"tenant")
    bench.tier.flush()
    assert bench.channel.of(Forget) == [Forget(b"tenant")]
    bench.answer(Forgotten(b"tenant", ""))
    assert bench.tier.forget(b"tenant")


class LostChannel(FakeChannel):
    """A channel whose process is killed at the first message."""

    def send(self, messages: Sequence[ToIO]) -> None:
        self.answers.append(HostDown("killed"))

    def wait(self, timeout_s: float) -> bool:
        assert self.answers, "nothing else would end this wait"
        return True


def test_a_drain_ends_with_the_process() -> None:
    """The next process does not answer the drain; all jobs have failed, so none is left to wait for."""
    bench = Bench(channel=LostChannel())
    bench.tier.submit_store(job(1, [b"a"]))
    assert bench.tier.drain(5.0)


def reported_changes(bench: Bench) -> tuple[set[bytes], set[bytes]]:
    """Return the blocks that events report as stored and as removed from now on."""
    stored: set[bytes] = set()
    removed: set[bytes] = set()
    while bench.tier.has_unreported:
        for event in bench.tier.take_events():
            (stored if event.cause is None else removed).update(event.keys)
    return stored, removed


def test_only_own_blocks_of_earlier_runs_are_reported() -> None:
    """An engine on a shared directory reports its own blocks; it reports neither arrival nor removal of others."""
    bench = Bench(recovered=False)
    bench.answer(
        PresenceAdded((b"a", b"b"), recovered=True),
        PresenceAdded((b"x",), recovered=True, own=False),
        PresenceAdded((b"y",), recovered=False, own=False),
        PresenceComplete(True, 3, 0.0),
    )
    bench.answer()
    bench.answer()
    assert reported_changes(bench) == ({b"a", b"b"}, set())
    assert {bench.tier.lookup(key) for key in (b"a", b"b", b"x", b"y")} == {LookupResult.HIT}
    bench.answer(PresenceRemoved((b"a", b"x", b"y"), RemovalCause.EVICTED))
    assert reported_changes(bench) == (set(), {b"a"})
    bench.tier.restate_events()
    assert reported_changes(bench) == ({b"b"}, set())


def test_reported_blocks_of_a_silent_medium_are_checked_regularly() -> None:
    """A few per step, and only those reported in events; absent blocks are reported as removed."""
    keys = [b"%d" % i for i in range(200)]
    bench = Bench(authoritative=False, verifies_events=True)
    bench.hold(*keys)
    bench.answer(PresenceAdded((b"other",), recovered=False, own=False))
    assert reported_changes(bench) == (set(keys), set())
    bench.tier.flush()
    assert not bench.channel.of(AskExistence), "not yet"
    bench.now += 301
    for _ in range(3):
        bench.tier.flush()
    questions = bench.channel.of(AskExistence)
    assert [len(question.keys) for question in questions] == [128, 72]
    assert {key for question in questions for key in question.keys} == set(keys)
    for question in questions:
        found = bytes(Found.ABSENT if key in (b"5", b"150") else Found.THERE for key in question.keys)
        bench.answer(ExistsDone(question.question_id, found, ""))
    assert reported_changes(bench) == (set(), {b"5", b"150"})
    silent = Bench(authoritative=False)
    silent.hold(*keys)
    silent.now += 301
    silent.tier.flush()
    assert not silent.channel.sent


def test_loaded_blocks_are_reported_as_accessed() -> None:
    """One event per load, with the blocks that arrived."""
    bench = Bench(access_events=True)
    bench.hold(b"a", b"b")
    bench.tier.take_events()
    bench.tier.submit_load(job(1, [b"a", b"b"]))
    bench.finish_number(1, Outcome.OK, Outcome.IO_ERROR)
    assert [event for event in bench.tier.take_events() if event.accessed] == [TierEvent((b"a",), accessed=True)]


def test_an_idle_engine_steps_until_recovered_blocks_are_reported() -> None:
    """The engine steps even if the scan has found no block yet, but not forever, nor if events are disabled."""
    bench = Bench(recovered=False)
    assert bench.tier.has_unreported
    bench.answer(PresenceAdded((b"a",), recovered=True), PresenceComplete(True, 1, 0.0))
    bench.answer()
    assert reported_changes(bench) == ({b"a"}, set())
    assert not bench.tier.has_unreported
    unanswered = Bench(recovered=False)
    unanswered.now += 61
    assert not unanswered.tier.has_unreported
    assert not Bench(recovered=False, events=False).tier.has_unreported


def test_a_block_of_another_engine_that_this_one_stores_later_is_reported() -> None:
    """The block is reported although presence already had it, because events did not."""
    bench = Bench()
    bench.answer(PresenceAdded((b"a",), recovered=False, own=False))
    bench.answer(PresenceAdded((b"a",), recovered=False))
    assert reported_changes(bench) == ({b"a"}, set())


def test_events_follow_the_death_of_the_io_process() -> None:
    """Its blocks become misses, so they are reported as removed, and as stored again once they are found."""
    bench = Bench()
    bench.hold(b"a", b"b")
    assert reported_changes(bench) == ({b"a", b"b"}, set())
    bench.answer(HostDown("killed"))
    assert reported_changes(bench) == (set(), {b"a", b"b"})
    bench.answer(HostUp(), PresenceAdded((b"a",), recovered=True), PresenceComplete(True, 1, 0.0))
    assert reported_changes(bench) == ({b"a"}, set())


def test_forgotten_blocks_of_a_shared_medium_are_reported_as_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgotten blocks are reported as removed; otherwise a consumer would keep them forever."""
    monkeypatch.setattr(Presence.__init__, "__kwdefaults__", {**Presence.__init__.__kwdefaults__, "shared_max": 2})
    bench = Bench(authoritative=False)
    bench.hold(b"a", b"b", b"c")
    assert reported_changes(bench) == ({b"b", b"c"}, set())
    bench.hold(b"d")
    assert reported_changes(bench) == ({b"d"}, {b"b"})


def test_blocks_that_are_absent_or_damaged_are_no_failure_of_the_medium() -> None:
    """Misses and corrupt blocks never open a breaker."""
    bench = Bench(breaker_failures=1)
    for i, outcome in enumerate((Outcome.MISS, Outcome.CORRUPT), start=2):
        bench.tier.submit_load(job(i, [b"k"]))
        bench.finish(i, outcome)
    stats = bench.tier.stats()
    assert (stats.load_breaker, stats.store_breaker) == ("closed", "closed")


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (TransferJob(1, [b"a"], [64]), "it has slot 64. The primary tier has slots 0 to 63."),
        (TransferJob(1, [b"a"], [-1]), "it has slot -1. The primary tier has slots 0 to 63."),
        (TransferJob(1, [b""], [0]), "it has a key of 0 bytes. Expected bytes, 1 to 64 long."),
        (TransferJob(1, cast(Any, ["a"]), [0]), "it has a key of type str. Expected bytes, 1 to 64 long."),
        (TransferJob(1, [b"a"], [0, 1]), "it has 1 keys and 2 slots. Give one slot for each key."),
    ],
)
def test_invalid_job_is_refused_at_once(bad: TransferJob, said: str, caplog: pytest.LogCaptureFixture) -> None:
    """It never reaches the medium, and does not affect its health; statistics and the log say what is wrong."""
    bench = Bench(breaker_failures=1)
    for submit in (bench.tier.submit_load, bench.tier.submit_store):
        submit(bad)
        [result] = bench.tier.get_finished()
        assert result.outcomes == (Outcome.REFUSED,)
        assert bench.tier.stats().last_error.endswith(said)
        assert said in caplog.text
    assert bench.channel.of(SubmitJob) == []
    assert bench.tier.stats().load_breaker == "closed"


def test_a_load_into_one_slot_twice_is_refused() -> None:
    """Two blocks in one slot would overwrite each other; storing one slot under two keys is valid."""
    bench = Bench()
    twice = TransferJob(1, [b"a", b"b"], [3, 3])
    bench.tier.submit_load(twice)
    assert [result.outcomes for result in bench.tier.get_finished()] == [(Outcome.REFUSED,) * 2]
    assert bench.tier.stats().last_error.endswith("two blocks are to be loaded into slot 3. Give each its own.")
    bench.tier.submit_store(twice)
    assert [result.outcomes for result in bench.finish(1, Outcome.OK, Outcome.OK)] == [(Outcome.OK,) * 2]


def test_a_late_load_waits_for_an_answer_that_is_hurried() -> None:
    """Its slots may still be written to, so it is not abandoned, and a stopped I/O half is detected soon."""
    bench = Bench(load_timeout=2)
    bench.hold(b"k")
    bench.tier.submit_load(TransferJob(1, [b"k"], [0]))
    assert bench.answer() == []
    bench.now += 2.05
    assert bench.answer() == []
    assert bench.channel.hurries == 0
    bench.now += 0.1
    assert bench.answer() == []
    assert bench.channel.hurries == 1
    (result,) = bench.finish(1, Outcome.TIMEOUT)
    assert result.job_id == 1
    assert bench.answer() == []
    assert bench.channel.hurries == 1


def test_a_late_answer_is_never_that_of_another_job_with_the_same_id() -> None:
    """An abandoned store's id may be reused; its late answer does not affect the next job."""
    bench = Bench(store_timeout=1)
    bench.tier.submit_store(job(5, [b"a"]))
    bench.tier.flush()
    first = bench.number_of(5)
    bench.now += 10
    assert [result.outcomes for result in bench.tier.get_finished()] == [(Outcome.TIMEOUT,)]
    bench.tier.submit_load(job(5, [b"b"]))
    assert bench.finish_number(first, Outcome.OK) == []
    [result] = bench.finish(5, Outcome.MISS)
    assert (result.job_id, result.outcomes) == (5, (Outcome.MISS,))


def test_two_running_jobs_with_one_id_are_both_reported() -> None:
    """A caller's mistake loses no result, and no exception is raised."""
    bench = Bench()
    bench.tier.submit_load(job(9, [b"a"]))
    bench.tier.submit_load(job(9, [b"b", b"c"]))
    bench.tier.flush()
    numbers = [message.job_id for message in bench.channel.of(SubmitJob)]
    assert [result.outcomes for result in bench.finish_number(numbers[1], Outcome.OK, Outcome.OK)] == [
        (Outcome.OK,) * 2
    ]
    assert [result.outcomes for result in bench.finish_number(numbers[0], Outcome.OK)] == [(Outcome.OK,)]


def test_close_reports_unanswered_jobs_as_failed() -> None:
    """A job without an answer at close is reported as failed, exactly once; later jobs fail immediately."""
    bench = Bench()
    bench.tier.submit_load(job(1, [b"a"]))
    bench.tier.flush()
    bench.tier.close(1)
    bench.tier.close(1)
    assert [(r.job_id, r.outcomes) for r in bench.tier.get_finished()] == [(1, (Outcome.CANCELLED,))]
    bench.tier.submit_store(job(2, [b"a"]))
    assert [r.job_id for r in bench.tier.get_finished()] == [2]
    assert bench.tier.drain(1)


class Reporting(RuleBasedStateMachine):
    """In any order of events each job is reported exactly once, and the bookkeeping returns to zero."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(store_backlog_bytes=8 * SLOT, breaker_failures=2, breaker_cooldown="1s", store_timeout="3s")
        self.next_id = 0
        self.submitted: dict[int, int] = {}
        self.reported: set[int] = set()
        self.late: list[int] = []

    def take(self, results: Sequence[Any]) -> None:
        """Check results on arrival."""
        for result in results:
            assert result.job_id in self.submitted, "a result for a job that nobody submitted"
            assert result.job_id not in self.reported, "a job reported twice"
            assert len(result.outcomes) == self.submitted[result.job_id]
            assert result.success == (len(result.successful_keys) == self.submitted[result.job_id])
            self.reported.add(result.job_id)

    @rule(keys=st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True), load=st.booleans())
    def submit(self, keys: list[int], load: bool) -> None:
        """Submit a job."""
        self.next_id += 1
        self.submitted[self.next_id] = len(keys)
        submit = self.bench.tier.submit_load if load else self.bench.tier.submit_store
        submit(job(self.next_id, [b"k%d" % k for k in keys], RequestContext("r")))

    @rule(pick=st.randoms(use_true_random=False))
    def answer(self, pick: Any) -> None:
        """Let the I/O half answer one of its jobs, perhaps long after the job was abandoned."""
        self.bench.tier.flush()
        open_jobs = [m for m in self.bench.channel.of(SubmitJob) if m.job_id not in self.late]
        if open_jobs:
            message = pick.choice(open_jobs)
            self.late.append(message.job_id)
            outcomes = [pick.choice(list(Outcome)) for _ in message.keys]
            self.take(self.bench.finish_number(message.job_id, *outcomes))

    @rule(keys=st.lists(st.integers(0, 30), max_size=6), added=st.booleans())
    def presence(self, keys: list[int], added: bool) -> None:
        """Blocks appear and disappear."""
        names = tuple(b"k%d" % k for k in keys)
        message = PresenceAdded(names, recovered=False) if added else PresenceRemoved(names, RemovalCause.EVICTED)
        self.take(self.bench.answer(message))

    @rule(seconds=st.floats(0.1, 5))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.bench.now += seconds
        self.take(self.bench.tier.get_finished())

    @rule()
    def probe(self) -> None:
        """The medium answers a probe."""
        self.take(self.bench.answer(ProbeDone(1)))

    @invariant()
    def bookkeeping(self) -> None:
        """Bytes in flight are never negative, and zero without jobs."""
        stats = self.bench.tier.stats()
        assert stats.bytes_in_flight >= 0
        assert (stats.jobs_in_flight == 0) == (stats.bytes_in_flight == 0)

    def teardown(self) -> None:
        """After close every submitted job has been reported."""
        self.bench.tier.close(1)
        self.take(self.bench.tier.get_finished())
        assert self.reported == set(self.submitted)


TestReporting = Reporting.TestCase
TestReporting.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def test_a_drain_lasts_until_its_answer_or_its_timeout() -> None:
    """Without a timeout it waits as long as the I/O half needs."""
    bench = Bench()
    channel = bench.channel
    answer_at = 0.0

    def wait(timeout_s: float) -> bool:
        bench.now += timeout_s
        if bench.now >= answer_at:
            channel.answers.append(Drained(bench.channel.of(Drain)[-1].drain_id))
        return bool(channel.answers)

    assert bench.tier.drain()
    send = channel.send
    channel.send = lambda messages: (send(messages), channel.answers.clear())[0]  # type: ignore[method-assign]
    channel.wait = wait  # type: ignore[method-assign]
    answer_at, began = bench.now + 100, bench.now
    assert not bench.tier.drain(2.5)
    assert bench.now == began + 2.5
    assert bench.tier.drain()
    assert bench.now >= answer_at


def test_a_step_takes_in_a_bounded_number_of_recovered_blocks() -> None:
    """Millions of recovered blocks are spread over steps, as a single step would take seconds."""
    bench = Bench(recovered=False)
    keys = [b"%d" % number for number in range(8192)]
    bench.channel.answers.extend(PresenceAdded(tuple(keys), recovered=True) for _ in range(100))
    bench.tier.get_finished()
    assert len(bench.channel.answers) == 96
    bench.tier.get_finished()
    assert len(bench.channel.answers) == 92


def cause_of(bench: Bench, key: bytes, ctx: RequestContext | None = None) -> MissCause:
    """Return the cause of a lookup's miss."""
    assert bench.tier.lookup(key, ctx) is LookupResult.MISS
    return bench.tier.miss_cause


@pytest.mark.parametrize("cause", RemovalCause)
def test_a_miss_names_the_cause_for_which_the_block_left(cause: RemovalCause) -> None:
    """A block that left has the cause of its removal, and one that was never there is absent."""
    bench = Bench()
    bench.hold(b"a")
    bench.answer(PresenceRemoved((b"a",), cause))
    assert cause_of(bench, b"a") is MissCause(cause.value)
    assert cause_of(bench, b"b") is MissCause.ABSENT


def test_a_miss_of_a_tier_that_cannot_answer_names_its_state() -> None:
    """An open breaker, an ended I/O process, a new epoch and a closed medium differ from absent blocks."""
    bench = Bench(breaker_failures=1)
    bench.hold(b"a")
    bench.fail_loads(1)
    assert cause_of(bench, b"a") is MissCause.BREAKER
    bench.answer(HostDown("killed"))
    assert cause_of(bench, b"a") is MissCause.DOWN
    bench.answer(HostUp(), PresenceComplete(True, 0, 0.0), StatsReport(0, 0, 0, {}, {}, ready=False))
    assert cause_of(bench, b"b") is MissCause.DOWN
    bench.answer(StatsReport(0, 0, 0, {}, {}))
    assert cause_of(bench, b"b") is MissCause.ABSENT
    bench.tier.begin_epoch()
    assert cause_of(bench, b"a") is MissCause.RESETTING
    shared = Bench(authoritative=False, lookup_timeout="1s")
    shared.answer(StatsReport(0, 0, 0, {}, {}, ready=False))
    assert shared.tier.lookup(b"a") is LookupResult.RETRY
    shared.now += 1.1
    assert cause_of(shared, b"a") is MissCause.DOWN


@pytest.mark.parametrize("recovered", [True, False])
def test_a_miss_without_an_answer_in_time_names_the_recovery(recovered: bool) -> None:
    """A lookup without an answer is late, during recovery because of it."""
    bench = Bench(authoritative=False, recovered=recovered, lookup_timeout="1s")
    assert bench.tier.lookup(b"a") is LookupResult.RETRY
    bench.tier.flush()
    bench.now += 1.1
    assert cause_of(bench, b"a") is (MissCause.TIMEOUT if recovered else MissCause.RECOVERING)


@pytest.mark.parametrize(("outcome", "cause"), [(Outcome.CORRUPT, MissCause.CORRUPT), (Outcome.MISS, MissCause.LOST)])
@pytest.mark.parametrize("is_reported", [True, False])
def test_a_miss_after_a_damaged_or_lost_block_names_it(outcome: Outcome, cause: MissCause, is_reported: bool) -> None:
    """Also other requests miss for that reason, whether the removal or the load is reported first."""
    bench, ctx = Bench(), RequestContext("r")
    bench.hold(b"a")
    bench.tier.submit_load(job(1, [b"a"], ctx))
    if is_reported:
        bench.answer(PresenceRemoved((b"a",), RemovalCause(cause.value)))
    bench.finish(1, outcome)
    assert cause_of(bench, b"a", ctx) is cause
    assert cause_of(bench, b"a") is cause


def test_the_cause_of_an_earlier_removal_explains_no_failure() -> None:
    """A block that was evicted, stored again and then failed to load has not been evicted."""
    bench, ctx = Bench(), RequestContext("r")
    bench.hold(b"a")
    bench.answer(PresenceRemoved((b"a",), RemovalCause.EVICTED))
    bench.hold(b"a")
    bench.tier.submit_load(job(1, [b"a"], ctx))
    bench.finish(1, Outcome.IO_ERROR)
    assert cause_of(bench, b"a", ctx) is MissCause.FAILED


def test_a_miss_after_a_failure_is_a_failure() -> None:
    """The request of a failed load, and all requests after a failed lookup, miss because of that failure."""
    bench, ctx = Bench(), RequestContext("r")
    bench.hold(b"a")
    bench.tier.submit_load(job(1, [b"a"], ctx))
    bench.finish(1, Outcome.IO_ERROR)
    assert cause_of(bench, b"a", ctx) is MissCause.FAILED
    shared = Bench(authoritative=False)
    assert shared.tier.lookup(b"a") is LookupResult.RETRY
    shared.tier.flush()
    shared.answer(ExistsDone(shared.channel.of(AskExistence)[0].question_id, b"", "connection refused"))
    assert cause_of(shared, b"a") is MissCause.FAILED


def test_damaged_records_are_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """At once, and then at most once a minute, with all counts since the start."""
    bench = Bench()
    for job_id, wait_s in ((1, 0), (2, 59), (3, 2)):
        bench.now += wait_s
        bench.tier.submit_load(job(job_id, [b"k%d" % job_id]))
        bench.answer(JobDone(bench.number_of(job_id), bytes([Outcome.CORRUPT]), 0, 0.0, {"payload": 1}, ""))
    found = [record.getMessage().partition("(since the start: ")[2].partition(")")[0] for record in caplog.records]
    assert list(filter(None, found)) == ["payload: 1", "payload: 3"]
