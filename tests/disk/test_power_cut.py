"""Power cuts at any moment: blocks are right or a miss; with ``durability: data`` all of them are there."""

from __future__ import annotations

import itertools
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.errors import RecordError
from kvstore.testing.seeds import fresh_seed
from kvstore.types import BlockKey, Outcome
from tests.disk.filled_root import frame_ends, home
from tests.disk.power import Event, RecordingDisk, after_power_cut
from tests.disk.rig import Rig, clone, opened, room_for
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
            await rig.scanned()
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
    await rig.scanned()
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


@pytest.mark.parametrize("durability", ["none", "data"])
async def test_power_cuts(tmp_path: Path, durability: str) -> None:
    """Whichever unsynced writes are lost, no block is wrong, and the directory stays usable."""
    rng = random.Random(seed := fresh_seed())
    capacity = room_for(16)
    values, events = await lives(tmp_path / "kv", capacity, durability, rng)
    for number in range(CUTS):
        cut = rng.randint(1, len(events))
        copy = after_power_cut(events, cut, rng, tmp_path / f"cut-{number}")
        where = (seed, number, cut)
        if (copy / "kv").is_dir():
            await goes_on(copy / "kv", capacity, values, where)
        shutil.rmtree(copy)


async def test_reported_blocks_survive_a_power_cut(tmp_path: Path) -> None:
    """With ``durability: data`` each block reported as stored is there, unless it was removed or evicted."""
    rng = random.Random(seed := fresh_seed())
    capacity = room_for(256)
    values, events = await lives(tmp_path / "kv", capacity, "data", rng)
    kept_somewhere = 0
    for number in range(CUTS):
        cut = rng.randint(1, len(events))
        said = [event.value for event in events[:cut] if event.kind == "mark"]
        left = {key for what, key in said if what == "leaves"}
        expected = {key for what, key in said if what == "stored"} - left
        copy = after_power_cut(events, cut, rng, tmp_path / f"cut-{number}")
        if expected:
            kept_somewhere += 1
            found = await goes_on(copy / "kv", capacity, values, (seed, number, cut))
            assert found >= expected, (seed, number, cut)
        shutil.rmtree(copy)
    assert kept_somewhere


async def test_files_are_synced_before_others_refer_to_them(tmp_path: Path) -> None:
    """A snapshot is renamed, and a journal is named by its predecessor, only when it is on the device."""
    disk = RecordingDisk(tmp_path)
    async with opened(tmp_path / "kv", "64MiB", disk=disk, engine="threads") as rig:
        await rig.put_new(3)
        await rig.session._write_snapshot()
        events = list(disk.events)
    made = {os.path.basename(event.path): event.file for event in events if event.kind == "create"}
    synced: set[int] = set()
    referred = []
    for event in events:
        if event.kind == "sync":
            synced.add(event.file)
        elif event.kind == "write":
            if event.file == made["journal.00000001"] and made["journal.00000002"] in created(events, event):
                referred.append(made["journal.00000002"] in synced)
            synced.discard(event.file)
        elif event.kind == "rename" and event.value.endswith("/index"):
            referred.append(made["index.tmp"] in synced)
    assert referred == [True, True]


def created(events: Sequence[Event], until: Event) -> set[int]:
    """Return the files created before an event."""
    return {event.file for event in itertools.takewhile(lambda e: e is not until, events) if event.kind == "create"}


def cuts_of(ends: Sequence[int]) -> list[int]:
    """Return the end of each frame, the next byte, and an offset inside the frame."""
    places = {at for end in ends for at in (end, end + 1)} | {(one + two) // 2 for one, two in itertools.pairwise(ends)}
    return sorted(at for at in places if at <= ends[-1])


async def test_a_journal_cut_at_every_frame(tmp_path: Path) -> None:
    """With cuts at and beside the ends of frames, slots newer than the journal are never another block."""
    rng = random.Random(seed := fresh_seed())
    root, capacity = tmp_path / "a", room_for(16)
    async with opened(root, capacity) as rig:
        values = await rig.put_new(3)
    async with opened(root, capacity) as rig:
        for count in (4, 1, 4, 4, 4):
            values |= await rig.put_new(count)
        await rig.backend.delete(list(values)[-2:])
        await rig.backend.quarantine(list(values)[-3:-2])
        values |= await rig.put_new(2)
        copy = clone(root, tmp_path / "b")
    name = max(home(copy).glob("journal.*")).name
    content = (home(copy) / name).read_bytes()
    ends = frame_ends(content)
    assert len(ends) > 10
    found = 0
    cuts = cuts_of(ends)
    for at in rng.sample(cuts, sized(5, full=len(cuts))):
        cut = clone(copy, tmp_path / f"cut-{at}")
        os.truncate(home(cut) / name, at)
        found += len(await goes_on(cut, capacity, values, (seed, at)))
        shutil.rmtree(cut)
    assert found
