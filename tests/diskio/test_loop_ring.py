"""A ring on the loop: loads first, bounded in flight, rejected submissions retried, cancellation after the kernel."""

from __future__ import annotations

import asyncio
import errno
import gc
import mmap
import os
import random
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.diskio import OsDisk, Transfer, TransferEngine, loop_ring
from kvstore.diskio.loop_ring import LIMITS, Limits, LoopRing
from kvstore.diskio.ring import IOVEC, SQE, SQE_ASYNC, Op, Ring
from kvstore.runtime.limits import Precedence
from kvstore.testing.seeds import fresh_seed
from kvstore.testing.waiting import eventually_async
from tests.diskio.faulty_disk import DiskFault, FaultyDisk


@pytest.fixture
async def ring() -> AsyncIterator[LoopRing]:
    """A ring of the test's loop."""
    ring = LoopRing()
    yield ring
    await eventually_async(lambda: is_idle(ring), what="the kernel has done")
    assert ring not in loop_ring.rings_at_work
    ring.close()
    ring.close()


@pytest.fixture
async def pipe() -> AsyncIterator[tuple[int, int]]:
    """A pipe: a read from it stays in flight for as long as a test needs."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def is_idle(ring: LoopRing) -> bool:
    """Return whether a ring has no operations and no batches, and counts no bytes in flight."""
    shown = repr(ring)
    return "(0 operations in flight of 0 batches" in shown and all(f"{each.name} 0/" in shown for each in Precedence)


def nops(count: int) -> npt.NDArray[Any]:
    """Return no-op operations."""
    return np.zeros(count, SQE)


def reads_of(fd: int, buffers: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return one read of a pipe into each row of an array, and the iovecs of the rows."""
    count, length = buffers.shape
    iovecs = np.zeros(count, IOVEC)
    iovecs["base"] = buffers.ctypes.data + length * np.arange(count, dtype=np.uint64)
    iovecs["len"] = length
    sqes = nops(count)
    sqes["opcode"], sqes["fd"], sqes["len"] = Op.READV, fd, 1
    sqes["addr"] = iovecs.ctypes.data + IOVEC.itemsize * np.arange(count, dtype=np.uint64)
    return sqes, iovecs


class Submissions:
    """A proxy between ring and kernel: records submissions, and may reject them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Callable[[int], int | None]) -> None:
        self.counts: list[int] = []
        self.flags: list[int] = []  # Of each operation, in order.
        whole = Ring.submit

        def submit(ring: Ring, sqes: npt.NDArray[Any]) -> int:
            told = answer(len(sqes))
            if told is not None and told <= 0:
                return told
            self.flags.extend(sqes["flags"].tolist())
            taken = whole(ring, sqes if told is None else sqes[:told])
            self.counts.append(taken)
            return taken

        monkeypatch.setattr(Ring, "submit", submit)


async def test_more_operations_than_fit_in_flight(ring: LoopRing) -> None:
    """Concurrent batches of all lengths end with a result for each operation, and leave no operation behind."""
    seed = fresh_seed()
    rng = random.Random(seed)
    lengths = [rng.choice([1, 2, 100, 255, 256, 257, 2000]) for _ in range(40)]
    runs = [
        ring.run(nops(n), [rng.choice([0, 1, 1 << 20])] * n, precedence=rng.choice(list(Precedence))) for n in lengths
    ]
    found = await asyncio.gather(*runs)
    assert found == [[0] * n for n in lengths], seed
    assert is_idle(ring)


async def test_each_operation_has_its_own_result(ring: LoopRing) -> None:
    """An error of one operation is reported for that operation."""
    sqes = nops(5)
    sqes["opcode"][[1, 3]], sqes["fd"][[1, 3]] = Op.FSYNC, -1
    assert await ring.run(sqes, [0] * 5, precedence=Precedence.LOAD) == [0, -errno.EBADF, 0, -errno.EBADF, 0]


async def test_bytes_in_flight_are_bounded_and_loads_pass_stores(
    ring: LoopRing, pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stores never exceed their share, so that a later load is submitted at once."""
    watched = Submissions(monkeypatch, lambda count: None)
    buffers = np.zeros((8, 1), np.uint8)
    sqes, iovecs = reads_of(pipe[0], buffers)
    half = LIMITS.bytes_first // 2
    store = asyncio.create_task(ring.run(sqes, [half] * 8, precedence=Precedence.STORE, keep=iovecs))
    await eventually_async(lambda: "(2 operations" in repr(ring), what="two are submitted, a turn each")
    for _ in range(10):
        await asyncio.sleep(0)
    assert watched.counts == [1, 1], "two of them are all that may be in flight"
    assert ring in loop_ring.rings_at_work
    assert await ring.run(nops(3), [half] * 3, precedence=Precedence.LOAD) == [0] * 3
    assert not store.done()
    os.write(pipe[1], bytes(range(1, 9)))
    assert await store == [1] * 8
    assert sorted(buffers[:, 0].tolist()) == list(range(1, 9))


async def test_one_operation_longer_than_the_share_goes_alone(ring: LoopRing) -> None:
    """An operation longer than the in-flight limit waits only for others of its kind."""
    size = 3 * LIMITS.store_bytes_max
    assert await ring.run(nops(4), [size] * 4, precedence=Precedence.STORE) == [0] * 4


@pytest.mark.parametrize(
    ("limits", "operations", "loads_max"),
    [
        (Limits(fast_s=-1.0, slow_s=-1.0), 10, LIMITS.bytes_min),
        (Limits(fast_s=3600.0), 70, LIMITS.load_bytes_max),
        (Limits(fast_s=-1.0, slow_s=3600.0), 10, LIMITS.bytes_first),
        (Limits(fast_s=3600.0, bytes_first=LIMITS.bytes_min), 70, LIMITS.load_bytes_max),
    ],
    ids=["slow", "fast", "neither", "fast after slow"],
)
async def test_limit_in_flight_follows_the_drive(limits: Limits, operations: int, loads_max: int) -> None:
    """As operations slow down, the limit in flight shrinks to a minimum; a fast drive's limit grows up to a maximum."""
    ring = LoopRing(limits)
    for _ in range(operations):
        await ring.run(nops(1), [1 << 20], precedence=Precedence.LOAD)
    assert f"LOAD 0/{loads_max} B, STORE 0/{limits.bytes_first} B" in repr(ring)
    ring.close()


@pytest.mark.parametrize("error", [errno.EAGAIN, errno.EBUSY, errno.EINTR])
async def test_a_busy_kernel_is_asked_again(ring: LoopRing, error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that takes none or part of a batch gets the rest a little later."""
    seed = fresh_seed()
    rng = random.Random(seed)
    refusals = iter([-error, -error, 0, 1, -error, 2])
    watched = Submissions(monkeypatch, lambda count: min(count, next(refusals, count)))
    lengths = [rng.randrange(1, 9) for _ in range(6)]
    runs = [ring.run(nops(n), [1] * n, precedence=rng.choice(list(Precedence))) for n in lengths]
    assert await asyncio.gather(*runs) == [[0] * n for n in lengths], seed
    assert sum(watched.counts) == sum(lengths), seed


async def test_a_kernel_that_refuses_for_good_fails_the_batch(ring: LoopRing, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hard error is the result of all operations not taken, and the next batch is tried independently."""
    answers = iter([2, -errno.EBADR])
    Submissions(monkeypatch, lambda count: next(answers, None))
    first, second = await asyncio.gather(
        ring.run(nops(5), [1] * 5, precedence=Precedence.STORE), ring.run(nops(3), [1] * 3, precedence=Precedence.STORE)
    )
    assert sorted(first) == [-errno.EBADR] * 3 + [0] * 2
    assert second == [0] * 3
    assert is_idle(ring)


async def test_a_cancelled_call_ends_when_the_kernel_has_done(ring: LoopRing, pipe: tuple[int, int]) -> None:
    """However often a call is cancelled, it waits for operations in flight; unsubmitted ones are dropped."""
    buffers = np.zeros((6, 1), np.uint8)
    sqes, iovecs = reads_of(pipe[0], buffers)
    size = LIMITS.bytes_first // 3
    task = asyncio.create_task(ring.run(sqes, [size] * 6, precedence=Precedence.LOAD, keep=iovecs))
    await eventually_async(lambda: "(4 operations" in repr(ring), what="all that may be in flight is")
    for _ in range(5):
        await asyncio.sleep(0)
        task.cancel()
    assert not task.done()
    os.write(pipe[1], b"abcdef")
    await asyncio.wait([task])
    assert task.cancelled()
    assert sorted(buffers[:, 0].tolist()) == sorted([0, 0, *b"abcd"]), "four were in flight"
    assert is_idle(ring)
    assert await ring.run(nops(2), [1] * 2, precedence=Precedence.LOAD) == [0, 0]


async def test_a_turn_submits_no_more_than_its_share(ring: LoopRing, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long batch is submitted in several turns of the loop, so that other tasks run in between."""
    watched = Submissions(monkeypatch, lambda count: None)
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while len(watched.counts) < 4:
            turns += 1
            await asyncio.sleep(0)

    share = LIMITS.submit_bytes // 4
    call = ring.run(nops(16), [share] * 16, precedence=Precedence.STORE)
    assert (await asyncio.gather(call, turn()))[0] == [0] * 16
    assert watched.counts == [4] * 4
    assert turns >= 2


async def test_a_batch_of_nothing_ends(ring: LoopRing) -> None:
    """An empty batch ends, and does not block later ones."""
    assert await ring.run(nops(0), [], precedence=Precedence.LOAD) == []
    assert await ring.run(nops(1), [0], precedence=Precedence.LOAD) == [0]


async def test_operations_in_flight_outlive_loop_and_caller(pipe: tuple[int, int]) -> None:
    """A loop closed during kernel operations leaves their memory alive until the kernel has finished."""
    kept: list[weakref.ref[Any]] = []
    lost, seen = threading.Event(), threading.Event()
    others = set(loop_ring.rings_at_work)  # Left on purpose by tests of stopped disks.

    def lose_a_loop() -> None:
        loop = asyncio.new_event_loop()
        # The handler would report a destroyed pending task, which this test causes on purpose.
        loop.set_exception_handler(lambda *_: None)
        buffers = np.zeros((1, 1), np.uint8)
        kept.append(weakref.ref(buffers))
        sqes, iovecs = reads_of(pipe[0], buffers)

        async def begin() -> None:
            keep = (iovecs, buffers)
            loop.create_task(LoopRing().run(sqes, [1], precedence=Precedence.LOAD, keep=keep)).set_name("lost")
            await asyncio.sleep(0)

        loop.run_until_complete(begin())
        loop.close()

    def lose_and_stay() -> None:
        lose_a_loop()
        gc.collect()
        lost.set()
        # The kernel cancels a thread's operations when the thread ends.
        seen.wait()

    thread = threading.Thread(target=lose_and_stay)
    thread.start()
    try:
        await eventually_async(lost.is_set, what="the loop is gone")
        found = kept[0]()
        assert found is not None
        (ring,) = loop_ring.rings_at_work - others
        os.write(pipe[1], b"z")
        await eventually_async(lambda: found[0, 0] == ord("z"), what="the kernel wrote into memory that is still there")
    finally:
        seen.set()
        thread.join()
    # The part that a live loop would have done.
    ring._ring.close()
    loop_ring.rings_at_work.discard(ring)


async def test_random_cancellations_lose_no_operation(ring: LoopRing) -> None:
    """Calls cancelled at any point neither hang nor take others' results, and all counters end at zero."""
    seed = fresh_seed()
    rng = random.Random(seed)
    for _ in range(50):
        tasks = []
        for _ in range(12):
            count = rng.randrange(1, 400)
            sizes = [rng.choice([1, 1 << 22])] * count
            call = ring.run(nops(count), sizes, precedence=rng.choice(list(Precedence)))
            tasks.append((count, asyncio.create_task(call)))
        for _, task in rng.sample(tasks, 6):
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.wait([task for _, task in tasks])
        assert all(task.cancelled() or task.result() == [0] * count for count, task in tasks), seed
        assert is_idle(ring), seed


async def test_a_closed_ring_leaves_no_descriptor() -> None:
    """Ring and eventfd are closed."""
    before = set(os.listdir("/proc/self/fd"))
    ring = LoopRing()
    await ring.run(nops(3), [0] * 3, precedence=Precedence.LOAD)
    ring.close()
    assert set(os.listdir("/proc/self/fd")) == before


async def test_close_with_a_frozen_disk_reports_pending_operations(tmp_path: Path) -> None:
    """Closing times out and reports that operations are left; when the disk is back, the call ends."""
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    fd = os.open(path, os.O_RDWR)
    disk, thawed = FaultyDisk(), threading.Event()
    engine = TransferEngine(disk, "io_uring")
    disk.add(DiskFault("preadv", stall=thawed))
    task = asyncio.create_task(engine.read([Transfer(fd, 0, [memoryview(bytearray(4096))], 4096)]))
    try:
        await eventually_async(lambda: disk.stalled == 1, what="the read stalls")
        assert not await engine.close(timeout_s=0.05)
        with pytest.raises(OSError, match="closed"):
            await engine.read([])
    finally:
        thawed.set()
        await task
    assert await engine.close()
    os.close(fd)


async def test_the_rest_of_a_batch_that_faults_struck_is_done(tmp_path: Path) -> None:
    """Injected errors fail only their transfers; the others go through the ring, even if none is left."""
    path = tmp_path / "file"
    path.write_bytes(bytes(8 * 4096))
    fd = os.open(path, os.O_RDWR)
    disk = FaultyDisk()
    engine = TransferEngine(disk, "io_uring")

    def writes() -> list[Transfer]:
        return [Transfer(fd, 8192 * i, [memoryview(bytearray(b"x" * 4096))], 4096) for i in range(3)]

    disk.fail("pwritev", errno.EIO, nth=2)
    batch = writes()
    await engine.write(batch)
    assert [t.error.errno if t.error else 0 for t in batch] == [0, errno.EIO, 0]
    disk.heal()
    disk.fail("pwritev", errno.ENOSPC, forever=True)
    batch = writes()
    await engine.write(batch)
    assert [t.error.errno if t.error else 0 for t in batch] == [errno.ENOSPC] * 3
    await engine.close()
    os.close(fd)


async def test_an_engine_makes_no_threads_for_its_transfers(tmp_path: Path) -> None:
    """With a ring, reads and writes start no thread."""
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    fd = os.open(path, os.O_RDWR)
    before = set(threading.enumerate())
    engine = TransferEngine(OsDisk(), "io_uring")
    target = memoryview(bytearray(4096))
    await engine.write([Transfer(fd, 0, [memoryview(bytearray(b"y" * 4096))], 4096)])
    await engine.read([Transfer(fd, 0, [target], 4096)])
    assert bytes(target) == b"y" * 4096
    assert not [thread for thread in threading.enumerate() if "kvstore-disk" in thread.name and thread not in before]
    await engine.close()
    os.close(fd)


async def test_files_without_nowait_run_in_kernel_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's own threads run their operations, so that submitting them does not block."""

    class SlowDisk(OsDisk):
        def supports_nowait(self, fd: int) -> bool:
            super().supports_nowait(fd)
            return fd != slow

    watched = Submissions(monkeypatch, lambda count: None)
    fds = []
    for name in ("slow", "quick"):
        path = tmp_path / name
        path.write_bytes(name.encode().ljust(4096))
        fds.append(os.open(path, os.O_RDWR | os.O_NONBLOCK))
    slow, quick = fds
    engine = TransferEngine(SlowDisk(), "io_uring")
    for fd in fds:
        engine.admit(fd)
    targets = [memoryview(bytearray(4096)) for _ in range(3)]
    reads = [Transfer(fd, 0, [target], 4096) for fd, target in zip((slow, quick, slow), targets, strict=True)]
    await engine.read(reads)
    assert [bytes(target).strip() for target in targets] == [b"slow", b"quick", b"slow"]
    assert watched.flags[-3:] == [SQE_ASYNC, 0, SQE_ASYNC]
    await engine.write(reads)
    assert watched.flags[-3:] == [SQE_ASYNC, 0, SQE_ASYNC]
    assert os.get_blocking(quick), "a file that says it never waits would be taken at its word"
    await engine.close()
    for fd in fds:
        os.close(fd)


async def test_only_buffered_writes_beside_another_ring_are_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads and direct writes are tried first, also in a file whose descriptor was that of a buffered one."""
    watched = Submissions(monkeypatch, lambda count: None)
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    memory = memoryview(mmap.mmap(-1, 4096))

    async def flags_of(engine: TransferEngine, direct: int) -> list[int]:
        fd = os.open(path, os.O_RDWR | direct)
        descriptors.add(fd)
        engine.admit(fd)
        await engine.write([Transfer(fd, 0, [memory], 4096)])
        await engine.read([Transfer(fd, 0, [memory], 4096)])
        os.close(fd)
        return watched.flags[-2:]

    for _ in range(2):
        engines = [TransferEngine(OsDisk(), "io_uring") for _ in range(3)]
        descriptors: set[int] = set()
        assert [await flags_of(each, 0) for each in engines] == [[0, 0], [SQE_ASYNC, 0], [SQE_ASYNC, 0]]
        assert await flags_of(engines[1], os.O_DIRECT) == [0, 0]
        assert len(descriptors) == 1
        await engines.pop().close()
        engines.append(TransferEngine(OsDisk(), "io_uring"))
        assert await flags_of(engines[-1], 0) == [SQE_ASYNC, 0]
        for engine in engines:
            await engine.close()
            await engine.close()


async def test_rings_of_earlier_loops_count() -> None:
    """A loop that ended while the kernel had operations leaves its ring open; the kernel sorts writes by thread."""

    def made() -> list[bool]:
        rings, loops = [], [asyncio.new_event_loop() for _ in range(2)]

        async def make() -> None:
            rings.append(LoopRing())

        for loop in loops:
            loop.run_until_complete(make())
        for ring, loop in zip(rings, loops, strict=True):
            ring.close()
            loop.close()
        return [ring.is_first for ring in rings]

    assert await asyncio.to_thread(made) == [True, False]
