"""Deleted directories and dead disks: misses and named failures, and an engine that closes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import threading
from pathlib import Path

import pytest

from kvstore.backends.disk.limits import Limits
from kvstore.diskio import OsDisk
from kvstore.errors import BackendError, BackendUnavailableError
from kvstore.testing.waiting import eventually_async
from kvstore.types import Outcome
from tests.disk.rig import NAMESPACE, BadDisk, opened, tables
from tests.diskio.faulty_disk import DiskFault, FaultyDisk


@pytest.mark.parametrize("what", ["root", "namespace"])
async def test_a_directory_is_removed_under_an_engine(tmp_path: Path, what: str) -> None:
    """No wrong block is read, no directory is recreated, no call hangs, and the next start stores and loads."""
    root = tmp_path / "kv"
    async with opened(root, 64) as rig:
        values = await rig.put_new(4)
        shutil.rmtree(root if what == "root" else root / NAMESPACE.hex)
        for payload, back in zip(values.values(), await rig.get(list(values)), strict=True):
            assert back in (None, payload)
        # Upkeep may have noticed it.
        with contextlib.suppress(BackendUnavailableError):
            for _ in range(20):
                await rig.put(rig.new(4))
        assert not root.exists() or what == "namespace"
    async with opened(root, 64) as rig:
        await rig.has_all(await rig.put_new(4))


@pytest.mark.parametrize("engine", ["threads", "io_uring"])
async def test_every_call_fails_for_a_while(tmp_path: Path, engine: str) -> None:
    """While every call fails, stores and loads report the system's error; afterwards both work again."""
    disk = FaultyDisk()
    async with opened(tmp_path, 64, disk=disk, engine=engine) as rig:
        values = await rig.put_new(4)
        disk.fail("any", errno.EIO, forever=True)
        assert set(await rig.put(rig.new(4))) <= {Outcome.IO_ERROR, Outcome.NO_SPACE}
        assert await rig.get(list(values)) == [None] * 4
        assert "nput/output error" in rig.backend.last_error
        assert rig.backend.stats().counters["io_errors"]
        with pytest.raises(BackendError, match="can't be used"):
            await rig.backend.probe()
        await rig.backend.quarantine([b"unknown"])
        disk.heal()
        await rig.backend.probe()
        for payload, back in zip(values.values(), await rig.get(list(values)), strict=True):
            # If no segment can be created, blocks are evicted.
            assert back in (None, payload)
        await rig.has_all(await rig.put_new(4))


async def test_dead_root_fails_no_probe_and_no_upkeep_of_another(tmp_path: Path) -> None:
    """While one of two roots is dead, a probe succeeds, and lost segments of the other one are noticed."""
    roots, disk = [tmp_path / "a", tmp_path / "b"], BadDisk()
    async with opened(roots, 256, disk=disk, engine="threads") as rig:
        await rig.put_new(128)
        disk.ops, disk.bad = ("fstat", "statvfs", "scandir", "pwritev"), str(roots[0])
        await rig.put(rig.new(16))
        await rig.backend.probe()
        lost = set(rig.session.index.segments_in(1))
        for table in tables(roots[1]):
            table.unlink()
        await eventually_async(
            lambda: lost.isdisjoint(rig.session.index.segments_in(1)), what="lost segments are dropped"
        )
        while roots[1].exists():
            shutil.rmtree(roots[1], ignore_errors=True)  # The upkeep makes and removes files meanwhile.
        disk.ops = ()
        await rig.has_all(await rig.put_new(4))
        assert not rig.backend.stats().is_lost


async def test_unexpected_error_ends_no_upkeep(tmp_path: Path) -> None:
    """A duty that fails for an unknown reason is tried again, and the other duties go on."""

    class Odd(OsDisk):
        fails = True

        def statvfs(self, fd: int) -> os.statvfs_result:
            if self.fails:
                raise ValueError("a defect")
            return super().statvfs(fd)

    disk = Odd()
    disk.fails = False
    async with opened(tmp_path, 256, disk=disk) as rig:
        await rig.put_new(16)
        disk.fails = True
        await eventually_async(lambda: rig.backend.stats().counters.get("upkeep_errors", 0) > 1, what="a duty fails")
        for table in tables(tmp_path):
            table.unlink()
        await eventually_async(lambda: len(rig.removed) == 16, what="lost segments are dropped")
        disk.fails = False
        await rig.has_all(await rig.put_new(16))


async def test_close_while_everything_fails(tmp_path: Path) -> None:
    """A backend on a dead disk closes without an exception and leaves no open descriptor."""
    disk = FaultyDisk()
    async with opened(tmp_path, 64, disk=disk) as rig:
        await rig.put_new(4)
        disk.fail("any", errno.EIO, forever=True)
    assert disk.open_fds == {}


@pytest.mark.parametrize("engine", ["threads", "io_uring"])
async def test_close_does_not_wait_for_a_frozen_disk(tmp_path: Path, engine: str) -> None:
    """A call that never returns does not prevent the engine from closing."""
    disk = FaultyDisk()
    gate = threading.Event()
    try:
        async with opened(tmp_path, 64, disk=disk, engine=engine, limits=Limits(close_s=0.1)) as rig:
            await rig.put_new(4)
            disk.add(DiskFault("pwritev", stall=gate, forever=True))
            storing = asyncio.create_task(rig.put(rig.new(2)))
            await eventually_async(lambda: disk.stalled > 0, what="the disk is frozen")
            async with asyncio.timeout(10):
                await rig.backend.close()
            storing.cancel()
            gate.set()
            await asyncio.wait({storing})
    finally:
        gate.set()


async def test_a_quarantine_on_a_dead_disk_forgets_the_block_all_the_same(tmp_path: Path) -> None:
    """Quarantine and removal on a disk that fails every write raise no error, and the block is not found again."""
    disk = FaultyDisk()
    async with opened(tmp_path, 64, disk=disk) as rig:
        values = list(await rig.put_new(4))
        disk.fail("pwritev", errno.EROFS, forever=True)
        await rig.backend.quarantine(values[:2])
        await rig.backend.delete(values[2:])
        assert await rig.backend.exists(values) == [False] * 4
        assert rig.backend.stats().counters["wipe_errors"]
        disk.heal()
        await rig.put_new(4)
