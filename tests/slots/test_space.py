"""Space of segments: full filesystems, capacity over all engines, unfinished segments."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from kvstore.testing.waiting import eventually_async
from kvstore.types import Outcome
from tests.diskio.faulty_disk import FaultyDisk
from tests.slots.rig import SLOT, opened, tables


async def test_full_filesystem_refuses_stores_and_leaves_no_file(tmp_path: Path) -> None:
    """Without room for a segment, stores are NO_SPACE; with some segments, they evict."""
    disk = FaultyDisk()
    async with opened(tmp_path / "a", 16, disk=disk) as rig:
        disk.fail("fallocate", errno.ENOSPC, forever=True)
        assert await rig.put({rig.maker.key(): rig.maker.payload()}) == [Outcome.NO_SPACE]
        assert list(tmp_path.rglob("*.seg")) == list(tmp_path.rglob("*.tab*")) == []
        disk.heal()
        values = {rig.maker.key(): rig.maker.payload() for _ in range(4)}

        async def is_stored() -> bool:
            return all(outcome.ok for outcome in await rig.put(values))

        await eventually_async(is_stored)
        disk.fail("fallocate", errno.ENOSPC, forever=True)
        for _ in range(8):
            await rig.put_new(1)
        assert len(tables(tmp_path)) == 4
        assert len(rig.removed) >= 8
        assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("op", ["fallocate", "pwritev", "fdatasync", "rename"])
async def test_failed_segment_leaves_no_file(tmp_path: Path, op: str) -> None:
    """Whichever call fails, the store fails, no file is left, and the next store succeeds."""
    disk = FaultyDisk()
    async with opened(tmp_path / "a", 16, disk=disk, engine="threads") as rig:
        disk.fail(op, errno.EIO)
        assert await rig.put({rig.maker.key(): rig.maker.payload()}) == [Outcome.IO_ERROR]
        assert list(tmp_path.rglob("*.seg")) == list(tmp_path.rglob("*.tab*")) == []
        await rig.has_all(await rig.put_new(4))


async def test_unfinished_segment_is_removed(tmp_path: Path) -> None:
    """A segment without a table and an unfinished table are removed when the next segment is made."""
    async with opened(tmp_path / "a", 16) as rig:
        await rig.put_new(1)
        namespace = tables(tmp_path)[0].parent
        (namespace / "000007.seg").write_bytes(bytes(SLOT))
        (namespace / "000007.tab.tmp").write_bytes(b"half of a head")
        await rig.put_new(1)
        assert {path.name[:6] for path in namespace.glob("0*")} == {"000000", "000001"}


async def test_engines_together_keep_the_capacity(tmp_path: Path) -> None:
    """Segments of three engines that store at once never exceed the capacity."""
    async with (
        opened(tmp_path / "a", 32) as first,
        opened(tmp_path / "a", 32) as second,
        opened(tmp_path / "a", 32) as third,
    ):
        for _ in range(8):
            batches = [
                rig.put({rig.maker.key(): rig.maker.payload() for _ in range(3)}) for rig in (first, second, third)
            ]
            outcomes = {outcome for batch in await asyncio.gather(*batches) for outcome in batch}
            assert outcomes <= {Outcome.OK, Outcome.NO_SPACE}
            assert sum(path.stat().st_size for path in tmp_path.rglob("*.seg")) <= 32 * SLOT
