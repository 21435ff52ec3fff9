"""The nvme backend: records in slots, by direct I/O, with an index in memory."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar, Final

from kvstore.backends.base import Backend, BackendStats, RecordGeometry, RecordRead, RecordWrite, outcome_of
from kvstore.backends.nvme.config import NvmeConfig
from kvstore.backends.nvme.free_slots import SlotId
from kvstore.backends.nvme.index import is_own
from kvstore.backends.nvme.records import ReadOp, WriteOp
from kvstore.backends.nvme.session import Session
from kvstore.codec.record import HEADER_BYTES
from kvstore.config import TierConfig
from kvstore.diskio import OsDisk, Priority
from kvstore.errors import BackendClosedError, BackendUnavailableError
from kvstore.namespace import Namespace
from kvstore.types import KEY_BYTES_MAX, BlockInfo, BlockKey, Outcome, RemovalCause

__all__ = ["NvmeBackend"]

_log = logging.getLogger("kvstore.backends.nvme")

_CLOSE_TIMEOUT_S: Final = 5.0
"""How long each step of closing may take; a frozen disk must not keep an engine from ending."""

_SCAN_BATCH: Final = 1024


class NvmeBackend(Backend):
    """Blocks in preallocated files of equal slots, one file per path. See ``docs/nvme.md``.

    Besides what every backend guarantees: the space is reserved when the files are made, and nothing is ever needed
    beyond it; a slot that is read is not given to another block meanwhile; what a slot holds is told by its own
    header, so that neither a stale snapshot nor a crash makes one block look like another.

    ``scan`` yields what the snapshot names at once, and the rest when all slots have been looked at.

    Args:
        config: See :class:`NvmeConfig`.
        disk: What calls the system; tests give one that fails.
    """

    name: ClassVar[str] = "nvme"
    config_type: ClassVar[type[TierConfig]] = NvmeConfig
    # The header is copied into our header page; payloads of whole pages travel without a copy.
    alignment: ClassVar[int] = HEADER_BYTES
    exclusive: bool = True

    def __init__(self, config: NvmeConfig, *, disk: OsDisk | None = None) -> None:
        super().__init__(config)
        self.config: NvmeConfig = config
        self._disk = disk or OsDisk()
        self._session: Session | None = None
        self._pending: dict[BlockKey, asyncio.Future[None]] = {}
        self._counters: Counter[str] = Counter()
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = asyncio.Lock()

    async def open(self, namespace: Namespace, geometry: RecordGeometry) -> None:
        """Open and lock the slabs and read their snapshots; a scan, if one is needed, goes on in the background.

        Raises:
            ConfigError: A path or the capacity can't be used, or a file is not ours or of an unknown format.
            LockedError: Another engine has a slab, and still has it after ``lock_timeout``.
            NoSpaceError: A filesystem has not got the room.
            BackendUnavailableError: A disk fails.
        """
        if self._session is not None:
            raise BackendUnavailableError("open was called twice. Close the backend first.", backend=self.name)
        session = Session(self._disk, self.config)
        await session.open(namespace, geometry, self._tell_lost)
        self._session = session

    async def close(self) -> None:
        """Finish what runs, write a snapshot, let go of everything. Idempotent; also after a failed ``open``."""
        async with self._closing:
            session, self._session = self._session, None
            if session is None:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await self._idle.wait()
            await session.close(_CLOSE_TIMEOUT_S)

    async def exists(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """Tell for each key whether the index has it. While a scan runs, what it has not found yet is not there."""
        with self._working() as session:
            return [is_own(key) and key in session.index for key in keys]

    async def put(self, writes: Sequence[RecordWrite]) -> Sequence[Outcome]:
        """Publish records, evicting others for them. What finds no slot is NO_SPACE."""
        with self._working() as session:
            outcomes: list[Outcome | None] = [None] * len(writes)
            while True:
                mine, others = self._claim(session, writes, outcomes)
                if mine:
                    await self._put_claimed(session, writes, mine, outcomes)
                if not others:
                    return [Outcome.IO_ERROR if outcome is None else outcome for outcome in outcomes]
                # Somebody else is putting these keys: they exist if he succeeds, and are ours to put if he fails.
                await asyncio.wait(others)

    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:
        """Read records into their buffers, all of them by one batch."""
        with self._working() as session:
            index = session.index
            outcomes = [Outcome.MISS] * len(reads)
            wanted = []
            for i, read in enumerate(reads):
                slot = index.find(read.key) if is_own(read.key) else None
                if slot is None:
                    continue
                size_bytes = index.size_bytes(slot)
                if size_bytes > read.capacity_bytes:
                    outcomes[i] = Outcome.CORRUPT
                    continue
                wanted.append((i, read, slot, size_bytes))
            if not wanted:
                return outcomes
            for _, _, slot, _ in wanted:
                index.pin(slot)
            ops = session.mover.reads(wanted)
            try:
                await session.engine.read([op.transfer for op in ops])
                for op in ops:
                    outcomes[op.index] = self._read_outcome(session, op)
            finally:
                session.mover.release(ops)
                for op in ops:
                    index.unpin(op.slot)
            index.touch(op.read.key for op in ops)
            return outcomes

    async def delete(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """Remove blocks and wipe their headers, so that no scan finds them again; waits for recovery to end."""
        with self._working() as session:
            await session.recovered.wait()
            slots = [session.index.remove(key) if is_own(key) else None for key in keys]
            await self._wipe(session, {key: slot for key, slot in zip(keys, slots, strict=True) if slot is not None})
            return [slot is not None for slot in slots]

    async def quarantine(self, keys: Sequence[BlockKey]) -> None:
        """Remove blocks that failed verification; a slot has no place for evidence."""
        with self._working() as session:
            found = {key: slot for key in keys if is_own(key) and (slot := session.index.remove(key)) is not None}
            self._counters["quarantined_blocks"] += len(found)
            await self._wipe(session, found)

    async def scan(self) -> AsyncIterator[BlockInfo]:
        """Yield every block of the namespace; first those of the snapshot, in no order, then what a scan finds."""
        async for keys in self.scan_keys():
            for key in keys:
                slot = self._session.index.find(key) if self._session else None
                if slot is not None and self._session is not None:
                    yield BlockInfo(key, self._session.index.size_bytes(slot))

    async def scan_keys(self) -> AsyncIterator[Sequence[BlockKey]]:
        """Yield the keys of :meth:`scan`, many at a time."""
        session = self._opened()
        keys = session.index.own_keys()
        partial = not session.recovered.is_set()
        for start in range(0, len(keys), _SCAN_BATCH):
            yield keys[start : start + _SCAN_BATCH]
            if start % (8 * _SCAN_BATCH) == 0:
                # So that what was yielded can be sent on meanwhile.
                await asyncio.sleep(0)
        if partial:
            known = set(keys)
            del keys
            await session.recovered.wait()
            rest = [key for key in session.index.own_keys() if key not in known]
            for start in range(0, len(rest), _SCAN_BATCH):
                yield rest[start : start + _SCAN_BATCH]

    async def probe(self) -> None:
        """Read the superblocks.

        Raises:
            BackendError: One can't be read.
        """
        with self._working() as session:
            for slab in session.slabs:
                try:
                    await session.engine.call(slab.check, priority=Priority.LOAD)
                except OSError as error:
                    raise BackendUnavailableError(f"{slab.path!r} can't be read: {error}", backend=self.name) from error

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Note a use of blocks, for eviction."""
        if self._session is not None:
            self._session.index.touch(keys)

    def stats(self) -> BackendStats:
        """Return a moment's view. ``used_bytes`` counts whole slots, and blocks of other namespaces too."""
        session = self._session
        if session is None:
            return BackendStats(counters=dict(self._counters))
        slot_bytes = session.slabs[0].superblock.slot_bytes
        capacity = sum(slab.superblock.slots for slab in session.slabs) * slot_bytes
        counts = session.recovery
        return BackendStats(
            blocks=len(session.index),
            used_bytes=len(session.index) * slot_bytes,
            capacity_bytes=capacity,
            counters={
                **self._counters,
                "recovery_scanned_slots": counts.scanned,
                "recovery_found_blocks": counts.found,
                "recovery_lost_blocks": counts.lost,
            },
            gauges={
                "free_slots": float(len(session.index.free)),
                "io_uring": float(session.engine.name == "io_uring"),
            },
        )

    def _claim(
        self, session: Session, writes: Sequence[RecordWrite], outcomes: list[Outcome | None]
    ) -> tuple[list[int], set[asyncio.Future[None]]]:
        """Decide what to put; return the places of what is ours to put, and whom to wait for besides."""
        index = session.index
        done: asyncio.Future[None] | None = None
        mine: list[int] = []
        others: set[asyncio.Future[None]] = set()
        record_bytes_max = session.slabs[0].superblock.slot_bytes
        for i, write in enumerate(writes):
            if outcomes[i] is not None:
                continue
            key = write.key
            if key in index:
                index.touch((key,))
                outcomes[i] = Outcome.EXISTS
            elif not 0 < len(key) <= KEY_BYTES_MAX or write.size_bytes > record_bytes_max:
                self.last_error = f"key of {len(key)} bytes, record of {write.size_bytes}: too long for a slot"
                outcomes[i] = Outcome.REFUSED
            elif (other := self._pending.get(key)) is not None:
                others.add(other)
            else:
                done = done or asyncio.get_running_loop().create_future()
                self._pending[key] = done
                mine.append(i)
        return mine, others

    async def _put_claimed(
        self, session: Session, writes: Sequence[RecordWrite], mine: Sequence[int], outcomes: list[Outcome | None]
    ) -> None:
        """Write claimed records; whatever happens, the claims end and every slot is used or free again."""
        index = session.index
        done = self._pending[writes[mine[0]].key]
        ops: list[WriteOp] = []
        published = 0
        slots, evicted = index.reserve(len(mine))
        try:
            self._tell(evicted)
            for i in mine[len(slots) :]:
                outcomes[i] = Outcome.NO_SPACE
            mine_placed = mine[: len(slots)]
            ops = session.mover.writes([writes[i] for i in mine_placed], slots)
            await session.engine.write([op.transfer for op in ops])
            if self.config.durability == "data":
                await _sync(self._disk, session, ops)
            self._publish(session, zip(mine_placed, ops, strict=True), outcomes)
            published = len(ops)
        finally:
            for slot in slots[published:]:
                index.release(slot)
            session.mover.release(ops)
            for i in mine:
                del self._pending[writes[i].key]
            done.set_result(None)

    def _publish(self, session: Session, placed: Iterable[tuple[int, WriteOp]], outcomes: list[Outcome | None]) -> None:
        """Publish records that are written, free the slots of others, and write what became of them."""
        good = []
        for i, op in placed:
            error = op.failure
            outcomes[i] = Outcome.OK if error is None else outcome_of(error)
            if error is None:
                good.append(op)
            else:
                session.index.release(op.slot)
                self.last_error = f"writing a block: {error}"
                self._counters["write_errors"] += 1
        session.index.add_all([op.key for op in good], [op.slot for op in good], [op.size_bytes for op in good])

    def _read_outcome(self, session: Session, op: ReadOp) -> Outcome:
        """Judge what was read and hand it over."""
        if op.transfer.error is not None:
            self.last_error = f"reading a block: {op.transfer.error}"
            self._counters["read_errors"] += 1
            return outcome_of(op.transfer.error)
        if session.index.find(op.read.key) != op.slot:
            # Removed while it was read; its header may have been wiped under the read.
            return Outcome.MISS
        if (found := session.mover.descriptor_of_another(op)) is not None:
            name, namespace = session.index.name_of(found.namespace_digest, found.key)
            if name != op.read.key:
                # An intact record of another block: the snapshot was stale, and the scan has not got here yet.
                session.index.correct(op.slot, op.read.key, name, found.record_bytes, namespace)
                self._counters["stale_blocks"] += 1
                self._removal_listener([op.read.key], RemovalCause.LOST)
                return Outcome.MISS
        # Whether it is intact is for the tier to say, which checks every byte.
        session.mover.deliver(op)
        return Outcome.OK

    async def _wipe(self, session: Session, found: Mapping[BlockKey, SlotId]) -> None:
        """Wipe the slots of blocks that the index has forgotten.

        Whoever puts one of them meanwhile has to wait, so that the tier hears first that it left and then that it came.
        """
        if not found:
            return
        wipes = [session.mover.wipe(slot) for slot in found.values()]
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.update(dict.fromkeys(found, done))
        try:
            await session.engine.write(wipes)
        finally:
            for key, slot in found.items():
                session.index.retire(slot)
                del self._pending[key]
            done.set_result(None)
        failed = [wipe.error for wipe in wipes if wipe.error is not None]
        if failed:
            # Gone from the index all the same; after a crash a scan may find such a block again.
            self._counters["wipe_errors"] += len(failed)
            _log.warning("%d removed blocks could not be wiped: %s", len(failed), failed[0])

    def _tell(self, evicted: Sequence[bytes]) -> None:
        if evicted:
            self._counters["evicted_blocks"] += len(evicted)
            own = [name for name in evicted if is_own(name)]
            if own:
                self._removal_listener(own, RemovalCause.EVICTED)

    def _tell_lost(self, keys: Sequence[BlockKey]) -> None:
        self._removal_listener(keys, RemovalCause.LOST)

    def _opened(self) -> Session:
        if self._session is None:
            raise BackendClosedError("not open: use it after open() and before close()", backend=self.name)
        return self._session

    @contextlib.contextmanager
    def _working(self) -> Iterator[Session]:
        """Hold the session open for a call."""
        session = self._opened()
        self._calls += 1
        self._idle.clear()
        try:
            yield session
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()


async def _sync(disk: OsDisk, session: Session, ops: Sequence[WriteOp]) -> None:
    """Bring what was written to the device; where that fails, all of it counts as not written."""
    fds = {op.transfer.fd for op in ops}
    try:
        for fd in fds:
            await session.engine.call(partial(disk.fdatasync, fd))
    except OSError as error:
        for op in ops:
            op.transfer.error = error
