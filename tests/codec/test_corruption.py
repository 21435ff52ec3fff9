"""A hundred thousand damaged, misplaced and foreign records: each is refused, for the right reason."""

from __future__ import annotations

import random

import pytest

from tests.codec.damage import KINDS, Damage
from tests.codec.records import SEED


@pytest.mark.parametrize(("damage", "count"), KINDS, ids=[damage.__name__ for damage, _ in KINDS])
def test_bad_records_are_refused(damage: Damage, count: int) -> None:
    """Every bad record of a kind is refused, and counted under its own fault."""
    seen = damage(random.Random(SEED), count)
    assert seen.total() == count, f"seed {SEED}: {seen.total()} records made, {count} meant"
    wrong = {pair: times for pair, times in seen.items() if pair[0] != pair[1]}
    assert not wrong, f"seed {SEED}: (expected, verdict) and how often: {wrong}"
