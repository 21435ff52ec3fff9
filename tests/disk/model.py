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
from collections import Counter
from collections.abc import Callable, Sequence
from glob import iglob
from pathlib import Path
from typing import Any, TypeVar

from kvstore.backends.disk import DiskBackend, DiskConfig
from kvstore.backends.disk.layout import OWNER_SHIFT, SLOT_MASK, segment_name
from kvstore.backends.disk.root import LedgerBusyError
from kvstore.config import Capacity
from kvstore.diskio import OsDisk
from kvstore.errors import BackendError, ConfigError
from kvstore.namespace import Namespace
from kvstore.types import BlockKey, Outcome, RemovalCause
from tests.disk.rig import GEOMETRY, NAMESPACE, OTHER_NAMESPACE, Rig, room_for
from tests.slots.model import BLOCKS, ENGINES, UNIVERSE, WrongError, payload
from tests.slots.model import ModelDisk as SlotsModelDisk

_T = TypeVar("_T")


class ModelDisk(SlotsModelDisk):
    """A disk that also cannot read some directories; when it is full, files do not grow."""

    def __init__(self, *, is_slow: bool = False) -> None:
        super().__init__(is_slow=is_slow)
        self.unreadable: set[str] = set()  # Names of directories.

    def syscall(self, op: str, function: Callable[..., _T], /, *args: Any, **kwargs: Any) -> _T:
        if op == "open" and args[0] in self.unreadable:
            raise OSError(errno.EIO, "an unreadable directory")
        if self.state == "full" and op == "pwritev" and self._grows(args[0]):
            raise OSError(errno.ENOSPC, "full")
        return super().syscall(op, function, *args, **kwargs)

    @staticmethod
    def _grows(fd: int) -> bool:
        return not os.readlink(f"/proc/self/fd/{fd}").endswith((".seg", "uses"))


class Engine:
    """An engine: its owner's name, and the blocks that its calls and reports say it has."""

    def __init__(self, rig: Rig, disk: ModelDisk, namespace: Namespace) -> None:
        self.rig = rig
        self.disk = disk
        self.namespace = namespace
        self.name = rig.session.owner.name
        self.held: set[BlockKey] = set()  # Blocks that must be found, with the right bytes.
        self.maybe: set[BlockKey] = set()  # Blocks whose store or removal failed or was cut short; they may be found.

    def own(self) -> dict[BlockKey, int]:
        """Return the slots of the blocks that the engine says it has."""
        index = self.rig.session.index
        return {key: slot for key in UNIVERSE if (slot := index.slot(key)) is not None}

    def doubt(self, keys: Sequence[BlockKey]) -> None:
        """Note that blocks may be found or not."""
        self.held.difference_update(keys)
        self.maybe.update(keys)


class Ended:
    """What an ended engine left: for each block its segment."""

    def __init__(self, engine: Engine) -> None:
        slots = engine.rig.session.geometry.segment_slots
        own = engine.own()
        self.name, self.namespace = engine.name, engine.namespace
        self.held = {key: own[key] // slots for key in engine.held if key in own}
        self.maybe = set(engine.maybe) | (set(own) - engine.held)


class World:
    """The cache, its engines and the model. Every random choice comes from ``seed``."""

    def __init__(self, root: Path, seed: int, *, is_racing: bool = False) -> None:
        self.choose = random.Random(seed)
        self.is_racing = is_racing
        self.paths = [root / "a", root / "b"]
        self.engines: list[Engine] = []
        self.ended: dict[str, Ended] = {}
        self.vague: set[str] = set()
        """Ended owners whose removals could not be journalled; a promise of theirs ends with the load."""
        self.was_blind = False
        self.counts: Counter[str] = Counter()

    async def run(self, steps: int) -> None:
        """Take steps, then close all engines."""
        try:
            for _ in range(steps):
                await self.step()
        finally:
            for engine in list(self.engines):
                engine.disk.state, engine.disk.unreadable = "ok", set()
                await self._end(engine, killed=False)

    async def step(self) -> None:
        """Take a random step and compare."""
        if not self.engines or (len(self.engines) < ENGINES and self.choose.random() < 0.02):
            await self._start()
            return
        engine = self.choose.choice(self.engines)
        steps: dict[Callable[[Engine], Any], float] = {
            self._store: 40, self._load: 20, self._load_and_store: 10, self._remove: 6, self._upkeep: 10,
            self._reorder: 0.3, self._disk_changes: 3, self._lose_segment: 0.3, self._wipe: 0.2, self._kill: 1,
            self._close: 0.7,
        }  # fmt: skip
        (step,) = self.choose.choices(list(steps), list(steps.values()))
        self.counts[step.__name__] += 1
        is_stuck = engine.disk.state != "ok"
        await step(engine)
        for each in self.engines:
            await each.rig.session.space.close()
            self._note_removals(each, can_not=is_stuck and each is engine and step != self._disk_changes)
        self._note_reclaimed()
        for each in self.engines:
            self._compare_own(each)
        if engine in self.engines:
            await self._compare_others(engine)
        sizes = [sum(map(os.path.getsize, iglob(f"{root}/*/*/*.seg"))) for root in self.paths]
        is_blind = any(each.disk.unreadable - {each.name} for each in self.engines)
        is_within = max(sizes) <= room_for(BLOCKS) // 2
        # An unreadable directory of another engine counts with its last known size.
        self.was_blind = is_blind or (self.was_blind and not is_within)
        self._check(is_within or self.was_blind, f"segments of {sizes} bytes")

    async def _start(self) -> None:
        """Start an engine: it adopts what an ended one left, or begins with nothing."""
        disk, namespace = ModelDisk(is_slow=self.is_racing), self.choose.choice([NAMESPACE, NAMESPACE, OTHER_NAMESPACE])
        if self.choose.random() < 0.1 and self.ended:
            disk.unreadable.add(self.choose.choice(list(self.ended)))
        backend = self._backend(disk, self.paths)
        rig = Rig(backend, namespace, random.Random(self.choose.random()))
        await backend.open(namespace, GEOMETRY)
        await rig.session.recovered.wait()
        # Upkeep is a step.
        for task in rig.session._tasks:
            task.cancel()
        engine = Engine(rig, disk, namespace)
        left, own = self.ended.pop(engine.name, None), set(engine.own())
        if left is not None:
            self._check(left.namespace is namespace, "a directory of another namespace was adopted")
            # A block that also another engine holds may have been found in either place.
            self._check(own >= set(left.held), f"lost in a restart: {set(left.held) - own}")
            engine.held, engine.maybe = own & set(left.held), left.maybe
        self._check(
            own <= engine.held | engine.maybe, f"not expected after a start: {own - engine.held - engine.maybe}"
        )
        self.vague.discard(engine.name)
        self.engines.append(engine)
        self.counts["starts"] += 1
        self.counts["adoptions"] += left is not None

    def _backend(self, disk: OsDisk, paths: Sequence[Path]) -> DiskBackend:
        return DiskBackend(
            DiskConfig(
                path=[str(path) for path in paths], capacity=Capacity(room_for(BLOCKS)), reserve=Capacity(0),
                lock_timeout=0, engine="threads", threads=8 if self.is_racing else 1,
            ),
            disk=disk,
        )  # fmt: skip

    async def _store(self, engine: Engine) -> None:
        keys = self.choose.sample(UNIVERSE, self.choose.randint(1, 8))
        session = engine.rig.session
        session.space._full_until = 0.0
        # A deleted segment is written until upkeep finds out.
        is_any_deleted = not all(self._segment(engine, number).exists() for number in session.space._own_segments())
        promised = {key: session.index.place(key) for key in keys}
        outcomes = await engine.rig.put({key: payload(key) for key in keys})
        for key, outcome in zip(keys, outcomes, strict=True):
            self.counts[f"store {outcome.name}"] += 1
            if outcome is Outcome.OK:
                engine.held.add(key)
                engine.maybe.discard(key)
            elif outcome is Outcome.EXISTS:
                self._check(promised[key] >= 0, f"{key!r} exists, but was not found before")
            else:
                self._check(promised[key] < 0, f"{key!r} was found before, and its store is {outcome.name}")
                engine.doubt([key])
        if is_any_deleted:
            self._doubt_missing(engine)

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
            where = f"{engine.name} ({engine.disk.state}): {engine.rig.backend.last_error}"
            self._check(key not in held or back is not None, f"{key!r} is held and not loaded, {where}")
            self.counts["loads"] += back is not None

    async def _remove(self, engine: Engine) -> None:
        keys = self.choose.sample(UNIVERSE, self.choose.randint(1, 3))
        if self.choose.random() < 0.02:
            await engine.rig.backend.quarantine(keys)
        else:
            await engine.rig.backend.delete(keys)
        engine.doubt(keys)
        self._check(not any(await engine.rig.backend.exists(keys)), "a removed block is found")
        if engine.disk.state == "ok" and not engine.rig.session.journal.is_behind:
            engine.maybe.difference_update(keys)

    async def _wipe(self, engine: Engine) -> None:
        await engine.rig.backend.delete(UNIVERSE)
        engine.doubt(UNIVERSE)

    async def _upkeep(self, engine: Engine) -> None:
        session = engine.rig.session
        duties = [
            session.space.retry, session.space.count_uses, session.space.match_files, session.space.give_up_excess,
            session._write_snapshot, session.followers.refresh,
        ]  # fmt: skip
        given_up = session.counts["segments_given_up"]
        with contextlib.suppress(OSError, LedgerBusyError):
            await self.choose.choice(duties)()
        if session.counts["segments_given_up"] > given_up and session.journal.is_behind:
            # On a full disk, the file of a segment goes before the frame.
            self._doubt_missing(engine)

    async def _disk_changes(self, engine: Engine) -> None:
        engine.disk.state = self.choose.choice(["ok", "ok", "full", "read-only"])
        running = [each.name for each in self.engines]
        namespaces = {NAMESPACE.hex, OTHER_NAMESPACE.hex} - {engine.namespace.hex}
        names = [*running, *self.ended, *namespaces]
        engine.disk.unreadable = set(self.choose.sample(names, 1)) if self.choose.random() < 0.3 else set()
        if engine.disk.state == "ok":
            await engine.rig.session.space.retry()

    async def _lose_segment(self, engine: Engine) -> None:
        """Delete a segment under its engine, as a user would."""
        session = engine.rig.session
        if own := session.space._own_segments():
            number = self.choose.choice(own)
            self._segment(engine, number).unlink(missing_ok=True)
            self._doubt_missing(engine)
            with contextlib.suppress(OSError):
                await session.space.match_files()

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
        if self.choose.random() < 0.2:
            # The kill tore the last frame.
            directory = self.paths[0] / engine.namespace.hex / engine.name
            with contextlib.suppress(FileNotFoundError), max(directory.glob("journal.*")).open("ab") as file:
                file.write(self.choose.randbytes(self.choose.randrange(1, 200)))
            self.vague.add(engine.name)

    async def _close(self, engine: Engine) -> None:
        await self._end(engine, killed=False)

    async def _end(self, engine: Engine, *, killed: bool) -> None:
        session = engine.rig.session
        await session.space.close()
        self._note_removals(engine)
        self.engines.remove(engine)
        if session.journal.is_behind or engine.disk.state != "ok":
            # The removals of these blocks were not journalled.
            engine.maybe.update(UNIVERSE)
        left = Ended(engine)
        if killed:
            session.followers.watch.close()
            await session._release(5.0)
            engine.rig.backend._open = None
        else:
            await engine.rig.backend.close()
            # The last frame had removals that were not journalled before.
            gone = {key for key, _ in engine.rig.removed}
            left.held = {key: number for key, number in left.held.items() if key not in gone}
        self.ended[engine.name] = left

    async def _reorder(self, engine: Engine) -> None:
        """Start an engine with the directories in another order: it is refused, and changes nothing."""
        backend = self._backend(OsDisk(), self.paths[::-1])
        with contextlib.suppress(ConfigError):
            await backend.open(engine.namespace, GEOMETRY)
            raise WrongError("directories in another order were accepted")

    def _note_removals(self, engine: Engine, *, can_not: bool = False) -> None:
        for key, cause in engine.rig.removed:
            self.counts[f"removal {cause.name}"] += 1
            if key in engine.held and self._is_gone(engine, key):
                self._check(cause is RemovalCause.EVICTED, f"{key!r} was removed: {cause}")
                self._check(not can_not, f"{key!r} left, on a disk that takes no frame")
                engine.held.discard(key)
        engine.rig.removed.clear()

    @staticmethod
    def _is_gone(engine: Engine, key: BlockKey) -> bool:
        return engine.rig.session.index.slot(key) is None

    def _note_reclaimed(self) -> None:
        """Take out of the model the blocks of ended engines whose segments others have reclaimed."""
        is_vague = any(engine.disk.state != "ok" for engine in self.engines)
        for name, left in list(self.ended.items()):
            gone = {number for number in set(left.held.values()) if not self._segment(left, number).exists()}
            if gone:
                self.counts["reclaimed segments"] += len(gone)
                if is_vague:
                    self.vague.add(name)
            left.held = {key: number for key, number in left.held.items() if number not in gone}

    def _compare_own(self, engine: Engine) -> None:
        own = set(engine.own())
        self._check(own >= engine.held, f"lost without a reason: {engine.held - own}")
        self._check(own <= engine.held | engine.maybe, f"found without a store: {own - engine.held - engine.maybe}")

    async def _compare_others(self, engine: Engine) -> None:
        """Check that every promise of another engine's block is kept after one look at its journal."""
        followers, index = engine.rig.session.followers, engine.rig.session.index
        try:
            await followers.refresh()
        except OSError:
            return
        holders: dict[str, Any] = {each.name: each for each in self.engines} | self.ended
        for key in UNIVERSE:
            if (place := index.place(key)) > SLOT_MASK and engine.disk.state == "ok" and not engine.disk.unreadable:
                name = followers.others[place >> OWNER_SHIFT].name
                holder = holders.get(name)
                kept = holder is not None and (key in holder.held or key in holder.maybe)
                self._check(kept or name in self.vague, f"{key!r} is promised, but {name} does not have it")

    def _doubt_missing(self, engine: Engine) -> None:
        """Doubt the blocks of segments that have no file."""
        slots = engine.rig.session.geometry.segment_slots
        own = {key: slot // slots for key, slot in engine.own().items()}
        gone = {number for number in set(own.values()) if not self._segment(engine, number).exists()}
        engine.doubt([key for key, number in own.items() if number in gone])

    def _segment(self, engine: Engine | Ended, number: int) -> Path:
        return Path(f"{self.paths[number % 2]}/{engine.namespace.hex}/{engine.name}/{segment_name(number)}")

    def _check(self, agrees: bool, what: str) -> None:
        if not agrees:
            raise WrongError(what)
