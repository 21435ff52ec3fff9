"""The index alone: pinned slots keep their block, and the least recently used blocks are evicted."""

from __future__ import annotations

import itertools

import pytest

from kvstore.backends.disk import index as index_module
from kvstore.backends.disk.columns import Columns
from kvstore.backends.disk.index import Index
from kvstore.backends.disk.layout import Kind, digest_of
from kvstore.backends.disk.table import NOWHERE


def filled(count: int) -> tuple[Index, list[int]]:
    """Return an index of one segment with ``count`` blocks, and their slots."""
    index = Index(Columns(count), 0)
    index.open_segment(0, 0)
    slots = index.take(count)
    index.add([(Kind.ADD, slot, 100, digest_of(b"%d" % slot), b"%d" % slot) for slot in slots])
    index.unpin(slots)
    return index, slots


def test_slot_stays_in_use_until_its_last_read_ends() -> None:
    """The slot of a block removed during two reads becomes free when the last read has ended."""
    index, (slot,) = filled(1)
    index.pin((slot,))
    index.pin((slot,))
    assert index.hide(b"%d" % slot) == slot
    index.leave(index.depart((slot,)))
    assert index.take(1) == []
    index.unpin((slot,))
    assert index.take(1) == []
    index.unpin((slot,))
    assert index.take(1) == [slot]


def test_a_slot_that_is_read_is_not_evicted() -> None:
    """Pinned blocks are not evicted; slots of evicted blocks become free once the journal has recorded the eviction."""
    index, slots = filled(8)
    index.pin(slots[:1])
    rows = index.evict(8)
    assert [slot for _, slot, *_ in rows] == slots[1:]
    assert index.take(8) == []
    index.leave(rows)
    assert index.take(8) == slots[1:]


def test_the_least_recently_used_leave_first() -> None:
    """Blocks are evicted in the order of their last use, new ones last."""
    index, slots = filled(20)
    index.touch(slots[:10])
    rows = index.evict(4)
    assert [slot for _, slot, *_ in rows] == slots[10:14]
    index.leave(rows)
    index.take(4)
    for slot in slots[10:14]:
        index.add([(Kind.ADD, slot, 100, digest_of(b"new %d" % slot), b"new %d" % slot)])
        index.unpin((slot,))
    assert [slot for _, slot, *_ in index.evict(20)] == [*slots[14:], *slots[:14]]
    assert index.evict(1) == []


def test_eviction_candidate_used_since_is_kept() -> None:
    """A candidate for eviction that was used since is kept, even if halving the ages restored its former age value."""
    index, slots = filled(64)

    others = itertools.cycle(slots[3:])

    def until(age: int) -> None:
        for _ in range(100_000):
            if index._ages.now == age:
                return
            index.touch((next(others),))
        raise AssertionError(f"age {age} never came")

    until(100)
    index.touch(slots[:3])
    until(150)
    assert [slot for _, slot, *_ in index.evict(1)] == slots[:1]
    until(200)
    index.touch(slots[1:2])
    until(254)
    until(150)
    assert [slot for _, slot, *_ in index.evict(2)] == slots[2:0:-1]


def test_ages_go_on_for_ever() -> None:
    """However often other blocks are used, unused ones are evicted first."""
    index, slots = filled(8)
    for _ in range(1000):
        index.touch(slots[:7])
    assert [slot for _, slot, *_ in index.evict(1)] == slots[7:]
    assert [slot for _, slot, *_ in index.evict(7)] == slots[:7]


def two_segments(blocks: int) -> tuple[Index, list[int]]:
    """Return an index of two segments of four slots each, and the slots of its blocks."""
    index = Index(Columns(4), 0)
    for segment in range(2):
        index.open_segment(segment, 0)
    slots = index.take(blocks)
    index.add([(Kind.ADD, slot, 100, digest_of(b"%d" % slot), b"%d" % slot) for slot in slots])
    index.unpin(slots)
    return index, slots


def test_segment_in_use_is_never_chosen_for_removal() -> None:
    """The least recently used segment is chosen, but never one with a slot in use by a read or a store."""
    for pinned, chosen in ([], 0), ([2], 1), ([2, 7], None):
        index, slots = two_segments(8)
        index.touch(slots[4:])
        index.pin([slots[place] for place in pinned])
        assert index.close_segment(index.by_use([0, 1])) == chosen


def test_a_victim_is_found_behind_many_pinned_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for victims, which looks at some slots of an age at a time, passes over all that are in use."""
    monkeypatch.setattr(index_module, "_CANDIDATES", 2)
    index, slots = two_segments(8)
    index.pin(slots[:7])
    assert [slot for _, slot, *_ in index.evict(8)] == slots[7:]
    index.unpin(slots[:6])
    assert [slot for _, slot, *_ in index.evict(8)] == slots[:6]


def test_columns_grow_without_a_copy() -> None:
    """Segments up to the expected number of blocks leave the columns in place; further ones keep their content."""
    columns = Columns(4)
    index = Index(columns, 8)
    before = [column.__array_interface__["data"][0] for column in (columns.size, columns.age, columns.keys)]
    for segment in range(2):
        index.open_segment(segment, 0)
    assert before == [column.__array_interface__["data"][0] for column in (columns.size, columns.age, columns.keys)]
    slots = index.take(8)
    index.add([(Kind.ADD, slot, 100, digest_of(b"%d" % slot), b"%d" % slot) for slot in slots])
    index.open_segment(2, 0)
    assert [columns.key(slot) for slot in slots] == [b"%d" % slot for slot in slots]
    assert columns.held().tolist() == slots


def test_a_key_with_the_digest_of_another_is_absent() -> None:
    """Two keys with the same digest give a miss, never the other key's block."""
    index = Index(Columns(4), 0)
    index.open_segment(0, 0)
    (slot,) = index.take(1)
    index.add([(Kind.ADD, slot, 10, 7, b"a")])
    assert index.place(b"a", 7) == slot
    assert index.place(b"b", 7) == NOWHERE


def test_segment_chosen_for_removal_allocates_no_slot() -> None:
    """Neither its free slots nor those of its departed blocks are written again, before and after its removal."""
    index, slots = two_segments(2)
    closed = slots[0] // 4
    assert index.close_segment([closed]) == closed
    rows = [*index.depart(slots), (Kind.DROP, closed * 4, 0, 0, b"")]
    assert [kind for kind, *_ in rows] == [Kind.REMOVE, Kind.REMOVE, Kind.DROP]
    assert index.place(b"%d" % slots[0]) == slots[0], "the removal is not journalled yet"
    assert index.close_segment([closed]) is None
    others = index.take(8)
    assert {slot // 4 for slot in others} == {1 - closed}
    index.leave(rows)
    assert index.take(8) == []
    assert (len(index), index.place(b"%d" % slots[0])) == (0, NOWHERE)
    index.open_segment(closed, 0)
    assert len(index.take(8)) == 4


def test_a_block_departs_once() -> None:
    """A block that is being evicted and is then removed has one journal record, and its slot becomes free once."""
    index, slots = filled(4)
    rows = index.evict(2)
    assert index.hide(b"%d" % slots[0]) == slots[0]
    assert index.depart(slots[:1]) == []
    assert (len(index), index.place(b"%d" % slots[0])) == (3, NOWHERE)
    index.leave(rows)
    assert (len(index), index.take(4)) == (2, slots[:2])


def test_a_retired_slot_stays_retired_after_its_last_read() -> None:
    """A slot retired after its block was evicted, during a read, is not free when the read ends."""
    index, (slot,) = filled(1)
    index.pin((slot,))
    evicted = index.depart((slot,))
    retired = index.depart((slot,), Kind.BAD)
    index.leave(evicted)
    index.leave(retired)
    index.unpin((slot,))
    assert index.take(1) == []
