"""Presence and existence: what is known without asking, and who asks."""

from __future__ import annotations

from kvstore.tiers.existence import Existence
from kvstore.tiers.failures import FailedLoads
from kvstore.tiers.presence import Known, Presence
from kvstore.types import RequestContext


def exclusive() -> Presence:
    """Presence of a tier that nobody else writes to."""
    return Presence(exclusive=True, positive_ttl_s=10, negative_ttl_s=5)


def shared() -> Presence:
    """Presence of a tier that others write to as well."""
    return Presence(exclusive=False, positive_ttl_s=10, negative_ttl_s=5)


def test_an_exclusive_tier_knows_absence_only_after_recovery() -> None:
    """Before the scan has ended an unknown key is unknown, afterwards it is absent."""
    presence = exclusive()
    assert presence.known(b"k", 0) is Known.UNKNOWN
    presence.end_recovery(authoritative=True)
    presence.absorb(0)
    assert presence.known(b"k", 0) is Known.ABSENT
    presence.add([b"k"], 0)
    assert presence.known(b"k", 1e9) is Known.PRESENT


def test_recovered_keys_are_absorbed_a_batch_at_a_time() -> None:
    """Each call takes in one batch, and only the last one makes presence complete."""
    presence = exclusive()
    presence.recover([b"a"])
    presence.recover([b"b"])
    presence.end_recovery(authoritative=True)
    assert list(presence.absorb(0)) == [b"a"]
    assert not presence.complete
    assert list(presence.absorb(0)) == [b"b"]
    assert presence.complete
    assert len(presence) == 2


def test_a_block_evicted_during_recovery_does_not_come_back() -> None:
    """A removal that overtakes the scan's own notice of the block stands."""
    presence = exclusive()
    presence.recover([b"a", b"b"])
    assert presence.remove([b"a"]) == []
    presence.end_recovery(authoritative=True)
    presence.absorb(0)
    assert presence.known(b"a", 0) is Known.ABSENT
    assert presence.known(b"b", 0) is Known.PRESENT


def test_a_block_put_again_during_recovery_stays() -> None:
    """Evicted and then put again before its batch is absorbed, a block is present."""
    presence = exclusive()
    presence.recover([b"a"])
    presence.remove([b"a"])
    presence.add([b"a"], 0)
    presence.end_recovery(authoritative=True)
    presence.absorb(0)
    assert presence.known(b"a", 0) is Known.PRESENT


def test_a_scan_that_ended_early_leaves_the_medium_to_be_asked() -> None:
    """Absence is known of no key then, presence only for the TTL, and removals are no longer remembered."""
    presence = exclusive()
    presence.recover([b"a"])
    presence.end_recovery(authoritative=False)
    presence.absorb(0)
    assert presence.complete
    assert presence.known(b"a", 9) is Known.PRESENT
    assert presence.known(b"a", 11) is Known.UNKNOWN
    assert presence.known(b"b", 0) is Known.UNKNOWN
    presence.add([b"b"], 0)
    assert presence.known(b"b", 9) is Known.PRESENT
    assert presence.known(b"b", 11) is Known.UNKNOWN


def test_a_shared_tier_remembers_so_many_blocks_and_no_more() -> None:
    """The oldest answers are forgotten first, and asked for again."""
    presence = Presence(exclusive=False, positive_ttl_s=10, negative_ttl_s=5, shared_max=3)
    presence.add([b"a", b"b", b"c"], 0)
    presence.add([b"a"], 1)
    presence.add([b"d"], 2)
    assert len(presence) == 3
    assert presence.known(b"b", 3) is Known.UNKNOWN
    assert all(presence.known(key, 3) is Known.PRESENT for key in (b"a", b"c", b"d"))


def test_answers_of_a_shared_tier_expire() -> None:
    """Positive and negative answers of a shared tier hold for their TTL and are unknown after it."""
    presence = shared()
    presence.end_recovery(authoritative=True)
    presence.absorb(0)
    assert presence.known(b"k", 0) is Known.UNKNOWN
    presence.note_absent([b"k"], 0)
    assert presence.known(b"k", 4.9) is Known.ABSENT
    assert presence.known(b"k", 5.1) is Known.UNKNOWN
    presence.add([b"k"], 6)
    assert presence.known(b"k", 15.9) is Known.PRESENT
    assert presence.known(b"k", 16.1) is Known.UNKNOWN


def test_existence_is_asked_once_however_many_ask() -> None:
    """Lookups of one key share one question, which carries all keys that were asked for."""
    existence = Existence(timeout_s=1, error_pause_s=1)
    for _ in range(3):
        assert existence.wants_answer(b"a", 0)
        assert existence.wants_answer(b"b", 0)
    [(batch_id, keys, deadline)] = existence.take_questions(0)
    assert keys == (b"a", b"b")
    assert deadline == 1
    assert existence.wants_answer(b"a", 0.5)
    assert existence.take_questions(0.5) == []
    assert existence.answered(batch_id, 0.6, failed=False) == (b"a", b"b")
    assert existence.answered(batch_id, 0.6, failed=False) == ()


def test_nobody_waits_beyond_the_lookup_deadline() -> None:
    """A question without an answer stops being worth waiting for at its deadline, and is not asked twice."""
    existence = Existence(timeout_s=1, error_pause_s=1)
    assert existence.wants_answer(b"a", 0)
    existence.take_questions(0)
    assert not existence.wants_answer(b"a", 1.0)
    assert not existence.unasked


def test_after_an_error_nothing_is_asked_for_a_while_and_nothing_is_known() -> None:
    """An error is a pause, not an absence: after it the same key is asked for again."""
    existence = Existence(timeout_s=1, error_pause_s=2)
    existence.wants_answer(b"a", 0)
    [(batch_id, _, _)] = existence.take_questions(0)
    existence.answered(batch_id, 0.5, failed=True)
    assert not existence.wants_answer(b"a", 1.0)
    assert existence.wants_answer(b"a", 2.6)


def test_a_failed_load_is_a_miss_for_its_request_for_good_and_for_others_for_a_while() -> None:
    """The request that failed never hits again; another one may try after the pause."""
    failed = FailedLoads(retry_after_s=5)
    one, two = RequestContext("1"), RequestContext("2")
    failed.note([b"k"], one, 0)
    assert failed.blocks(b"k", two, 4.9)
    assert not failed.blocks(b"k", two, 5.1)
    assert failed.blocks(b"k", one, 1e6)
    assert not failed.blocks(b"other", one, 0)
    failed.forget_request("1")
    assert not failed.blocks(b"k", RequestContext("1"), 1e6)


def test_requests_that_nobody_ends_are_forgotten() -> None:
    """A load that fails after its request has ended leaves nothing for ever."""
    failed = FailedLoads(retry_after_s=5)
    for i in range(5000):
        failed.note([b"k"], RequestContext(str(i)), 0)
    assert not failed.blocks(b"k", RequestContext("0"), 1e6)
    assert failed.blocks(b"k", RequestContext("4999"), 1e6)
    assert len(failed._by_request) <= 4096
