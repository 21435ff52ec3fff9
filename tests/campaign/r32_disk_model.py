"""R32: engines that share a disk agree with a model over random steps.

Method: worlds of up to four engines of two namespaces in two directories. They store, load, evict, remove and wipe
blocks; they are killed at a random system call, closed, and take the segments of others; disks are full or read-only,
segments are deleted. After each step each engine is
compared with the model: its own blocks exactly, and each block of another engine that it promises.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections import Counter
from pathlib import Path
from typing import Final

from tests.campaign.program import failed, passed, rounds
from tests.disk.model import World, WrongError

WORLDS: Final = 100
"""Of each round: ten minutes. Ten rounds are the goal."""
STEPS: Final = 1000
"""Of each world."""

if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    total: Counter[str] = Counter()
    for first in rounds():
        for seed in range(first, first + WORLDS):
            with tempfile.TemporaryDirectory() as directory:
                world = World(Path(directory), seed, is_racing=seed % 4 == 0)
                try:
                    asyncio.run(world.run(STEPS))
                except (WrongError, AssertionError) as error:
                    failed(f"world {seed}: {error}")
            total += world.counts
            total["steps"] += STEPS
    figures = {
        "steps": "steps",
        "loads": "loads",
        "evictions": "removal EVICTED",
        "kills": "_kill",
        "taken later": "blocks taken over",
    }
    passed(", ".join(f"{total[name]:,} {what}" for what, name in figures.items()) + " (goal: 1,000,000 steps)")
