"""The file backend: one file per block in a directory that may be shared by engines, models and restarts."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import ClassVar, Final

from kvstore.backends.base import Backend, BackendStats, RecordGeometry, RecordRead, RecordWrite
from kvstore.backends.file.config import FileConfig
from kvstore.backends.file.engine import FileEngine
from kvstore.backends.file.index import Entry
from kvstore.backends.file.layout import is_key
from kvstore.backends.file.ledger import Removal
from kvstore.backends.file.machine import Machine
from kvstore.backends.file.reader import ReadOp, StatOp
from kvstore.backends.file.remover import RemoveOp
from kvstore.backends.file.root import probe_root
from kvstore.backends.file.session import Session
from kvstore.backends.file.space import charge
from kvstore.config import TierConfig
from kvstore.diskio import ALIGNMENT, OsDisk, Priority, bare, flat
from kvstore.errors import BackendClosedError, BackendUnavailableError
from kvstore.namespace import Namespace
from kvstore.types import BlockInfo, BlockKey, Outcome, RemovalCause

__all__ = ["FileBackend"]

_log = logging.getLogger("kvstore.backends.file")

_LOCK_RETRY_S: Final = 0.1
"""Pause between two tries for a namespace; a killed engine is gone within some tenths of a second."""

_CLOSE_TIMEOUT_S: Final = 5.0
"""How long each step of closing may take; a frozen disk must not keep an engine from ending."""

_SCAN_BATCH: Final = 1000
"""Keys that a scan yields at a time: some tenths of a millisecond."""

_IDENTITIES_MAX: Final = 4096
"""Files read last of which we remember which they were, for quarantine; a verdict comes right after the read."""


class FileBackend(Backend):
    """Blocks as files ``<path>/<namespace>/<shard>/<key>.kv``. See ``docs/file-tier.md``.

    Besides what every backend guarantees: nothing outside of ``path`` is ever read or written, whatever lies in it;
    files that are not ours are never removed; the blocks in ``path`` never take more than ``capacity`` plus one block
    per concurrent write, over all namespaces and processes; a process killed at any moment leaves nothing that is read
    as a block, and nothing that the next start does not sweep.

    ``scan`` yields what the last snapshot names at once, and the rest when all files have been looked at.

    Args:
        config: See :class:`FileConfig`.
        disk: What calls the system; tests give one that fails.
    """

    name: ClassVar[str] = "file"
    config_type: ClassVar[type[TierConfig]] = FileConfig
    alignment: ClassVar[int] = ALIGNMENT

    def __init__(self, config: FileConfig, *, disk: OsDisk | None = None) -> None:
        super().__init__(config)
        self.config: FileConfig = config
        self.exclusive = not config.shared
        self._disk = disk or OsDisk()
        self._machine: Machine | None = None
        self._closing = asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()
        self._calls = 0
        self._identities: OrderedDict[BlockKey, tuple[int, int]] = OrderedDict()

    async def open(self, namespace: Namespace, geometry: RecordGeometry) -> None:
        """Open the directory and take the namespace; recovery goes on in the background.

        Raises:
            ConfigError: The directory or the limits can't be used as they are configured.
            LockedError: Another engine has the namespace, and still has it after ``lock_timeout``.
            BackendUnavailableError: The disk fails.
        """
        if self._machine is not None:
            raise BackendUnavailableError("open was called twice. Close the backend first.", backend=self.name)
        engine = FileEngine(self.config.threads, self.config.engine)
        session = Session(self._disk, self.config, namespace, geometry)
        try:
            await engine.call(session.open_root)
            await self._lock(engine, session)
            await engine.call(session.enter)
        except BaseException:
            # Also when cancelled: what was taken so far is let go of.
            await asyncio.shield(self._abandon(engine, session))
            raise
        self._machine = Machine(engine, session, self._tell_removed)

    async def close(self) -> None:
        """Finish what runs, write a snapshot, let go of everything. Idempotent; also after a failed ``open``."""
        async with self._closing:
            machine, self._machine = self._machine, None
            if machine is None:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await self._idle.wait()
            await machine.close(_CLOSE_TIMEOUT_S)
            self._identities.clear()

    async def exists(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """Tell for each key whether its block is there; the files are asked, all of them in one batch.

        Raises:
            BackendError: The files could not be asked.
        """
        with self._working() as machine:
            index = machine.index
            ops = [StatOp(key, machine.shard_of(key)) for key in keys if is_key(key) and key not in index.leaving]
            expected = [index.get(op.key) for op in ops]
            with index.pinned([op.key for op in ops]):
                await machine.engine.run_blocks(machine.reader.look, ops, priority=Priority.LOAD)
            lost = []
            for op, entry in zip(ops, expected, strict=True):
                if op.error is not None:
                    raise self._failed("asking for blocks", op.error) from op.error
                if op.charge_bytes is None:
                    lost += [op.key] if entry is not None and index.get(op.key) is entry else []
                elif index.is_news(op.key):
                    index.add(op.key, op.charge_bytes, op.used_at)
            self._forget_lost(machine, lost)
            found = {op.key for op in ops if op.charge_bytes is not None}
            return [key in found for key in keys]

    async def put(self, writes: Sequence[RecordWrite]) -> Sequence[Outcome]:
        """Publish records. What does not fit even after eviction is NO_SPACE."""
        with self._working() as machine:
            outcomes = await machine.intake.put(writes)
            self.last_error = machine.last_error
            return outcomes

    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:
        """Read records into their buffers, all of the batch at once."""
        with self._working() as machine:
            index = machine.index
            ops = [
                ReadOp(read.key, machine.shard_of(read.key), flat(read.buffers))
                if is_key(read.key) and read.key not in index.leaving
                else ReadOp(read.key, 0, (), Outcome.MISS)
                for read in reads
            ]
            expected = [index.get(read.key) for read in reads]
            todo = [op for op in ops if op.outcome is None]
            with index.pinned([op.key for op in todo]):
                reader = machine.reader
                in_batches = reader.reads_in_batches(todo)
                await machine.engine.run_blocks(reader.read, todo, priority=Priority.LOAD, in_batches=in_batches)
            lost = []
            for read, op, entry in zip(reads, ops, expected, strict=True):
                read.filled_bytes = op.filled_bytes
                if op.outcome is Outcome.OK:
                    self._note_read(machine, op)
                elif op.outcome is Outcome.CORRUPT:
                    self._remember(op)
                elif op.outcome is Outcome.MISS and entry is not None and index.get(op.key) is entry:
                    lost.append(op.key)
            self._forget_lost(machine, lost)
            machine.note_errors([op.error for op in todo if op.error is not None], "loading")
            self.last_error = machine.last_error
            machine.note_use([op.key for op in ops if op.outcome is Outcome.OK])
            return [Outcome.IO_ERROR if op.outcome is None else op.outcome for op in ops]

    async def delete(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """Remove records; True where there was one."""
        with self._working() as machine:
            return await self._remove(machine, keys, quarantine=False)

    async def quarantine(self, keys: Sequence[BlockKey]) -> None:
        """Move damaged records out of the way, unless somebody has replaced them by good ones since they were read."""
        with self._working() as machine:
            await self._remove(machine, keys, quarantine=True)

    async def scan(self) -> AsyncIterator[BlockInfo]:
        """Yield the blocks of the snapshot at once, coldest first, and the rest when recovery has ended."""
        index = self._opened().index
        async for keys in self.scan_keys():
            for key in keys:
                entry = index.get(key)
                if entry is not None:
                    yield BlockInfo(key, entry.size_bytes, entry.used_at)

    async def scan_keys(self) -> AsyncIterator[Sequence[BlockKey]]:
        """Yield the keys of :meth:`scan`, many at a time."""
        machine = self._opened()
        await machine.recovery.snapshot_loaded.wait()
        seen: set[BlockKey] = set()
        while True:
            is_all = machine.recovery.ended.is_set()
            keys = [key for key in machine.index.ordered() if key not in seen]
            for start in range(0, len(keys), _SCAN_BATCH):
                yield [key for key in keys[start : start + _SCAN_BATCH] if key in machine.index]
                # So that what was yielded can be sent on meanwhile.
                await asyncio.sleep(0)
            if is_all:
                return
            seen.update(keys)
            await machine.recovery.ended.wait()

    async def probe(self) -> None:
        """Write and remove a small file.

        Raises:
            BackendUnavailableError: That is not possible. (A full disk is no failure: eviction is there for it.)
        """
        with self._working() as machine:
            session = machine.session
            try:
                await machine.engine.call(
                    lambda: probe_root(self._disk, session.root, session.writer, time.time_ns() & 0xFFFFFFFF)
                )
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise self._failed("writing", error) from error

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Note a use of blocks, for eviction."""
        if self._machine is not None:
            self._machine.note_use(keys)

    def stats(self) -> BackendStats:
        """Return a moment's view; ``used_bytes`` are those of this namespace, the gauges tell of the whole root."""
        return self._machine.stats() if self._machine is not None else BackendStats()

    async def _lock(self, engine: FileEngine, session: Session) -> None:
        deadline = time.monotonic() + self.config.lock_timeout
        while not await engine.call(session.try_lock):
            if time.monotonic() >= deadline:
                raise await engine.call(session.locked_error)
            await asyncio.sleep(_LOCK_RETRY_S)

    async def _abandon(self, engine: FileEngine, session: Session) -> None:
        await engine.call(session.release)
        await engine.close(_CLOSE_TIMEOUT_S)

    def _note_read(self, machine: Machine, op: ReadOp) -> None:
        self._remember(op)
        if machine.index.is_news(op.key):
            machine.index.add(op.key, charge(op.filled_bytes))

    def _remember(self, op: ReadOp) -> None:
        if op.identity is not None:
            self._identities[op.key] = op.identity
            self._identities.move_to_end(op.key)
            while len(self._identities) > _IDENTITIES_MAX:
                self._identities.popitem(last=False)

    def _forget_lost(self, machine: Machine, keys: Sequence[BlockKey]) -> None:
        """Forget blocks that the index has and the disk has not; the next scan sets the ledger right."""
        for key in keys:
            machine.index.remove(key)
        if keys:
            machine.counters.add("lost_blocks", len(keys))
            machine.evictor.wants_recount = True
            self._tell_removed(keys, RemovalCause.LOST)

    async def _remove(self, machine: Machine, keys: Sequence[BlockKey], *, quarantine: bool) -> list[bool]:
        ops = {
            key: RemoveOp(key, machine.shard_of(key), identity=self._identities.pop(key, None) if quarantine else None)
            for key in keys
            if is_key(key) and key not in machine.index.leaving
        }
        index, remover, ledger = machine.index, machine.remover, machine.session.ledger
        removal = Removal(len(ops) * machine.session.block_bytes, len(ops))
        entries: dict[BlockKey, Entry | None] = {}
        # From now on nobody begins to read or write them; what has begun ends first, so that the index stays right.
        index.leaving.update(ops)
        try:
            await index.wait_unpinned(ops)
            await machine.engine.call(lambda: ledger.begin(removal))
            entries = {key: index.remove(key) for key in ops}
            await machine.engine.run_blocks(remover.isolate if quarantine else remover.unlink, list(ops.values()))
        except OSError as error:
            # The ledger can't be reached: then nothing was removed.
            machine.note_errors([bare(error)], "removing")
        finally:
            removed = [op for op in ops.values() if op.removed]
            index.left(ops, gone=[op.key for op in removed])
            for key, entry in entries.items():
                if entry is not None and (ops[key].removed is None or ops[key].error is not None):
                    # Nobody has tried, or it can't be removed: it is still there.
                    index.add(key, entry.size_bytes, entry.used_at)
            gone = [op for op in removed if op.freed_bytes]
            ledger.end(removal, (sum(op.freed_bytes for op in gone), len(gone)))
            machine.note_errors([op.error for op in ops.values() if op.error is not None], "removing")
        left, answers = {op.key for op in removed}, []
        for key in keys:
            answers.append(key in left)
            # A key given twice was there once.
            left.discard(key)
        return answers

    @contextlib.contextmanager
    def _working(self) -> Iterator[Machine]:
        """Hold off ``close`` while a call uses what it releases."""
        machine = self._opened()
        self._calls += 1
        self._idle.clear()
        try:
            yield machine
        finally:
            self._calls -= 1
            if self._calls == 0:
                self._idle.set()

    def _opened(self) -> Machine:
        if self._machine is None:
            raise BackendClosedError(
                "the backend is not open. Call open first, and nothing after close.", backend="file"
            )
        return self._machine

    def _failed(self, doing: str, error: OSError) -> BackendUnavailableError:
        reason = error.strerror or str(error)
        return BackendUnavailableError(
            f"{doing} in {self.config.path!r} failed: {reason}. Check the disk.", backend="file"
        )

    def _tell_removed(self, keys: Sequence[BlockKey], cause: RemovalCause) -> None:
        self._removal_listener(keys, cause)
