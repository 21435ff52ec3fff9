"""Power cuts at any moment: blocks are right or a miss; with ``durability: data`` all of them are there."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from kvstore.errors import RecordError
from kvstore.testing.seeds import fresh_seed
from kvstore.types import BlockKey, Outcome
from tests.disk.power import Event, RecordingDisk, after_power_cut
from tests.disk.rig import Rig, opened
from tests.sizes import sized

CUTS = sized(4, full=200)
"""Number of power cuts per test."""


async def lives(
    root: Path, capacity: int, durability: str, rng: random.Random
) -> tuple[dict[BlockKey, bytes], list[Event]]:
    """Store, remove, evict, close and restart; return the stored blocks, and all changes of the disk."""
    disk = RecordingDisk(root.parent)
    values: dict[BlockKey, bytes] = {}
    for _ in range(3):
        async with opened(
            root, capacity, disk=disk, durability=durability, engine="threads", seed=rng.randrange(1 << 30)
        ) as rig:
            rig.backend.set_removal_listener(lambda keys, cause: [disk.mark(("leaves", key)) for key in keys] and None)
            for _ in range(5):
                new = rig.new(rng.randrange(1, 5))
                values |= new
                for key, outcome in zip(new, await rig.put(new), strict=True):
                    if outcome is Outcome.OK:
                        disk.mark(("stored", key))
                if rng.random() < 0.4:
                    key = rng.choice(list(values))
                    disk.mark(("leaves", key))
                    await rig.backend.delete([key])
    return values, disk.events


async def proved(rig: Rig, values: dict[BlockKey, bytes], where: object) -> set[BlockKey]:
    """Check that every block found is right; return the keys found."""
    targets = [rig.maker.target(key) for key in values]
    outcomes = await rig.backend.get_into([target.read for target in targets])
    found = set()
    for target, outcome in zip(targets, outcomes, strict=True):
        if outcome is not Outcome.OK:
            continue
        try:
            assert rig.maker.content(target) == values[target.key], where
        except AssertionError as error:
            # Lost bytes are detected by the record's verifier, the tier.
            if not isinstance(error.__cause__, RecordError):
                raise
            continue
        found.add(target.key)
    return found


async def goes_on(root: Path, capacity: int, values: dict[BlockKey, bytes], where: object) -> set[BlockKey]:
    """Check that engines work in a directory after a crash, and that one reads the other's blocks."""
    async with opened(root, capacity) as rig:
        found = await proved(rig, values, where)
        async with opened(root, capacity) as other:
            await proved(other, values, where)
        fresh = rig.new(4)
        assert set(await rig.put(fresh)) <= {Outcome.OK}, (where, rig.backend.last_error)
        await rig.has_all(fresh)
    async with opened(root, capacity) as rig:
        again = await proved(rig, values | fresh, where)
        assert again >= set(fresh), where
    return found


@pytest.mark.parametrize(("durability", "slots"), [("none", 16), ("data", 16), ("data", 256)])
async def test_power_cuts(tmp_path: Path, durability: str, slots: int) -> None:
    """Whichever unsynced writes are lost, no block is wrong, and the directory stays usable.

    With ``durability: data`` each block reported as stored is there, unless it was removed or evicted.
    """
    rng = random.Random(seed := fresh_seed())
    values, events = await lives(tmp_path / "kv", slots, durability, rng)
    for number in range(CUTS):
        cut = rng.randint(1, len(events))
        said = [event.value for event in events[:cut] if event.kind == "mark"]
        left = {key for what, key in said if what == "leaves"}
        # Of few slots, the row of an evicted block is written before the eviction is reported.
        expected = {key for what, key in said if what == "stored" and slots == 256} - left
        copy = after_power_cut(events, cut, rng, tmp_path / f"cut-{number}")
        if (copy / "kv").is_dir():
            assert await goes_on(copy / "kv", slots, values, (seed, number, cut)) >= expected, (seed, number, cut)
        assert (copy / "kv").is_dir() or not expected
        shutil.rmtree(copy)
