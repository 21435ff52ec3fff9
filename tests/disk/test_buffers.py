"""Buffers lent to the backend: every byte is returned correctly, and no buffer is touched after a call has ended."""

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
from kvstore.testing.seeds import fresh_seed
from kvstore.testing.waiting import eventually_async
from kvstore.types import Outcome
from tests.disk.rig import PAYLOAD, opened
from tests.diskio.faulty_disk import DiskFault, FaultyDisk


@pytest.mark.parametrize("engine", ["threads", "io_uring"])
async def test_cancelled_store_waits_for_started_writes(tmp_path: Path, engine: str) -> None:
    """The call returns only when the disk has finished with the buffers, as their owner may reuse them."""
    disk = FaultyDisk()
    async with opened(tmp_path, 64, disk=disk, engine=engine) as rig:
        await rig.put_new(1)
        # No announcement of rows is stalled instead.
        await rig.session.tables.end()
        gate = threading.Event()
        disk.add(DiskFault("pwritev", stall=gate))
        storing = asyncio.create_task(rig.put(rig.new(3)))
        await eventually_async(lambda: disk.stalled == 1, what="a write has begun")
        storing.cancel()
        done, _ = await asyncio.wait({storing}, timeout=0.05)
        assert not done
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await storing
        await rig.put_new(4)


@pytest.mark.parametrize("engine", ["threads", "io_uring"])
async def test_cancelled_load_touches_no_buffer_afterwards(tmp_path: Path, engine: str) -> None:
    """Buffers that are reused right after a cancelled load are not overwritten by it."""
    rng = random.Random(seed := fresh_seed())
    async with opened(tmp_path, 64, engine=engine) as rig:
        keys = list(await rig.put_new(24))
        for _ in range(40):
            targets = [rig.maker.target(key) for key in keys]
            loading = asyncio.create_task(rig.backend.get_into([target.read for target in targets]))
            for _ in range(rng.randrange(12)):
                await asyncio.sleep(0)
            loading.cancel()
            await asyncio.wait({loading})
            for target in targets:
                target.fill()
            await rig.has_all({})
            await rig.get(keys[:2])
            assert all(target.untouched for target in targets), f"seed {seed}"


@pytest.mark.parametrize("op", ["none", "pwritev", "preadv", "open"])
async def test_no_view_of_a_buffer_survives_the_call(tmp_path: Path, op: str) -> None:
    """When a call has returned or failed, its buffers can be unmapped at once."""
    disk = FaultyDisk()
    async with opened(tmp_path, 64, disk=disk) as rig:
        (key,) = await rig.put_new(1)
        for engine_error in (errno.EINVAL, errno.EIO, errno.ENOSPC):
            memory = mmap.mmap(-1, 4096 + PAYLOAD)
            gc.disable()
            try:
                view = memoryview(memory)
                disk.fail(op, engine_error, forever=True)
                buffers = [view[4096 - 256 : 4096], view[4096:]]
                await rig.backend.put([RecordWrite(b"n" * 36, buffers)])
                await rig.backend.get_into([RecordRead(key, buffers)])
                del view, buffers
                memory.close()
            finally:
                gc.enable()
                disk.heal()
            await rig.backend.delete([b"n" * 36])


async def test_any_length_and_place_comes_back(tmp_path: Path) -> None:
    """Records of any length come back unchanged, from memory suitable for direct I/O and from other memory."""
    rng = random.Random(seed := fresh_seed())
    async with opened(tmp_path, 64) as rig:
        for kind in ("mmap", "bytearray", "numpy", "odd"):
            lengths = [1, 255, 4095, 4096, 4097, PAYLOAD - 1, PAYLOAD, *(rng.randrange(1, PAYLOAD) for _ in range(5))]
            values = {rig.maker.key(): rng.randbytes(length) for length in lengths}
            writes = [rig.maker.write(key, payload, kind) for key, payload in values.items()]
            assert set(await rig.backend.put(writes)) == {Outcome.OK}
            targets = [rig.maker.target(key, kind=kind) for key in values]
            outcomes = await rig.backend.get_into([target.read for target in targets])
            assert set(outcomes) == {Outcome.OK}, (seed, kind)
            assert [rig.maker.content(target) for target in targets] == list(values.values()), (seed, kind)
