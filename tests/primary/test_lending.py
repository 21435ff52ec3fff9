"""Lending: rows that another thread reads stay unchanged, whatever the scheduler does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from kvstore.eviction import POLICY_NAMES
from kvstore.primary.lending import Lender
from kvstore.primary.tier import PrimaryTier, SlotState
from kvstore.types import Found

SLOT_BYTES = 64


@pytest.fixture(params=POLICY_NAMES)
def tier(request: pytest.FixtureRequest) -> Iterator[PrimaryTier]:
    """A tier of four slots, of each policy."""
    tier = PrimaryTier(memoryview(bytearray(4 * SLOT_BYTES)), SLOT_BYTES, policy=request.param)
    yield tier
    tier.close()


def keys_of(*numbers: int) -> list[bytes]:
    """Return keys by number."""
    return [b"key-%d" % number for number in numbers]


def fill(tier: PrimaryTier, *numbers: int) -> list[int] | None:
    """Store blocks whose bytes are their number."""
    keys = keys_of(*numbers)
    slots = tier.allocate(keys)
    if slots is not None:
        for number, slot in zip(numbers, slots, strict=True):
            with tier.row(slot) as row:
                row[:] = bytes([number % 251]) * SLOT_BYTES
        tier.commit(keys)
    return slots


def reclaim(tier: PrimaryTier) -> list[int]:
    """Run the manager's work of one step."""
    ended = tier.loans.take_ended()
    for slot in ended:
        tier.reclaim(slot)
    return ended


def test_lenders_share_the_storage_they_were_given(tier: PrimaryTier) -> None:
    """Each lender with the shared list sees storage opened later; a lender without the list has none."""
    storage: list[object] = []
    lenders = [Lender(tier, storage) for _ in range(2)]
    storage.append("opened later")
    assert [lender.backends for lender in lenders] == [["opened later"]] * 2
    assert Lender(tier).backends == []


def test_only_whole_blocks_are_lent(tier: PrimaryTier) -> None:
    """Only complete blocks are lent, with the right bytes; absent blocks and those being written are not."""
    lender = Lender(tier)
    (key,) = keys_of(7)
    assert lender.lend(key) is None and lender.find(key) is Found.ABSENT
    assert tier.allocate([key]) is not None
    assert lender.lend(key) is None and lender.find(key) is Found.ABSENT
    tier.commit([key])
    assert lender.find(key) is Found.THERE
    loan = lender.lend(key)
    assert loan is not None and loan.slot == tier.slot_of(key) and loan.row.nbytes == SLOT_BYTES
    lender.give_back(loan)
    with pytest.raises(ValueError, match="released"):
        bytes(loan.row)


def test_an_evicted_block_keeps_its_row_while_it_is_lent(tier: PrimaryTier) -> None:
    """All blocks are evicted; the lent row is not reused until the loan has ended."""
    fill(tier, 1, 2, 3, 4)
    lender = Lender(tier)
    loans = [lender.lend(key) for key in (*keys_of(1), *keys_of(1))]
    assert loans[0] is not None and loans[1] is not None
    assert fill(tier, 11, 12, 13) is not None
    assert fill(tier, 14) is not None  # One of the new blocks was evicted.
    assert tier.lookup(keys_of(1)[0]) is None
    assert tier.state_of(loans[0].slot) is SlotState.ABANDONED
    assert bytes(loans[0].row) == b"\1" * SLOT_BYTES
    lender.give_back(loans[0])
    assert reclaim(tier) == []
    assert bytes(loans[1].row) == b"\1" * SLOT_BYTES
    lender.give_back(loans[1])
    assert reclaim(tier) == [loans[1].slot] and reclaim(tier) == []
    assert tier.stats().abandoned == 0 and tier.stats().free == 1


def test_there_is_no_room_while_all_rows_are_lent(tier: PrimaryTier) -> None:
    """With every row lent an allocation fails; it succeeds once one row is returned."""
    fill(tier, 1, 2, 3, 4)
    lender = Lender(tier)
    loans = [loan for key in keys_of(1, 2, 3, 4) if (loan := lender.lend(key)) is not None]
    assert tier.allocate(keys_of(5)) is None
    for loan in loans:
        lender.give_back(loan)
    assert len(reclaim(tier)) == len(tier.take_evicted())
    assert fill(tier, 5) is not None


def test_a_reset_leaves_lent_rows_alone(tier: PrimaryTier) -> None:
    """A reset drops every block; lent rows are out of use until they are returned, even over two resets."""
    fill(tier, 1, 2, 3, 4)
    lender = Lender(tier)
    first, second = lender.lend(keys_of(1)[0]), lender.lend(keys_of(2)[0])
    assert first is not None and second is not None
    assert tier.remove(keys_of(1)[0])
    for _ in range(2):
        tier.clear()
        assert tier.stats().abandoned == 2 and tier.stats().free == 2
    assert fill(tier, 5, 6) is not None
    assert bytes(first.row) == b"\1" * SLOT_BYTES and bytes(second.row) == b"\2" * SLOT_BYTES
    lender.give_back(first)
    lender.give_back(second)
    assert sorted(reclaim(tier)) == sorted([first.slot, second.slot])
    assert tier.stats().abandoned == 0
    assert fill(tier, 7, 8) is not None


def test_nothing_is_lent_while_it_is_closed(tier: PrimaryTier) -> None:
    """A closed lender lends nothing, and records no refused loans."""
    fill(tier, 1)
    lender = Lender(tier)
    tier.hand_overs.begin("request", b"name")
    assert lender.is_waiting(b"name") and not lender.is_waiting(b"other")
    lender.is_open = False
    assert not lender.is_waiting(b"name")
    assert lender.lend(keys_of(1)[0]) is None and lender.find(keys_of(1)[0]) is Found.ABSENT
    assert lender.keys() == []
    assert tier.remove(keys_of(1)[0]) and tier.stats().abandoned == 0
    lender.is_open = True
    fill(tier, 2)
    assert lender.find(keys_of(2)[0]) is Found.THERE


class _Interrupted(dict[int, int]):
    """The loans of a tier, with callbacks immediately before and after a loan is recorded."""

    before: Callable[[], object]
    after: Callable[[], object]

    def __setitem__(self, slot: int, count: int) -> None:
        self.before()
        super().__setitem__(slot, count)
        self.after()


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("again", [False, True], ids=["gone", "stored anew"])
def test_a_block_that_leaves_while_it_is_being_lent(tier: PrimaryTier, moment: str, again: bool) -> None:
    """Whatever happens between the index lookup and the record of the loan, the row is right, or none is lent."""

    def evict() -> None:
        loans.before = loans.after = lambda: None
        assert tier.remove(keys_of(1)[0])
        assert fill(tier, 21, 22, 23) is not None
        fill(tier, *((1,) if again else (24,)))

    loans = _Interrupted()
    loans.before = loans.after = lambda: None
    setattr(loans, moment, evict)
    tier.loans._lent = loans
    fill(tier, 1, 2, 3, 4)
    lender = Lender(tier)
    loan = lender.lend(keys_of(1)[0])
    if loan is not None:
        assert bytes(loan.row) == b"\1" * SLOT_BYTES
        assert tier.slot_of(keys_of(1)[0]) == loan.slot
        lender.give_back(loan)
    reclaim(tier)
    assert tier.stats().abandoned == 0
    assert not loans


def test_a_reset_while_a_block_is_being_lent(tier: PrimaryTier) -> None:
    """A new block under the same key, in the same slot, is not lent: it belongs to the next namespace."""
    fill(tier, 1, 2, 3, 4)
    (key,), slot = keys_of(1), tier.slot_of(keys_of(1)[0])
    lender = Lender(tier)

    def reset() -> None:
        loans.before = lambda: None
        lender.is_open = False
        tier.clear()
        assert fill(tier, 1, 2, 3, 4) is not None
        assert tier.slot_of(key) == slot

    loans = _Interrupted()
    loans.before, loans.after = reset, lambda: None
    tier.loans._lent = loans
    assert lender.lend(key) is None
    assert not lender.is_open and not loans


def test_another_thread_never_sees_a_row_change() -> None:
    """A thread borrows and reads while this one evicts and writes: each row is entirely its own block."""
    tier = PrimaryTier(memoryview(bytearray(8 * 4096)), 4096)
    lender = Lender(tier)
    ended = threading.Event()
    wrong: list[bytes] = []
    seen = [0]

    def borrow() -> None:
        while not ended.is_set():
            for number in range(24):
                loan = lender.lend(b"%d" % number)
                if loan is not None:
                    first, last = bytes(loan.row), bytes(loan.row)
                    if first != last or first != bytes([number]) * 4096:
                        wrong.append(b"%d" % number)
                    lender.give_back(loan)
                    seen[0] += 1

    thread = threading.Thread(target=borrow)
    thread.start()
    try:
        number = 0
        while seen[0] < 3000 and number < 200_000:
            number += 1
            key = b"%d" % (number % 24)
            for slot in tier.loans.take_ended():
                tier.reclaim(slot)
            if key in tier or (slots := tier.allocate([key])) is None:
                continue
            with tier.row(slots[0]) as row:
                row[:] = bytes([number % 24]) * 4096
            tier.commit([key])
    finally:
        ended.set()
        thread.join(60)
    assert not wrong and seen[0]
    for slot in tier.loans.take_ended():
        tier.reclaim(slot)
    stats = tier.stats()
    assert (stats.abandoned, stats.free + stats.ready) == (0, 8)
    tier.close()
