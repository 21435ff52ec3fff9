"""A frozen filesystem: no engine blocks on it, and all work resumes after the thaw."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import threading
import time
from pathlib import Path

import pytest

from kvstore import Namespace, TransferJob, open_tier
from kvstore.backends.disk.drives import Drives
from kvstore.backends.disk.limits import Limits
from kvstore.diskio import OsDisk, Transfer
from kvstore.testing.waiting import eventually, eventually_async
from kvstore.types import BlockKey, JobResult, Outcome
from tests.disk.mounts import ext4, frozen
from tests.disk.rig import opened, proved

pytestmark = [pytest.mark.torture, pytest.mark.root, pytest.mark.timeout(180)]

SLOT = 16384


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "storing"])
async def test_close(tmp_path: Path, engine: str, busy: bool) -> None:
    """Closing waits for no call on the disk; stored blocks are found when the disk is back."""
    with ext4(tmp_path) as point:
        async with opened(point / "kv", 64, engine=engine, limits=Limits(close_s=0.2)) as rig:
            values = await rig.put_new(8)
            with frozen(point):
                storing = asyncio.create_task(rig.put(rig.new(4))) if busy else None
                await asyncio.sleep(0)
                assert await rig.backend.exists(list(values)) == [True] * 8
                async with asyncio.timeout(60):
                    await rig.backend.close()
            if storing is not None:
                await asyncio.wait({storing})
        async with opened(point / "kv", 64, engine=engine) as rig:
            await rig.scanned()
            await rig.has_all(values)
            await rig.has_all(await rig.put_new(2))


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
async def test_close_beside_a_frozen_drive_leaves_the_other_one(tmp_path: Path, engine: str) -> None:
    """The files of the other drive are closed before the thaw, so that another engine takes its segments."""
    for name in "ab":
        (tmp_path / name).mkdir()
    with ext4(tmp_path / "a") as one, ext4(tmp_path / "b") as two:
        async with opened([one / "kv", two / "kv"], 64, engine=engine, limits=Limits(close_s=0.2)) as rig:
            for _ in range(8):
                await rig.put_new(4)
            with frozen(one):
                storing = [asyncio.create_task(rig.put(rig.new(4))) for _ in range(2)]
                await asyncio.sleep(0.2)
                await rig.backend.close()
                await eventually_async(lambda: not open_files(two), 60, "its files are closed")
                assert open_files(one)
            await asyncio.gather(*storing, return_exceptions=True)
            await eventually_async(lambda: not open_files(one), 60, "all files are closed")


@pytest.mark.parametrize("position", [0, 1])
async def test_buffered_writes_wait_for_no_other_drive(tmp_path: Path, position: int) -> None:
    """Buffered writes to many files of one drive end while those to as many files of another one are blocked.

    By default Linux runs buffered writes to two files one after the other if hashes of their inodes are equal, of 64.
    """
    for name in "ab":
        (tmp_path / name).mkdir()
    drives = Drives(OsDisk(), "io_uring", 2, threads=4, frozen_s=2.0)
    assert drives.name == "io_uring"
    page = memoryview(bytes(4096))
    with ext4(tmp_path / "a") as one, ext4(tmp_path / "b") as two, contextlib.ExitStack() as files:
        writes: list[list[Transfer]] = []
        for root, point in enumerate((one, two)):
            writes.append([])
            for number in range(100):
                file = files.enter_context((point / str(number)).open("wb+", buffering=0))
                file.write(page)
                drives.admit(root, file.fileno())
                writes[root].append(Transfer(file.fileno(), 0, [page], 4096))
        with frozen((one, two)[position]):
            blocked = asyncio.create_task(drives.write(writes[position]))
            await asyncio.sleep(0.2)
            free = asyncio.create_task(drives.write(writes[1 - position]))
            # Without an assertion, because a cancelled write waits for its end.
            await asyncio.wait({blocked, free}, timeout=20, return_when=asyncio.FIRST_COMPLETED)
            ended = blocked.done(), free.done()
        await asyncio.gather(blocked, free)
        assert ended == (False, True)
        assert [each.done_bytes for some in writes for each in some] == [4096] * 200
        assert await drives.close(60)


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
async def test_frozen_drive_costs_few_stores(tmp_path: Path, engine: str) -> None:
    """Stores go to the other drive once the frozen one has not answered for some seconds; other engines see them."""
    for name in "ab":
        (tmp_path / name).mkdir()
    with ext4(tmp_path / "a") as one, ext4(tmp_path / "b") as two:
        roots = [one / "kv", two / "kv"]
        async with opened(roots, 256, engine=engine) as other, opened(roots, 256, engine=engine) as rig:
            # More than the capacity, so that stores evict.
            for _ in range(40):
                await rig.put(rig.new(8))
            late: set[asyncio.Task[list[Outcome]]] = set()
            stored: dict[BlockKey, bytes] = {}
            with frozen(one):
                async with asyncio.timeout(100):
                    while len(stored) < 64:
                        values = rig.new(1)
                        storing = asyncio.create_task(rig.put(values))
                        _, pending = await asyncio.wait({storing}, timeout=0.5)
                        late |= pending
                        if not pending and storing.result() == [Outcome.OK]:
                            stored |= values
                kept = [key for key in stored if key not in {key for key, _ in rig.removed}]
                await eventually_async(lambda: set(other.arrived) >= set(kept[-8:]), 60, "the other engine's blocks")
                assert await proved(other, {key: stored[key] for key in kept[-8:]})
            await asyncio.wait(late)
            await rig.has_all(await rig.still_there(stored))


class Memory:
    """Slots that another process can map, with a tier over them."""

    def __init__(self, config: dict[str, object]) -> None:
        fd = os.memfd_create("kvstore-test")
        os.ftruncate(fd, 16 * SLOT)
        self.memory = mmap.mmap(fd, 16 * SLOT)
        os.close(fd)
        self.view = memoryview(self.memory)
        self.tier = open_tier(config, primary=self.view, slot_bytes=SLOT, namespace=Namespace({"model": "m"}))
        self.jobs = 0

    def store(self, keys: list[bytes]) -> int:
        """Submit a store."""
        self.jobs += 1
        self.tier.submit_store(TransferJob(self.jobs, keys, list(range(len(keys)))))
        return self.jobs

    def load(self, keys: list[bytes]) -> int:
        """Submit a load."""
        self.jobs += 1
        self.tier.submit_load(TransferJob(self.jobs, keys, list(range(len(keys)))))
        return self.jobs

    def result(self) -> JobResult:
        """Wait for the next result."""
        found: list[JobResult] = []
        eventually(lambda: found.extend(self.tier.get_finished()) or found, 60, "a result")
        return found[0]


@pytest.mark.parametrize("host", ["thread", "process"])
def test_jobs_and_other_tiers(tmp_path: Path, host: str) -> None:
    """Stores are reported as failed, the other tier of the process keeps serving, and stores succeed after the thaw."""
    with ext4(tmp_path) as point:
        config = {"backend": "file", "path": str(point / "kv"), "capacity": "16MiB", "reserve": 0, "io": host}
        disk = Memory({**config, "store_timeout": "0.3s", "load_timeout": "0.3s", "breaker_failures": 1000})
        other = Memory({"backend": "memory", "capacity": "1MiB"})
        keys = [b"key %d" % number for number in range(8)]
        stored = False
        while not stored:
            # A busy machine may exceed the timeout.
            disk.store(keys)
            stored = disk.result().success
        other.store(keys[:2])
        assert other.result().success
        with frozen(point):
            for _ in range(3):
                disk.store([b"new %d %d" % (disk.jobs, number) for number in range(4)])
                assert Outcome.OK not in disk.result().outcomes
                other.load(keys[:2])
                assert other.result().success
        stored = False
        while not stored:
            disk.store([b"late %d" % disk.jobs])
            stored = disk.result().success
        disk.load(keys)
        eventually(lambda: disk.result().success or disk.load(keys) < 0, 60, "all is there")
        disk.tier.close()
        other.tier.close()


# A child that could not be killed during the freeze is left without an owner.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("host", ["thread", "process"])
def test_a_tier_closes(tmp_path: Path, host: str) -> None:
    """An engine closes although its disk does not respond."""
    with ext4(tmp_path) as point:
        config = {"backend": "file", "path": str(point / "kv"), "capacity": "16MiB", "reserve": 0, "io": host}
        disk = Memory(config)
        disk.store([b"key"])
        assert disk.result().success
        with frozen(point):
            disk.store([b"another"])
            disk.tier.flush()
            disk.tier.close(0.2)
            assert disk.tier._channel.closed


def open_files(point: Path) -> list[str]:
    """Return the open files of this process below a directory."""
    files = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            files.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [path for path in files if path.startswith(f"{point}/")]


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_a_closed_tier_ends_with_the_thaw(tmp_path: Path, engine: str) -> None:
    """Once the disk responds, a tier whose close was cut short holds no file, lock or thread."""
    with ext4(tmp_path) as point:
        config = {"backend": "file", "path": str(point / "kv"), "capacity": "16MiB", "reserve": 0, "engine": engine}
        disk = Memory(config)
        disk.store([b"key"])
        assert disk.result().success
        assert open_files(point)
        with frozen(point):
            disk.store([b"another"])
            disk.tier.flush()
            time.sleep(0.5)  # Let the store reach the disk.
            disk.tier.close(0.2)
        eventually(lambda: not open_files(point), 60, "its files are closed")
        eventually(lambda: not any(each.name.startswith("kvstore-") for each in threading.enumerate()), 60, "all ends")
