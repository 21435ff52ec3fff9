"""A filesystem that others fill to its last block: engines survive and free room."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.testing.waiting import eventually_async
from kvstore.types import BlockKey, Outcome
from tests.disk.mounts import ext4, filled, mounted
from tests.disk.rig import opened
from tests.project.tree import ROOT

pytestmark = [pytest.mark.torture, pytest.mark.root, pytest.mark.timeout(180)]

READER = """
import asyncio, sys
from pathlib import Path
from kvstore.testing.waiting import eventually_async
from tests.disk.mounts import filled
from tests.disk.rig import opened

async def main(root):
    async with opened(root, 2048) as one, opened(root, 2048) as two:
        values = await one.put_new(600)
        await eventually_async(lambda: len(two.arrived) == 600, what="the other engine is told")
        with filled(root.parent):
            for _ in range(3):
                await two.has_all(values)
                await asyncio.sleep(1.1)
        await two.has_all(values)

asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.mark.parametrize("kind", ["ext4", "tmpfs"])
def test_a_reader_on_a_full_disk_lives(tmp_path: Path, kind: str) -> None:
    """Recording a read on a full disk needs no room or is skipped; it never kills the engine (SIGBUS)."""
    context = (
        ext4(tmp_path) if kind == "ext4" else mounted(tmp_path / "mnt", "-t", "tmpfs", "-o", "size=64m", "kvstore-test")
    )
    with context as point:
        done = subprocess.run(
            [sys.executable, "-c", READER, str(point / "kv")], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


async def test_room_is_given_back_to_a_full_disk(tmp_path: Path) -> None:
    """An engine removes segments until the reserve is free again, even without a free block in the filesystem."""
    with ext4(tmp_path) as point:
        async with opened(point / "kv", "24MiB", reserve="8MiB") as rig:
            for _ in range(100):
                await rig.put_new(16)

            def is_free() -> bool:
                filesystem = os.statvfs(point)
                return filesystem.f_bavail * filesystem.f_frsize >= 8 << 20

            with filled(point):
                assert not is_free()
                await eventually_async(is_free, 60, what="the reserve is free again")
                assert set(await rig.put(rig.new(2))) <= {Outcome.OK, Outcome.NO_SPACE}
                assert rig.backend.stats().counters["segments_given_up"]
            await rig.has_all(await rig.put_new(2))


async def test_error_of_a_store_has_the_free_bytes_of_a_disk_that_others_fill(tmp_path: Path) -> None:
    """They show whether other engines or other files take the room."""
    with ext4(tmp_path) as point:
        async with opened(point / "kv", "24MiB", reserve="8MiB") as rig:
            with filled(point):
                assert set(await rig.put(rig.new(2))) == {Outcome.NO_SPACE}
            assert "the disk is full: 0 are free, and the reserve is 8MiB" in rig.backend.last_error


async def test_stores_end_and_loads_go_on_when_the_disk_is_full(tmp_path: Path) -> None:
    """Without a reserve, stores evict, for tables and segments are preallocated; stored blocks are found."""
    with ext4(tmp_path) as point:
        async with opened(point / "kv", 1024) as rig:
            values: dict[BlockKey, bytes] = {}
            while len(values) < 1024:
                values |= await rig.put_new(64)
            values = await rig.still_there(values)
            with filled(point):
                for _ in range(16):
                    assert set(await rig.put(rig.new(64))) <= {Outcome.OK, Outcome.NO_SPACE}
                await rig.has_all(await rig.still_there(values))
            await rig.has_all(await rig.put_new(2))
