"""Events compared with a model of the tier: consumers list exactly the present blocks."""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterable

from kvstore.tiers.inventory import _FOUND_KEYS, Inventory
from kvstore.types import RemovalCause, TierEvent

KEYS = [b"%04d" % i for i in range(2000)]
CAUSES = list(RemovalCause)


class Consumer:
    """A router's view: blocks reported as stored, and not as removed."""

    def __init__(self) -> None:
        self.blocks: set[bytes] = set()

    def receive(self, events: Iterable[TierEvent]) -> None:
        """Apply a report."""
        for event in events:
            keys = set(event.keys)
            assert len(keys) == len(event.keys), "a key twice in one event"
            if event.cause is None:
                assert not keys & self.blocks, "stored twice"
                self.blocks |= keys
            else:
                assert keys <= self.blocks, "removed without having been stored"
                self.blocks -= keys


def test_a_million_random_changes_leave_no_phantom_and_no_missing_block() -> None:
    """Stores, evictions, resets, restarts and repeated statements, compared with a set; a block is stated once."""
    seed = secrets.randbits(32)
    choose = random.Random(seed)
    held: set[bytes] = set()
    inventory, consumer = Inventory(), Consumer()
    for step in range(100_000):
        keys = choose.sample(KEYS, choose.randint(1, 19))
        kind = choose.random()
        if kind < 0.55:
            inventory.stored(keys)
            held.update(keys)
        elif kind < 0.995:
            # Also for absent blocks.
            inventory.removed(keys, choose.choice(CAUSES))
            held.difference_update(keys)
        elif kind < 0.997:
            inventory.clear(RemovalCause.REMOVED)
            held.clear()
        elif kind < 0.999:
            inventory.restate()
            assert inventory
            consumer.blocks.clear()
        else:
            # Consumers drop an engine's blocks when it ends; the next engine finds some of them on the disk.
            held = {key for key in held if choose.random() < 0.9}
            inventory, consumer = Inventory(), Consumer()
            inventory.found(sorted(held))
        if choose.random() < 0.4:
            consumer.receive(inventory.take())
        if step % 1000 == 999:
            while inventory:
                consumer.receive(inventory.take())
            assert consumer.blocks == held, f"seed {seed}, step {step}"


def test_a_block_that_left_and_came_back_is_no_change() -> None:
    """A block removed and stored again between two reports is no change, nor is one stored and removed."""
    inventory = Inventory()
    inventory.stored([b"a"])
    assert inventory.take() == [TierEvent((b"a",))]
    inventory.removed([b"a"], RemovalCause.EVICTED)
    inventory.stored([b"a", b"b"])
    inventory.removed([b"b"], RemovalCause.CORRUPT)
    assert not inventory
    assert inventory.take() == []


def test_restatement_reports_no_earlier_removals() -> None:
    """A repeated statement lists the blocks in the tier as found, and no earlier removal."""
    inventory = Inventory()
    inventory.stored([b"a", b"b"])
    assert inventory.take() == [TierEvent((b"a", b"b"))]
    inventory.removed([b"a"], RemovalCause.EVICTED)
    inventory.restate()
    assert inventory.take() == [TierEvent((b"b",))]


def test_found_blocks_come_at_a_bounded_rate_and_in_order() -> None:
    """A long report is split; changes are not delayed by it."""
    inventory = Inventory()
    inventory.found(KEYS)
    reports = [inventory.take()]
    inventory.stored([b"new"])
    inventory.removed([KEYS[0], KEYS[-1]], RemovalCause.EXPIRED)
    reports.append(inventory.take())
    assert reports[0] == [TierEvent(tuple(KEYS[:_FOUND_KEYS]))]
    assert reports[1] == [
        TierEvent((b"new", *KEYS[_FOUND_KEYS : min(2 * _FOUND_KEYS, len(KEYS) - 1)])),
        TierEvent((KEYS[0],), RemovalCause.EXPIRED),
    ]
    while inventory:
        reports.append(inventory.take())
    assert [k for r in reports for e in r if e.cause is None for k in e.keys if k != b"new"] == KEYS[:-1]
    inventory.restate()
    again = [inventory.take() for _ in range(len(KEYS) // _FOUND_KEYS + 1)]
    assert not inventory
    assert all(sum(len(event.keys) for event in report) <= _FOUND_KEYS for report in again)
    assert sorted(k for r in again for e in r for k in e.keys) == sorted([*KEYS[1:-1], b"new"])


def test_store_found_by_a_scan_first_is_reported_in_its_order() -> None:
    """The scan at start may list blocks of a store that has just ended, in the order of the medium."""
    inventory = Inventory()
    inventory.found([*KEYS, b"second", b"first"])
    inventory.stored([b"first", b"second"])
    assert inventory.take()[0].keys[:2] == (b"first", b"second")
    consumer = Consumer()
    inventory.restate()
    while inventory:
        consumer.receive(inventory.take())
    assert consumer.blocks == {*KEYS, b"first", b"second"}


def test_nothing_is_kept_unless_enabled() -> None:
    """An engine without events uses no memory for them."""
    inventory = Inventory(enabled=False)
    inventory.stored(KEYS)
    inventory.found(KEYS)
    inventory.removed(KEYS, RemovalCause.EVICTED)
    inventory.clear(RemovalCause.LOST)
    inventory.restate()
    assert not inventory
    assert inventory.take() == []


def test_accesses_are_reported_once_a_job_between_arrival_and_removal() -> None:
    """Reads are reported only if asked for; the oldest are dropped, and an idle engine takes no step for them."""
    inventory = Inventory(accesses=True)
    inventory.stored([b"a", b"b"])
    inventory.take()
    inventory.accessed([b"a", b"b"])
    inventory.accessed([b"a"])
    inventory.accessed([])
    assert not inventory
    inventory.stored([b"c"])
    inventory.removed([b"a"], RemovalCause.EVICTED)
    reads = [TierEvent((b"a", b"b"), accessed=True), TierEvent((b"a",), accessed=True)]
    assert inventory.take() == [TierEvent((b"c",)), *reads, TierEvent((b"a",), RemovalCause.EVICTED)]
    assert inventory.take() == []
    for number in range(5000):
        inventory.accessed([b"%d" % number])
    assert [event.keys[0] for event in inventory.take()] == [b"%d" % number for number in range(904, 5000)]
    without = Inventory()
    without.accessed([b"a"])
    assert without.take() == []
