"""R1: a damaged record is never returned.

Method: the kinds of damage of tests/codec/test_corruption.py with fresh seeds until there are a million, each record
refused under its own cause.
"""

from __future__ import annotations

import random

from tests.campaign.program import failed, passed, rounds
from tests.codec.damage import KINDS

GOAL = 1_000_000

if __name__ == "__main__":
    total = 0
    for seed in rounds():
        for damage, count in KINDS:
            seen = damage(random.Random(seed), count)
            total += seen.total()
            wrong = {pair: times for pair, times in seen.items() if pair[0] != pair[1]}
            if wrong or seen.total() != count:
                failed(f"seed {seed}, {damage.__name__}: {seen.total()} of {count} made, (expected, found): {wrong}")
        if total >= GOAL:
            break
    passed(f"0 of {total:,} damaged records returned (goal: {GOAL:,})")
