"""Engines that share a disk agree with a model; the campaign does the same over a million steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.testing.seeds import fresh_seed
from tests.disk.model import World
from tests.sizes import sized

STEPS = sized(300, full=5000, quick=100)


@pytest.mark.parametrize("number", range(4))
async def test_engines_agree_with_the_model(tmp_path: Path, number: int) -> None:
    """No byte is wrong, no promise outlives a look at its table, and no block is lost without a reason."""
    world = World(tmp_path, seed := fresh_seed() + number, is_racing=number == 3)
    try:
        await world.run(STEPS)
    except Exception as error:
        error.add_note(f"seed {seed}")
        raise
    assert world.counts["loads"], seed
