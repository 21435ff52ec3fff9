"""Files and slots in use by a read or write: they stay open, and keep their block, until the call has ended."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.diskio import OsDisk
from kvstore.testing.waiting import eventually_async
from kvstore.types import BlockKey, Outcome
from tests.disk.rig import SLOT, opened, room_for
from tests.diskio.faulty_disk import FaultyDisk


class UseDisk(OsDisk):
    """A disk that records the files in use, and can hold the next read of a slot."""

    def __init__(self) -> None:
        self.wrong: list[int] = []  # Files that were closed while in use.
        self.held = 0  # Reads currently held.
        self.go_on = threading.Event()  # Releases the held reads.
        self._in_use: Counter[int] = Counter()
        self._hold_next = False
        self._lock = threading.Lock()

    def hold_next(self) -> None:
        """Hold the next read until released."""
        self._hold_next = True

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        is_slot = buffers[0].nbytes == 4096 and len(buffers) > 1
        with self._using([fd]):
            if is_slot and self._takes_hold():
                self.go_on.wait()
            return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        with self._using([fd]):
            return super().pwritev(fd, buffers, offset)

    async def awaited_syscalls(
        self, op: str, subjects: Sequence[Any], function: Callable[[Sequence[int]], Awaitable[list[int]]]
    ) -> list[int]:
        with self._using(subjects):
            if op == "preadv" and self._takes_hold():
                while not self.go_on.is_set():
                    # Like the kernel, which does not cancel a call.
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.sleep(0.001)
            return await super().awaited_syscalls(op, subjects, function)

    def close(self, fd: int) -> None:
        with self._lock:
            if self._in_use[fd]:
                self.wrong.append(fd)
        super().close(fd)

    def _takes_hold(self) -> bool:
        with self._lock:
            takes, self._hold_next = self._hold_next, False
            self.held += takes
        return takes

    @contextlib.contextmanager
    def _using(self, fds: Sequence[int]) -> Iterator[None]:
        with self._lock:
            self._in_use.update(fds)
        try:
            yield
        finally:
            with self._lock:
                self._in_use.subtract(fds)


ENGINES = pytest.mark.parametrize("engine", ["io_uring", "threads"])


@ENGINES
async def test_a_segment_that_is_read_stays_open(tmp_path: Path, engine: str) -> None:
    """A segment being read stays open while many others are opened, even above the limit of open files."""
    disk = UseDisk()
    async with opened(tmp_path, room_for(16), disk=disk, engine=engine) as rig:
        values = await rig.put_new(16)
        rig.session.segments._open_max = 2
        first = dict(list(values.items())[:1])
        disk.hold_next()
        reading = asyncio.create_task(rig.get(list(first)))
        await eventually_async(lambda: disk.held, what="a read has begun")
        for _ in range(3):
            for key in list(values)[1:]:
                await rig.has_all({key: values[key]})
        disk.go_on.set()
        assert await reading == list(first.values())
        assert disk.wrong == []


@ENGINES
async def test_segment_removed_during_a_read_is_a_miss(tmp_path: Path, engine: str) -> None:
    """The reader's file stays open until the read has ended, and the read is a miss."""
    disk = UseDisk()
    async with opened(tmp_path, room_for(16)) as one, opened(tmp_path, room_for(16), disk=disk, engine=engine) as two:
        values = await one.put_new(1)
        await eventually_async(lambda: len(two.arrived) == 1, what="the other engine is told")
        disk.hold_next()
        reading = asyncio.create_task(two.get(list(values)))
        await eventually_async(lambda: disk.held, what="a read has begun")
        await one.session.space._give_up([0])
        await eventually_async(lambda: len(two.removed) == 1, what="the other engine is told")
        disk.go_on.set()
        assert await reading == [None]
        assert disk.wrong == []


@ENGINES
async def test_close_leaves_files_open_that_the_kernel_still_reads(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descriptor number freed before the read has ended could be reused for another file."""
    monkeypatch.setattr("kvstore.backends.disk.backend._CLOSE_TIMEOUT_S", 0.1)
    disk = UseDisk()
    async with opened(tmp_path, room_for(16), disk=disk, engine=engine) as rig:
        values = await rig.put_new(2)
        disk.hold_next()
        reading = asyncio.create_task(rig.get(list(values)))
        await eventually_async(lambda: disk.held, what="a read has begun")
        await rig.backend.close()
        assert disk.wrong == []
        disk.go_on.set()
        await asyncio.wait({reading})
        assert disk.wrong == []


@ENGINES
async def test_a_block_that_is_removed_while_it_is_read(tmp_path: Path, engine: str) -> None:
    """The slot is reused only after the read has ended; the read returns the block's own bytes or a miss."""
    disk = UseDisk()
    async with opened(tmp_path, room_for(16), disk=disk, engine=engine) as rig:
        values = await rig.put_new(16)
        key = list(values)[3]
        disk.hold_next()
        reading = asyncio.create_task(rig.get([key]))
        await eventually_async(lambda: disk.held, what="a read has begun")
        assert await rig.backend.delete([key]) == [True]
        new: dict[BlockKey, bytes] = {}
        for _ in range(10):
            new |= await rig.put_new(2)
        disk.go_on.set()
        assert await reading in ([None], [values[key]])
        left = await rig.still_there(new)
        await rig.has_all(left)
        assert len(left) >= 15
        while rig.backend.stats().blocks < 16:
            await rig.put_new(1)


@ENGINES
async def test_a_block_that_is_read_is_not_evicted(tmp_path: Path, engine: str) -> None:
    """Whatever is stored meanwhile, a slow read returns its block, and the slot keeps that block."""
    disk = UseDisk()
    async with opened(tmp_path, room_for(16), disk=disk, engine=engine) as rig:
        values = await rig.put_new(16)
        key = next(iter(values))
        disk.hold_next()
        reading = asyncio.create_task(rig.get([key]))
        await eventually_async(lambda: disk.held, what="a read has begun")
        while len(rig.removed) < 40:
            await rig.put_new(1)
        assert key not in dict(rig.removed)
        disk.go_on.set()
        assert await reading == [values[key]]


async def test_files_that_are_opened_twice_at_once_are_closed_twice(tmp_path: Path) -> None:
    """Concurrent loads that need the same segment leave one file open, and none at the end."""
    disk = FaultyDisk()
    async with opened(tmp_path, room_for(16)) as one:
        values = await one.put_new(4)
        async with opened(tmp_path, room_for(16), disk=disk) as two:
            found = await asyncio.gather(*(two.get(list(values)) for _ in range(6)))
            assert found == [list(values.values())] * 6
            assert len([name for name in disk.open_fds.values() if name.endswith(".seg")]) == 4
    assert disk.open_fds == {}


@contextlib.contextmanager
def file_size_limit(size_bytes: int) -> Iterator[None]:
    """Limit the length of files: a write across the limit is short, and later ones fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


@ENGINES
async def test_short_write_fails_only_its_own_record(tmp_path: Path, engine: str) -> None:
    """A short write, as at a limit or on a full disk, fails its own record and no other."""
    capacity = room_for(16 * 64)
    async with opened(tmp_path, capacity, engine=engine) as rig:
        values = await rig.put_new(1)
        with file_size_limit(20 * SLOT + 4096):
            for _ in range(64):
                new = rig.new(1)
                outcomes = await rig.put(new)
                if outcomes != [Outcome.OK]:
                    break
                values |= new
            assert outcomes[0] in (Outcome.IO_ERROR, Outcome.NO_SPACE)
            assert len(values) > 10
            assert await rig.backend.exists(list(new)) == [False]
            await rig.has_all(values)
        await rig.has_all(await rig.put_new(8))
        await rig.has_all(values)
