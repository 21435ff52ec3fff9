"""Keys with deadlines."""

from __future__ import annotations

import random

import pytest

from kvstore.tiering.deadlines import Deadlines
from tests.tiering.engine import deadlines_of, key_of, keys_of


@pytest.mark.parametrize("seed", range(20))
def test_keys_are_due_at_their_last_deadline_in_order(seed: int) -> None:
    """In a random walk, each key is due once, at its last deadline, the earliest first."""
    rng = random.Random(seed)
    deadlines, expected, now = Deadlines(), dict[bytes, float](), 0.0
    for _ in range(2000):
        key = key_of(rng.randrange(30))
        match rng.randrange(4):
            case 0 | 1:
                expected[key] = now + rng.randrange(50)
                deadlines.set(key, expected[key])
            case 2:
                assert deadlines.remove(key) == (expected.pop(key, None) is not None)
            case _:
                now += rng.randrange(10)
                limit = rng.choice((None, 1, 3))
                due = sorted((end, key) for key, end in expected.items() if end <= now)[:limit]
                taken = deadlines.take_due(now, limit)
                assert sorted((expected.pop(key), key) for key in taken) == due
                assert limit is None or len(taken) <= limit
        assert sorted(deadlines) == sorted(expected) and len(deadlines) == len(expected)
        assert deadlines.get(key, -1.0) == expected.get(key, -1.0)


def test_the_earliest_beyond_a_number_are_due() -> None:
    """If only a few may be kept, the earliest deadlines are due first, whatever the time."""
    deadlines = Deadlines()
    for number in range(10):
        deadlines.set(key_of(number), 100.0 - number)
    assert deadlines.take_due(0.0, keep=7) == keys_of(9, 8, 7)
    assert deadlines.take_due(0.0, keep=7) == []


def test_changed_and_removed_deadlines_take_no_memory() -> None:
    """However often deadlines are moved forward or removed, only present keys take memory."""
    deadlines = Deadlines()
    for number in range(10_000):
        deadlines.set(key_of(number % 8), 10_000.0 - number)
        deadlines.set(key_of(number), 5.0)
        deadlines.remove(key_of(number))
        assert deadlines_of(deadlines)[1] <= 2 * len(deadlines) + 65
    deadlines.clear()
    assert not deadlines and deadlines_of(deadlines)[1] == 0
