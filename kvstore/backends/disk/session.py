"""A session: the open files of a disk backend from ``open`` to ``close``, with their upkeep and recovery."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, Final

from kvstore.backends.base import RecordGeometry
from kvstore.backends.disk import layout
from kvstore.backends.disk.config import DiskConfig
from kvstore.backends.disk.followers import Followers
from kvstore.backends.disk.index import Index
from kvstore.backends.disk.journal import Journal
from kvstore.backends.disk.layout import OWNER_SHIFT, PAGE, SLOT_MASK, Geometry, Kind, Row
from kvstore.backends.disk.notes import Notes
from kvstore.backends.disk.owner import Owner, take_owner
from kvstore.backends.disk.records import RecordMover, aligned_buffer
from kvstore.backends.disk.root import LedgerBusyError, Root, check_drives, open_root
from kvstore.backends.disk.segments import SegmentFiles
from kvstore.backends.disk.space import Space
from kvstore.codec.record import HEADER_BYTES
from kvstore.diskio import OsDisk, Transfer, TransferEngine
from kvstore.errors import BackendUnavailableError, ConfigError, LockedError
from kvstore.namespace import Namespace
from kvstore.runtime.limits import Precedence
from kvstore.tenants import Tenants
from kvstore.types import BlockKey, RemovalCause

_log = logging.getLogger("kvstore.backends.disk")

_SEGMENT_BYTES_MIN: Final = 64 << 20
_SEGMENT_BYTES_MAX: Final = 1 << 30
_SEGMENTS_WANTED: Final = 64
_SEGMENTS_MIN: Final = 16
"""A capacity is divided into 64 segments of 64 MiB to 1 GiB; a small one into 16 smaller segments."""

_SLOT_BYTES_MAX: Final = 1 << 30
_LOCK_RETRY_S: Final = 0.05
_UPKEEP_S: Final = 1.0
"""Interval at which space requests of other engines are read: the longest wait for a new engine's first segment."""

_JOURNAL_BYTES: Final = 1 << 20
"""Shortest journal worth a snapshot: 12,000 records."""

_FRAME_ROWS: Final = 1 << 13
"""Most records of a frame of corrections."""

_SCAN_BATCH: Final = 256
"""Headers read at once: enough to keep a drive's queue full, and about a millisecond of the loop."""


class Session:
    """Roots, owner, index, journal and engine of an open backend; created by :meth:`open`."""

    engine: TransferEngine
    index: Index
    journal: Journal
    notes: Notes
    mover: RecordMover
    space: Space
    segments: SegmentFiles
    followers: Followers
    owner: Owner
    geometry: Geometry

    def __init__(
        self,
        disk: OsDisk,
        config: DiskConfig,
        counts: Counter[str],
        on_added: Callable[[Sequence[BlockKey]], None],
        on_removed: Callable[[Sequence[BlockKey], RemovalCause], None],
        on_doubt: Callable[[], None],
        tenants: Tenants | None = None,
    ) -> None:
        self._tenants = tenants
        self.roots: list[Root] = []
        self.recovered = asyncio.Event()  # Set when all blocks on the disk are known.
        self.counts = counts
        # Keys of blocks that are being stored or removed, with a future that ends with that operation.
        self.claims: dict[BlockKey, asyncio.Future[None]] = {}
        self.disk = disk
        self.config = config
        self._on_added = on_added
        self.on_removed = on_removed
        self._on_doubt = on_doubt
        self._files = contextlib.ExitStack()
        self._tasks: list[asyncio.Task[None]] = []
        self.removed = False  # Whether our directory was deleted.
        self._snapshot_frames = 0
        self._snapshotting = asyncio.Lock()

    async def open(self, namespace: Namespace, geometry: RecordGeometry) -> None:
        """Open the roots, take an owner's directory, and read its files and those of all other owners.

        Raises:
            ConfigError: The configuration can't be used here.
            BackendError: One of the engines that use the roots is exclusive, or a disk fails.
        """
        if geometry.header_bytes > HEADER_BYTES:
            raise ConfigError(f"Headers of {geometry.header_bytes} bytes; the disk backend takes {HEADER_BYTES}.")
        slot_bytes = PAGE + -(-geometry.payload_bytes_max // PAGE) * PAGE
        if slot_bytes > _SLOT_BYTES_MAX:
            raise ConfigError(f"Blocks of {geometry.payload_bytes_max} bytes; the disk backend takes 1 GiB at most.")
        self.digest = namespace.digest
        # The header has a page of its own.
        self.record_bytes_max = geometry.header_bytes + slot_bytes - PAGE
        self.engine = TransferEngine(self.disk, self.config.engine, threads=self.config.threads)
        try:
            await self.engine.call(partial(self._open_roots, namespace))
            await self._join()
            self.geometry = self._geometry(slot_bytes)
            slots_max = sum(root.capacity_bytes for root in self.roots) // slot_bytes
            await self.engine.call(partial(self._take_owner, slots_max))
            await self._begin(geometry.header_bytes, slots_max)
        except OSError as error:
            await self._release(1.0)
            raise BackendUnavailableError(
                f"{self.config.paths} can't be used now: {error.strerror or error}. Free some space or check the disk.",
                backend="file",
            ) from error
        except BaseException:
            await asyncio.shield(self._release(1.0))
            raise

    async def close(self, timeout_s: float) -> None:
        """Write a snapshot and close everything, if the disk responds."""
        self.followers.watch.close()
        for task in self._tasks:
            task.cancel()
        # A task that waits for a thread on a frozen disk ends only with the thread, even if it is cancelled.
        await asyncio.wait({asyncio.gather(*self._tasks, return_exceptions=True)}, timeout=timeout_s)
        ending = asyncio.get_running_loop().create_task(self._end())
        try:
            await asyncio.wait({ending}, timeout=timeout_s)
        finally:
            ending.cancel()
        await self._release(timeout_s)

    async def _end(self) -> None:
        """Finish all pending writes, and write a snapshot."""
        await self.space.close()
        await self.notes.settle()
        await self._note_activity()
        await self._write_snapshot()

    @contextlib.contextmanager
    def claimed(self, keys: Collection[BlockKey]) -> Iterator[None]:
        """Claim keys that are not claimed."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.claims.update(dict.fromkeys(keys, done))
        try:
            yield
        finally:
            for key in keys:
                del self.claims[key]
            done.set_result(None)

    def note_use(self, places: Sequence[int]) -> None:
        """Record a use of the blocks at these places, for eviction by their owners."""
        self.index.touch([place for place in places if 0 <= place <= SLOT_MASK])
        for place in places:
            if place > SLOT_MASK and (other := self.followers.others.get(place >> OWNER_SHIFT)) is not None:
                other.read_slots.add(place & SLOT_MASK)

    def _open_roots(self, namespace: Namespace) -> None:
        check_drives(self.disk, self.config)
        for position in range(len(self.config.paths)):
            self.roots.append(open_root(self.disk, position, self.config, namespace))
            self.roots[-1].first = self.roots[0] if position else None
            self._files.callback(self.roots[-1].close)
        for position, root in enumerate(self.roots):
            root.note_position(position)

    async def _join(self) -> None:
        """Take the members' lock of each root, waiting for an engine that does not share."""
        deadline = time.monotonic() + self.config.lock_timeout
        while True:
            if await self.engine.call(lambda: all(r.join(exclusive=self.config.exclusive) for r in self.roots)):
                return
            if time.monotonic() >= deadline:
                paths = ", ".join(repr(root.path) for root in self.roots)
                raise LockedError(
                    f"{paths} can't be shared: another engine uses it, and one of the two is 'exclusive'. Stop that "
                    "one, name another 'path', or let both share.",
                    backend="file",
                )
            await asyncio.sleep(_LOCK_RETRY_S)

    def _geometry(self, slot_bytes: int) -> Geometry:
        capacity = min(root.capacity_bytes for root in self.roots)
        if capacity < slot_bytes:
            raise ConfigError(
                f"'capacity' is {str(self.config.capacity)!r}, which leaves {capacity} bytes for a root, and one "
                f"block takes {slot_bytes}. Give room for many blocks, such as '100GiB'."
            )
        wanted = min(_SEGMENT_BYTES_MAX, max(_SEGMENT_BYTES_MIN, capacity // _SEGMENTS_WANTED))
        wanted = min(wanted, capacity // _SEGMENTS_MIN)
        return Geometry(slot_bytes, max(1, wanted // slot_bytes), len(self.roots))

    def _take_owner(self, slots_max: int) -> None:
        self.owner = take_owner(self.disk, self.roots, self.geometry, slots_max, self.digest)
        self._files.callback(self.owner.close)

    async def _begin(self, header_bytes: int, slots_max: int) -> None:
        """Create the index, find the other owners, and start the upkeep of both."""
        owner = self.owner
        self.engine.hold([lock.fd for lock in owner.locks])
        self.mover = RecordMover(owner.number, self.digest, header_bytes)
        self.journal = Journal(self.engine, owner.number, owner.end, durable=self.config.durability == "data")
        self._files.callback(self.journal.close)
        self.segments = SegmentFiles(self.engine, direct=all(root.direct for root in self.roots))
        self.segments.add_owner(0, lambda: contextlib.nullcontext(owner.fds), self.geometry.segment_slots)
        self._files.callback(self.segments.close)
        self.index = await self.engine.call(partial(Index, owner.columns, slots_max, self._tenants))
        self.notes = Notes(self.engine, owner.fds[0], owner.number, lambda key: self.index.slot(key) is not None)
        self.followers = Followers(
            self.engine,
            self.roots,
            owner.name,
            self.digest,
            self.index,
            self.segments,
            self._on_added,
            self.on_removed,
            self._on_doubt,
        )
        self._files.callback(self.followers.close)
        # A scan reports the other owners' blocks.
        await self.followers.refresh(report=False)
        self.space = Space(
            self.engine, self.roots, owner, self.index, self.journal, self.segments, self.counts, self.on_removed
        )
        self._files.callback(self.space.release)
        if owner.intact:
            self.recovered.set()
        else:
            self._start(self._scan_slots(self.index.withhold()))
        await self._note_activity(owner.corrections)
        if self.config.exclusive:
            await self.space.preallocate()
        self._start(self.followers.run())
        self._start(self._keep_up())

    async def _keep_up(self) -> None:
        """Perform the duties of upkeep until cancelled; each fails alone, and the next round retries it."""
        # A journal that is long at the start was left by a killed engine.
        self._snapshot_frames = -1 if self.journal.end.offset > _JOURNAL_BYTES else 0
        self._snapshot_at = time.monotonic() + self.config.snapshot_interval
        while True:
            for name, duty in self._duties().items():
                try:
                    await duty()
                except (OSError, LedgerBusyError) as error:
                    level = logging.DEBUG if self.counts[f"upkeep_{name}_errors"] else logging.WARNING
                    _log.log(level, "upkeep (%s) failed: %s", name, error)
                    self.counts[f"upkeep_{name}_errors"] += 1
                    self.counts["upkeep_errors"] += 1
            await asyncio.sleep(_UPKEEP_S)

    def _duties(self) -> dict[str, Callable[[], Awaitable[None]]]:
        duties: dict[str, Callable[[], Awaitable[None]]] = {
            "directory": self._notice_removal,
            "uses": self.space.count_uses,
            "journal": self.space.retry,
        }
        # Before recovery, a segment with unknown blocks would count as empty.
        if self.recovered.is_set():
            duties["files"] = self.space.match_files
            duties["room"] = self.space.end_lack
            if not self.config.exclusive:
                duties["shares"] = self.space.give_up_excess
        duties["snapshot"] = self._write_due_snapshot
        return duties

    async def _notice_removal(self) -> None:
        status = await self.engine.call(partial(self.disk.fstat, self.owner.fds[0]))
        if not status.st_nlink and not self.removed:
            _log.warning("%r was removed while in use; its blocks are lost", self.roots[0].path)
            self.removed = True
            # The space of removed files is freed when no process has them open.
            self.segments.forget_owner(0)

    async def _write_due_snapshot(self) -> None:
        long = self.journal.end.offset > max(_JOURNAL_BYTES, len(self.index) * layout.RECORD.itemsize)
        due = bool(self.config.snapshot_interval) and time.monotonic() > self._snapshot_at
        if due:
            await self._note_activity()
        if long or due:
            self._snapshot_at = time.monotonic() + self.config.snapshot_interval
            await self._write_snapshot()

    async def _note_activity(self, rows: Sequence[Row] = ()) -> None:
        """Write a frame, possibly empty, so that this directory is newer than unused ones."""
        # If there is no room for the frame, the next start finds the same differences.
        with contextlib.suppress(OSError):
            for start in range(0, len(rows) or 1, _FRAME_ROWS):
                await self.journal.append(rows[start : start + _FRAME_ROWS])

    async def _write_snapshot(self) -> None:
        """Begin a new journal, write a snapshot, and remove all earlier journals."""
        async with self._snapshotting:
            if self.journal.frames == self._snapshot_frames or not self.recovered.is_set():
                return
            try:
                number = await self.journal.switch(self.owner.create_journal)
                if not number:
                    return
                # The copy keeps these arrays when the index grows into larger ones.
                columns = copy.copy(self.index.columns)
                self._snapshot_frames = self.journal.frames
                await self.engine.call(partial(self.owner.write_snapshot, columns, number))
                self.counts["snapshots"] += 1
            except OSError as error:
                # The journals are complete; only the next start takes a little longer.
                level = logging.DEBUG if self.counts["snapshot_errors"] else logging.WARNING
                _log.log(level, "no snapshot could be written: %s", error)
                self.counts["snapshot_errors"] += 1

    async def _scan_slots(self, slots: Sequence[int]) -> None:
        """Read the headers of slots that the journal does not list; an intact header there is a block."""
        buffer = aligned_buffer(_SCAN_BATCH * PAGE)
        pages = [buffer[i : i + PAGE] for i in range(0, buffer.nbytes, PAGE)]
        for start in range(0, len(slots), _SCAN_BATCH):
            batch = slots[start : start + _SCAN_BATCH]
            found = await self._read_headers(batch, pages)
            keys = [key for key, _, _ in found]
            taken = {slot for _, slot, _ in found}
            rows = [(Kind.ADD, slot, size, layout.digest_of(key), key) for key, slot, size in found]
            with self.claimed(keys):
                try:
                    if rows:
                        self.index.pin(taken)
                        await self.space.enter(rows)
                        self.counts["recovery_found_blocks"] += len(rows)
                        self._on_added(keys)
                except OSError as error:
                    _log.debug("%d blocks that were found could not be recorded: %s", len(rows), error)
            self.counts["recovery_scanned_slots"] += len(batch)
            self.index.release([slot for slot in batch if slot not in taken])
            await asyncio.sleep(0)
        with contextlib.suppress(OSError):
            await self.journal.append([(Kind.SURE, 0, 0, 0, b"")])
        self.recovered.set()

    async def _read_headers(self, slots: Sequence[int], pages: Sequence[memoryview]) -> list[tuple[BlockKey, int, int]]:
        """Return key, slot and length of our blocks in slots."""
        async with self.segments.files_of(slots) as fds:
            reads = {
                slot: Transfer(fd, self.geometry.offset_of(slot), [page], PAGE)
                for slot, fd, page in zip(slots, fds, pages, strict=False)
                if fd >= 0
            }
            await self.engine.read(list(reads.values()), Precedence.STORE)
        found, seen = [], set()
        for slot, read in reads.items():
            if read.done_bytes != PAGE or (header := layout.decode_descriptor(read.buffers[0])) is None:
                continue
            here = (header.owner, header.slot, header.namespace_digest) == (self.owner.number, slot, self.digest)
            fits = 0 < header.record_bytes <= self.record_bytes_max
            # The journal says that this block left this slot; it may since have been removed from another slot.
            left = self.index.columns.holds(slot, header.key)
            # The block may have been stored again, or its store may be running.
            known = header.key in seen or header.key in self.claims or self.index.slot(header.key) is not None
            if here and fits and not left and not known:
                seen.add(header.key)
                found.append((header.key, slot, header.record_bytes))
        return found

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work))

    async def _release(self, timeout_s: float) -> None:
        for task in self._tasks:
            task.cancel()
        if await self.engine.close(timeout_s):
            self._files.close()
        else:
            self.close_late()

    def close_late(self) -> None:
        """Close the files once the last thread has left the kernel, without waiting for that."""
        for task in self._tasks:
            task.cancel()
        self.engine.release(self._files.close)
