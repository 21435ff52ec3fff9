"""The disk backend on ext4, xfs, btrfs and a filesystem in user space."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.testing.seeds import fresh_seed
from kvstore.testing.waiting import eventually_async
from kvstore.types import Outcome
from tests.disk.model import World
from tests.disk.mounts import bound, filled, made
from tests.disk.rig import opened
from tests.sizes import sized

pytestmark = pytest.mark.root

TOOLS = {"ext4": "mkfs.ext4", "xfs": "mkfs.xfs", "btrfs": "mkfs.btrfs", "fuse": "bindfs"}
SIZE_BYTES = 384 << 20
"""The smallest xfs has 300 MiB."""

STEPS = sized(150, full=5000, quick=50)


@pytest.fixture(params=list(TOOLS))
def point(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A mounted filesystem."""
    if shutil.which(TOOLS[request.param]) is None:
        pytest.skip(f"needs {TOOLS[request.param]}")
    with contextlib.ExitStack() as stack:
        if request.param == "fuse":
            (tmp_path / "source").mkdir()
            yield stack.enter_context(bound(tmp_path / "source", tmp_path / "mnt"))
        else:
            yield stack.enter_context(made(request.param, tmp_path, SIZE_BYTES))


async def test_engines_agree_with_the_model(point: Path) -> None:
    """Engines that store, load, evict, are killed and share agree with the model on each filesystem."""
    await World(point, fresh_seed()).run(STEPS)


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
async def test_two_engines_find_each_others_blocks(point: Path, engine: str) -> None:
    """A block of one engine is read by the other, by either I/O method, with direct I/O."""
    root = point / "kv"
    async with opened(root, "64MiB", engine=engine) as one, opened(root, "64MiB", engine=engine) as two:
        assert all(root.direct for root in two.session.roots)
        values = await one.put_new(8)
        await eventually_async(lambda: set(two.arrived) >= set(values), what="the other engine is told")
        await two.has_all(values)


@pytest.mark.parametrize("point", ["ext4", "xfs", "btrfs"], indirect=True)
async def test_blocks_stay_on_a_full_filesystem(point: Path) -> None:
    """On a filesystem that another user has filled, stores may fail, and every stored block is still loaded."""
    async with opened(point / "kv", 512) as rig:
        values = await rig.put_new(256)
        with filled(point):
            for _ in range(4):
                assert set(await rig.put(rig.new(64))) <= {Outcome.OK, Outcome.NO_SPACE}, rig.backend.last_error
            await rig.has_all(await rig.still_there(values))
        await rig.has_all(await rig.put_new(2))
