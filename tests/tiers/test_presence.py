"""Presence and existence: cached answers, and queries to the medium."""

from __future__ import annotations

import pytest

from kvstore.tiers.presence import Existence, FailedLoads, Presence
from kvstore.types import Found, RequestContext, Source

ONE, TWO, THREE = Source("one"), Source("two"), Source("three")


def authoritative() -> Presence:
    """Presence of an authoritative tier."""
    return Presence(authoritative=True, positive_ttl_s=10, negative_ttl_s=5)


def shared() -> Presence:
    """Presence of a tier with other writers."""
    return Presence(authoritative=False, positive_ttl_s=10, negative_ttl_s=5)


def test_authoritative_tier_reports_absence_only_after_recovery() -> None:
    """Before the scan has ended an unlisted key is unknown; afterwards it is absent."""
    presence = authoritative()
    assert presence.holds(b"k", 0) is None
    presence.end_recovery(authoritative=True)
    presence.absorb(0)
    assert presence.holds(b"k", 0) is False
    presence.add([b"k"], 0)
    assert presence.holds(b"k", 1e9) is True
    assert b"k" in presence and b"other" not in presence


def test_recovered_keys_are_absorbed_a_batch_at_a_time() -> None:
    """Each call processes one batch, and presence is complete only after the last one."""
    presence = authoritative()
    presence.recover([b"a"])
    presence.recover([b"b"])
    presence.end_recovery(authoritative=True)
    assert presence.absorb(0) == ([b"a"], True)
    assert not presence.complete
    assert presence.absorb(0) == ([b"b"], True)
    assert presence.complete
    assert len(presence) == 2


def test_a_block_evicted_during_recovery_does_not_come_back() -> None:
    """A removal that is reported before the scan lists the block remains in effect."""
    presence = authoritative()
    presence.recover([b"a", b"b"])
    assert presence.remove([b"a"]) == []
    presence.end_recovery(authoritative=True)
    presence.absorb(0)
    assert presence.holds(b"a", 0) is False
    assert presence.holds(b"b", 0) is True


def test_a_block_put_again_during_recovery_stays() -> None:
    """A block evicted and stored again before its batch is processed is present."""
    presence = authoritative()
    presence.recover([b"a"])
    presence.remove([b"a"])
    presence.add([b"a"], 0)
    presence.end_recovery(authoritative=True)
    presence.absorb(0)
    assert presence.holds(b"a", 0) is True


def test_a_scan_that_ended_early_leaves_the_medium_to_be_asked() -> None:
    """No key is known to be absent then, presence lasts only for the TTL, and removals are no longer recorded."""
    presence = authoritative()
    presence.recover([b"a"])
    presence.end_recovery(authoritative=False)
    presence.absorb(0)
    assert presence.complete
    assert presence.holds(b"a", 9) is True
    assert presence.holds(b"a", 11) is None
    assert presence.holds(b"b", 0) is None
    presence.add([b"b"], 0)
    assert presence.holds(b"b", 9) is True
    assert presence.holds(b"b", 11) is None


def test_a_shared_tier_remembers_so_many_blocks_and_no_more() -> None:
    """The oldest answers are dropped first, and queried again."""
    presence = Presence(authoritative=False, positive_ttl_s=10, negative_ttl_s=5, shared_max=3)
    presence.add([b"a", b"b", b"c"], 0)
    presence.add([b"a"], 1)
    presence.add([b"d"], 2)
    assert len(presence) == 3
    assert presence.holds(b"b", 3) is None
    assert all(presence.holds(key, 3) is True for key in (b"a", b"c", b"d"))


def test_a_removed_block_does_not_count_among_those_remembered() -> None:
    """Removed blocks free their entries, so no other block is dropped."""
    presence = Presence(authoritative=False, positive_ttl_s=10, negative_ttl_s=5, shared_max=3)
    presence.add([b"a", b"b", b"c"], 0)
    presence.remove([b"b"])
    presence.add([b"d"], 1)
    assert sorted(presence.keys()) == [b"a", b"c", b"d"]


def test_answers_of_a_shared_tier_expire() -> None:
    """Positive and negative answers of a shared tier expire after their TTL."""
    presence = shared()
    presence.end_recovery(authoritative=True)
    presence.absorb(0)
    assert presence.holds(b"k", 0) is None
    presence.note_absent([b"k"], 0)
    assert presence.holds(b"k", 4.9) is False
    assert presence.holds(b"k", 5.1) is None
    presence.add([b"k"], 6)
    assert presence.holds(b"k", 15.9) is True
    assert presence.holds(b"k", 16.1) is None


def test_lookups_of_one_key_share_one_query() -> None:
    """Lookups of one key share one query, which carries all pending keys."""
    existence = Existence(timeout_s=1, error_pause_s=1)
    for _ in range(3):
        assert existence.ask(b"a", 0)
        assert existence.ask(b"b", 0)
    (question,) = existence.take_questions(0)
    question_id, keys, deadline = question.question_id, question.keys, question.deadline
    assert keys == (b"a", b"b")
    assert deadline == 1
    assert existence.ask(b"a", 0.5)
    assert existence.take_questions(0.5) == []
    assert existence.answered(question_id, b"\0\1", 0.6) == ([b"b"], [b"a"], [])
    assert existence.answered(question_id, b"\0\1", 0.6) == ([], [], [])


def test_unanswered_query_is_abandoned_at_the_lookup_deadline() -> None:
    """After its deadline a query without an answer is not waited for, and not repeated."""
    existence = Existence(timeout_s=1, error_pause_s=1)
    assert existence.ask(b"a", 0)
    existence.take_questions(0)
    assert not existence.ask(b"a", 1.0)
    assert not existence.unasked


def test_after_an_error_nothing_is_asked_for_a_while_and_nothing_is_known() -> None:
    """An error causes a pause, not an absence: afterwards the key is queried again."""
    existence = Existence(timeout_s=1, error_pause_s=2)
    existence.ask(b"a", 0)
    (question,) = existence.take_questions(0)
    question_id = question.question_id
    existence.answered(question_id, b"", 0.5)
    assert not existence.ask(b"a", 1.0)
    assert existence.ask(b"a", 2.6)


def test_failed_load_is_a_permanent_miss_for_its_own_request() -> None:
    """The request whose load failed never hits again; other requests may retry after the pause."""
    failed = FailedLoads(retry_after_s=5)
    one, two = RequestContext("1"), RequestContext("2")
    failed.note([b"k"], one, 0)
    assert failed.blocks(b"k", two, 4.9)
    assert not failed.blocks(b"k", two, 5.1)
    assert failed.blocks(b"k", one, 1e6)
    assert not failed.blocks(b"other", one, 0)
    failed.forget_request("1")
    assert not failed.blocks(b"k", RequestContext("1"), 1e6)


def test_failed_loads_of_unfinished_requests_are_bounded() -> None:
    """A load that fails after its request has ended leaves no permanent entry."""
    failed = FailedLoads(retry_after_s=5)
    for i in range(5000):
        failed.note([b"k"], RequestContext(str(i)), 0)
    assert not failed.blocks(b"k", RequestContext("0"), 1e6)
    assert failed.blocks(b"k", RequestContext("4999"), 1e6)
    assert len(failed._by_request) <= 4096


def test_an_absence_from_before_a_request_named_its_source_does_not_count() -> None:
    """An absence counts only if it was found at ``since`` or later."""
    presence = shared()
    presence.note_absent([b"k"], 10)
    assert presence.holds(b"k", 11, since=10) is False
    assert presence.holds(b"k", 11, since=10.5) is None


def test_requests_of_one_step_may_name_different_sources() -> None:
    """Requests that look up a block in one step, each with another source or none, do not share a question."""
    existence = Existence(timeout_s=1, error_pause_s=1)
    assert existence.ask(b"a", 0.0, ONE)
    assert existence.ask(b"a", 0.0, TWO)
    assert existence.ask(b"a", 0.0)
    asked = [(question.keys, question.sources) for question in existence.take_questions(0.0)]
    assert asked == [((b"a",), (ONE,)), ((b"a",), (TWO,)), ((b"a",), ())]
    assert existence.ask(b"a", 0.1, TWO)
    assert existence.take_questions(0.1) == []


def test_the_number_of_open_questions_is_bounded() -> None:
    """Over the limit a lookup is a MISS, until an answer makes room."""
    existence = Existence(timeout_s=1, error_pause_s=1, pending_max=2)
    assert [existence.ask(key, 0) for key in (b"a", b"b", b"c")] == [True, True, False]
    (question,) = existence.take_questions(0)
    existence.answered(question.question_id, b"\0\0", 0.1)
    assert existence.ask(b"c", 0.1)


@pytest.mark.parametrize(("limit", "second"), [({"sources_max": 1}, Source("one", b"2")), ({"addresses_max": 1}, TWO)])
def test_the_sources_of_a_step_are_bounded(limit: dict[str, int], second: Source) -> None:
    """A further source or address is queried in the next step, when its request looks up the block again."""
    existence = Existence(timeout_s=1, error_pause_s=1, **limit)
    first = Source("one", b"1")
    assert existence.ask(b"a", 0, first)
    assert existence.ask(b"b", 0, second)
    (question,) = existence.take_questions(0)
    assert (question.keys, question.sources) == ((b"a",), (first,))
    assert existence.ask(b"b", 0, second)
    (question,) = existence.take_questions(0)
    assert (question.keys, question.sources) == ((b"b",), (second,))


def test_hand_overs_of_one_engine_share_a_question() -> None:
    """Many requests of one step that name the same engine cost one question."""
    existence = Existence(timeout_s=1, error_pause_s=1)
    sources = [Source("one", b"%d" % number) for number in range(20)]
    for number, source in enumerate(sources):
        assert existence.ask(b"%d" % number, 0, source)
    (question,) = existence.take_questions(0)
    assert question.sources == tuple(sources) and len(question.keys) == 20


def test_a_failure_elsewhere_does_not_end_the_wait_for_a_source() -> None:
    """While a source waits for its hand-over, an unknown answer of the others counts for requests without it only."""
    existence = Existence(timeout_s=1, error_pause_s=1)
    ctx = RequestContext("r", source=ONE, since=0.0, patience_s=60.0)
    for now, state in ((5.0, Found.COMING), (6.0, Found.ABSENT)):
        assert existence.ask(b"a", now, ONE)
        (question,) = existence.take_questions(now)
        answered = existence.answered(question.question_id, bytes((Found.UNKNOWN,)), now, bytes((state,)))
        assert answered == ([], [], []), "unknown to this request only"
        assert existence.is_open(b"a", now + 0.1, ctx) is (state is Found.COMING)
    # The block may be elsewhere, so it is a miss, and queried again after a pause.
    assert existence.has_failed(b"a", 6.9, ONE) and not existence.has_failed(b"a", 7.1, ONE)
    assert not existence.has_failed(b"a", 6.9, TWO) and not existence.has_failed(b"a", 6.9, None)


def test_only_the_blocks_of_a_hand_over_are_waited_for_on_its_account() -> None:
    """A source without a hand-over's blocks keeps only that hand-over's request waiting."""
    existence = Existence(timeout_s=1, error_pause_s=1)
    early, late = Source("one", b"early"), Source("one", b"late")
    waits = RequestContext("waits", source=late, since=0.0, patience_s=60.0)
    lost = RequestContext("lost", source=early, since=0.0, patience_s=60.0)
    for source in (early, late):
        assert existence.ask(b"a", 5.0, source)
    (question,) = existence.take_questions(5.0)
    existence.answered(question.question_id, bytes((Found.ABSENT,)), 5.1, bytes((Found.ABSENT, Found.COMING)))
    assert existence.is_open(b"a", 5.2, waits)
    assert not existence.is_open(b"a", 5.2, lost)
    # Answers found for other requests don't answer a request whose source has not been queried.
    new = RequestContext("new", source=Source("one", b"new"), since=0.0, patience_s=60.0)
    assert existence.is_open(b"a", 5.2, new)
    assert existence.ask(b"a", 5.2, new.source)
    (question,) = existence.take_questions(5.2)
    assert question.sources == (new.source,)
    existence.answered(question.question_id, bytes((Found.ABSENT,)), 5.3, bytes((Found.ABSENT,)))
    assert not existence.is_open(b"a", 5.4, new)
    assert existence.is_open(b"a", 5.4, waits)
    assert not existence.is_open(b"a", 60.0, waits)


def test_block_queried_before_its_hand_over_is_queried_again() -> None:
    """Of two running queries only the later one finds the hand-over: the block is queried again."""
    existence = Existence(timeout_s=1, error_pause_s=1)
    ctx = RequestContext("r", source=ONE, since=0.0, patience_s=60.0)
    questions = []
    for key in (b"a", b"b"):
        assert existence.ask(key, 5.0, ONE)
        questions += existence.take_questions(5.0)
    existence.answered(questions[0].question_id, bytes((Found.ABSENT,)), 5.1, bytes((Found.COMING,)))
    existence.answered(questions[1].question_id, bytes((Found.ABSENT,)), 5.1, bytes((Found.ABSENT,)))
    assert existence.is_open(b"a", 5.2, ctx)
    assert not existence.is_open(b"b", 5.2, ctx)
    assert existence.ask(b"a", 5.2, ONE)
    (question,) = existence.take_questions(5.2)
    existence.answered(question.question_id, bytes((Found.ABSENT,)), 5.3, bytes((Found.ABSENT,)))
    assert not existence.is_open(b"a", 5.4, ctx)


def test_only_a_request_that_names_a_source_waits_for_an_absent_block() -> None:
    """Without a source a negative answer holds until it expires, however patient the request is."""
    existence = Existence(timeout_s=1, error_pause_s=1)
    patient = {"since": 0.0, "patience_s": 60.0}
    assert existence.is_open(b"a", 1.0, RequestContext("r", source=ONE, **patient))
    assert not existence.is_open(b"a", 1.0, RequestContext("r", **patient))
    assert not existence.is_open(b"a", 1.0, None)


def test_a_block_to_come_is_looked_up_every_20_ms_at_most() -> None:
    """In between, a request waits without a query, although each step looks up the block."""
    existence = Existence(timeout_s=1, error_pause_s=1)
    assert existence.ask(b"a", 0.0, ONE)
    (question,) = existence.take_questions(0.0)
    existence.answered(question.question_id, bytes((Found.COMING,)), 1.0, bytes((Found.ABSENT,)))
    assert existence.ask(b"a", 1.01, ONE) and not existence.unasked
    assert existence.ask(b"a", 1.03, ONE) and existence.unasked


def test_source_with_a_late_hand_over_is_waited_for() -> None:
    """A router may send a request to the decoding engine first, before the other engine has the hand-over."""
    existence = Existence(timeout_s=1, error_pause_s=1)
    ctx = RequestContext("r", source=ONE, since=0.0, patience_s=60.0)
    for now, state in ((0.1, Found.ABSENT), (0.5, Found.COMING)):
        assert existence.is_open(b"a", now, ctx)
        assert existence.ask(b"a", now, ONE)
        (question,) = existence.take_questions(now)
        existence.answered(question.question_id, bytes((Found.ABSENT,)), now, bytes((state,)))
    assert existence.is_open(b"a", 5.0, ctx)


def test_request_may_extend_the_wait_for_a_late_hand_over() -> None:
    """A source without the block is queried again until the deadline for its notification of the request."""
    existence = Existence(timeout_s=1, error_pause_s=1)
    ctx = RequestContext("r", source=ONE, since=0.0, patience_s=60.0, unheard_s=4.0)
    assert existence.ask(b"a", 0.1, ONE)
    (question,) = existence.take_questions(0.1)
    existence.answered(question.question_id, bytes((Found.ABSENT,)), 0.1, bytes((Found.ABSENT,)))
    assert existence.is_open(b"a", 3.9, ctx)
    assert not existence.is_open(b"a", 4.1, ctx)


def test_the_sources_remembered_for_a_block_are_bounded() -> None:
    """A missing block that many requests look up does not accumulate all their sources."""
    existence = Existence(timeout_s=1, error_pause_s=1)
    for number in range(1000):
        source = Source("one", b"%d" % number)
        assert existence.ask(b"a", float(number), source)
        (question,) = existence.take_questions(float(number))
        existence.answered(question.question_id, bytes((Found.ABSENT,)), number + 0.1, bytes((Found.ABSENT,)))
        ctx = RequestContext("r", source=source, since=number - 5.0, patience_s=60.0)
        assert not existence.is_open(b"a", number + 0.2, ctx)
    (answer,) = existence._source_answers.values()
    assert len(answer.settled) <= 256


@pytest.mark.parametrize("answer", [bytes((Found.UNKNOWN,)), b""], ids=["unknown", "no answer"])
def test_block_of_a_failed_source_is_not_waited_for(answer: bytes) -> None:
    """A block that a source announced is waited for until that source fails to answer."""
    existence = Existence(timeout_s=1, error_pause_s=1)
    ctx = RequestContext("r", source=ONE, since=0.0, patience_s=60.0)
    assert existence.ask(b"a", 0.0, ONE)
    (question,) = existence.take_questions(0.0)
    existence.answered(question.question_id, bytes((Found.COMING,)), 0.1, bytes((Found.ABSENT,)))
    assert existence.is_open(b"a", 0.2, ctx)
    assert existence.ask(b"a", 0.2, ONE)
    (question,) = existence.take_questions(0.2)
    existence.answered(question.question_id, answer, 0.3, answer)
    assert not existence.is_open(b"a", 0.4, ctx)
