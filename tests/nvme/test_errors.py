"""Every system call of a session fails once, or from then on: no wrong byte, no surprise, no leak, and it recovers."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.backends.nvme import NvmeBackend, NvmeConfig
from kvstore.config import Capacity
from kvstore.diskio.rings import EngineChoice
from kvstore.errors import KVStoreError
from kvstore.testing.faulty_disk import DiskFault, FaultyDisk
from kvstore.types import BlockKey, Outcome
from tests.nvme.rig import GEOMETRY, NAMESPACE, Rig, opened, room_for

pytestmark = pytest.mark.timeout(600)

BLOCKS = 6
ERRORS: Sequence[int | None] = (errno.EIO, errno.ENOSPC, errno.EROFS, errno.EINTR, errno.EMFILE, None)
"""What goes wrong; None is a short transfer."""


async def session(path: Path, disk: FaultyDisk, values: dict[BlockKey, bytes], engine: EngineChoice) -> None:
    """Open, store, load, remove, evict and close, whatever fails; wrong bytes raise."""
    config = NvmeConfig(paths=str(path), capacity=Capacity(room_for(8)), engine=engine, threads=2, lock_timeout=0)
    backend = NvmeBackend(config, disk=disk)
    rig = Rig(backend, NAMESPACE, random.Random(1))
    try:
        await backend.open(NAMESPACE, GEOMETRY)
        keys = list(values)
        outcomes = await rig.put(dict(list(values.items())[:BLOCKS]))
        assert set(outcomes) <= {Outcome.OK, Outcome.EXISTS, Outcome.IO_ERROR, Outcome.NO_SPACE, Outcome.REFUSED}
        check(values, keys, await rig.get(keys))
        await backend.delete(keys[:2])
        assert list(await backend.exists(keys[:2])) == [False, False]
        await rig.put(dict(list(values.items())[BLOCKS:]))
        check(values, keys, await rig.get(keys))
        await backend.probe()
    except KVStoreError:
        pass
    finally:
        await backend.close()


def check(values: dict[BlockKey, bytes], keys: Sequence[BlockKey], got: Sequence[bytes | None]) -> None:
    """Insist that what was got is right or nothing."""
    for key, payload in zip(keys, got, strict=True):
        assert payload in (None, values[key]), f"wrong bytes of {key.hex()}"


async def run_with(path: Path, fault: DiskFault, values: dict[BlockKey, bytes], engine: EngineChoice) -> None:
    """Run a session with a fault, then one without."""
    disk = FaultyDisk()
    disk.add(fault)
    await session(path, disk, values, engine)
    assert disk.open_fds == {}, f"descriptors left: {disk.open_fds}"
    disk.heal()
    async with opened(path, room_for(8), disk=disk, engine=engine, threads=2) as rig:
        got = await rig.get(list(values))
        check(values, list(values), got)
        # What a crash left has no free slot before the scan has found one.
        await rig.scanned()
        fresh = await rig.put_new(3)
        assert await rig.get(list(fresh)) == list(fresh.values())
    assert disk.open_fds == {}


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: errno.errorcode[error] if error else "short")
def test_the_nth_call_fails(tmp_path: Path, error: int | None, engine: EngineChoice) -> None:
    """For each call of a session in turn, failing once and failing for ever."""
    rng = random.Random(7)
    values = {rng.randbytes(32): rng.randbytes(8192) for _ in range(BLOCKS + 4)}
    counting = FaultyDisk()
    asyncio.run(session(tmp_path / "count", counting, values, engine))
    calls = counting.count()
    assert calls > 25
    for forever in (False, True):
        for nth in range(1, calls + 1):
            path = tmp_path / f"{nth}-{forever}"
            fault = DiskFault("any", nth, error, short=error is None, forever=forever)
            try:
                asyncio.run(run_with(path, fault, values, engine))
            except BaseException as failure:
                failure.add_note(f"call {nth} of {calls}, forever={forever}")
                raise


@pytest.mark.parametrize("op", ["pwritev", "preadv"])
async def test_one_bad_block_fails_alone(tmp_path: Path, op: str) -> None:
    """When a run of neighbours fails as a whole, each block of it is tried by itself, and only the bad one fails."""
    disk = FaultyDisk()
    async with opened(tmp_path, room_for(8), disk=disk, engine="threads", threads=1) as rig:
        values = {rig.maker.key(): rig.maker.payload() for _ in range(6)}
        if op == "preadv":
            await rig.put(values)
        # The first call is the run, the third its second block.
        disk.fail(op, errno.EIO, nth=1)
        disk.fail(op, errno.EIO, nth=3)
        if op == "pwritev":
            outcomes = await rig.put(values)
        else:
            targets = [rig.maker.target(key) for key in values]
            outcomes = list(await rig.backend.get_into([target.read for target in targets]))
        assert outcomes == [Outcome.OK, Outcome.IO_ERROR, *[Outcome.OK] * 4]
        expected = list(values.values())
        if op == "pwritev":
            expected[1] = None  # type: ignore[call-overload]
        assert await rig.get(list(values)) == expected


async def test_durable_stores_wait_for_the_device(tmp_path: Path) -> None:
    """With durability "data" a block is OK only when its bytes are on the device, and fails when that fails."""
    disk = FaultyDisk()
    async with opened(tmp_path, room_for(8), disk=disk, engine="threads", durability="data") as rig:
        before = disk.count("fdatasync")
        values = await rig.put_new(2)
        assert disk.count("fdatasync") == before + 1
        disk.fail("fdatasync", errno.EIO)
        assert set(await rig.put({rig.maker.key(): rig.maker.payload()})) == {Outcome.IO_ERROR}
        assert await rig.scanned() == set(values)
