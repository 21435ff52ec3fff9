"""The index alone: pinned slots stay whose they are, and what is chosen for eviction is what was used longest ago."""

from __future__ import annotations

import numpy as np

from kvstore.backends.disk.columns import Columns
from kvstore.backends.disk.index import Index
from kvstore.backends.disk.layout import Kind, digest_of


def filled(count: int) -> tuple[Index, list[int]]:
    """Return an index of one segment with so many blocks, and their slots."""
    index = Index(Columns(count), 0)
    index.open_segment(0, 0)
    slots = index.take(count)
    index.add([(Kind.ADD, slot, 100, digest_of(b"%d" % slot), b"%d" % slot) for slot in slots])
    for slot in slots:
        index.unpin(slot)
    return index, slots


def test_a_slot_that_is_read_is_given_to_nobody() -> None:
    """A block that is removed while two read it leaves its slot to others when the last of them has done."""
    index, (slot,) = filled(1)
    index.pin(slot)
    index.pin(slot)
    assert index.remove(b"%d" % slot) == slot
    index.release((slot,))
    assert index.take(1) == []
    index.unpin(slot)
    assert index.take(1) == []
    index.unpin(slot)
    assert index.take(1) == [slot]


def test_a_slot_that_is_read_is_not_evicted() -> None:
    """Pinned blocks are passed over, and so are those used since they were chosen."""
    index, slots = filled(8)
    index.pin(slots[0])
    index.suggest(index.coldest(8))
    index.touch([slots[1]])
    assert [slot for _, slot, *_ in index.evict(8)] == slots[2:]


def test_others_uses_count() -> None:
    """A slot that another process has marked is chosen last, and its mark is cleared."""
    index, slots = filled(8)
    index.touch(slots[1:])
    index.touch([])
    marks = np.zeros(8, np.uint8)
    marks[slots[0]] = 1
    index.count_uses(marks)
    assert not marks.any()
    assert index.coldest(8)[-1][0] == slots[0]
