"""Tenants of a disk: which blocks are evicted, also after a restart, after a crash and in an I/O process."""

from __future__ import annotations

import mmap
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstore import LookupResult, Namespace, TransferJob, open_tier
from kvstore.backends.disk.columns import Columns
from kvstore.backends.disk.index import Index
from kvstore.backends.disk.layout import Kind, digest_of
from kvstore.tenants import Tenants, tag_of
from kvstore.testing import eventually
from kvstore.types import BlockKey
from tests.disk.rig import Rig, clone, opened, room_for

TENANTS = msgspec.convert({"by": "cache_salt", "named": {"quiet": {"guaranteed": 0.5}}}, Tenants)
BLOCKS = 64


def keys(name: str, *numbers: int) -> list[BlockKey]:
    """Return keys of a tenant's blocks."""
    return [tag_of(name, named=name == "quiet") + b"%028d" % number for number in numbers]


async def fill(rig: Rig, name: str, first: int, count: int) -> dict[BlockKey, bytes]:
    """Put blocks of a tenant, a few at a time; return them."""
    values = {key: rig.maker.payload() for key in keys(name, *range(first, first + count))}
    for start in range(0, count, 8):
        await rig.put(dict(list(values.items())[start : start + 8]))
    return values


async def kept(rig: Rig, values: dict[BlockKey, bytes]) -> int:
    """Return how many blocks are there, and right."""
    found = await rig.get(list(values))
    assert all(payload in (None, values[key]) for key, payload in zip(values, found, strict=True))
    return sum(payload is not None for payload in found)


@pytest.mark.parametrize("tenants", [TENANTS, None])
async def test_neighbour_displaces_no_guaranteed_block(tmp_path: Path, tenants: Tenants | None) -> None:
    """Guaranteed blocks stay, unlike without tenants; also after a restart and after a crash."""
    guaranteed = 24
    async with opened(tmp_path / "kv", room_for(BLOCKS), tenants=tenants) as rig:
        quiet = await fill(rig, "quiet", 0, guaranteed)
        await fill(rig, "noisy", 0, 3 * BLOCKS)
        assert await kept(rig, quiet) == (guaranteed if tenants else 0)
        crashed = clone(tmp_path / "kv", tmp_path / "crashed")
    for path in (tmp_path / "kv", crashed):
        async with opened(path, room_for(BLOCKS), tenants=tenants) as rig:
            await rig.session.recovered.wait()
            await fill(rig, "other", 0, 3 * BLOCKS)
            assert await kept(rig, quiet) == (guaranteed if tenants else 0)
            assert rig.backend.stats().blocks > BLOCKS // 2


async def test_a_quiet_tenant_takes_its_share_back(tmp_path: Path) -> None:
    """The share is reclaimed from a neighbour that used the whole disk."""
    async with opened(tmp_path, room_for(BLOCKS), tenants=TENANTS) as rig:
        noisy = await fill(rig, "noisy", 0, 3 * BLOCKS)
        quiet = await fill(rig, "quiet", 0, 24)
        assert await kept(rig, quiet) == 24
        assert 0 < await kept(rig, noisy) <= BLOCKS - 24


def add(index: Index, slot: int, key: BlockKey) -> None:
    """Add a block in a taken slot."""
    index.add([(Kind.ADD, slot, 100, digest_of(key), key)])
    index.unpin((slot,))


def test_within_a_share_the_least_recently_used_leave_first() -> None:
    """Pinned blocks are passed over, and blocks within the guarantee are never evicted."""
    index = Index(Columns(64), 0, TENANTS)
    index.open_segment(0, 0)
    slots = index.take(64)
    for slot in slots:
        add(index, slot, *keys("quiet" if slot % 2 else "noisy", slot))
    index.touch(slots[:20])
    index.pin(slots[20:22])
    assert [slot for _, slot, *_ in index.evict(4)] == [22, 24, 26, 28]
    assert {slot % 2 for _, slot, *_ in index.evict(64)} == {0}
    assert index.evict(1) == [], "half of the slots are guaranteed, and one of the others is pinned"
    index.unpin(slots[20:22])
    assert [slot for _, slot, *_ in index.evict(1)] == [20]


def test_index_counts_equal_its_blocks() -> None:
    """The counts are right after any calls, and in another index over the same columns."""
    rng = random.Random("shares of a disk")
    columns = Columns(32)
    index = Index(columns, 0, TENANTS)
    segments: set[int] = set()
    for number in range(4000):
        match rng.randrange(8):
            case 0 if len(segments) < 4:
                segment = rng.choice([each for each in range(4) if each not in segments])
                index.open_segment(segment, 0)
                segments.add(segment)
            case 1 if segments and rng.random() < 0.1:
                segment = segments.pop()
                assert index.close_segment([segment]) == segment
                index.leave(index.depart(columns.held(segment * 32, segment * 32 + 32).tolist()))
                index.leave([(Kind.DROP, segment * 32, 0, 0, b"")])
            case 2:
                index.leave(index.evict(rng.randint(1, 6)))
            case 3:
                held = columns.held().tolist()
                index.leave(index.depart(rng.sample(held, min(3, len(held)))))
            case 4:
                index.touch(columns.held().tolist()[:10])
            case _:
                for slot in index.take(rng.randint(1, 4)):
                    add(index, slot, *keys(rng.choice(["quiet", "a", "b", "c"]), number * 1000 + slot))
        for each in (index, Index(columns, 0, TENANTS)) if number % 50 == 0 else (index,):
            assert each._shares is not None
            there = Counter(each._shares._accounts.of(key).name for key in columns.keys_in(columns.held()))
            counted: Counter[str] = Counter()
            for account in each._shares._accounts:
                counted[account.name] += account.blocks
            assert +counted == there


def test_io_process_receives_the_tenants(tmp_path: Path) -> None:
    """The tenants are passed to the process that does the I/O."""
    slot_bytes, count = 8192, 32
    fd = os.memfd_create("kvstore-test")
    os.ftruncate(fd, count * slot_bytes)
    memory = mmap.mmap(fd, count * slot_bytes)
    os.close(fd)
    options: dict[str, Any] = {"backend": "file", "path": str(tmp_path), "capacity": room_for(BLOCKS), "reserve": 0}
    tier = open_tier(
        {**options, "io": "process"},
        primary=memoryview(memory),
        slot_bytes=slot_bytes,
        namespace=Namespace({"model": "m"}),
        tenants=TENANTS,
    )
    numbers = iter(range(1000))

    def store(some: list[BlockKey]) -> None:
        tier.submit_store(TransferJob(next(numbers), some, list(range(len(some)))))
        tier.flush()
        assert tier.drain(60)
        tier.get_finished()

    quiet = keys("quiet", *range(16))
    store(quiet)
    for first in range(0, 4 * BLOCKS, 32):
        store(keys("noisy", *range(first, first + 32)))
    eventually(lambda: all(tier.lookup(key) is LookupResult.HIT for key in quiet), timeout_s=30, what="the quiet one")
    assert sum(tier.lookup(key) is LookupResult.HIT for key in keys("noisy", *range(4 * BLOCKS))) < BLOCKS
    tier.close()
