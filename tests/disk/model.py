"""A model of one cache in two directories, with up to four engines of two namespaces, compared after every step.

The engines run in one loop, and their upkeep runs as steps, so a seed repeats a run. A kill is a disk on which every
call fails from a random call on. In a racing world, each engine has several threads and reads slots in two parts,
with a pause between them, so that a slot reused during a read gives a mixed block; a seed repeats its steps, not its
races.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

from kvstore.backends.disk import DiskBackend, DiskConfig
from kvstore.backends.disk.ledger import LedgerBusyError
from kvstore.backends.disk.session import Session
from kvstore.backends.disk.table import NOWHERE
from kvstore.config import Capacity
from kvstore.diskio import OsDisk
from kvstore.errors import BackendError
from kvstore.namespace import Namespace
from kvstore.types import BlockKey, Outcome, RemovalCause
from tests.disk.rig import GEOMETRY, NAMESPACE, PAYLOAD, SLOT, Rig

_T = TypeVar("_T")

OTHER_NAMESPACE: Final = Namespace({"test": "another"})
ENGINES: Final = 4
BLOCKS: Final = 64
UNIVERSE: Final = [b"block %d" % number for number in range(96)]
SLOW_S: Final = 0.003
"""Pause in a slow read: some stores take less."""

CHANGES: Final = frozenset({"pwritev", "unlink", "ftruncate", "fdatasync", "rename", "mkdir", "rmdir", "fallocate"})
WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class WrongError(Exception):
    """An engine and the model differ."""


@cache
def payload(key: BlockKey) -> bytes:
    """Return the content of a block."""
    return random.Random(key).randbytes(PAYLOAD)


class ModelDisk(OsDisk):
    """A disk that is full or read-only, or belongs to a killed engine; with ``is_slow``, reads of slots take time."""

    def __init__(self, *, is_slow: bool = False) -> None:
        self.is_slow = is_slow
        self.state = "ok"  # ``"ok"``, ``"full"`` or ``"read-only"``.
        self.calls_left = -1  # Calls until the engine is killed; negative: it is not.

    def syscall(self, op: str, function: Callable[..., _T], /, *args: Any, **kwargs: Any) -> _T:
        if self.calls_left >= 0 and op not in {"close", "flock"}:
            if not self.calls_left:
                raise OSError(errno.EIO, "the engine was killed")
            self.calls_left -= 1
        if self.state == "read-only" and (op in CHANGES or (op == "open" and args[1] & WRITES)):
            raise OSError(errno.EROFS, "read-only")
        if self.state == "full" and op == "fallocate":
            raise OSError(errno.ENOSPC, "full")
        if op == "fdatasync":
            return None  # type: ignore[return-value]  # Kills lose nothing; a flush would take most of a step.
        return function(*args, **kwargs)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if not self.is_slow or len(buffers) < 2:
            return super().preadv(fd, buffers, offset)
        done = super().preadv(fd, buffers[:1], offset)
        if done < buffers[0].nbytes:
            return done
        time.sleep(SLOW_S)
        return done + super().preadv(fd, buffers[1:], offset + done)


class Engine:
    """An engine, and the blocks that its calls and reports say it has."""

    def __init__(self, rig: Rig, disk: ModelDisk, namespace: Namespace) -> None:
        self.rig = rig
        self.disk = disk
        self.namespace = namespace
        self.given_up = 0
        self.held: set[BlockKey] = set()  # Blocks that must be found, with the right bytes.
        self.maybe: set[BlockKey] = set()  # Blocks whose store or removal failed or was cut short; they may be found.

    @property
    def session(self) -> Session:
        """The open session."""
        assert self.rig.backend._open is not None
        return self.rig.backend._open

    def own(self) -> set[BlockKey]:
        """Return the blocks in segments that the engine holds."""
        index = self.session.index
        places = {key: index.place(key) for key in UNIVERSE}
        return {key for key, place in places.items() if place >= 0 and index.at(place)[0].is_ours}

    def doubt(self, keys: Sequence[BlockKey]) -> None:
        """Note that blocks may be found or not."""
        self.held.difference_update(keys)
        self.maybe.update(keys)


class World:
    """The cache, its engines and the model. Every random choice comes from ``seed``."""

    def __init__(self, root: Path, seed: int, *, is_racing: bool = False) -> None:
        self.choose = random.Random(seed)
        self.is_racing = is_racing
        self.paths = [root / "a", root / "b"]
        self.engines: list[Engine] = []
        self.left: defaultdict[str, set[BlockKey]] = defaultdict(set)
        """Blocks that ended engines may have left, by namespace."""
        self.counts: Counter[str] = Counter()

    async def run(self, steps: int) -> None:
        """Take steps, then close all engines."""
        try:
            for _ in range(steps):
                await self.step()
        finally:
            for engine in list(self.engines):
                engine.disk.state = "ok"
                await self._end(engine, killed=False)

    async def step(self) -> None:
        """Take a random step and compare."""
        if not self.engines or (len(self.engines) < ENGINES and self.choose.random() < 0.02):
            await self._start()
            return
        engine = self.choose.choice(self.engines)
        steps: dict[Callable[[Engine], Any], float] = {
            self._store: 40, self._load: 20, self._load_and_store: 10, self._remove: 6, self._upkeep: 14,
            self._disk_changes: 3, self._lose_segment: 0.3, self._wipe: 0.2, self._kill: 1, self._close: 0.7,
        }  # fmt: skip
        (step,) = self.choose.choices(list(steps), list(steps.values()))
        self.counts[step.__name__] += 1
        await step(engine)
        for each in self.engines:
            await each.session.space.close()
            self._note_changes(each)
        for each in self.engines:
            self._compare_own(each)
        if engine in self.engines:
            await self._compare_others(engine)
        sizes = [sum(segment.stat().st_size for segment in path.rglob("*.seg")) for path in self.paths]
        self._check(max(sizes) <= BLOCKS * SLOT // 2, f"segments of {sizes} bytes")

    async def _start(self) -> None:
        """Start an engine: it takes what ended ones left, or begins with nothing."""
        disk, namespace = ModelDisk(is_slow=self.is_racing), self.choose.choice([NAMESPACE, NAMESPACE, OTHER_NAMESPACE])
        backend = DiskBackend(
            DiskConfig(
                path=[str(path) for path in self.paths], capacity=Capacity(BLOCKS * SLOT), reserve=Capacity(0),
                engine="threads", threads=8 if self.is_racing else 1,
            ),
            disk=disk,
        )  # fmt: skip
        rig = Rig(backend, random.Random(self.choose.random()), namespace)
        await backend.open(namespace, GEOMETRY)
        engine = Engine(rig, disk, namespace)
        # Upkeep is a step.
        for task in engine.session._tasks:
            task.cancel()
        self.engines.append(engine)
        self._note_changes(engine)
        self.counts["starts"] += 1
        self.counts["taken blocks"] += len(engine.held)

    async def _store(self, engine: Engine) -> None:
        keys = self.choose.sample(UNIVERSE, self.choose.randint(1, 8))
        engine.session.space._full_until = 0.0
        before = set(await self._found(engine))
        outcomes = await engine.rig.put({key: payload(key) for key in keys})
        for key, outcome in zip(keys, outcomes, strict=True):
            self.counts[f"store {outcome.name}"] += 1
            if outcome is Outcome.OK:
                engine.held.add(key)
                engine.maybe.discard(key)
            elif outcome is Outcome.EXISTS:
                # The store may have taken a segment with the block.
                self._check(key in before or key in engine.own(), f"{key!r} exists, but was not found before")
            else:
                engine.doubt([key])

    async def _load_and_store(self, engine: Engine) -> None:
        """Load blocks while others are evicted and their slots written, by this engine or another one."""
        writer = engine
        if self.is_racing and self.choose.random() < 0.5:
            writer = self.choose.choice(self.engines)
        await asyncio.gather(self._load(engine, may_miss=True), self._store(writer), self._load(engine, may_miss=True))

    async def _load(self, engine: Engine, *, may_miss: bool = False) -> None:
        keys = self.choose.sample(UNIVERSE, self.choose.randint(1, 12))
        held = set() if may_miss else engine.held.intersection(keys)
        for key, back in zip(keys, await engine.rig.get(keys), strict=True):
            self._check(back in (None, payload(key)), f"{key!r} has wrong bytes")
            self._check(key not in held or back is not None, f"{key!r} is held and not loaded")
            self.counts["loads"] += back is not None

    async def _remove(self, engine: Engine) -> None:
        keys = self.choose.sample(UNIVERSE, self.choose.randint(1, 3))
        if self.choose.random() < 0.02:
            await engine.rig.backend.quarantine(keys)
        else:
            await engine.rig.backend.delete(keys)
        engine.doubt(keys)
        self._check(not any(await engine.rig.backend.exists(keys)), "a removed block is found")

    async def _wipe(self, engine: Engine) -> None:
        await engine.rig.backend.delete(UNIVERSE)
        engine.doubt(UNIVERSE)

    async def _upkeep(self, engine: Engine) -> None:
        duties = [duty for root in engine.session.roots for duty in engine.session.duties(root).values()]
        duties += [each.refresh for each in engine.session.followers]
        with contextlib.suppress(OSError, LedgerBusyError):
            await self.choose.choice(duties)()

    async def _disk_changes(self, engine: Engine) -> None:
        engine.disk.state = self.choose.choice(["ok", "ok", "full", "read-only"])
        if engine.disk.state == "ok":
            await engine.rig.backend.probe()

    async def _lose_segment(self, engine: Engine) -> None:
        """Delete a segment under its engine, as a user would."""
        session = engine.session
        if own := list(session.index.segments.values()):
            lost = self.choose.choice(own)
            [path] = self.paths[lost.root].rglob(f"{engine.namespace.hex}/{lost.number:06d}.seg")
            path.unlink()
            path.with_suffix(".tab").unlink()
            engine.doubt([lost.key(slot) for slot in lost.held().tolist()])
            with contextlib.suppress(OSError):
                await session.duties(session.roots[lost.root])["files"]()

    async def _kill(self, engine: Engine) -> None:
        """Kill an engine at a random call of a random operation."""
        engine.disk.calls_left = self.choose.randrange(40)
        engine.doubt(keys := self.choose.sample(UNIVERSE, 6))
        with contextlib.suppress(OSError, BackendError):
            if self.choose.random() < 0.7:
                await engine.rig.put({key: payload(key) for key in keys})
            else:
                await engine.rig.backend.delete(keys)
        engine.disk.calls_left = 0
        await self._end(engine, killed=True)

    async def _close(self, engine: Engine) -> None:
        await self._end(engine, killed=False)

    async def _end(self, engine: Engine, *, killed: bool) -> None:
        session = engine.session
        await session.space.close()
        self._note_changes(engine)
        self.engines.remove(engine)
        if killed:
            await session._release(5.0)
            engine.rig.backend._open = None
        else:
            await engine.rig.backend.close()
        # An eviction whose row could not be written may have been.
        self.left[engine.namespace.hex] |= engine.held | engine.maybe | set(dict(engine.rig.removed))

    def _note_changes(self, engine: Engine) -> None:
        """Take what an engine has taken or lost into the model."""
        own = engine.own()
        for key, cause in engine.rig.removed:
            self.counts[f"removal {cause.name}"] += 1
            if key in engine.held and key not in own:
                self._check(cause is RemovalCause.EVICTED, f"{key!r} was removed: {cause}")
                engine.doubt([key])
        # An evicted block that another engine holds as well is not reported.
        engine.doubt([key for key in engine.held - own if engine.session.index.place(key) != NOWHERE])
        given_up = engine.rig.backend.stats().counters["segments_given_up"]
        if given_up != engine.given_up:
            # Another engine may take the segment with its blocks.
            engine.given_up = given_up
            self.left[engine.namespace.hex] |= set(dict(engine.rig.removed)) | engine.maybe
        engine.rig.removed.clear()
        taken = (own - engine.held) & self.left[engine.namespace.hex]
        engine.held |= taken
        self.counts["taken later"] += len(taken)

    async def _found(self, engine: Engine) -> list[BlockKey]:
        found = await engine.rig.backend.exists(UNIVERSE)
        return [key for key, is_found in zip(UNIVERSE, found, strict=True) if is_found]

    def _compare_own(self, engine: Engine) -> None:
        own = engine.own()
        self._check(own >= engine.held, f"lost without a reason: {engine.held - own}")
        self._check(own <= engine.held | engine.maybe, f"found without a store: {own - engine.held - engine.maybe}")

    async def _compare_others(self, engine: Engine) -> None:
        """Check that every promise of another engine's block is kept after one look at its table."""
        for each in self.engines:
            await each.session.tables.end()
        for followers in engine.session.followers:
            await followers.refresh()
        self._note_changes(engine)
        if engine.disk.state == "ok":
            others = [each for each in self.engines if each.namespace is engine.namespace]
            kept = set().union(self.left[engine.namespace.hex], *(each.held | each.maybe for each in others))
            promised = set(await self._found(engine))
            self._check(promised <= kept, f"{promised - kept} are promised, and no engine has stored them")

    def _check(self, agrees: bool, what: str) -> None:
        if not agrees:
            raise WrongError(what)
