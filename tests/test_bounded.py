"""BoundedDict: never more entries than its limit, and the oldest is removed first."""

from __future__ import annotations

import random

from kvstore.bounded import BoundedDict


def test_the_oldest_goes_first_and_one_set_again_is_the_newest() -> None:
    """After any sets, reads and removals it has the entries that were set last, in the order of their last set."""
    rng = random.Random(1)
    bounded: BoundedDict[int, int] = BoundedDict(8)
    model: dict[int, int] = {}
    for step in range(2000):
        key = rng.randrange(16)
        if rng.random() < 0.2:
            assert bounded.pop(key, None) == model.pop(key, None)
            continue
        if rng.random() < 0.2 and key not in model:
            bounded.setdefault(key, step)
        else:
            bounded[key] = step
        model.pop(key, None)
        model[key] = step
        if len(model) > 8:
            del model[next(iter(model))]
        assert list(bounded.items()) == list(model.items())
