"""Which engine gives up segments, and that a stopped, ended or closed engine costs only its own space."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import shutil
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.backends.disk import root as root_module
from kvstore.backends.disk import space as space_module
from kvstore.diskio import OsDisk
from kvstore.testing.waiting import eventually_async
from kvstore.types import Outcome
from tests.disk.rig import Rig, opened, room_for, segment_bytes
from tests.diskio.faulty_disk import FaultyDisk


class Disk(OsDisk):
    """A disk with a number of free bytes, where some calls wait or fail."""

    free = 1 << 40
    thawed: threading.Event | None = None
    """If set, the removal of a segment waits for it."""
    waiting = False
    stuck = ""
    """Owner whose segments can't be removed."""

    def statvfs(self, fd: int) -> Any:
        return SimpleNamespace(f_bavail=self.free, f_frsize=1, f_blocks=1 << 40)

    def unlink(self, name: str, dir_fd: int) -> None:
        if name.endswith(".seg"):
            if self.thawed is not None:
                self.waiting = True
                self.thawed.wait(60)
            self._refuse(dir_fd)
        super().unlink(name, dir_fd)

    def ftruncate(self, fd: int, size: int) -> None:
        self._refuse(fd)
        super().ftruncate(fd, size)

    def _refuse(self, fd: int) -> None:
        if self.stuck and self.stuck in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EPERM, "refused for the test")


async def fill(rig: Rig, segments: int) -> None:
    """Make an engine create segments."""
    for _ in range(segments):
        await rig.put_new(4)


async def test_an_engine_closed_on_a_frozen_disk_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger and all files of a closed engine are free once its last call has left the kernel."""
    monkeypatch.setattr("kvstore.backends.disk.backend._CLOSE_TIMEOUT_S", 0.1)
    disk = Disk()
    async with opened(tmp_path, room_for(64)) as other:
        async with opened(tmp_path, room_for(64), disk=disk, engine="threads", reserve="1MiB") as rig:
            await fill(rig, 4)
            owner = rig.session.owner.name
            disk.thawed, disk.free = threading.Event(), 0
            await eventually_async(lambda: disk.waiting, what="the upkeep gives up a segment")
        ledger = other.session.roots[0].ledger()
        assert not ledger.try_acquire(), "the call is still in the kernel"
        disk.thawed.set()
        await eventually_async(ledger.try_acquire, what="the ledger")
        ledger.release()
        files = Path("/proc/self/fd")
        names = [os.readlink(file) for file in files.iterdir() if os.path.lexists(file)]
        assert sum(name.endswith("ledger.lock") for name in names) == 0
        await eventually_async(lambda: not root_is_locked(other, owner), what="the owner's lock")


def root_is_locked(rig: Rig, owner: str) -> bool:
    """Return whether a running engine has an owner's directory."""
    return any(each.name == owner and not each.has_ended for each in rig.session.roots[0].owners(try_locks=True))


async def test_segments_that_can_not_be_removed_cost_their_owner_only(tmp_path: Path) -> None:
    """Other ended engines are reclaimed, and running ones share, although one directory can't be changed."""
    disk = Disk()
    async with opened(tmp_path, room_for(64)) as first, opened(tmp_path, room_for(64)) as second:
        await fill(first, 5)
        await fill(second, 5)
        names = [rig.session.owner.name for rig in (first, second)]
    disk.stuck = names[0]
    for name in names:
        for file in tmp_path.rglob(f"{name}/*"):
            os.utime(file, (time.time() - 100,) * 2)
    async with opened(tmp_path, room_for(64), disk=disk, seed=9, reserve="1MiB") as rig:
        if rig.session.owner.name in names:
            disk.stuck = next(name for name in names if name != rig.session.owner.name)
        for _ in range(40):
            assert set(await rig.put(rig.new(4))) <= {Outcome.OK, Outcome.EXISTS}
        assert [len(list(tmp_path.rglob(f"{disk.stuck}/*.seg"))), rig.backend.stats().gauges["segments"]] == [5, 11]
        disk.free = 0
        await rig.session.space.give_up_excess()
        assert rig.session.counts["segments_given_up"] == 1, "the reserve is restored from running engines"
        ended, disk.stuck, disk.free = disk.stuck, "", 1 << 40
        async with asyncio.timeout(60):
            while len(list(tmp_path.rglob(f"{ended}/*.seg"))) > 4:
                await rig.put(rig.new(4))
                await asyncio.sleep(0.01)
        disk.free = 0
        await rig.session.space.give_up_excess()
        assert rig.session.counts["segments_given_up"] == 1, "the ended engine's segments can be removed again"
        disk.free = 1 << 40


async def test_the_reserve_is_restored_from_ended_engines_first(tmp_path: Path) -> None:
    """An engine that stores nothing removes the segments of ended engines when the reserve is missed."""
    disk = Disk()
    async with opened(tmp_path, room_for(64), disk=disk, reserve="1MiB") as rig:
        async with opened(tmp_path, room_for(64)) as ended:
            await fill(ended, 2)
        await fill(rig, 2)
        before = segment_bytes(tmp_path)
        disk.free = (1 << 20) - 1
        await rig.session.space.give_up_excess()
        assert segment_bytes(tmp_path) == before - room_for(4)
        assert rig.session.counts["segments_given_up"] == 0
        disk.free = 1 << 40


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_the_largest_engine_restores_the_reserve(tmp_path: Path, is_stopped: bool) -> None:
    """A smaller one removes nothing unless the largest does not act in time, and then one segment in that time."""
    disk = Disk()
    async with (
        opened(tmp_path, room_for(64), disk=disk, reserve="1MiB") as large,
        opened(tmp_path, room_for(64), disk=disk, reserve="1MiB") as small,
    ):
        for rig in (large, small):
            for task in rig.session._tasks:
                task.cancel()  # Upkeep is done by the test alone.
        await fill(large, 3)
        await fill(small, 2)
        disk.free = (1 << 20) - 1
        for _ in range(3):
            await small.session.space.give_up_excess()
        assert small.session.counts["segments_given_up"] == 0
        if is_stopped:
            small.session.roots[0]._lacking_since -= root_module._LARGEST_S
        for _ in range(2 if is_stopped else 1):
            await (small if is_stopped else large).session.space.give_up_excess()
        given_up = [rig.session.counts["segments_given_up"] for rig in (large, small)]
        assert given_up == ([0, 1] if is_stopped else [1, 0])
        disk.free = 1 << 40


async def test_expired_request_gets_no_segment(tmp_path: Path) -> None:
    """An engine that stopped storing gets no segment of another's."""
    async with opened(tmp_path, room_for(64)) as one, opened(tmp_path, room_for(64)) as two:
        await fill(one, 16)
        root, name = two.session.roots[0], two.session.owner.name
        root.want(name, wanted=True)
        wish = tmp_path / ".kvstore" / f"want.{name}"
        os.utime(wish, (time.time() - 60,) * 2)
        await one.session.space.give_up_excess()
        assert one.session.counts["segments_given_up"] == 0
        root.want(name, wanted=True)
        await one.session.space.give_up_excess()
        assert one.session.counts["segments_given_up"] == 1


async def test_a_failure_after_a_cancelled_store_is_no_error_of_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work for room goes on when its store is cancelled; its failure then concerns no caller."""
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    begun, gate = asyncio.Event(), asyncio.Event()

    async def grow(**options: bool) -> bool:
        begun.set()
        await gate.wait()
        raise OSError(errno.EIO, "failed for the test")

    async with opened(tmp_path, room_for(64)) as rig:
        monkeypatch.setattr(rig.session.space, "_grow", grow)
        taking = asyncio.create_task(rig.session.space.take(2))
        await begun.wait()
        taking.cancel()
        await asyncio.wait({taking})
        gate.set()
        await rig.session.space.close()
    gc.collect()
    assert not reported


class SlowUses(OsDisk):
    """A disk where the writes to the file that counts uses wait for ``thawed``, once there is one."""

    thawed: threading.Event | None = None
    waiting = False

    def pwritev(self, fd: int, buffers: Any, offset: int) -> int:
        if self.thawed is not None and os.readlink(f"/proc/self/fd/{fd}").endswith("uses"):
            self.waiting = True
            self.thawed.wait(60)
        return super().pwritev(fd, buffers, offset)


async def test_loads_of_other_engines_blocks_wait_for_no_count_of_uses(tmp_path: Path) -> None:
    """While a disk takes no writes, the blocks of other engines are still loaded."""
    disk = SlowUses()
    async with (
        opened(tmp_path, room_for(64)) as other,
        opened(tmp_path, room_for(64), disk=disk, engine="threads", threads=4) as rig,
    ):
        values = await other.put_new(4)
        disk.thawed = threading.Event()
        await eventually_async(
            lambda: rig.session.index.place(next(iter(values))) >= 0, what="the other engine's blocks"
        )
        try:
            await rig.has_all(values)
            await eventually_async(lambda: disk.waiting, what="a count of uses")
            async with asyncio.timeout(10):
                await rig.has_all(values)
        finally:
            disk.thawed.set()


async def test_removed_segment_is_not_replaced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The room is for the engine that requested it, which may take a second to notice."""
    monkeypatch.setattr(space_module, "_ASK_AGAIN_S", 60.0)
    async with opened(tmp_path, room_for(64)) as one, opened(tmp_path, room_for(64)) as two:
        await fill(one, 16)
        one.session.space._full_until = 0.0
        two.session.roots[0].want(two.session.owner.name, wanted=True)
        await one.session.space.give_up_excess()
        assert segment_bytes(tmp_path) == room_for(60)
        assert not await one.session.space._grow(needed=True)
        assert await two.session.space._grow(needed=True)


@contextlib.asynccontextmanager
async def two_engines_with_all_the_room(root: Path) -> AsyncIterator[tuple[Rig, Rig, Rig]]:
    """Open three engines; the third has no segment."""
    async with (
        opened(root, room_for(64)) as one,
        opened(root, room_for(64)) as two,
        opened(root, room_for(64)) as poor,
    ):
        for _ in range(8):
            await fill(one, 1)
            await fill(two, 1)
        yield one, two, poor


async def test_room_is_for_the_engine_that_requests_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that store more often do not take it, and the requester needs no further store to get it."""
    monkeypatch.setattr(space_module, "_ASK_AGAIN_S", 0.0)
    async with two_engines_with_all_the_room(tmp_path) as (one, two, poor):
        assert await poor.put(poor.new(1)) == [Outcome.NO_SPACE]
        # Upkeep gives up a segment for it, and creates it there.
        async with asyncio.timeout(30):
            while not poor.backend.stats().gauges["segments"]:
                await fill(one, 1)
                await fill(two, 1)
                await asyncio.sleep(0)
        await poor.put_new(1)


async def test_room_is_for_an_engine_with_two_segments_less(tmp_path: Path) -> None:
    """An engine that would then have two segments more than one that requests space leaves the room."""
    async with opened(tmp_path, room_for(64)) as one, opened(tmp_path, room_for(64)) as poor:
        await fill(one, 1)
        poor.session.roots[0].want(poor.session.owner.name, wanted=True)
        assert not await one.session.space._grow(needed=True)
        assert await poor.session.space._grow(needed=True)
        one.session.space._full_until = 0.0
        assert await one.session.space._grow(needed=True)


async def test_one_engine_removes_a_segment_for_a_request(tmp_path: Path) -> None:
    """Of several engines with more, one removes a segment."""
    async with two_engines_with_all_the_room(tmp_path) as (one, two, poor):
        poor.session.roots[0].want(poor.session.owner.name, wanted=True)
        for rig in (one, two, one, two):
            await rig.session.space.give_up_excess()
        assert one.session.counts["segments_given_up"] + two.session.counts["segments_given_up"] == 1


@pytest.mark.parametrize("runs", [False, True])
async def test_owner_without_its_directory_is_forgotten(tmp_path: Path, runs: bool) -> None:
    """Its blocks are misses, their departure is reported as a doubt, and its files are closed, also while it runs."""
    disk = FaultyDisk()
    doubts: list[int] = []
    async with opened(tmp_path, room_for(64), disk=disk) as one, contextlib.AsyncExitStack() as stack:
        other = await stack.enter_async_context(opened(tmp_path, room_for(64)))
        values, name = await other.put_new(2), other.session.owner.name
        one.backend.set_doubt_listener(lambda: doubts.append(len(one.session.followers.others)))
        await one.session.followers.refresh()
        await one.has_all(values)
        if not runs:
            await stack.aclose()
        (directory,) = [path for path in tmp_path.rglob(name) if path.is_dir()]
        shutil.rmtree(directory)
        await eventually_async(lambda: not one.session.followers.others, what="the owner forgotten")
        await eventually_async(lambda: bool(doubts), what="the doubt")
        assert await one.backend.exists(list(values)) == [False] * 2
        assert await one.get(list(values)) == [None] * 2
        files = [open_ for fd, open_ in disk.open_fds.items() if fd != one.session.journal.end.fd]
        assert not any(open_ == name or open_.startswith("journal") or open_.endswith(".seg") for open_ in files)
        await one.has_all(await one.put_new(2))
