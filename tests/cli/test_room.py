"""The simulated disk tier of a dry replay, compared with the real one."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from kvstore.backends.disk.limits import Limits
from kvstore.cli.bench.engine import DryTier
from kvstore.cli.bench.room import SlotsRoom
from kvstore.tenants import Tenant, Tenants, tag_of
from kvstore.types import BlockKey, LookupResult, TransferJob
from tests.disk.rig import PAYLOAD, SLOT, Rig, opened
from tests.sizes import sized

_SLOTS = 320
"""Room for 16 segments of 20 slots; 5 of them are freed ahead of need."""

_COMPARED_EVERY = sized(1, full=1, quick=8)
"""Requests after which all blocks are compared."""


def _trace(rng: random.Random, tenants: list[bytes]) -> list[list[BlockKey]]:
    """Return prompts of sessions that grow, some of them forgotten, and of single requests."""
    numbers = iter(range(10**6))

    def blocks(count: int) -> list[BlockKey]:
        tag = rng.choice(tenants)
        return [tag + next(numbers).to_bytes(28, "little") for _ in range(count)]

    sessions, prompts = [blocks(6) for _ in range(40)], []
    for _ in range(400):
        number = min(39, int(rng.expovariate(0.1)))
        sessions[number] += blocks(rng.randrange(3))
        prompts.append(list(sessions[number]))
        if rng.random() < 0.1:
            sessions[rng.randrange(40)] = blocks(6)
        if rng.random() < 0.2:
            prompts.append(blocks(rng.randrange(1, 30)))
    return prompts


async def _ask_backend(rig: Rig, prompt: list[BlockKey]) -> int:
    """Load the blocks before the first miss, store the others; return the number of hits."""
    there = await rig.backend.exists(prompt)
    hits = there.index(False) if False in there else len(prompt)
    assert None not in await rig.get(prompt[:hits])
    await rig.put({key: bytes(PAYLOAD) for key in prompt[hits:]})
    # Slots are freed ahead of need in the background. A probe runs after what is queued on the only thread.
    for _ in range(2):
        await rig.backend.probe()
    while (gauges := rig.backend.stats().gauges)["free_slots"] < gauges["segments"] * 20 // 64:
        await rig.backend.probe()
    await rig.backend.probe()
    return hits


def _ask_model(tier: DryTier, number: int, prompt: list[BlockKey]) -> int:
    hits = 0
    while hits < len(prompt) and tier.lookup(prompt[hits]) is LookupResult.HIT:
        hits += 1
    tier.submit_load(TransferJob(2 * number, prompt[:hits], range(hits)))
    tier.submit_store(TransferJob(2 * number + 1, prompt[hits:], range(len(prompt) - hits)))
    tier.flush()
    return hits


_TENANTS = Tenants(by="parameter", named={"acme": Tenant(guaranteed=0.5)})


@pytest.mark.parametrize("tenants", [None, _TENANTS], ids=["alone", "tenants"])
async def test_simulated_disk_tier_evicts_the_blocks_that_the_real_one_evicts(
    tmp_path: Path, tenants: Tenants | None
) -> None:
    """After each of some hundred requests, both have had the same hits and hold the same blocks."""
    tags = [bytes(8)] if tenants is None else [tag_of("acme", named=True), tag_of("other", named=False)]
    tier = DryTier("file", SlotsRoom(_SLOTS * SLOT, PAYLOAD, tenants), block_bytes=PAYLOAD)
    seen: set[BlockKey] = set()
    limits = Limits(ask_again_s=math.inf)
    async with opened(tmp_path / "kv", _SLOTS, engine="threads", threads=1, tenants=tenants, limits=limits) as rig:
        # Upkeep, or another attempt to make a segment, would let it grow or evict later than the model.
        for task in rig.session._tasks:
            task.cancel()
        await rig.session.space.close()
        for number, prompt in enumerate(_trace(random.Random(1), tags)):
            seen.update(prompt)
            assert _ask_model(tier, number, prompt) == await _ask_backend(rig, prompt), f"request {number}"
            if number % _COMPARED_EVERY:
                continue
            held = [block.key async for block in rig.backend.scan()]
            assert {key for key in seen if tier.lookup(key) is LookupResult.HIT} == set(held), f"request {number}"
        assert rig.backend.stats().counters["evicted_blocks"] == tier.stats().removals["evicted"] > 1000
