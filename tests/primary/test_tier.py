"""Slots of the primary tier: their states, pins and eviction."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstore.errors import ConfigError
from kvstore.eviction import POLICY_NAMES
from kvstore.primary.tier import PrimaryTier, SlotState

SLOT_BYTES = 16


def keys_of(*numbers: int) -> list[bytes]:
    """Return keys by number."""
    return [b"key-%d" % number for number in numbers]


@pytest.fixture(params=POLICY_NAMES)
def tier(request: pytest.FixtureRequest) -> Iterator[PrimaryTier]:
    """A tier of four slots, of each policy."""
    tier = PrimaryTier(memoryview(bytearray(4 * SLOT_BYTES)), SLOT_BYTES, policy=request.param)
    yield tier
    tier.close()


def _fill(tier: PrimaryTier, *numbers: int) -> list[int]:
    slots = tier.allocate(keys_of(*numbers))
    assert slots is not None
    tier.commit(keys_of(*numbers))
    return slots


def _exempt(tier: PrimaryTier, key: bytes, reason: str) -> Callable[[], object]:
    """Give a block a reason to stay; return a function that ends it."""
    if reason == "pinned":
        tier.pin([key])
        return lambda: tier.unpin([key])
    tier.mark_dirty([key])
    return lambda: tier.mark_clean([key])


def test_a_block_is_written_then_ready(tier: PrimaryTier) -> None:
    """A slot is free, being written, ready, and free again."""
    (key,) = keys_of(1)
    assert tier.lookup(key) is None
    slots = tier.allocate([key])
    assert slots is not None
    assert tier.lookup(key) is tier.state_of(slots[0]) is SlotState.WRITING
    tier.commit([key])
    assert tier.lookup(key) is tier.state_of(slots[0]) is SlotState.READY
    assert tier.remove(key) and not tier.remove(key)
    assert tier.lookup(key) is None and tier.state_of(slots[0]) is SlotState.FREE


def test_slots_are_rows_of_the_memory() -> None:
    """Slot i is row i, whatever the shape of the memory."""
    memory = bytearray(4 * SLOT_BYTES)
    with memoryview(memory).cast("B", (4, SLOT_BYTES)) as shaped:
        tier = PrimaryTier(shaped, SLOT_BYTES)
        with tier.row(2) as row:
            row[:] = b"x" * SLOT_BYTES
        tier.close()
    assert memory[2 * SLOT_BYTES : 3 * SLOT_BYTES] == b"x" * SLOT_BYTES and memory.count(b"x") == SLOT_BYTES


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_large_tier_evicts_a_few_blocks_at_a_time(policy: str) -> None:
    """An allocation that must evict evicts a few more blocks, no exempt ones; the next allocations evict none."""
    slots, piece = 1024, 8
    tier = PrimaryTier(memoryview(bytearray(slots)), 1, policy=policy)
    _fill(tier, *range(slots))
    exempt = keys_of(*range(slots - piece - 1, slots - piece + 1))
    for key, reason in zip(exempt, ("pinned", "dirty"), strict=True):
        _exempt(tier, key, reason)

    assert tier.allocate(keys_of(-1)) is not None
    evicted = tier.take_evicted()
    assert len(set(evicted)) == piece == tier.stats().evicted and tier.free_slots == piece - 1
    assert not set(evicted) & set(exempt) and not any(key in tier for key in evicted)
    assert tier.allocate(keys_of(*range(-piece, -1))) is not None
    assert not tier.take_evicted() and tier.free_slots == 0
    tier.close()


@pytest.mark.parametrize("evictable", [0, 1, 2, 7, 8])
def test_large_tier_evicts_as_few_blocks_as_needed(evictable: int) -> None:
    """If a few more can't be evicted, the allocation evicts as many as needed, or none."""
    slots, piece = 1024, 8
    tier = PrimaryTier(memoryview(bytearray(slots)), 1)
    _fill(tier, *range(slots))
    tier.pin(keys_of(*range(evictable, slots)))
    assert (tier.allocate(keys_of(-1, -2)) is None) is (evictable < 2)
    expected = 0 if evictable < 2 else 2 if evictable < piece else piece
    evicted = tier.take_evicted()
    assert len(evicted) == expected == tier.stats().evicted and tier.free_slots == max(0, expected - 2)
    assert set(evicted) <= set(keys_of(*range(evictable)))
    tier.close()


def test_pinned_and_dirty_blocks_are_exempt(tier: PrimaryTier) -> None:
    """Pinned and dirty blocks stay until all of these reasons have ended."""
    _fill(tier, 1, 2, 3, 4)
    tier.pin(keys_of(1, 1))
    tier.mark_dirty(keys_of(1, 2))
    assert tier.allocate(keys_of(11, 12, 13)) is None
    assert sorted(tier.take_wanted()) in (keys_of(1, 2), keys_of(2)), "what is dirty is asked for when its turn comes"
    tier.mark_clean(keys_of(1, 2))
    slots = tier.allocate(keys_of(11, 12, 13))
    assert slots is not None and sorted(tier.take_evicted()) == keys_of(2, 3, 4)
    for _ in range(2):
        assert tier.allocate(keys_of(14)) is None
        tier.unpin(keys_of(1))
    assert tier.allocate(keys_of(14)) is not None and tier.take_evicted() == keys_of(1)


def test_unpinned_block_is_evicted_next_unless_used() -> None:
    """A block whose turn came while it was pinned is evicted next; a use in between gives it a new place."""
    tier = PrimaryTier(memoryview(bytearray(4 * SLOT_BYTES)), SLOT_BYTES)
    for number in (1, 2, 3, 4):
        _fill(tier, number)
    tier.pin(keys_of(1, 2))
    _fill(tier, 5)
    assert tier.take_evicted() == keys_of(3)
    tier.unpin(keys_of(1, 2))
    tier.touch(keys_of(1))
    _fill(tier, 6)
    _fill(tier, 7)
    assert tier.take_evicted() == keys_of(2, 4)


def test_the_end_of_a_prefix_goes_first() -> None:
    """Of blocks committed or touched together, the last is evicted first."""
    tier = PrimaryTier(memoryview(bytearray(4 * SLOT_BYTES)), SLOT_BYTES)
    _fill(tier, 1, 2, 3, 4)
    _fill(tier, 5)
    assert tier.take_evicted() == keys_of(4)
    tier.touch(keys_of(1, 2))
    _fill(tier, 6, 7)
    assert tier.take_evicted() == keys_of(3, 5)


def test_a_rank_that_a_block_already_has_changes_nothing() -> None:
    """Of equal ranks, the block that was due for eviction first leaves first, even if it was given its rank again."""
    tier = PrimaryTier(memoryview(bytearray(4 * SLOT_BYTES)), SLOT_BYTES)
    for number in (1, 2, 3, 4):
        _fill(tier, number)
    for key in keys_of(1, 2):
        tier.retain(key, (1, 0))
    _fill(tier, 5)
    assert tier.take_evicted() == keys_of(3)
    tier.retain(keys_of(1)[0], (1, 0))
    tier.pin(keys_of(4, 5))
    _fill(tier, 6)
    assert tier.take_evicted() == keys_of(1)


def test_pieces_of_a_prefix_are_put_in_order() -> None:
    """A prefix stored in pieces is evicted from its end once it has been put in order."""
    tier = PrimaryTier(memoryview(bytearray(4 * SLOT_BYTES)), SLOT_BYTES)
    _fill(tier, 1, 2)
    _fill(tier, 3, 4)
    tier.touch(keys_of(1, 2, 3, 4), anew=False)
    _fill(tier, 5, 6)
    assert tier.take_evicted() == keys_of(4, 3)


def test_abandoned_slots_come_back_when_the_last_has_let_go(tier: PrimaryTier) -> None:
    """A slot with pending users is not reused until all of them have ended."""
    slots = tier.allocate(keys_of(1))
    assert slots is not None
    tier.abandon(keys_of(1)[0])
    assert tier.lookup(keys_of(1)[0]) is None and tier.state_of(slots[0]) is SlotState.ABANDONED
    assert tier.allocate(keys_of(11, 12, 13, 14)) is None
    tier.reclaim(slots[0])
    others = _fill(tier, 11, 12, 13, 14)
    tier.clear(still_touched=[others[0], others[0], others[1]])
    assert tier.stats().abandoned == 2 and tier.stats().free == 2
    tier.reclaim(others[0])
    tier.reclaim(others[1])
    assert tier.state_of(others[0]) is SlotState.ABANDONED and tier.state_of(others[1]) is SlotState.FREE
    tier.reclaim(others[0])
    assert sorted(_fill(tier, 21, 22, 23, 24)) == [0, 1, 2, 3]


def test_spare_slots(tier: PrimaryTier) -> None:
    """A spare slot has no block; when a block moves into it, the block's former slot is left to its pending I/O."""
    _fill(tier, 1)
    (old,) = tier.allocate(keys_of(2)) or ()
    spares = tier.allocate_spare(2) or ()
    assert len({old, *spares}) == 3 and tier.stats().free == 0
    assert [tier.state_of(slot) for slot in spares] == [SlotState.ABANDONED] * 2
    assert tier.stats().writing == 1
    tier.exchange(keys_of(2)[0], spares[0])
    assert tier.slot_of(keys_of(2)[0]) == spares[0] and tier.state_of(spares[0]) is SlotState.WRITING
    assert tier.state_of(old) is SlotState.ABANDONED
    assert (tier.stats().writing, tier.stats().abandoned) == (1, 2)
    tier.commit(keys_of(2))
    assert tier.state_of(spares[0]) is SlotState.READY
    for slot in (old, spares[1]):
        tier.reclaim(slot)
        assert tier.state_of(slot) is SlotState.FREE
    assert tier.stats().abandoned == 0


def test_spare_slots_evict(tier: PrimaryTier) -> None:
    """Spare slots evict the coldest blocks, or none if there are too few; a clear leaves them to their I/O."""
    _fill(tier, 1)
    _fill(tier, 2, 3, 4)
    tier.pin(keys_of(2, 3))
    assert tier.allocate_spare(3) is None and not tier.evicted and tier.stats().ready == 4
    (spare,) = tier.allocate_spare(1) or ()
    assert tier.take_evicted() == keys_of(1)
    assert tier.clear() == keys_of(2, 3, 4)
    assert tier.state_of(spare) is SlotState.ABANDONED and tier.stats().free == 3
    tier.reclaim(spare)
    assert tier.stats().free == 4


def test_clear_returns_the_ready_blocks(tier: PrimaryTier) -> None:
    """Clearing drops all blocks in any state, and returns those that were ready."""
    _fill(tier, 1, 2)
    tier.allocate(keys_of(3))
    tier.pin(keys_of(1))
    tier.mark_dirty(keys_of(2))
    assert sorted(tier.clear()) == keys_of(1, 2)
    stats = tier.stats()
    assert (stats.free, stats.pinned, stats.dirty, len(tier)) == (4, 0, 0, 0)


def test_a_promised_block_is_not_removed(tier: PrimaryTier) -> None:
    """A hit can be loaded until its step ends, even if the block is removed or forgotten in that step."""
    _fill(tier, 1)
    tier.promise(keys_of(1)[0])
    assert not tier.remove(keys_of(1)[0])
    tier.end_promises()
    assert tier.remove(keys_of(1)[0])


@pytest.mark.parametrize("pinned", [False, True], ids=["promised", "promised-and-pinned"])
def test_clear_ends_promises(tier: PrimaryTier, pinned: bool) -> None:
    """A promise made before a clear does not apply to a later block in the same slot or with the same key."""
    _fill(tier, 1, 2)
    tier.promise(keys_of(1)[0])
    if pinned:
        tier.pin_promised()
    tier.clear()
    _fill(tier, 1)
    tier.pin(keys_of(1))
    tier.pin_promised()
    tier.end_promises()
    assert tier.pins[tier.slot_of(keys_of(1)[0]) or 0] == 1
    tier.unpin(keys_of(1))
    assert tier.remove(keys_of(1)[0])


def test_clear_ends_promises_of_blocks_that_do_not_come_again(tier: PrimaryTier) -> None:
    """After a clear, eviction does not look for a block that was promised before."""
    _fill(tier, 1)
    tier.promise(keys_of(1)[0])
    tier.clear()
    _fill(tier, 2, 3, 4, 5)
    _fill(tier, 6)
    tier.end_promises()
    assert len(tier.take_evicted()) == 1


def test_clear_ends_requests_for_copies(tier: PrimaryTier) -> None:
    """A dirty block that was due for eviction before a clear is not due when it is dirty again."""
    _fill(tier, 1, 2, 3, 4)
    tier.mark_dirty(keys_of(4))
    _fill(tier, 5, 6, 7)
    tier.clear()
    _fill(tier, 4)
    tier.mark_dirty(keys_of(4))
    assert not tier.take_wanted()


def test_look_ahead_requests_copies_of_the_coldest_dirty_blocks(tier: PrimaryTier) -> None:
    """Looking ahead marks the coldest dirty blocks for copying; once copied, they are evicted first."""
    _fill(tier, 1, 2, 3, 4)
    tier.mark_dirty(keys_of(3, 4))
    tier.prepare_eviction(2)
    wanted = tier.take_wanted()
    assert wanted and set(wanted) <= set(keys_of(3, 4)) and tier.take_wanted() == []
    tier.mark_clean(wanted)
    _fill(tier, 5)
    assert tier.take_evicted()[0] in wanted


@pytest.mark.parametrize("reason", ["pinned", "dirty"])
def test_a_removed_block_leaves_nothing_to_its_successor(tier: PrimaryTier, reason: str) -> None:
    """A block that was exempt, skipped by an eviction and removed may be stored again, and then evicted."""
    _fill(tier, 1, 2, 3, 4)
    (key,) = keys_of(2)
    _exempt(tier, key, reason)
    assert tier.allocate(keys_of(11, 12, 13, 14)) is None
    if reason == "pinned":
        tier.unpin([key])
    assert tier.remove(key)
    assert not tier.marks.dirty
    _fill(tier, 2)
    tier.mark_dirty([key])
    tier.mark_clean([key])
    _fill(tier, 11, 12, 13, 14)
    assert sorted(tier.take_evicted()) == keys_of(1, 2, 3, 4)
    _fill(tier, 21, 22, 23, 24)
    assert sorted(tier.take_evicted()) == keys_of(11, 12, 13, 14)


@pytest.mark.parametrize("reason", ["pinned", "dirty"])
def test_a_block_first_in_line_stays_if_there_is_a_reason_again(tier: PrimaryTier, reason: str) -> None:
    """The block was due for eviction; a dirty one is copied next."""
    _fill(tier, 1, 2, 3, 4)
    (key,) = keys_of(2)
    tier.pin([key])
    assert tier.allocate(keys_of(11, 12, 13, 14)) is None
    tier.unpin([key])
    end = _exempt(tier, key, reason)
    assert tier.allocate(keys_of(11, 12, 13, 14)) is None
    assert tier.take_wanted() == ([key] if reason == "dirty" else [])
    end()
    _fill(tier, 11, 12, 13, 14)
    assert sorted(tier.take_evicted()) == keys_of(1, 2, 3, 4)


def test_nothing_is_evicted_while_slots_are_free(tier: PrimaryTier) -> None:
    """An allocation uses the last free slot and evicts no block."""
    _fill(tier, 1, 2, 3)
    _fill(tier, 4)
    assert not tier.evicted and tier.stats().ready == 4
    tier.prepare_eviction(0)
    _fill(tier, 5)
    assert len(tier.take_evicted()) == 1


def test_memory_of_any_format_is_bytes_and_given_back() -> None:
    """A flat array of numbers is used as bytes; after close its owner may resize it."""
    memory = array("q", bytes(4 * SLOT_BYTES))
    tier = PrimaryTier(memoryview(memory), SLOT_BYTES)
    assert tier.slots == 4
    with tier.row(1) as row:
        assert row.nbytes == SLOT_BYTES
        row[:] = b"x" * SLOT_BYTES
    assert memory.tobytes()[SLOT_BYTES : 2 * SLOT_BYTES] == b"x" * SLOT_BYTES
    tier.close()
    tier.close()
    memory.append(1)


@pytest.mark.parametrize(("memory", "slots"), [(0, None), (SLOT_BYTES - 1, None), (SLOT_BYTES, 2), (SLOT_BYTES, 0)])
def test_memory_that_does_not_do_is_refused(memory: int, slots: int | None) -> None:
    """Too little memory for the requested slots, or for any, is an error that states how many would fit."""
    with pytest.raises(ConfigError, match="room for"):
        PrimaryTier(memoryview(bytearray(memory)), SLOT_BYTES, slots=slots)


def test_pinned_blocks_do_not_slow_eviction_down() -> None:
    """Eviction inspects a pinned block once, so ten thousand pinned blocks do not slow down every eviction."""
    slots, pinned = 20_000, 10_000
    tier = PrimaryTier(memoryview(bytearray(slots)), 1)
    old = [b"old-%d" % number for number in range(pinned)]
    tier.allocate(old)
    tier.commit(old, pins=1)
    looked_at = 0

    class Pins(list[int]):
        def __getitem__(self, slot: Any) -> Any:
            nonlocal looked_at
            looked_at += 1
            return super().__getitem__(slot)

    tier._order._pins = tier.pins = Pins(tier.pins)
    looked_at = 0
    started = time.monotonic()
    for number in range(3 * pinned):
        key = b"new-%d" % number
        assert tier.allocate([key]) is not None
        tier.commit([key])
    assert looked_at <= pinned + 3 * pinned, f"{looked_at} in {time.monotonic() - started:.1f} s"


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_random_walk_evicts_lowest_priority_first(policy: str, seed: int) -> None:
    """In a random walk no exempt block is evicted, and no block while one of lower priority could be."""
    rng = random.Random(seed)
    tier = PrimaryTier(memoryview(bytearray(12 * SLOT_BYTES)), SLOT_BYTES, policy=policy)
    priorities: dict[bytes, int] = {}
    exempt: dict[tuple[bytes, str], Callable[[], object]] = {}
    for step in range(600):
        ready = [key for key in keys_of(*range(40)) if tier.lookup(key) is SlotState.READY]
        key = rng.choice(ready or keys_of(0))
        match rng.randrange(8) if ready else 0:
            case 0 | 1:
                new = tier.missing(keys_of(*rng.sample(range(40), rng.randrange(1, 4))))
                kept = {key for key, _ in exempt}
                free = tier.free_slots
                may_go = sorted(priorities.get(key, 0) for key in ready if key not in kept)
                slots = tier.allocate(new)
                assert (slots is None) is (len(new) > free + len(may_go)), step
                gone = tier.take_evicted()
                assert not kept.intersection(gone)
                assert sorted(priorities.pop(key, 0) for key in gone) == may_go[: len(gone)], step
                if slots is not None:
                    tier.commit(new)
            case 2:
                priorities[key] = rng.randrange(1, 4)
                tier.retain(key, (priorities[key], rng.randrange(-3, 0)))
            case 3:
                priorities.pop(key, None)
                tier.end_retention(key)
            case 4:
                priorities.pop(key, None)
                tier.demote([key])
            case 5:
                tier.touch(rng.sample(ready, rng.randrange(1, len(ready) + 1)))
                tier.prepare_eviction(rng.randrange(4))
            case 6:
                reason = rng.choice(("pinned", "dirty"))
                if (key, reason) not in exempt:
                    exempt[key, reason] = _exempt(tier, key, reason)
            case _:
                if exempt:
                    exempt.pop(rng.choice(list(exempt)))()
        assert tier.stats().retained == len(priorities) and tier.stats().ready == len(tier)
    tier.close()


def test_demoted_blocks_are_evicted_first_from_the_end() -> None:
    """Demoted blocks are evicted before all others: earlier demotions first, and within one the last block first."""
    tier = PrimaryTier(memoryview(bytearray(4 * SLOT_BYTES)), SLOT_BYTES)
    _fill(tier, 1, 2, 3, 4)
    tier.demote(keys_of(1, 2))
    for number, expected in ((5, 2), (6, 1), (7, 4)):
        _fill(tier, number)
        assert tier.take_evicted() == keys_of(expected)
