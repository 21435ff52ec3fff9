"""Space among engines: shares, segments without a holder, unused namespaces, stopped engines, and kills."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import itertools
import os
import random
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from kvstore.backends.disk.limits import Limits
from kvstore.backends.disk.root import Due
from kvstore.config import Capacity
from kvstore.diskio import OsDisk
from kvstore.namespace import Namespace
from kvstore.testing.seeds import fresh_seed
from kvstore.testing.waiting import eventually_async
from kvstore.types import BlockKey, Outcome, RemovalCause
from tests.disk.rig import NAMESPACE, SLOT, Rig, segment_bytes
from tests.disk.rig import opened as opened_at
from tests.diskio.faulty_disk import FaultyDisk
from tests.sizes import sized

_T = TypeVar("_T")

OTHER = Namespace({"test": "another model"})
SLOTS = 64
"""A capacity of 16 segments of 4 slots."""


OFTEN = Limits(upkeep_s=0.05, ask_again_s=0.05)
"""Engines look after their space twenty times as often."""

opened = partial(opened_at, limits=OFTEN)


def segments(rig: Rig) -> int:
    """Return how many segments an engine holds."""
    return int(rig.backend.stats().gauges["segments"])


def given_up(rig: Rig) -> int:
    """Return how many segments an engine has given up."""
    return rig.backend.stats().counters["segments_given_up"]


async def fill(rig: Rig, blocks: int = SLOTS) -> dict[BlockKey, bytes]:
    """Put new blocks, a few at a time; return them."""
    values: dict[BlockKey, bytes] = {}
    for _ in range(blocks // 4):
        values |= await rig.put_new(4)
    return values


async def store(rig: Rig) -> None:
    """Put a few new blocks, which may find no room."""
    outcomes = await rig.put({rig.maker.key(): rig.maker.payload() for _ in range(3)})
    assert set(outcomes) <= {Outcome.OK, Outcome.NO_SPACE}, outcomes


async def stores_until(rigs: Sequence[Rig], shares: list[int]) -> None:
    """Let engines store until they hold so many segments."""

    async def are_shared() -> bool:
        for rig in rigs:
            await store(rig)
        return sorted(segments(rig) for rig in rigs) == shares

    await eventually_async(are_shared, 60)


@contextlib.contextmanager
def engine(root: Path, seed: int, blocks: int) -> Iterator[subprocess.Popen[str]]:
    """Run an engine in a process, which has stored so many blocks and then waits, until the context ends."""
    command = [sys.executable, "-m", "tests.disk.test_sharing", str(root), str(seed), str(blocks)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "stored\n"
            yield process
        finally:
            process.kill()


async def _run_engine(root: Path, seed: int, blocks: int) -> None:
    async with opened(root, SLOTS, seed=seed) as rig:
        await fill(rig, blocks)
        print("stored", flush=True)
        await asyncio.to_thread(sys.stdin.read)


async def test_shares_settle(tmp_path: Path) -> None:
    """Shares of engines that store differ by a segment at most; then no segment changes hands any more."""
    async with opened(tmp_path, SLOTS) as one, opened(tmp_path, SLOTS) as two, opened(tmp_path, SLOTS) as three:
        await fill(one)
        rigs = [one, two, three]
        await stores_until(rigs, [5, 5, 6])
        # A segment is counted after its locks were released, when it may have been taken already.
        await asyncio.sleep(0.5)
        before = [given_up(rig) for rig in rigs]
        assert sum(before) >= 10
        for _ in range(20):
            for rig in rigs:
                await store(rig)
            await asyncio.sleep(0.05)
        assert [given_up(rig) for rig in rigs] == before
        assert segment_bytes(tmp_path) == SLOTS * SLOT


async def test_given_segment_keeps_its_blocks(tmp_path: Path) -> None:
    """The blocks of a segment change hands with it: the giver reports them as evicted, and finds them all the same."""
    async with opened(tmp_path, SLOTS) as one, opened(tmp_path, SLOTS) as two:
        values = await fill(one)
        assert await two.put({two.maker.key(): two.maker.payload()}) == [Outcome.NO_SPACE]
        # The engine takes the segment without a further store.
        await eventually_async(lambda: any(two.backend.own(list(values))))
        given = set(itertools.compress(values, two.backend.own(list(values))))
        evicted = {key for key, cause in one.removed if cause is RemovalCause.EVICTED}
        assert given <= evicted
        assert set(two.arrived) >= given
        kept = {key: values[key] for key in values if key in given or key not in evicted}

        async def are_there() -> bool:
            return all([await rig.get(list(kept)) == list(kept.values()) for rig in (one, two)])

        # The giver follows the segment when it has let it go.
        await eventually_async(are_there)
        assert segment_bytes(tmp_path) == SLOTS * SLOT


class SlowSlots(OsDisk):
    """A disk on which calls of one kind on slots wait until they may go on."""

    op = ""

    def __init__(self) -> None:
        self.stalled, self.goes_on = threading.Event(), threading.Event()

    def syscall(self, op: str, function: Callable[..., _T], /, *args: Any, **kwargs: Any) -> _T:
        if op == self.op and os.readlink(f"/proc/self/fd/{args[0]}").endswith(".seg"):
            self.stalled.set()
            assert self.goes_on.wait(30)
        return super().syscall(op, function, *args, **kwargs)


@pytest.mark.parametrize("op", ["pwritev", "preadv"])
async def test_segment_is_given_once_no_operation_runs_on_it(tmp_path: Path, op: str) -> None:
    """A segment is not given while a store or a load of its last holder is on its way to the disk."""
    disk = SlowSlots()
    # A segment has one slot. The least used is given: that of the first block, or the one without a block.
    async with opened(tmp_path, 16, disk=disk, engine="threads") as one, opened(tmp_path, 16) as two:
        values = await one.put_new(16)
        key, payload = next(iter(values.items()))
        if op == "pwritev":
            await one.backend.delete([key])
        disk.op = op
        work = asyncio.create_task(one.get([key]) if op == "preadv" else one.put({key: payload}))
        await eventually_async(disk.stalled.is_set)
        for _ in range(10):
            await store(two)
            await asyncio.sleep(0.05)
        early = segments(two)
        disk.goes_on.set()
        assert early == 0
        assert (await work)[0] in (payload, Outcome.OK, Outcome.EXISTS)
        await eventually_async(lambda: segments(two) > 0)
        assert await two.get([key]) == [payload]


async def test_engine_of_another_namespace_receives_its_share(tmp_path: Path) -> None:
    """A segment given to an engine of another model is removed, and one of that model is made in its place."""
    async with opened(tmp_path, SLOTS) as one, opened(tmp_path, SLOTS, namespace=OTHER) as two:
        await fill(one)
        await store(two)
        # Without a further store.
        await eventually_async(lambda: segments(two) > 0)
        await stores_until([one, two], [8, 8])
        assert segment_bytes(tmp_path / OTHER.hex) == segment_bytes(tmp_path / NAMESPACE.hex) == SLOTS * SLOT // 2


async def test_idle_engine_gives_and_keeps_the_rest(tmp_path: Path) -> None:
    """An engine that stores nothing gives half of its segments to one that stores, and no more."""
    async with opened(tmp_path, SLOTS) as idle, opened(tmp_path, SLOTS) as busy:
        await fill(idle)
        await eventually_async(lambda: stores_up_to(busy, 8))
        for _ in range(15):
            await store(busy)
            await asyncio.sleep(0.05)
        assert (segments(idle), segments(busy)) == (8, 8)


async def test_engine_that_stopped_storing_asks_no_more(tmp_path: Path) -> None:
    """An engine without room receives it while it stores; others keep their segments afterwards."""
    async with (
        opened(tmp_path, SLOTS) as one,
        opened(tmp_path, SLOTS, limits=replace(OFTEN, asking_s=0.0)) as two,
    ):
        await fill(one)
        await store(two)
        await asyncio.sleep(1)
        assert given_up(one) <= 1


@pytest.mark.parametrize("stopped", ["asker", "largest"])
async def test_stopped_engine_delays_others_only(tmp_path: Path, stopped: str) -> None:
    """A stopped engine that asks keeps the room of a segment; one that holds most is passed over after a while."""
    with engine(tmp_path, 1, 40 if stopped == "largest" else 0) as process:
        soon = replace(OFTEN, largest_s=0.5)
        async with opened(tmp_path, SLOTS, limits=soon) as one, opened(tmp_path, SLOTS, limits=soon) as two:
            await fill(one, 24 if stopped == "largest" else SLOTS)
            process.send_signal(signal.SIGSTOP)
            await eventually_async(lambda: stores_up_to(two, 3), 60)
            # Also into segments that are being given.
            await one.put_new(4)


async def test_engine_in_place_of_a_silent_larger_one_removes_one_segment_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the larger engine before each segment that it removes to restore the capacity."""
    async with opened(tmp_path, SLOTS) as one, opened(tmp_path, SLOTS) as two:
        for task in (*one.session._tasks, *two.session._tasks):
            task.cancel()
        await one.put_new(8)
        await two.put_new(4)
        (root,) = two.session.roots
        root.capacity = Capacity(1)
        clock = itertools.count(100)
        monkeypatch.setattr("kvstore.backends.disk.root.time", SimpleNamespace(monotonic=lambda: next(clock)))
        dues = [root.due(4 * SLOT, 0, 4 * SLOT, largest_s=5) for _ in range(13)]
        assert [number for number, due in enumerate(dues) if due is Due.REMOVE] == [5, 10]


async def stores_up_to(rig: Rig, count: int) -> bool:
    """Store; return whether the engine holds so many segments."""
    await store(rig)
    return segments(rig) >= count


async def test_room_is_kept_for_an_engine_that_asks(tmp_path: Path) -> None:
    """An engine leaves the room for one segment to an engine that asks and holds less, until that one ends."""
    async with opened(tmp_path, SLOTS) as rig:
        await rig.put_new(4)
        unnamed = tmp_path / "asker"
        unnamed.write_bytes(struct.pack("<QQ32s", 0, 4 * SLOT, OTHER.digest))
        with unnamed.open() as file:
            # Without the lock, the engine would remove it.
            fcntl.flock(file, fcntl.LOCK_EX)
            unnamed.rename(tmp_path / ".kvstore" / f"engine.{0:016x}")
            await fill(rig, 80)
            assert segment_bytes(tmp_path) == 15 * 4 * SLOT
        await eventually_async(lambda: stores_up_to(rig, 16))


async def test_killed_engine_leaves_its_share(tmp_path: Path) -> None:
    """The segments of a killed engine are taken by the one that is left."""
    with engine(tmp_path, 1, 40) as process:
        async with opened(tmp_path, SLOTS) as rig:
            await fill(rig, 24)
            assert segments(rig) == 6
            process.kill()
            await eventually_async(lambda: segments(rig) == 16)
            assert len(list((tmp_path / ".kvstore").glob("engine.*"))) == 1


async def test_segments_without_a_holder_are_shared(tmp_path: Path) -> None:
    """Of two engines that start on a filled root, neither takes more than half; alone, an engine takes the rest."""
    async with opened(tmp_path, SLOTS) as rig:
        values = await fill(rig)
    async with opened(tmp_path, SLOTS, namespace=OTHER) as other:
        async with opened(tmp_path, SLOTS) as one, opened(tmp_path, SLOTS) as two:
            assert segments(one) == 16 // 2
            assert segments(two) == 16 // 3
        assert segment_bytes(tmp_path) == SLOTS * SLOT
        assert segments(other) == 0
    async with opened(tmp_path, SLOTS) as heir:
        gone = {key for key, _ in rig.removed}
        await heir.has_all({key: values[key] for key in values if key not in gone})


async def test_segment_without_a_holder_is_taken_rather_than_made(tmp_path: Path) -> None:
    """An engine that needs room beyond its share takes the segments that no engine holds, with their blocks."""
    async with opened(tmp_path, SLOTS) as rig:
        await fill(rig)
    async with opened(tmp_path, SLOTS, namespace=OTHER), opened(tmp_path, SLOTS) as rig:
        assert segments(rig) == 8
        names = {path.stat().st_ino for path in tmp_path.rglob("*.seg")}
        await rig.put_new(4)
        assert segments(rig) == 16
        assert {path.stat().st_ino for path in tmp_path.rglob("*.seg")} == names


async def test_unused_namespaces_go_first(tmp_path: Path) -> None:
    """Segments of namespaces that no engine uses are removed before any block is evicted, the oldest first."""
    oldest = Namespace({"test": "oldest"})
    for namespace, slots in ((oldest, 16), (OTHER, 16)):
        async with opened(tmp_path, SLOTS, namespace=namespace) as rig:
            await fill(rig, slots)
    for path in (tmp_path / oldest.hex).iterdir():
        os.utime(path, (1000, 1000))
    async with opened(tmp_path, SLOTS) as rig:
        await fill(rig, 32 + 4)
        assert segment_bytes(tmp_path / oldest.hex) == 12 * SLOT
        # Some slots stay free: without any, some blocks are evicted ahead of need.
        await fill(rig, 12 + 12)
        await rig.put_new(1)
        assert segment_bytes(tmp_path / oldest.hex) == segment_bytes(tmp_path / OTHER.hex) == 0
        assert rig.removed == []
        assert segment_bytes(tmp_path) == SLOTS * SLOT
        # Half of a segment: its maker was killed.
        (tmp_path / OTHER.hex / "000003.seg").write_bytes(bytes(SLOT))
        await eventually_async(lambda: segment_bytes(tmp_path) == SLOTS * SLOT)


async def test_segment_that_can_not_be_removed_costs_its_space_only(tmp_path: Path) -> None:
    """An engine goes on with the room that is left, and others of the namespace are removed all the same."""
    async with opened(tmp_path, SLOTS, namespace=OTHER) as rig:
        await fill(rig)
    disk = FaultyDisk()
    async with opened(tmp_path, SLOTS, disk=disk) as rig:
        disk.fail("unlink", errno.EIO, nth=1)
        await rig.put_new(4)
        assert segment_bytes(tmp_path) == SLOTS * SLOT
        await fill(rig, 4 * 14)
        assert rig.removed == []


async def test_engine_that_looks_at_segments_disturbs_no_other(tmp_path: Path) -> None:
    """A segment is made while other engines look for segments without a holder."""
    async with contextlib.AsyncExitStack() as stack:
        rigs = [await stack.enter_async_context(opened(tmp_path, SLOTS)) for _ in range(4)]
        for _ in range(4):
            await asyncio.gather(*[rig.put_new(4) for rig in rigs])


class DyingDisk(OsDisk):
    """A disk on which an engine changes nothing after so many changes, as if it had been killed."""

    left = 1 << 60
    is_dead = False

    def syscall(self, op: str, function: Callable[..., _T], /, *args: Any, **kwargs: Any) -> _T:
        is_change = op in ("unlink", "ftruncate", "pwritev", "rename", "fallocate")
        if op == "flock" and args[1] & fcntl.LOCK_UN:
            is_change = not os.readlink(f"/proc/self/fd/{args[0]}").endswith("ledger.lock")
        elif op == "open" and args[1] & os.O_CREAT:
            is_change = args[0] != "ledger.lock"
        self.is_dead |= is_change and self.left == 0
        if self.is_dead and op != "close":
            raise OSError(errno.EIO, "dead")
        self.left -= is_change
        return super().syscall(op, function, *args, **kwargs)

    def statvfs(self, fd: int) -> Any:
        # Not the reserve, which the engine has to restore.
        return SimpleNamespace(f_bavail=self.free, f_frsize=1, f_blocks=1 << 40)

    free = 1 << 40


@pytest.mark.parametrize("dying", ["giver", "taker", "taker of another namespace", "remover"])
async def test_killed_engine_loses_no_segment(tmp_path: Path, dying: str) -> None:
    """An engine killed between any two steps of giving, taking or removing a segment leaves all of its segments."""
    for step in itertools.count(0, sized(5, full=1, quick=11)):
        root, disk = tmp_path / str(step), DyingDisk()
        namespace = OTHER if dying == "taker of another namespace" else NAMESPACE
        async with contextlib.AsyncExitStack() as stack:
            disks = (disk, None) if dying in ("giver", "remover") else (None, disk)
            one, two = [
                await stack.enter_async_context(
                    opened(root, SLOTS, disk=each, engine="threads", reserve="1MiB", namespace=name)
                )
                for each, name in zip(disks, (NAMESPACE, namespace), strict=True)
            ]
            values = await fill(one)
            disk.left = step

            async with asyncio.timeout(30):
                while not disk.is_dead and not (given_up(one) and (dying == "remover" or segments(two))):
                    if dying == "remover":
                        disk.free = 0
                    else:
                        await two.put({two.maker.key(): two.maker.payload()})
                    await asyncio.sleep(0.01)
        async with opened(root, SLOTS) as heir:
            found = dict(zip(values, await heir.get(list(values)), strict=True))
            assert {found[key] for key in found} <= {None, *values.values()}
            assert all(payload in (None, values[key]) for key, payload in found.items())
            assert list(found.values()).count(None) <= 16
            await fill(heir)
            assert segments(heir) == 16
            assert segment_bytes(root) == SLOTS * SLOT
            assert not list((root / NAMESPACE.hex).glob("*.tmp"))
        if not disk.is_dead:
            break


class World:
    """Engines of two namespaces in one root, which start, store, load, end and die."""

    def __init__(self, root: Path, rng: random.Random, stack: contextlib.AsyncExitStack) -> None:
        self.root = root
        self.rng = rng
        self.rigs: list[Rig] = []
        self.disks: dict[Rig, DyingDisk] = {}
        self.values: dict[BlockKey, bytes] = {}
        self.stack = stack

    async def step(self) -> None:
        """Do one random operation, and check capacity and content."""
        kind = self.rng.choice(["start", "end", "die", *["store"] * 12, *["load"] * 4, *["wait"] * 4])
        if (kind == "start" and len(self.rigs) < 4) or not self.rigs:
            await self.start()
        rig = self.rng.choice(self.rigs)
        if kind in ("end", "die"):
            self.rigs.remove(rig)
            if kind == "die":
                # From now on it changes nothing, and then its locks are released.
                self.disks[rig].left = self.rng.randrange(12)
                await self.store(rig)
            await rig.backend.close()
        elif kind == "store":
            await self.store(rig)
        elif kind == "load":
            keys = self.rng.sample(sorted(self.values), min(20, len(self.values)))
            for key, payload in zip(keys, await rig.get(keys), strict=True):
                assert payload in (None, self.values[key])
        else:
            await asyncio.sleep(0.05)
        with (self.root / ".kvstore" / "ledger.lock").open() as ledger:
            # No segment is made or removed meanwhile.
            fcntl.flock(ledger, fcntl.LOCK_EX)
            assert segment_bytes(self.root) <= SLOTS * SLOT

    async def start(self) -> None:
        """Start an engine."""
        namespace, disk = self.rng.choice([NAMESPACE, OTHER]), DyingDisk()
        engine = opened(
            self.root, SLOTS, disk=disk, namespace=namespace, engine="threads", seed=self.rng.getrandbits(32)
        )
        rig = await self.stack.enter_async_context(engine)
        self.disks[rig] = disk
        self.rigs.append(rig)

    async def store(self, rig: Rig) -> None:
        """Put new blocks, which may find no room."""
        new = {rig.maker.key(): rig.maker.payload() for _ in range(self.rng.randint(1, 6))}
        self.values |= new
        await rig.put(new)


async def test_engines_that_come_and_go_share_the_space(tmp_path: Path) -> None:
    """At any time, the capacity holds and no wrong byte is loaded; engines that store afterwards have equal shares."""
    seed = fresh_seed()
    print("seed", seed)
    for number in range(sized(2, full=100)):
        async with contextlib.AsyncExitStack() as stack:
            world = World(tmp_path / str(number), random.Random(seed + number), stack)
            for _ in range(80):
                await world.step()
            while len(world.rigs) < 2:
                await world.start()
            count = len(world.rigs)
            shares = [(16 + i) // count for i in range(count)]
            await stores_until(world.rigs, shares)
            assert segment_bytes(world.root) == SLOTS * SLOT


if __name__ == "__main__":
    asyncio.run(_run_engine(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))


async def test_segment_released_after_its_engine_ended_is_taken_soon(tmp_path: Path) -> None:
    """The kernel may keep the locks of an engine a little longer than its file; the next round takes its segments."""
    async with opened(tmp_path, SLOTS) as taker:
        root = taker.session.roots[0]
        for task in taker.session._tasks:
            task.cancel()
        async with opened(tmp_path, SLOTS) as other:
            values = await other.put_new(1)
        with next(tmp_path.rglob("*.seg")).open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            await taker.session.space.take_segments(root, report=True)
            assert taker.arrived == []
        await taker.session.space.take_segments(root, report=True)
        assert taker.arrived == list(values)
