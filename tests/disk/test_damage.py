"""Damage on the drive and random lifecycles: a read returns the block's bytes or a miss."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.backends.disk.layout import decode_descriptor
from kvstore.errors import RecordError
from kvstore.testing.seeds import fresh_seed
from kvstore.types import BlockKey, Outcome
from tests.disk.rig import PAYLOAD, SLOT, Rig, clone, opened, room_for
from tests.torture.blocks import Client, key_of

Damage = Callable[[bytearray, random.Random], None]


def flip_in_header(slot: bytearray, rng: random.Random) -> None:
    """Flip a bit of the record's header."""
    bit = rng.randrange(256 * 8)
    slot[bit // 8] ^= 1 << bit % 8


def flip_in_descriptor(slot: bytearray, rng: random.Random) -> None:
    """Flip a bit of the descriptor: magic, owner, slot, length, namespace or key."""
    bit = rng.randrange(256 * 8, 400 * 8)
    slot[bit // 8] ^= 1 << bit % 8


def flip_in_payload(slot: bytearray, rng: random.Random) -> None:
    """Flip a bit of the payload."""
    bit = rng.randrange((len(slot) - 4096) * 8)
    slot[4096 + bit // 8] ^= 1 << bit % 8


def zero_a_page(slot: bytearray, rng: random.Random) -> None:
    """Zero a page of the slot, as a lost write does."""
    page = rng.randrange(len(slot) // 4096)
    slot[page * 4096 : (page + 1) * 4096] = bytes(4096)


def burst(slot: bytearray, rng: random.Random) -> None:
    """Overwrite some bytes of header or payload."""
    start = rng.choice([rng.randrange(200), 4096 + rng.randrange(len(slot) - 4096 - 64)])
    length = rng.randrange(1, 65)
    old = bytes(slot[start : start + length])
    while bytes(slot[start : start + length]) == old:
        slot[start : start + length] = rng.randbytes(length)


DAMAGES: list[Damage] = [flip_in_header, flip_in_descriptor, flip_in_payload, zero_a_page, burst]


def edit(root: Path, key: BlockKey, slot_bytes: int, change: Callable[[bytearray], None]) -> None:
    """Change the bytes of a block's slot on the disk."""
    for path in root.rglob("*.seg"):
        with path.open("r+b") as file:
            for at in range(0, path.stat().st_size, slot_bytes):
                file.seek(at)
                content = bytearray(file.read(slot_bytes))
                found = decode_descriptor(memoryview(content))
                if found is not None and found.key == key:
                    change(content)
                    file.seek(at)
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                    return
    raise AssertionError(f"no slot holds {key!r}")


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_damaged_slots(tmp_path: Path, engine: str) -> None:
    """100 damages of all kinds: the damaged block is not loaded, the others are right, and it can be stored again."""
    rng = random.Random(seed := fresh_seed())
    config = {"backend": "file", "path": str(tmp_path), "capacity": "16MiB", "reserve": 0, "engine": engine}
    client = Client({**config, "negative_ttl": "1ms", "load_timeout": 60, "store_timeout": 60})
    assert client.tier.wait_recovered(60)
    assert client.store(range(8)).success
    for round_ in range(20):
        for damage in DAMAGES:
            edit(tmp_path, key_of(3), client.slot_bytes + 4096, lambda slot, damage=damage: damage(slot, rng))  # type: ignore[misc]
            result = client.load(range(8))
            where = (seed, round_, damage.__name__)
            assert client.wrong(range(8), result) == [], where
            # Parts of a slot's page that the engine does not use may be damaged without harm.
            bad = [n for n, outcome in enumerate(result.outcomes) if outcome is not Outcome.OK]
            assert bad == [3] or (damage is flip_in_descriptor and not bad), where
            again = client.store([3])
            while bad and again.outcomes[0] is not Outcome.OK:
                # The load was reported before the damaged block was quarantined.
                again = client.store([3])
            if not bad:
                client.tier.remove([key_of(3)])
                while client.store([3]).outcomes[0] is not Outcome.OK:
                    continue
            assert client.load([3]).success, where
    client.close()


async def test_a_segment_that_was_cut_off(tmp_path: Path) -> None:
    """Blocks beyond the end of a truncated segment are not delivered, earlier ones are, and stores continue."""
    async with opened(tmp_path, room_for(128)) as rig:
        values = await rig.put_new(8)
        (path,) = tmp_path.rglob("*.seg")
        os.truncate(path, 5 * SLOT + 6000)
        targets = [rig.maker.target(key) for key in values]
        outcomes = await rig.backend.get_into([target.read for target in targets])
        good = 0
        for target, outcome, payload in zip(targets, outcomes, values.values(), strict=True):
            if outcome is Outcome.OK:
                # A record that is too short is detected by its verifier, the tier.
                try:
                    assert rig.maker.content(target) == payload
                except AssertionError as error:
                    assert isinstance(error.__cause__, RecordError)
                else:
                    good += 1
        assert good == 5
        await rig.has_all(await rig.put_new(4))


async def test_a_read_of_nothing_is_a_miss(tmp_path: Path) -> None:
    """A read beyond the end of its segment does not return the page of an earlier read."""
    async with opened(tmp_path, room_for(128)) as rig:
        values = await rig.put_new(1)
        await rig.has_all(values)
        (path,) = tmp_path.rglob("*.seg")
        os.truncate(path, 0)
        assert await rig.backend.get_into([rig.maker.target(key).read for key in values]) == [Outcome.MISS]


async def test_random_lives(tmp_path: Path) -> None:
    """Through crashes, restarts, evictions, removals and snapshots, a read returns the block's bytes or a miss."""
    rng = random.Random(seed := fresh_seed())
    values: dict[BlockKey, bytes] = {}
    removed: set[BlockKey] = set()
    root = tmp_path / "0"
    for life in range(12):
        crashed = tmp_path / str(life + 1)
        async with opened(root, room_for(48), seed=rng.randrange(1 << 30)) as rig:
            await rig.session.recovered.wait()
            await _prove(rig, values, removed, seed)
            for _ in range(rng.randrange(1, 8)):
                new = rig.new(rng.randrange(1, 6))
                values |= new
                assert set(await rig.put(new)) <= {Outcome.OK, Outcome.NO_SPACE}, seed
                if rng.random() < 0.3:
                    gone = rng.sample(list(values), min(3, len(values)))
                    removed.update(gone)
                    await rig.backend.delete(gone)
                if rng.random() < 0.2:
                    await rig.session._write_snapshot()
            await _prove(rig, values, removed, seed)
            if is_crash := rng.random() < 0.6:
                clone(root, crashed)
        if is_crash:
            shutil.rmtree(root)
            root = crashed


async def _prove(rig: Rig, values: dict[BlockKey, bytes], removed: set[BlockKey], seed: int) -> None:
    got = await rig.get(list(values))
    for (key, payload), back in zip(values.items(), got, strict=True):
        assert back in (None, payload), seed
        assert key not in removed or back is None, seed
    assert sum(back is not None for back in got) == len(await rig.scanned()), seed


async def test_the_most_used_stay(tmp_path: Path) -> None:
    """Loaded or touched blocks stay, the least recently used are evicted, and each eviction is reported."""
    async with opened(tmp_path, room_for(32)) as rig:
        loaded, touched = await rig.put_new(2), await rig.put_new(2)
        stored = 4
        for _ in range(40):
            await rig.has_all(loaded)
            rig.backend.touch(list(touched))
            await rig.put_new(2)
            stored += 2
            assert stored == rig.backend.stats().blocks + len(rig.removed)
        assert len(rig.removed) > 40
        await rig.has_all({**loaded, **touched})
        assert PAYLOAD * rig.backend.stats().blocks <= room_for(32)


async def test_a_batch_larger_than_the_capacity(tmp_path: Path) -> None:
    """As much of the batch as fits is stored and the rest is NO_SPACE; its own blocks do not evict each other."""
    async with opened(tmp_path, room_for(16)) as rig:
        values = rig.new(40)
        outcomes = await rig.put(values)
        assert set(outcomes) == {Outcome.OK, Outcome.NO_SPACE}
        stored = [key for key, outcome in zip(values, outcomes, strict=True) if outcome is Outcome.OK]
        assert len(stored) == 16
        await rig.has_all({key: values[key] for key in stored})
