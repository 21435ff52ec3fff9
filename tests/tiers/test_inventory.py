"""Events compared with a model of the tier: consumers list exactly the present blocks."""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterable, Mapping

import pytest

from kvstore.tiers.inventory import _FOUND_KEYS, _REPEATED_KEYS, Inventory
from kvstore.types import RemovalCause, TierEvent

KEYS = [b"%04d" % i for i in range(2000)]
CAUSES = list(RemovalCause)


class Consumer:
    """A router's view: blocks reported as stored, and not as removed.

    Each take is a batch with a sequence number. A consumer that misses one drops all blocks, because removals may be
    lost, and is correct again once all blocks have been reported again.
    """

    def __init__(self, *, strict: bool = True) -> None:
        self.blocks: set[bytes] = set()
        self.strict = strict
        self.repeated = False
        self._next = 0

    def receive(self, sequence: int, events: Iterable[TierEvent]) -> None:
        """Apply a batch."""
        if sequence != self._next:
            self.blocks.clear()
        self._next = sequence + 1
        for event in events:
            keys = set(event.keys)
            assert len(keys) == len(event.keys), "a key twice in one event"
            if event.cause is None:
                assert self.repeated or not self.strict or not keys & self.blocks, "stored twice"
                self.blocks |= keys
            else:
                assert not self.strict or keys <= self.blocks, "removed without having been stored"
                self.blocks -= keys


@pytest.mark.parametrize("loss", [0.0, 0.05])
def test_a_million_random_changes_leave_no_phantom_and_no_missing_block(loss: float) -> None:
    """Stores, evictions, resets, restarts and repetitions, compared with a set; also if a consumer loses batches."""
    seed = secrets.randbits(32)
    choose = random.Random(seed)
    held: set[bytes] = set()
    inventory, consumer, sequence = Inventory(), Consumer(strict=not loss), 0

    def take() -> None:
        nonlocal sequence
        events = inventory.take()
        if choose.random() >= loss:
            consumer.receive(sequence, events)
        sequence += 1

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
            inventory.repeat()
            consumer.repeated = True
        else:
            # Consumers drop an engine's blocks when it ends; the next engine finds some of them on the disk.
            held = {key for key in held if choose.random() < 0.9}
            inventory, consumer = Inventory(), Consumer(strict=not loss)
            sequence = 0
            inventory.found(sorted(held))
        if choose.random() < 0.4:
            take()
        if step % 1000 == 999 and not loss:
            while inventory:
                take()
            assert consumer.blocks == held, f"seed {seed}, step {step}"
    loss = 0.0
    take()
    inventory.repeat()
    consumer.repeated = True
    while inventory:
        take()
    assert consumer.blocks == held, f"seed {seed}"


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


def test_found_and_repeated_blocks_come_at_a_bounded_rate_and_in_order() -> None:
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
    inventory.repeat()
    again = [inventory.take() for _ in range(len(KEYS) // _REPEATED_KEYS + 1)]
    assert not inventory
    assert all(sum(len(event.keys) for event in report) <= _REPEATED_KEYS for report in again)
    assert {k for r in again for e in r for k in e.keys} == {*KEYS[1:-1], b"new"}


def test_a_repetition_asked_for_during_one_begins_when_that_ends() -> None:
    """A repetition requested during another starts after it, so each consumer gets all blocks after its request."""
    inventory = Inventory()
    inventory.stored(KEYS)
    inventory.take()
    inventory.repeat()
    first = {key for event in inventory.take() for key in event.keys}
    inventory.repeat()
    inventory.repeat()
    stated: list[bytes] = []
    while inventory:
        stated += [key for event in inventory.take() for key in event.keys]
    assert len(stated) == 2 * len(KEYS) - len(first)
    assert set(stated[-len(KEYS) :]) == set(KEYS)


def test_nothing_is_kept_unless_enabled() -> None:
    """An engine without events uses no memory for them."""
    inventory = Inventory(enabled=False)
    inventory.stored(KEYS)
    inventory.found(KEYS)
    inventory.removed(KEYS, RemovalCause.EVICTED)
    inventory.clear(RemovalCause.LOST)
    inventory.repeat()
    assert not inventory
    assert inventory.take() == []


class PrefixIndex:
    """Blocks by their parents, as in Dynamo's tree: a block with an unknown parent is ignored."""

    def __init__(self, parents: Mapping[bytes, bytes | None]) -> None:
        self.parents = parents
        self.blocks: set[bytes] = set()
        """Known blocks, even if a parent has been removed."""

    def receive(self, events: Iterable[TierEvent]) -> None:
        """Apply a report."""
        for event in events:
            for key in event.keys:
                if event.cause is not None:
                    self.blocks.discard(key)
                elif self.parents[key] is None or self.parents[key] in self.blocks:
                    self.blocks.add(key)


def lines_of(choose: random.Random, count: int) -> dict[bytes, bytes | None]:
    """Return blocks of random prompts, which share prefixes, with their parents."""
    parents: dict[bytes, bytes | None] = {}
    for i in range(count):
        known = [None, *list(parents)[-40:]]
        parents[b"%05d" % i] = choose.choice(known) if choose.random() < 0.2 else known[-1]
    return parents


@pytest.mark.parametrize("found", [False, True])
def test_parents_come_first(found: bool) -> None:
    """In any order of arrival, and however reports are split, a prefix index misses no block."""
    seed = secrets.randbits(32)
    choose = random.Random(seed)
    parents = lines_of(choose, 3000)
    inventory, index = Inventory(), PrefixIndex(parents)
    inventory.parent_of = parents.get
    shuffled = choose.sample(list(parents), len(parents))
    if found:
        inventory.found(shuffled)
    else:
        for start in range(0, len(shuffled), 50):
            inventory.stored(shuffled[start : start + 50])
            index.receive(inventory.take())
    while inventory:
        events = inventory.take()
        assert sum(len(event.keys) for event in events) <= _FOUND_KEYS or not found
        index.receive(events)
    assert index.blocks == set(parents), f"seed {seed}"
    assert not inventory._orphans and not inventory._orphaned
    index.blocks.clear()
    inventory.repeat()
    reports = 0
    while inventory:
        events = inventory.take()
        assert sum(len(event.keys) for event in events) <= _REPEATED_KEYS
        index.receive(events)
        reports += 1
    # Blocks already reported with their descendants keep their places in the queue.
    assert reports <= 2 * -(-len(parents) // _REPEATED_KEYS), f"seed {seed}"
    assert index.blocks == set(parents), f"repeated, seed {seed}"


def test_an_index_of_prefixes_is_complete_after_a_repetition() -> None:
    """The index is complete even if parents were removed and stored again, and keeps no state of removed blocks."""
    seed = secrets.randbits(32)
    choose = random.Random(seed)
    parents = lines_of(choose, 400)
    keys = list(parents)
    inventory, index, held = Inventory(), PrefixIndex(parents), set[bytes]()
    inventory.parent_of = parents.get
    for step in range(4000):
        some = choose.sample(keys, choose.randint(1, 12))
        if choose.random() < 0.5:
            inventory.stored(some)
            held.update(some)
        else:
            inventory.removed(some, RemovalCause.EVICTED)
            held.difference_update(some)
        if choose.random() < 0.5:
            index.receive(inventory.take())
        if step % 200 == 199:
            inventory.repeat()
            while inventory:
                index.receive(inventory.take())
            whole = PrefixIndex(parents)
            whole.receive([TierEvent((key,)) for key in keys if key in held])
            assert index.blocks & whole.blocks == whole.blocks, f"seed {seed}, step {step}"
            assert index.blocks <= held, f"seed {seed}, step {step}"
            assert inventory._orphaned.keys() <= held
            assert sum(map(len, inventory._orphans.values())) == len(inventory._orphaned)
    inventory.removed(keys, RemovalCause.EVICTED)
    assert not inventory._orphans and not inventory._orphaned


def test_parents_in_a_circle_end_nothing() -> None:
    """Forged lineage may contain anything."""
    inventory = Inventory()
    inventory.parent_of = {b"a": b"b", b"b": b"a", b"c": b"c"}.get
    inventory.stored([b"a", b"b", b"c"])
    assert {key for event in inventory.take() for key in event.keys} == {b"a", b"b", b"c"}
    inventory.repeat()
    assert {key for event in inventory.take() for key in event.keys} == {b"a", b"b", b"c"}
    inventory.clear(RemovalCause.LOST)
    inventory.found([b"a", b"b", b"c"])
    inventory.take()
    assert {key for event in inventory.take() for key in event.keys} <= {b"a", b"b", b"c"}
