"""Backends with one defect each, typical of backend authors, for the suite to find."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

from kvstore.backends.base import Backend, BackendStats, RecordGeometry, RecordRead, RecordWrite
from kvstore.backends.memory import MemoryBackend, MemoryConfig
from kvstore.config import ByteSize
from kvstore.errors import BackendError, BackendUnavailableError
from kvstore.namespace import Namespace
from kvstore.testing import BackendTests
from kvstore.types import BlockInfo, BlockKey, Outcome, RemovalCause

_shelves = (f"broken-{number}" for number in itertools.count())


class SuiteOf(BackendTests):
    """The suite over a backend class that extends :class:`Breakable`: ``kind``."""

    kind: type[Breakable]

    async def make_backend(self) -> Backend:
        return self.kind(MemoryConfig(shelf=next(_shelves)))

    async def reopen(self, backend: Backend) -> Backend:
        return self.kind(cast(MemoryConfig, backend.config))

    async def make_small_backend(self, capacity_bytes: int) -> Backend:
        return self.kind(MemoryConfig(capacity=ByteSize(capacity_bytes)))

    async def break_medium(self, backend: Backend) -> bool:
        cast(Breakable, backend).broken = True
        return True

    async def mend_medium(self, backend: Backend) -> None:
        cast(Breakable, backend).broken = False


class Breakable(MemoryBackend):
    """No defect: a memory backend whose medium can be made to fail."""

    broken = False

    async def exists(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        self._check()
        return await super().exists(keys)

    async def put(self, writes: Sequence[RecordWrite]) -> Sequence[Outcome]:
        return [Outcome.IO_ERROR] * len(writes) if self.broken else await super().put(writes)

    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:
        self._check()
        return await super().get_into(reads)

    def _check(self) -> None:
        if self.broken:
            raise BackendUnavailableError("the medium is gone", backend=self.name)


class WritesAfterReturn(Breakable):
    """A cancelled get ends at once, and its reads continue in the background."""

    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:

        async def late() -> Sequence[Outcome]:
            await asyncio.sleep(0.002)
            return await Breakable.get_into(self, reads)

        return await asyncio.shield(asyncio.ensure_future(late()))


class ReadsAfterReturn(Breakable):
    """A cancelled put ends at once, and its writes continue in the background."""

    async def put(self, writes: Sequence[RecordWrite]) -> Sequence[Outcome]:

        async def late() -> Sequence[Outcome]:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            return await Breakable.put(self, writes)

        return await asyncio.shield(asyncio.ensure_future(late()))


class KeepsBuffers(Breakable):
    """Stores views instead of copies."""

    kept: ClassVar[dict[BlockKey, Sequence[memoryview]]] = {}

    def _put_one(self, shelf: Any, write: RecordWrite) -> Outcome:
        outcome = super()._put_one(shelf, write)
        if outcome is Outcome.OK:
            self.kept[write.key] = write.buffers
        return outcome

    def _get_one(self, shelf: Any, read: RecordRead) -> Outcome:
        if read.key in shelf.records:
            shelf.records[read.key] = b"".join(self.kept[read.key])
        return super()._get_one(shelf, read)


class WrongBlock(Breakable):
    """Returns the reads of a batch in another order."""

    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:
        swapped = [
            RecordRead(other.key, read.buffers) for read, other in zip(reads, reads[1:] + reads[:1], strict=True)
        ]
        outcomes = await super().get_into(swapped)
        for read, other in zip(reads, swapped, strict=True):
            read.filled_bytes = other.filled_bytes
        return outcomes


class OutcomesInOrderOfCompletion(Breakable):
    """Handles misses first, and reports them first."""

    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:
        return sorted(await super().get_into(reads))


class LosesABatch(Breakable):
    """Reports every fourth batch as OK without storing it."""

    _puts = 0

    async def put(self, writes: Sequence[RecordWrite]) -> Sequence[Outcome]:
        self._puts += 1
        if self._puts % 4 == 0 and not self.broken:
            return [Outcome.EXISTS if there else Outcome.OK for there in await self.exists([w.key for w in writes])]
        return await super().put(writes)


class SaysOKWithoutStoring(Breakable):
    """Reports the last block of a batch as OK without storing it."""

    async def put(self, writes: Sequence[RecordWrite]) -> Sequence[Outcome]:
        return [*await super().put(writes[:-1]), *([Outcome.OK] if writes else [])]


class LastWriterWins(Breakable):
    """Replaces existing blocks."""

    async def put(self, writes: Sequence[RecordWrite]) -> Sequence[Outcome]:
        there = await self.exists([write.key for write in writes])
        await self.delete([write.key for write in writes])
        outcomes = await super().put(writes)
        return [Outcome.EXISTS if was else outcome for was, outcome in zip(there, outcomes, strict=True)]


class MissRaises(Breakable):
    """Raises for absent blocks."""

    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:
        outcomes = await super().get_into(reads)
        if Outcome.MISS in outcomes:
            raise BackendError("no such block", backend=self.name)
        return outcomes


class OneFailureFailsAll(Breakable):
    """One miss makes the whole batch a miss."""

    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:
        outcomes = await super().get_into(reads)
        return [Outcome.MISS] * len(reads) if Outcome.MISS in outcomes else outcomes


class NotAtomic(Breakable):
    """A record is visible while it is being put."""

    def _put_one(self, shelf: Any, write: RecordWrite) -> Outcome:
        outcome = super()._put_one(shelf, write)
        if outcome is Outcome.OK:
            whole = shelf.records[write.key]
            shelf.records[write.key] = whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2)
            loop = asyncio.get_running_loop()
            loop.call_later(0.05, lambda: shelf.records.__setitem__(write.key, whole))
        return outcome


class CutsKeys(Breakable):
    """Distinguishes keys by their first 32 bytes only."""

    async def put(self, writes: Sequence[RecordWrite]) -> Sequence[Outcome]:
        return await super().put([RecordWrite(write.key[:32], write.buffers) for write in writes])


class ReportsWrongLength(Breakable):
    """Reports that the buffers were filled to their end."""

    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:
        outcomes = await super().get_into(reads)
        for read in reads:
            read.filled_bytes = read.capacity_bytes
        return outcomes


class FillsShortBuffers(Breakable):
    """Reads as much of a record as fits and calls it OK."""

    def _get_one(self, shelf: Any, read: RecordRead) -> Outcome:
        record = shelf.records.get(read.key)
        if record is not None and len(record) > read.capacity_bytes:
            read.filled_bytes = read.capacity_bytes
            return Outcome.OK
        return super()._get_one(shelf, read)


class SecondCloseRaises(Breakable):
    """Can be closed only once."""

    async def close(self) -> None:
        self._open_shelf()
        await super().close()


class UsableAfterClose(Breakable):
    """Reports all blocks as absent when closed."""

    async def exists(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        return [False] * len(keys) if self._shelf is None else await super().exists(keys)


class ScanForgets(Breakable):
    """A scan omits the first block."""

    async def scan(self) -> AsyncIterator[BlockInfo]:
        first = True
        async for info in super().scan():
            if not first:
                yield info
            first = False


class ScanRepeats(Breakable):
    """A scan yields every block twice."""

    async def scan(self) -> AsyncIterator[BlockInfo]:
        async for info in super().scan():
            yield info
            yield info


class IgnoresCapacity(Breakable):
    """Exceeds its capacity."""

    def _evict(self, shelf: Any, incoming_bytes: int) -> None:
        """Do nothing."""


class EvictsSilently(Breakable):
    """Evicts without a notification."""

    def _evict(self, shelf: Any, incoming_bytes: int) -> None:
        listener, self._removal_listener = self._removal_listener, lambda keys, cause: None
        super()._evict(shelf, incoming_bytes)
        self._removal_listener = listener


class ReportsWrongCause(Breakable):
    """Reports evictions as losses."""

    def _evict(self, shelf: Any, incoming_bytes: int) -> None:
        listener = self._removal_listener
        self._removal_listener = lambda keys, cause: listener(keys, RemovalCause.LOST)
        try:
            super()._evict(shelf, incoming_bytes)
        finally:
            self._removal_listener = listener


class EvictsTheHottest(Breakable):
    """Evicts the most recently used block."""

    def _evict(self, shelf: Any, incoming_bytes: int) -> None:
        for key in reversed(list(shelf.policy)):
            shelf.policy.touch(key)
        super()._evict(shelf, incoming_bytes)


class IgnoresNamespace(Breakable):
    """Uses one namespace for all."""

    async def open(self, namespace: Namespace, geometry: RecordGeometry) -> None:
        await super().open(Namespace({}), geometry)


class ForgetsAtRestart(Breakable):
    """Loses one of its blocks at a restart."""

    async def open(self, namespace: Namespace, geometry: RecordGeometry) -> None:
        await super().open(namespace, geometry)
        if keys := list(self._open_shelf().records):
            await self.delete(keys[-1:])


class RevivesDeleted(Breakable):
    """A delete is forgotten at a restart."""

    async def delete(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        shelf = self._open_shelf()
        _graves.setdefault(self.config.shelf, {}).update(
            {key: shelf.records[key] for key in keys if key in shelf.records}
        )
        return await super().delete(keys)

    async def open(self, namespace: Namespace, geometry: RecordGeometry) -> None:
        await super().open(namespace, geometry)
        writes = [RecordWrite(key, [memoryview(old)]) for key, old in _graves.pop(self.config.shelf, {}).items()]
        await super().put(writes)


_graves: dict[str, dict[BlockKey, bytes]] = {}


class QuarantineDoesNothing(Breakable):
    """Leaves bad blocks in place."""

    async def quarantine(self, keys: Sequence[BlockKey]) -> None:
        """Do nothing."""


class ErrorIsAbsence(Breakable):
    """Reports a block as absent when the medium cannot be queried."""

    async def exists(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        try:
            return await super().exists(keys)
        except BackendUnavailableError:
            return [False] * len(keys)


class RaisesGroups(Breakable):
    """Raises the exception group of a TaskGroup."""

    async def exists(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(super().exists(keys))
        return task.result()


class NeverAnswers(Breakable):
    """Waits for an answer without a deadline."""

    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:
        await asyncio.Event().wait()
        return []


class FailedGetIsAMiss(Breakable):
    """Returns MISS when the medium fails."""

    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:
        return [Outcome.MISS] * len(reads) if self.broken else await super().get_into(reads)


class CountsWrong(Breakable):
    """Does not count deletions."""

    def stats(self) -> BackendStats:
        stats = super().stats()
        return BackendStats(stats.blocks + 1, stats.used_bytes + 1, stats.capacity_bytes)


class SleepsOnTheLoop(Breakable):
    """Sleeps with a blocking call."""

    async def put(self, writes: Sequence[RecordWrite]) -> Sequence[Outcome]:
        time.sleep(0.0001)  # noqa: ASYNC251 - the defect.
        return await super().put(writes)


class OpensFilesOnTheLoop(Breakable):
    """Reads a file on the loop, while all other tasks wait."""

    async def put(self, writes: Sequence[RecordWrite]) -> Sequence[Outcome]:
        Path("/proc/self/status").read_text()
        return await super().put(writes)


class ConnectsOnTheLoop(Breakable):
    """Uses a blocking client."""

    async def put(self, writes: Sequence[RecordWrite]) -> Sequence[Outcome]:
        with socket.socket() as client, contextlib.suppress(OSError):
            client.connect(("127.0.0.1", 1))
        return await super().put(writes)


class ProbeLeavesTraces(Breakable):
    """Writes when probed."""

    async def probe(self) -> None:
        await super().probe()
        await self.put([RecordWrite(b"probe", [memoryview(b"probe")])])
