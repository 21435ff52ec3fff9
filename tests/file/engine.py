"""A small engine in a process of its own: stores and loads blocks of a shared root, and reports what it saw."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from pathlib import Path

from tests.file.rig import Rig


async def live(root: str, seed: int, rounds: int, universe: int, capacity: int) -> dict[str, int]:
    """Store and load random blocks; wrong bytes end it with an AssertionError."""
    rng = random.Random(seed)
    rig = Rig(Path(root), capacity=capacity, shared=True)
    seen: Counter[str] = Counter()
    async with rig.open() as backend:
        for _ in range(rounds):
            numbers = rng.sample(range(universe), 8)
            if rng.random() < 0.5:
                seen.update(f"store.{outcome.name}" for outcome in await rig.put(backend, numbers))
            else:
                seen.update(f"load.{outcome.name}" for outcome in await rig.get(backend, numbers))
            if rng.random() < 0.05:
                await backend.delete([rig.write(rng.randrange(universe)).key])
            seen["peak"] = max(seen["peak"], rig.used_at_once())
        seen["evicted"] = backend.stats().counters["evicted_blocks"]
    return dict(seen)


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    sys.stdout.write(json.dumps(asyncio.run(live(**arguments))))
