"""Rings and batched transfers: all bytes arrive, errors belong to their operation, short transfers are completed."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import mmap
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.codec.rows import address_of
from kvstore.diskio import EngineChoice, OsDisk, Transfer, TransferEngine
from kvstore.diskio.loop_ring import LoopRing
from kvstore.diskio.ring import IOVEC, SQE, Op, Ring, probe
from kvstore.testing.seeds import fresh_seed
from kvstore.testing.waiting import eventually_async
from tests.diskio.faulty_disk import DiskFault, FaultyDisk

PAGE = 4096


@pytest.fixture
def ring() -> Iterator[Ring]:
    """A small ring."""
    ring = Ring(8)
    yield ring
    ring.close()
    ring.close()


@pytest.fixture(params=["io_uring", "threads"])
def choice(request: pytest.FixtureRequest) -> EngineChoice:
    """Either engine."""
    found: EngineChoice = request.param
    return found


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    """A file of 64 pages, open for direct I/O."""
    path = tmp_path / "file"
    path.write_bytes(bytes(64 * PAGE))
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    yield fd
    os.close(fd)


def pages(count: int, fill: int = 0) -> memoryview:
    """Return aligned memory."""
    memory = memoryview(mmap.mmap(-1, count * PAGE))
    memory[:] = bytes([fill]) * (count * PAGE)
    return memory


def transfer(fd: int, page: int, *buffers: memoryview) -> Transfer:
    """Return a transfer from a page on."""
    return Transfer(fd, page * PAGE, buffers, sum(b.nbytes for b in buffers))


def test_each_operation_has_its_own_result(ring: Ring) -> None:
    """Failures and successes are distinguished by the caller's identifier of each operation."""
    sqes = np.zeros(6, SQE)
    sqes["opcode"][::3] = Op.FSYNC
    sqes["fd"] = -1
    sqes["user_data"] = range(10, 16)
    assert ring.submit(sqes) == 6
    found: dict[int, int] = {}
    while len(found) < 6:
        found.update(ring.completions())
    assert found == {10: -errno.EBADF, 11: 0, 12: 0, 13: -errno.EBADF, 14: 0, 15: 0}


def test_a_call_that_fails_leaves_nothing_in_the_ring(fd: int, ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations that the kernel refused are withdrawn: their memory may be reused when the next call submits."""
    slot = pages(1, 1)
    iovecs = np.array([(address_of(slot), PAGE)], IOVEC)
    read = np.zeros(1, SQE)
    read["opcode"], read["fd"], read["addr"], read["len"] = Op.READV, fd, iovecs.ctypes.data, 1
    with monkeypatch.context() as context:
        context.setattr("kvstore.diskio.ring.submit", lambda *_: -errno.EPERM)
        assert ring.submit(read) == -errno.EPERM
    assert ring.submit(np.zeros(1, SQE)) == 1
    assert ring.completions() == [(0, 0)]
    assert bytes(slot) == bytes([1]) * PAGE


async def test_random_transfers(fd: int, choice: EngineChoice) -> None:
    """Batches of transfers of all lengths, adjacent or not, write and read the same bytes as a plain file."""
    seed = fresh_seed()
    rng = random.Random(seed)
    engine = TransferEngine(OsDisk(), choice, threads=3)
    model = bytearray(64 * PAGE)
    for round_ in range(60):
        writes, page = [], 0
        while (page := page + rng.choice([0, 0, 0, 1, 5])) < 60:
            counts = [rng.randrange(1, 3) for _ in range(rng.randrange(1, 3))]
            buffers = [pages(count, rng.randrange(256)) for count in counts]
            model[page * PAGE : (page + sum(counts)) * PAGE] = b"".join(buffers)
            writes.append(transfer(fd, page, *buffers))
            page += sum(counts)
        rng.shuffle(writes)
        # The creator of a transfer may supply its buffers' addresses: for none, some or all of a batch.
        for known in rng.sample(writes, rng.choice([0, len(writes) // 2, len(writes)])):
            known.addresses = [address_of(buffer) for buffer in known.buffers]
        await engine.write(writes)
        assert all(w.error is None and w.done_bytes == w.size_bytes for w in writes), (seed, round_)
        reads = [transfer(fd, page, pages(1), pages(1)) for page in range(0, 64, 2)]
        await engine.read(reads)
        assert b"".join(bytes(b) for read in reads for b in read.buffers) == bytes(model), (seed, round_)
    assert await engine.close()


async def test_errors_belong_to_their_transfer(fd: int, choice: EngineChoice, tmp_path: Path) -> None:
    """A bad descriptor or a misaligned offset fails its own transfer, not its neighbours."""
    engine = TransferEngine(OsDisk(), choice, threads=2)
    writes = [transfer(fd, page, pages(1, 7)) for page in range(6)]
    writes[2].fd = 10_000
    writes[4].offset += 1
    await engine.write(writes)
    assert [w.error.errno if w.error else 0 for w in writes] == [0, 0, errno.EBADF, 0, errno.EINVAL, 0]
    await engine.close()


async def test_the_end_of_the_file(fd: int, choice: EngineChoice) -> None:
    """A read across the end returns the available bytes without an error; one beyond the end returns none."""
    engine = TransferEngine(OsDisk(), choice, threads=2)
    reads = [transfer(fd, 62, pages(1), pages(3)), transfer(fd, 80, pages(1)), transfer(fd, 0, pages(1))]
    await engine.read(reads)
    assert [(r.done_bytes, r.error) for r in reads] == [(2 * PAGE, None), (0, None), (PAGE, None)]
    await engine.close()


async def test_short_calls_are_completed(fd: int) -> None:
    """When the kernel repeatedly moves half of the requested bytes, the rest follows."""
    disk = FaultyDisk()
    engine = TransferEngine(disk, "threads", threads=1)
    for nth in (1, 2, 3):
        disk.add(DiskFault("pwritev", nth, short=True))
        disk.add(DiskFault("preadv", nth, short=True))
    writes = [transfer(fd, 3 * i, pages(1, i), pages(2, i + 50)) for i in range(5)]
    await engine.write(writes)
    reads = [transfer(fd, 3 * i, pages(1), pages(2)) for i in range(5)]
    await engine.read(reads)
    assert all(t.error is None and t.done_bytes == 3 * PAGE for t in (*writes, *reads))
    for write, read in zip(writes, reads, strict=True):
        assert b"".join(map(bytes, write.buffers)) == b"".join(map(bytes, read.buffers))
    await engine.close()


async def test_short_results_of_a_ring_are_completed(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers that a ring moves in part or reports to try again are completed by plain calls; real errors remain."""
    whole = LoopRing.run

    async def cut(self: LoopRing, *args: Any, **kwargs: Any) -> list[int]:
        results = await whole(self, *args, **kwargs)
        results[:3] = PAGE + 100, -errno.EINTR, -errno.EIO
        return results

    engine = TransferEngine(OsDisk(), "io_uring")
    monkeypatch.setattr(LoopRing, "run", cut)
    content = os.urandom(4 * PAGE)
    os.pwrite(fd, _aligned(content * 8), 0)
    # Not adjacent, so that each is an operation of its own.
    reads = [transfer(fd, 8 * i, pages(4)) for i in range(4)]
    await engine.read(reads)
    assert [(r.done_bytes, r.error.errno if r.error else 0) for r in reads] == [
        (4 * PAGE, 0), (4 * PAGE, 0), (0, errno.EIO), (4 * PAGE, 0),
    ]  # fmt: skip
    assert bytes(reads[0].buffers[0]) == bytes(reads[1].buffers[0]) == content
    await engine.close()


def _refuse_setup(*_: Any) -> int:
    raise OSError(errno.ENOSYS, "Function not implemented")


@pytest.mark.parametrize(
    ("call", "refuse", "reason"),
    [
        ("setup", _refuse_setup, "Function not implemented"),
        ("submit", lambda *_: -errno.EPERM, "of 4 no-ops -1 were taken and [] came back"),
    ],
)
async def test_refused_io_uring_is_reported_once(
    fd: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
    refuse: Callable[..., int],
    reason: str,
) -> None:
    """If the kernel refuses io_uring, or its operations, threads are used and one line gives the reason."""
    assert probe() == ""
    monkeypatch.setattr(f"kvstore.diskio.ring.{call}", refuse)
    assert reason in probe()
    with caplog.at_level(logging.WARNING):
        engine = TransferEngine(OsDisk(), "auto", threads=2)
        writes = [transfer(fd, page, pages(1, 9)) for page in range(20)]
        await engine.write(writes)
    assert engine.name == "threads"
    (record,) = caplog.records
    assert reason in record.message
    assert all(w.done_bytes == PAGE for w in writes)
    await engine.close()


async def test_a_loop_that_can_have_no_ring_uses_threads(
    fd: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a ring, or without a signal to the loop, transfers use plain calls, and one line reports it."""
    before = len(os.listdir("/proc/self/fd"))

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOMEM, "no memory may be locked")

    monkeypatch.setattr("kvstore.diskio.ring.register", refuse)
    engine = TransferEngine(OsDisk(), "io_uring", threads=2)
    assert len(os.listdir("/proc/self/fd")) == before
    await engine.write([transfer(fd, page, pages(1, 8)) for page in range(8)])
    target = pages(1)
    await engine.read([transfer(fd, 0, target)])
    assert bytes(target) == bytes([8]) * PAGE
    assert engine.name == "threads"
    assert len([record for record in caplog.records if "no memory may be locked" in record.message]) == 1
    await engine.close()


async def test_a_cancelled_batch_touches_nothing_afterwards(fd: int, choice: EngineChoice) -> None:
    """Once a cancelled read has ended, its buffers are never touched again."""
    engine = TransferEngine(OsDisk(), choice, threads=2)
    rng = random.Random(5)
    watched = []
    for _ in range(100):
        reads = [transfer(fd, rng.randrange(60), pages(1, 1)) for _ in range(16)]
        task = asyncio.ensure_future(engine.read(reads))
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        for read in reads:
            read.buffers[0][:] = b"\xaa" * PAGE
            watched.append(read.buffers[0])
    await engine.close()
    assert all(bytes(buffer) == b"\xaa" * PAGE for buffer in watched)


def _aligned(content: bytes) -> memoryview:
    memory = pages(len(content) // PAGE)
    memory[:] = content
    return memory


async def test_short_transfers_resume_at_whole_units(fd: int, choice: EngineChoice) -> None:
    """A transfer that stops within a unit resumes at the unit's start: direct I/O takes no other offset."""
    offsets: list[int] = []

    class Short(OsDisk):
        def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
            offsets.append(offset)
            return min(super().pwritev(fd, buffers, offset), PAGE + 1000)

        async def awaited_syscalls(self, op: str, subjects: Sequence[Any], function: Any) -> list[int]:
            return [min(each, PAGE + 1000) for each in await super().awaited_syscalls(op, subjects, function)]

    engine = TransferEngine(Short(), choice)
    write = transfer(fd, 1, pages(5, 7))
    await engine.write([write])
    assert (write.error, write.done_bytes) == (None, 5 * PAGE)
    assert offsets
    assert all(offset % PAGE == 0 for offset in offsets)
    await engine.close()


async def test_a_ring_keeps_the_lock_of_the_lifetime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock of the process's lifetime lasts until the ring has gone."""
    path = tmp_path / "lifetime"
    lifetime = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(lifetime, fcntl.LOCK_EX)
    monkeypatch.setattr("kvstore.diskio.ring.held", lambda: lifetime)
    ring = Ring(4)
    os.close(lifetime)

    def is_free() -> bool:
        with path.open("r+b") as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    assert not is_free()
    ring.close()
    await eventually_async(is_free, what="the kernel has let go of the ring")


def test_a_close_is_never_repeated(tmp_path: Path) -> None:
    """The descriptor is released by the first try, whatever close returns."""
    disk = FaultyDisk()
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    disk.fail("close", errno.EINTR)
    with pytest.raises(InterruptedError):
        disk.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
