"""Damage on the drive: a read returns the block's bytes or a miss; which blocks are evicted."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvstore import Namespace
from kvstore.backends.disk.layout import State, decode_head, decode_rows
from kvstore.testing.seeds import fresh_seed
from kvstore.types import BlockKey, Outcome
from tests.disk.rig import opened, tables
from tests.torture.blocks import Client, key_of

Damage = Callable[[bytearray, random.Random], None]


def flip_in_header(slot: bytearray, rng: random.Random) -> None:
    """Flip a bit of the record's header."""
    bit = rng.randrange(256 * 8)
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


DAMAGES: list[Damage] = [flip_in_header, flip_in_payload, zero_a_page, burst]


def edit(root: Path, key: BlockKey, slot_bytes: int, change: Callable[[bytearray], None]) -> None:
    """Change the bytes of a block's slot on the disk."""
    for table in tables(root):
        head = decode_head(table.read_bytes(), Namespace({"model": "m"}).digest)
        assert head is not None
        rows, intact = decode_rows(table.read_bytes()[head.rows_at :], np.arange(head.slots), head)
        for slot in np.flatnonzero(intact & (rows["state"] == State.USED)).tolist():
            if bytes(rows["key"][slot])[: rows["key_length"][slot]] == key:
                with table.with_suffix(".seg").open("r+b") as file:
                    file.seek(slot * slot_bytes)
                    content = bytearray(file.read(slot_bytes))
                    change(content)
                    file.seek(slot * slot_bytes)
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                return
    raise AssertionError(f"no slot holds {key!r}")


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_damaged_slots(tmp_path: Path, engine: str) -> None:
    """80 damages of all kinds: the damaged block is not loaded, the others are right, and it can be stored again."""
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
            assert [n for n, outcome in enumerate(result.outcomes) if outcome is not Outcome.OK] == [3], where
            while client.store([3]).outcomes[0] is not Outcome.OK:
                # The load was reported before the damaged block was quarantined.
                continue
            assert client.load([3]).success, where
    client.close()


async def test_a_read_of_nothing_is_a_miss(tmp_path: Path) -> None:
    """A read beyond the end of its segment does not return the page of an earlier read."""
    async with opened(tmp_path, 128) as rig:
        values = await rig.put_new(1)
        await rig.has_all(values)
        (path,) = tmp_path.rglob("*.seg")
        os.truncate(path, 0)
        assert await rig.backend.get_into([rig.maker.target(key).read for key in values]) == [Outcome.MISS]


async def test_the_most_used_stay(tmp_path: Path) -> None:
    """Loaded or touched blocks stay, the least recently used are evicted, and each eviction is reported."""
    async with opened(tmp_path, 32) as rig:
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
        assert rig.backend.stats().blocks <= 32


async def test_a_batch_larger_than_the_capacity(tmp_path: Path) -> None:
    """As much of the batch as fits is stored and the rest is NO_SPACE; its own blocks do not evict each other."""
    async with opened(tmp_path, 16) as rig:
        values = rig.new(40)
        outcomes = await rig.put(values)
        assert set(outcomes) == {Outcome.OK, Outcome.NO_SPACE}
        stored = [key for key, outcome in zip(values, outcomes, strict=True) if outcome is Outcome.OK]
        assert len(stored) == 16
        await rig.has_all({key: values[key] for key in stored})
