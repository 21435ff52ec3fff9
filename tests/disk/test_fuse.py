"""A filesystem in user space, mounted twice: like a network filesystem on two machines, without the network."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from kvstore.testing.waiting import eventually_async
from tests.disk.mounts import bound
from tests.disk.rig import opened

pytestmark = [
    pytest.mark.root,
    pytest.mark.matrix,
    pytest.mark.skipif(shutil.which("bindfs") is None or not Path("/dev/fuse").exists(), reason="needs bindfs"),
]

SIZES_CACHED_S = 1.1
"""FUSE caches the size of a file for a second; until then, a read of a file that has grown may be short."""

SLOTS = 16


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
async def test_two_mounts(tmp_path: Path, engine: str) -> None:
    """Engines on both mounts see each other's blocks without wake-ups, hold no lock twice, and read no wrong block."""
    source = tmp_path / "source"
    source.mkdir()
    with bound(source, tmp_path / "a") as a, bound(source, tmp_path / "b") as b:
        async with (
            opened(a / "kv", SLOTS, engine=engine) as one,
            opened(b / "kv", SLOTS, engine=engine) as two,
        ):
            values = await one.put_new(8)
            await eventually_async(lambda: set(values) <= set(two.arrived), what="the other engine sees them")
            await asyncio.sleep(SIZES_CACHED_S)
            await two.has_all(values)
            assert two.backend.own(list(values)) == [False] * 8
            for _ in range(10):
                values |= await one.put_new(4)
                for payload, back in zip(values.values(), await two.get(list(values)), strict=True):
                    assert back in (None, payload)
            last = await one.put_new(4)
            await eventually_async(lambda: set(last) <= set(two.arrived), what="the other engine sees them")
        await asyncio.sleep(SIZES_CACHED_S)
        async with opened(b / "kv", SLOTS, engine=engine) as rig:
            await rig.has_all(last)
