"""The index alone: pinned slots keep their block, and the least recently used blocks are evicted."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvstore.backends.disk import ages as ages_module
from kvstore.backends.disk.index import Index, RowChanges
from kvstore.backends.disk.layout import PAGE, ROW, State, digest_of
from kvstore.backends.disk.table import NOWHERE
from tests.disk.bare_index import add, open_segment, read_segment, take


def filled(*slots: int) -> tuple[Index, list[int]]:
    """Return an index of segments with so many slots, and the places of its blocks."""
    index = Index(sum(slots))
    for count in slots:
        open_segment(index, count)
    places = take(index, sum(slots))
    add(index, places)
    return index, places


@pytest.mark.parametrize("state", [State.FREE, State.RETIRED])
def test_slot_stays_in_use_until_its_last_read_ends(state: int) -> None:
    """The slot of a block removed during two reads is free when the last has ended, unless it was retired."""
    index, (place,) = filled(1)
    index.pin((place,))
    index.pin((place,))
    index.leave(index.depart((place,)), state)
    assert index.place(b"%d" % place) == NOWHERE
    assert take(index, 1) == []
    index.unpin((place,))
    assert take(index, 1) == []
    index.unpin((place,))
    assert take(index, 1) == ([place] if state == State.FREE else [])


def test_departing_block_leaves_with_its_segment() -> None:
    """A block that is being evicted when its segment leaves is found no more, even if its row can't be written."""
    index, places = filled(2)
    segment, _ = index.at(places[0])
    departing = index.depart(places[:1])
    assert index.close_segment(segment) == [b"%d" % place for place in reversed(places)]
    assert index.place(b"%d" % places[0]) == NOWHERE
    index.stay(departing)
    assert index.is_quiet(segment)
    index.forget(segment)
    assert index.place(b"%d" % places[0]) == NOWHERE


def test_segments_that_answer_are_used_in_place_of_those_that_do_not() -> None:
    """Neither slots, victims nor a segment to give up come from a root to avoid; the last root that is left is used."""
    index = Index(8)
    segments = [open_segment(index, 2) for _ in range(2)]
    segments[1].root = 1
    add(index, take(index, 2))
    index.avoid([0], 60.0)
    assert index.evict(4, PAGE) == []
    others = take(index, 4)
    assert others == [segments[1].first, segments[1].first + 1]
    add(index, others)
    assert index.coldest(2 * segments[0].head.slot_bytes, is_wasting=False) is segments[1]
    index.avoid([1], 60.0)
    assert not segments[1].rests_until


def test_block_that_is_elsewhere_too_is_not_evicted() -> None:
    """A segment's copy of a block that is elsewhere holds none: its slot is freed once, when its row was written."""
    index = Index(8)
    index.open_segment(*read_segment((1, b"a")))
    second, digests = read_segment((1, b"a"), (1, b"b"))
    assert index.open_segment(second, digests) == [second.first]
    assert index.used()[0] == 2
    assert index.evict(8, PAGE) == [index.place(b"a"), index.place(b"b")]


def test_changed_blocks_of_a_segment_that_is_taken() -> None:
    """Of a segment that is taken, blocks that were replaced since the last look are removed, and new ones added."""
    index = Index(8)
    theirs, digests = read_segment((1, b"a"), (1, b"b"), is_ours=False)
    index.follow(theirs)
    index.see(theirs, digests, 0, 2)
    doubled, news = index.take_over(theirs, *read_segment((1, b"a"), (2, b"c")))
    assert (doubled, news.removed, news.added) == ([], [b"b"], [b"c"])
    assert index.place(b"b") == NOWHERE
    assert index.place(b"a") == theirs.first


def test_row_with_the_digest_of_another_key() -> None:
    """A forged row, with the digest of a key that it has not, costs that key a miss, also when its segment is gone."""
    index = Index(8)
    segment, digests = read_segment((1, b"a"))
    index.open_segment(segment, np.full_like(digests, digest_of(b"b")))
    assert index.place(b"b") == NOWHERE
    index.close_segment(segment)
    index.forget(segment)
    assert index.place(b"b") == NOWHERE
    open_segment(index, 1)
    add(index, take(index, 1), [b"b"])
    assert index.place(b"b") != NOWHERE


def test_block_used_since_it_was_chosen_is_kept() -> None:
    """Of the blocks that one search for victims has found, those used since are passed over."""
    index, _ = filled(1024)
    index.evict(1, PAGE)
    chosen = index._line.candidates[-1]
    index.touch((chosen,))
    assert chosen not in index.evict(8, PAGE)


def test_eviction_candidate_used_since_is_kept() -> None:
    """A candidate for eviction that was used since is kept, even if halving the ages restored its former age value."""
    index, places = filled(64)
    others = itertools.cycle(places[3:])

    def until(age: int) -> None:
        for _ in range(100_000):
            if index._ages.now == age:
                return
            index.touch((next(others),))
        raise AssertionError(f"age {age} never came")

    until(100)
    index.touch(places[:3])
    until(150)
    assert index.evict(1, 0) == places[:1]
    until(200)
    index.touch(places[1:2])
    until(254)
    until(150)
    assert index.evict(2, 0) == places[2:0:-1]


def test_ages_go_on_for_ever() -> None:
    """However often other blocks are used, unused ones are evicted first, and once."""
    index, places = filled(8)
    for _ in range(1000):
        index.touch(places[:7])
    assert index.evict(1, 0) == places[7:]
    # Other engines report uses late.
    index.touch(places[7:])
    assert index.evict(8, 0) == places[:7]


def test_slot_that_could_not_be_written_is_taken_last() -> None:
    """A store that failed in a slot is not followed by others there while the segment has other free slots."""
    index = Index(8)
    open_segment(index, 8)
    (bad, *_) = take(index, 2)
    index.rest((bad,))
    assert len(take(index, 6)) == 6
    assert take(index, 1) == [bad]


def test_block_after_a_failed_eviction_is_tried_last() -> None:
    """One row that can't be written does not stop evictions: the next victims are the other blocks."""
    index, places = filled(4, 4)
    (failed,) = index.evict(1, 0)
    index.stay((failed,))
    assert index.evict(8, 0) == [*places[1:], failed]


def test_evictions_in_vain_are_bounded_over_all_calls() -> None:
    """While stores fail, a share of the blocks departs, however often room is needed; after a success more may."""
    index, places = filled(64)
    index.note_failures(places[-2:])
    share = index.evict(64, 0)
    assert 0 < len(share) < 64
    index.leave(share)
    assert index.evict(64, 0) == []
    add(index, take(index, 1))
    assert len(index.evict(64, 0)) == 64 - len(share) + 1


def test_victim_is_found_behind_many_pinned_blocks() -> None:
    """The search for victims, which looks at some slots of an age at a time, passes over all that are in use."""
    count = 2 * ages_module._CANDIDATES
    index, places = filled(count, count)
    pinned = places[: 2 * count - 1]
    index.pin(pinned)
    assert index.evict(len(places), 0) == places[len(pinned) :]
    index.unpin(pinned[:-1])
    assert index.evict(len(places), 0) == pinned[:-1]


def test_victim_is_found_behind_pinned_blocks_of_its_age() -> None:
    """If all that one look at the oldest age finds is in use, the rest of that age is evicted before later ones."""
    pinned = ages_module._CANDIDATES + 10
    index, places = filled(2 * pinned)
    index.pin(places[:pinned])
    assert index.evict(2, 0) == places[pinned : pinned + 2]


def test_key_with_the_digest_of_another_is_absent() -> None:
    """Two keys with the same digest give a miss, never the other key's block."""
    index = Index(4)
    open_segment(index, 4)
    (place,) = take(index, 1)
    index.add(place, 10, 0, 7, b"a")
    assert index.place(b"a", 7) == place
    assert index.place(b"b", 7) == NOWHERE


def test_released_segment_takes_no_block() -> None:
    """No slot of it is written again, it is quiet once no operation runs on it, and a late store stays unknown."""
    index, places = filled(4, 4)
    first, reading = index.at(places[0])[0], places[1]
    writing = places[2]
    index.leave(index.depart((writing,)))
    assert take(index, 1) == [writing]
    index.pin((reading,))
    assert sorted(index.close_segment(first)) == sorted(b"%d" % place for place in places[:4] if place != writing)
    assert len(index) == 4
    assert not index.is_quiet(first)
    index.unpin((reading,))
    assert not index.is_quiet(first)
    assert not index.add(writing, 100, 0, digest_of(b"late"), b"late")
    assert index.place(b"late") == NOWHERE
    assert index.is_quiet(first)
    assert take(index, 8) == []
    assert {place >> 24 for place in index.evict(8, 0)} == {places[4] >> 24}


def test_block_departs_once() -> None:
    """A block that is being evicted and is then removed gets one row, and its slot becomes free once."""
    index, places = filled(4)
    gone = index.evict(2, 0)
    assert index.depart(places[:1]) == []
    index.hide(places[:1])
    assert (len(index), index.place(b"%d" % places[0])) == (3, NOWHERE)
    index.leave(gone)
    assert (len(index), take(index, 4)) == (2, places[:2])


def test_generation_after_the_last() -> None:
    """After the largest generation of a row comes 0; the row is written, and readers see a change."""
    segment, _ = read_segment((0xFFFFFFFF, b"a"))
    assert [segment.next_row(0, State.FREE, 0, 0, b"")[0] for _ in range(2)] == [0, 1]


def test_a_key_is_not_held_by_a_longer_one() -> None:
    """A key that is the start of another one, with the same digest, is not found in its place."""
    segment, _ = read_segment((1, b"ab"))
    assert [segment.holds(0, key) for key in (b"a", b"ab", b"abc")] == [False, True, False]


def test_block_in_three_other_engines_is_found_until_the_last_is_removed() -> None:
    """Lookups find any remaining copy of a block, in whatever order the copies are removed."""
    for order in itertools.permutations(range(3)):
        index = Index(8)
        copies = [read_segment((1, b"a"), is_ours=False) for _ in range(3)]
        for segment, digests in copies:
            index.follow(segment)
            index.see(segment, digests, 0, 1)
        for left, number in zip((2, 1, 0), order, strict=True):
            segment = copies[number][0]
            gone = RowChanges(np.arange(1), np.zeros(1, ROW), np.zeros(1, np.bool_))
            assert index.update(segment, gone).removed == ([] if left else [b"a"])
            assert (index.place(b"a") != NOWHERE) == bool(left)


def test_segment_that_is_taken_has_no_second_copies() -> None:
    """A block has one place after its segment is taken, so no memory is spent on a second one."""
    index = Index(8)
    theirs, digests = read_segment((1, b"a"), (1, b"b"), is_ours=False)
    index.follow(theirs)
    index.see(theirs, digests, 0, 2)
    index.take_over(theirs, *read_segment((1, b"a"), (1, b"b")))
    assert not index._doubled
