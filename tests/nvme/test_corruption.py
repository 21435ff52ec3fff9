"""Slabs that were damaged under the tier: never a wrong byte, every damaged block a miss that is told."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.backends.nvme.layout import DATA_OFFSET, SLAB_NAME
from kvstore.testing.seeds import fresh_seed
from kvstore.types import LookupResult, Outcome
from tests.torture.blocks import Client, key_of

BLOCKS = 8
PAYLOAD = 16384
SLOT = 4096 + PAYLOAD

Damage = Callable[[bytearray, int, random.Random], None]


def flip_bit_of_header(slot: bytearray, number: int, rng: random.Random) -> None:
    """Flip a bit of the record's header."""
    bit = rng.randrange(256 * 8)
    slot[bit // 8] ^= 1 << bit % 8


def flip_bit_of_payload(slot: bytearray, number: int, rng: random.Random) -> None:
    """Flip a bit of the payload."""
    bit = rng.randrange(PAYLOAD * 8)
    slot[4096 + bit // 8] ^= 1 << bit % 8


def zero_a_page(slot: bytearray, number: int, rng: random.Random) -> None:
    """Make a page of the slot zero, as a lost write does."""
    page = rng.randrange(SLOT // 4096)
    slot[page * 4096 : (page + 1) * 4096] = bytes(4096)


def burst(slot: bytearray, number: int, rng: random.Random) -> None:
    """Overwrite some bytes of header or payload."""
    start = rng.choice([rng.randrange(200), 4096 + rng.randrange(PAYLOAD - 64)])
    length = rng.randrange(1, 65)
    old = bytes(slot[start : start + length])
    while bytes(slot[start : start + length]) == old:
        slot[start : start + length] = rng.randbytes(length)


DAMAGES: list[Damage] = [flip_bit_of_header, flip_bit_of_payload, zero_a_page, burst]


@pytest.fixture(params=["io_uring", "threads"])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Client]:
    """A tier with blocks 0 to 7 in its slots 0 to 7."""
    config = {"backend": "nvme", "path": str(tmp_path), "capacity": DATA_OFFSET + 40 * SLOT, "engine": request.param}
    client = Client({**config, "negative_ttl": "1ms", "load_timeout": 60, "store_timeout": 60})
    # Before that an unknown block has to be asked for.
    assert client.tier.wait_recovered(60)
    assert client.store(range(BLOCKS)).success
    yield client
    client.close()


def edit(path: Path, slot: int, change: Callable[[bytearray], None]) -> None:
    """Change the bytes of a slot on the disk."""
    with (path / SLAB_NAME).open("r+b") as file:
        file.seek(DATA_OFFSET + slot * SLOT)
        content = bytearray(file.read(SLOT))
        change(content)
        file.seek(DATA_OFFSET + slot * SLOT)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def test_damaged_slots(client: Client, tmp_path: Path) -> None:
    """400 damages of all kinds: the damaged block is CORRUPT and gone, the others come back right."""
    seed = fresh_seed()
    rng = random.Random(seed)
    for round_ in range(100):
        for damage in DAMAGES:
            edit(tmp_path, 3, lambda slot, damage=damage: damage(slot, 3, rng))  # type: ignore[misc]
            result = client.load(range(BLOCKS))
            where = (seed, round_, damage.__name__)
            assert client.wrong(range(BLOCKS), result) == [], where
            assert [n for n, outcome in enumerate(result.outcomes) if outcome is not Outcome.OK] == [3], where
            assert client.tier.lookup(key_of(3)) is LookupResult.MISS, where
            again = client.store([3])
            while again.outcomes[0] is not Outcome.OK:
                # The load was answered before the damaged block was set aside.
                again = client.store([3])
            assert client.load([3]).success, where


def test_swapped_slots(client: Client, tmp_path: Path) -> None:
    """Whole, intact records in each other's place are misses, never each other's bytes."""
    slots: dict[int, bytes] = {}
    for number in (2, 5):
        edit(tmp_path, number, lambda slot, number=number: slots.update({number: bytes(slot)}))  # type: ignore[misc]
    for number, other in ((2, 5), (5, 2)):
        edit(tmp_path, number, lambda slot, other=other: slot.__setitem__(slice(None), slots[other]))  # type: ignore[misc]
    result = client.load(range(BLOCKS))
    assert client.wrong(range(BLOCKS), result) == []
    assert sorted(n for n, outcome in enumerate(result.outcomes) if outcome is not Outcome.OK) == [2, 5]


def test_a_slab_that_was_cut_off(client: Client, tmp_path: Path) -> None:
    """Blocks behind the end of a truncated slab are lost, those before it are not, and stores go on."""
    os.truncate(tmp_path / SLAB_NAME, DATA_OFFSET + 5 * SLOT + 6000)
    result = client.load(range(BLOCKS))
    assert client.wrong(range(BLOCKS), result) == []
    assert [outcome is Outcome.OK for outcome in result.outcomes] == [True] * 5 + [False] * 3
    assert client.store(range(100, 108)).success
    result = client.load(range(100, 108))
    assert result.success
    assert client.wrong(range(100, 108), result) == []
