"""A reader finds the blocks of a root's engines, and changes nothing for them."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

from kvstore.testing.waiting import eventually_async
from kvstore.types import BlockKey, Outcome
from tests.disk.rig import GEOMETRY, NAMESPACE, Rig, opened, proved


@contextlib.asynccontextmanager
async def reading(rig: Rig) -> AsyncIterator[Rig]:
    """Open a reader beside an engine, as another process does."""
    reader = Rig(rig.backend.reader(), random.Random(0), NAMESPACE)
    await reader.backend.open(NAMESPACE, GEOMETRY)
    try:
        yield reader
    finally:
        await reader.backend.close()


async def finds(reader: Rig, values: dict[BlockKey, bytes]) -> None:
    """Wait until a reader finds blocks, and compare their bytes."""
    await eventually_async(lambda: set(reader.arrived) >= set(values), what="the reader finds the new blocks")
    await reader.has_all(values)


def members(root: Path) -> int:
    """Return how many engines a root has, as its engines count them."""
    return len(list((root / ".kvstore").glob("engine.*")))


async def test_a_reader_finds_new_blocks_and_misses_evicted_ones(tmp_path: Path) -> None:
    """Every block that a reader loads is right, while its engine replaces all blocks several times."""
    async with opened(tmp_path, 64) as engine, reading(engine) as reader:
        values = await engine.put_new(40)
        await finds(reader, values)
        for _ in range(8):
            values |= await engine.put_new(32)
            await proved(reader, values)
        left = await engine.still_there(values)
        await eventually_async(lambda: set(reader.arrived) >= set(left), what="the reader finds the last blocks")
        assert await proved(reader, values) == len(left) < len(values)


async def test_engines_do_not_count_a_reader(tmp_path: Path) -> None:
    """A reader holds no segment, also of an engine that has ended; the next engine takes all of them."""
    async with opened(tmp_path, 64) as engine:
        values = await engine.put_new(60)
        segments = engine.backend.stats().gauges["segments"]
        async with reading(engine) as reader:
            assert members(tmp_path) == 1
            await engine.backend.close()
            assert members(tmp_path) == 0
            async with opened(tmp_path, 64) as following:
                assert following.backend.stats().gauges["segments"] == segments
                assert reader.backend.stats().gauges["segments"] == 0
                await following.has_all(values)
                await reader.has_all(values)
                await finds(reader, await following.put_new(4))


async def test_a_reader_finds_the_last_blocks_of_an_ended_engine(tmp_path: Path) -> None:
    """An engine that ends announces the rows that it wrote last, although no other engine takes its segments."""
    async with opened(tmp_path, 64) as engine, reading(engine) as reader:
        await finds(reader, await engine.put_new(2))
        values = await engine.put_new(2)
        await engine.backend.close()
        await finds(reader, values)


async def test_a_reader_takes_no_stores(tmp_path: Path) -> None:
    """What is put to a reader is shed: it gets no segment, and engines do not see it."""
    async with opened(tmp_path, 64) as engine, reading(engine) as reader:
        files = set(tmp_path.rglob("*"))
        assert await reader.put(reader.new(3)) == [Outcome.SHED] * 3
        assert members(tmp_path) == 1
        assert set(tmp_path.rglob("*")) == files


async def test_a_reader_leaves_a_replaced_root_after_its_engines(tmp_path: Path) -> None:
    """A reader stays in a directory that has another name now while an engine is there, and is lost after that."""
    root, before = tmp_path / "kv", tmp_path / "before"
    async with opened(root, 64) as engine, reading(engine) as reader:
        await engine.put_new(4)
        shutil.copytree(root, tmp_path / "copy", ignore=shutil.ignore_patterns("engine.*"))
        root.rename(before)
        (tmp_path / "copy").rename(root)
        for _ in range(3):
            # Each takes a look, or a round of upkeep.
            await finds(reader, await engine.put_new(1))
            for duty in reader.session.duties(reader.session.roots[0]).values():
                await duty()
            assert not reader.backend.stats().is_lost
        await engine.backend.close()
        await eventually_async(lambda: reader.backend.stats().is_lost, what="the reader notices that it is alone")


async def test_a_reader_stays_in_a_root_behind_a_link(tmp_path: Path) -> None:
    """A reader whose path is a symbolic link is where its engines are, also while there is none."""
    (tmp_path / "drive").mkdir()
    (tmp_path / "kv").symlink_to(tmp_path / "drive")
    async with opened(tmp_path / "kv", 64) as engine, reading(engine) as reader:
        values = await engine.put_new(4)
        await finds(reader, values)
        await engine.backend.close()
        for duty in reader.session.duties(reader.session.roots[0]).values():
            await duty()
        assert not reader.backend.stats().is_lost
        await reader.has_all(values)
