"""Tenants of a disk: whose blocks are evicted, also in an I/O process."""

from __future__ import annotations

import mmap
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from kvstore import LookupResult, Namespace, TransferJob, open_tier
from kvstore.backends.disk.index import Index
from kvstore.tenants import Tenants, tag_of
from kvstore.testing import eventually
from kvstore.types import BlockKey
from tests.disk.bare_index import add, open_segment, take
from tests.disk.rig import SLOT

TENANTS = msgspec.convert({"by": "cache_salt", "named": {"quiet": {"guaranteed": 0.5}}}, Tenants)
BLOCKS = 64


def keys(name: str, *numbers: int) -> list[BlockKey]:
    """Return keys of a tenant's blocks."""
    return [tag_of(name, named=name == "quiet") + b"%028d" % number for number in numbers]


def test_counts_of_tenants_equal_their_blocks() -> None:
    """Whatever is stored, evicted, kept, used and given up."""
    rng = random.Random("shares of a disk")
    index = Index(128, TENANTS)
    departing: list[int] = []
    for number in range(4000):
        segments = list(index.segments.values())
        held = [segment.first + slot for segment in segments for slot in segment.held().tolist()]
        match rng.randrange(9):
            case 0 if len(segments) < 4:
                open_segment(index, 32)
            case 1 if segments and rng.random() < 0.1:
                index.close_segment(rng.choice(segments))
            case 2:
                departing += index.evict(rng.randint(1, 6), 0)
            case 3:
                departing += index.depart(rng.sample(held, min(3, len(held))))
            case 4:
                index.touch(held[:10])
            case 5:
                index.stay([place for place in departing if place in held])
                departing.clear()
            case 6:
                index.leave([place for place in departing if place in held])
                departing.clear()
            case _:
                for place in take(index, rng.randint(1, 4)):
                    add(index, [place], keys(rng.choice(["quiet", "a", "b", "c"]), number * 10**9 + place))
        shares = index._shares
        assert shares is not None
        there = Counter(
            shares._accounts.of(segment.key(slot)).name
            for segment in index.segments.values()
            for slot in segment.held().tolist()
            if segment.age_view[slot] != 255
        )
        counted: Counter[str] = Counter()
        for account, _ in shares._known:
            counted[account.name] += account.blocks
        assert +counted == there, number


def test_io_process_receives_the_tenants(tmp_path: Path) -> None:
    """The tenants are passed to the process that does the I/O."""
    slot_bytes, count = 8192, 32
    fd = os.memfd_create("kvstore-test")
    os.ftruncate(fd, count * slot_bytes)
    memory = mmap.mmap(fd, count * slot_bytes)
    os.close(fd)
    options: dict[str, Any] = {"backend": "file", "path": str(tmp_path), "capacity": BLOCKS * SLOT, "reserve": 0}
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
