"""The table of digests against a dict."""

from __future__ import annotations

import random

import numpy as np

from kvstore.backends.disk.table import NOWHERE, DigestTable
from kvstore.testing.seeds import fresh_seed

END = (1 << 64) - 1


def digest(rng: random.Random) -> int:
    """Return a digest; some fall at the beginning or the end of the table, some are equal."""
    return rng.choice([rng.randrange(END), rng.randrange(1000), END - rng.randrange(1000), rng.randrange(9) << 60])


def test_like_a_dict() -> None:
    """After sets, removals, additions by array and growth, the table has the same content as a dict."""
    seed = fresh_seed()
    rng = random.Random(seed)
    for _ in range(30):
        table, model = DigestTable(rng.choice([0, 100, 1000])), dict[int, int]()
        for step in range(600):
            if rng.random() < 0.02:
                digests = [digest(rng) for _ in range(rng.randrange(1, 80))]
                added = table.add_all(np.array(digests, np.uint64), np.arange(len(digests), dtype=np.int64))
                for place, each in enumerate(digests):
                    assert added[place] == (each not in model), seed
                    model.setdefault(each, place)
            elif rng.random() < 0.55 or not model:
                each = digest(rng)
                table.set(each, step)
                model[each] = step
            else:
                each = rng.choice([digest(rng), *rng.sample(sorted(model), 1)])
                place = model.get(each, 5) if rng.random() < 0.9 else -7
                assert table.remove(each, place) == (model.get(each) == place), seed
                if model.get(each) == place:
                    del model[each]
            assert len(table) == len(model), seed
        digests = [*model, *(digest(rng) for _ in range(200))]
        expected = [model.get(each, NOWHERE) for each in digests]
        assert [table.find(each) for each in digests] == expected, seed
        assert table.find_all(np.array(digests, np.uint64)).tolist() == expected, seed


def test_memory_of_a_block() -> None:
    """A block costs 32 bytes in a table created for the right number of blocks."""
    assert 16 * DigestTable(1_000_000).rows <= 32_100_000
