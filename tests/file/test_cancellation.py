"""Cancelled calls: no buffer is touched after they returned, and what they began is accounted."""

from __future__ import annotations

import asyncio
import errno
import gc
import mmap
import random
import threading
from pathlib import Path

import pytest

from kvstore.backends.base import RecordRead, RecordWrite
from kvstore.testing import DiskFault
from kvstore.testing.seeds import fresh_seed
from kvstore.testing.waiting import eventually_async
from kvstore.types import Outcome
from tests.file.rig import PAGE, Rig, key

pytestmark = pytest.mark.usefixtures("either_engine")


@pytest.mark.parametrize("op", ["pwritev", "link", "flock"])
async def test_a_cancelled_store_waits_for_what_has_started(tmp_path: Path, op: str) -> None:
    """The call returns only when the disk has let go; blocks not started are dropped, the rest is accounted."""
    rig = Rig(tmp_path / "kv", threads=1)
    gate = threading.Event()
    blocks = 40 if rig.engine == "threads" else 300  # More than a thread does in one go.
    async with rig.open() as backend:
        rig.disk.add(DiskFault(op, stall=gate, nth=2 if op == "pwritev" else 1))
        storing = asyncio.create_task(rig.put(backend, range(blocks)))
        await eventually_async(lambda: rig.disk.stalled == 1)
        storing.cancel()
        done, _ = await asyncio.wait({storing}, timeout=0.05)
        assert not done
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await storing
        stored = len(rig.files())
        assert stored < blocks
        assert backend.stats().blocks == stored
        await rig.settled(backend)
        assert set(await rig.put(backend, range(40))) <= {Outcome.OK, Outcome.EXISTS}


async def test_a_cancelled_load_touches_no_buffer_afterwards(tmp_path: Path) -> None:
    """Buffers that are reused right after a cancelled load are not written to by it."""
    rig = Rig(tmp_path / "kv", threads=3, payload_bytes=16 * 4096)
    seed = fresh_seed()
    rng = random.Random(seed)
    async with rig.open() as backend:
        await rig.put(backend, range(24))
        for _ in range(60):
            reads = [rig.read(number) for number in range(24)]
            loading = asyncio.create_task(backend.get_into(reads))
            await asyncio.sleep(rng.random() * 0.004)
            loading.cancel()
            await asyncio.wait({loading})
            for read in reads:
                for buffer in read.buffers:
                    buffer[:] = b"\xc7" * buffer.nbytes
            await backend.exists([key(number) for number in range(24)])
            untouched = all(bytes(buffer) == b"\xc7" * buffer.nbytes for read in reads for buffer in read.buffers)
            assert untouched, f"seed {seed}"


async def test_stores_cancelled_at_random_leave_the_space_right(tmp_path: Path) -> None:
    """However stores, loads and removals are cut off, index, files and ledger agree in the end."""
    seed = fresh_seed()
    rng = random.Random(seed)
    rig = Rig(tmp_path / "kv", capacity=60 * 8192)
    async with rig.open() as backend:
        for _ in range(80):
            numbers = rng.sample(range(150), 6)
            calls = [
                asyncio.create_task(rig.put(backend, numbers)),
                asyncio.create_task(rig.get(backend, numbers)),
                asyncio.create_task(backend.delete([key(number) for number in numbers[:2]])),  # type: ignore[arg-type]
            ]
            await asyncio.sleep(rng.random() * 0.003)
            for call in rng.sample(calls, 2):
                call.cancel()
            await asyncio.wait(calls)
            assert rig.used_bytes() <= 60 * 8192, f"seed {seed}"
        machine = backend._machine
        assert machine is not None
        await machine.evictor.make_room([])
        await rig.settled(backend)
        assert backend.stats().used_bytes == rig.used_bytes(), f"seed {seed}"
        here = [number for number in range(150) if rig.path(number).exists()]
        assert await rig.get(backend, here) == [Outcome.OK] * len(here), f"seed {seed}"


@pytest.mark.parametrize("op", ["none", "pwritev", "preadv", "link", "flock"])
@pytest.mark.parametrize("error", [errno.EINVAL, errno.EIO, errno.ENOSPC])
async def test_no_view_of_a_buffer_survives_the_call(tmp_path: Path, op: str, error: int) -> None:
    """When a call has returned, its buffers can be unmapped at once, also when it failed."""
    rig = Rig(tmp_path / "kv")
    async with rig.open() as backend:
        await rig.put(backend, [2])
        memory = mmap.mmap(-1, 2 * PAGE)
        gc.disable()
        try:
            view = memoryview(memory)
            rig.disk.fail(op, error, forever=True)
            await backend.put([RecordWrite(key(1), [view[:PAGE], view[PAGE:]])])
            await backend.get_into([RecordRead(key(2), [view[:PAGE], view[PAGE:]])])
            del view
            # A thread lets go of its last unit right after it has reported it.
            await eventually_async(lambda: closes(memory))
        finally:
            gc.enable()
            rig.disk.heal()


def closes(memory: mmap.mmap) -> bool:
    """Close memory if nothing refers to it."""
    try:
        memory.close()
    except BufferError:
        return False
    return True


async def test_a_cancelled_open_lets_go(tmp_path: Path) -> None:
    """An engine that gives up waiting for a namespace leaves nothing behind."""
    rig = Rig(tmp_path / "kv", lock_timeout=60)
    async with rig.open():
        fds = len(rig.disk.open_fds)
        calls = rig.disk.count("flock")
        second = rig.backend()
        opening = asyncio.create_task(rig.open().__aenter__())
        await eventually_async(lambda: rig.disk.count("flock") > calls + 3)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await second.close()
        assert len(rig.disk.open_fds) == fds
