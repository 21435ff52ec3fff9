"""A directory that dies under a running engine: outcomes, no exceptions, and life again when it comes back."""

from __future__ import annotations

import asyncio
import errno
import logging
import shutil
import threading
from pathlib import Path

import pytest

from kvstore.errors import BackendUnavailableError
from kvstore.testing import DiskFault
from kvstore.testing.waiting import eventually_async
from kvstore.types import Outcome, RemovalCause
from tests.file.rig import NAMESPACE, Rig, key, keys


@pytest.mark.parametrize("shared", [False, True])
async def test_the_root_is_removed(tmp_path: Path, shared: bool) -> None:
    """Loads miss, stores and the probe fail, nothing is made anew in its place, close works."""
    rig = Rig(tmp_path / "kv", shared=shared)
    async with rig.open() as backend:
        await rig.put(backend, range(4))
        shutil.rmtree(rig.root)
        assert await rig.get(backend, range(4)) == [Outcome.MISS] * 4
        assert {cause for _, cause in rig.removed} == {RemovalCause.LOST}
        assert set(await rig.put(backend, range(4, 8))) == {Outcome.IO_ERROR}
        with pytest.raises(BackendUnavailableError, match="writing"):
            await backend.probe()
        assert list(await backend.exists(keys(range(8)))) == [False] * 8
        assert list(await backend.delete(keys(range(8)))) == [False] * 8
        assert not rig.root.exists()
    assert rig.disk.open_fds == {}


async def test_the_namespace_is_removed(tmp_path: Path) -> None:
    """Below a living root, directories are made again, and blocks are stored and loaded as before."""
    rig = Rig(tmp_path / "kv")
    async with rig.open() as backend:
        await rig.put(backend, range(4))
        shutil.rmtree(rig.root / NAMESPACE.hex)
        assert await rig.get(backend, range(4)) == [Outcome.MISS] * 4
        assert await rig.put(backend, range(4)) == [Outcome.OK] * 4
        assert await rig.get(backend, range(4)) == [Outcome.OK] * 4
        shutil.rmtree(rig.shard(1))
        assert await rig.get(backend, [1]) == [Outcome.MISS]
        assert await rig.put(backend, [1]) == [Outcome.OK]
        assert await rig.get(backend, [1]) == [Outcome.OK]
        fds = len(rig.disk.open_fds)
        for _ in range(20):
            shutil.rmtree(rig.shard(1))
            await rig.get(backend, [1])
            assert await rig.put(backend, [1]) == [Outcome.OK]
        assert len(rig.disk.open_fds) == fds


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(errno.EIO, Outcome.IO_ERROR), (errno.EROFS, Outcome.REFUSED), (errno.EMFILE, Outcome.IO_ERROR)],
)
async def test_every_call_fails_for_a_while(
    tmp_path: Path, error: int, outcome: Outcome, caplog: pytest.LogCaptureFixture
) -> None:
    """Batches come back with failures, one warning is logged, and when the disk is back all blocks are there."""
    rig = Rig(tmp_path / "kv")
    async with rig.open() as backend:
        await rig.put(backend, range(4))
        caplog.set_level(logging.WARNING)
        rig.disk.fail("any", error, forever=True)
        for _ in range(3):
            assert set(await rig.put(backend, range(4, 8))) == {outcome}
            assert set(await rig.get(backend, range(4))) == {outcome}
        with pytest.raises(BackendUnavailableError):
            await backend.exists([key(1)])
        with pytest.raises(BackendUnavailableError):
            await backend.probe()
        await backend.quarantine([key(1)])
        assert list(await backend.delete([key(1)])) == [False]
        assert len(caplog.records) == 1
        rig.disk.heal()
        await backend.probe()
        assert await rig.get(backend, range(4)) == [Outcome.OK] * 4
        assert await rig.put(backend, range(4, 8)) == [Outcome.OK] * 4
        await rig.settled(backend)


async def test_close_while_everything_fails(tmp_path: Path) -> None:
    """A backend on a dead disk closes without an exception, and leaves no descriptor."""
    rig = Rig(tmp_path / "kv")
    async with rig.open() as backend:
        await rig.put(backend, range(4))
        rig.disk.fail("any", errno.EIO, forever=True)
    assert rig.disk.open_fds == {}


async def test_close_does_not_wait_for_a_frozen_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that never comes back does not keep the engine from ending."""
    monkeypatch.setattr("kvstore.backends.file.backend._CLOSE_TIMEOUT_S", 0.2)
    rig = Rig(tmp_path / "kv")
    gate = threading.Event()
    try:
        async with asyncio.timeout(60), rig.open() as backend:
            await rig.put(backend, range(4))
            rig.disk.add(DiskFault("any", stall=gate, forever=True))
            storing = asyncio.create_task(rig.put(backend, range(4, 8)))
            await eventually_async(lambda: rig.disk.stalled > 0)
        assert not storing.done()
    finally:
        rig.disk.heal()
        gate.set()
    await asyncio.wait({storing})
    # Other tests look for threads that are left.
    await eventually_async(lambda: not [t for t in threading.enumerate() if t.name.startswith("kvstore-file")])
    assert storing.exception() is None or isinstance(storing.exception(), OSError | RuntimeError)


async def test_failures_have_a_text(tmp_path: Path) -> None:
    """What stopped a load or a store can be read, with the directory and the system's words, and is counted."""
    rig = Rig(tmp_path / "kv")
    async with rig.open() as backend:
        await rig.put(backend, [1])
        rig.disk.fail("preadv", errno.EIO, forever=True)
        assert await rig.get(backend, [1]) == [Outcome.IO_ERROR]
        assert "loading in" in backend.last_error
        assert "Input/output error" in backend.last_error
        rig.disk.heal()
        rig.disk.fail("pwritev", errno.EIO, forever=True)
        assert await rig.put(backend, [2]) == [Outcome.IO_ERROR]
        assert "storing in" in backend.last_error
        assert backend.stats().counters["io_errors"] == 2
