"""A session: everything that an open disk backend holds, from ``open`` to ``close``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final

from kvstore.backends.base import RecordGeometry
from kvstore.backends.disk.columns import Columns
from kvstore.backends.disk.config import DiskConfig
from kvstore.backends.disk.files import names_in, write_snapshot
from kvstore.backends.disk.followers import Followers
from kvstore.backends.disk.index import OWNER_SHIFT, Index
from kvstore.backends.disk.journal import Journal, create_journal
from kvstore.backends.disk.layout import (
    PAGE,
    RECORD,
    Geometry,
    Kind,
    Row,
    decode_descriptor,
    digest_of,
    journal_name,
    journal_number,
)
from kvstore.backends.disk.owner import Owner, take_owner
from kvstore.backends.disk.records import RecordMover, aligned_buffer
from kvstore.backends.disk.root import LedgerBusyError, Root, open_root
from kvstore.backends.disk.segments import SegmentFiles, SegmentId
from kvstore.backends.disk.space import Space
from kvstore.codec.record import HEADER_BYTES
from kvstore.diskio import OsDisk, Priority
from kvstore.diskio.transfers import Transfer, TransferEngine
from kvstore.errors import BackendUnavailableError, ConfigError, LockedError
from kvstore.namespace import Namespace
from kvstore.types import BlockKey, RemovalCause

__all__ = ["Session"]

_log = logging.getLogger("kvstore.backends.disk")

_SEGMENT_BYTES_MIN: Final = 64 << 20
_SEGMENT_BYTES_MAX: Final = 1 << 30
_SEGMENTS_WANTED: Final = 64
_SEGMENTS_MIN: Final = 16
"""A capacity is made of 64 segments of 64 MiB to 1 GiB; a small one of 16 that are smaller."""

_SLOT_BYTES_MAX: Final = 1 << 30
_LOCK_RETRY_S: Final = 0.05
_UPKEEP_S: Final = 1.0
"""How often is asked whether others want room: so long may a new engine wait for its first segment."""

_JOURNAL_BYTES: Final = 1 << 20
"""Shortest journal that a snapshot is worth: 12,000 records."""

_SCAN_BATCH: Final = 256
"""Headers read at once: keeps a drive's queue full, and costs the loop about a millisecond."""


class Session:
    """Roots, owner, index, journal and engine of an open backend; made by :meth:`open`.

    Attributes:
        index: Which block is where.
        engine: Does the I/O.
        mover: Makes transfers.
        space: Finds room.
        segments: Open ones.
        followers: The other owners.
        recovered: Set when all that is on the disk is known.
        counts: Of what happened.
        removed: Whether somebody has deleted our directory.
    """

    engine: TransferEngine
    index: Index
    journal: Journal
    mover: RecordMover
    space: Space
    segments: SegmentFiles
    followers: Followers
    owner: Owner
    geometry: Geometry

    def __init__(self, disk: OsDisk, config: DiskConfig) -> None:
        self.roots: list[Root] = []
        self.recovered = asyncio.Event()
        self.counts: Counter[str] = Counter()
        self._disk = disk
        self._config = config
        self._tasks: list[asyncio.Task[None]] = []
        self.removed = False
        self._snapshot_frames = 0
        self._snapshotting = asyncio.Lock()

    async def open(
        self,
        namespace: Namespace,
        geometry: RecordGeometry,
        on_added: Callable[[Sequence[BlockKey]], None],
        on_removed: Callable[[Sequence[BlockKey], RemovalCause], None],
    ) -> None:
        """Open the roots, take an owner's directory and read what it and the others hold.

        Raises:
            ConfigError: The configuration can't be used here.
            BackendError: Another engine does not share the roots, or a disk fails.
        """
        if geometry.header_bytes > HEADER_BYTES:
            raise ConfigError(f"Headers of {geometry.header_bytes} bytes; the disk backend takes {HEADER_BYTES}.")
        slot_bytes = PAGE + -(-geometry.payload_bytes_max // PAGE) * PAGE
        if slot_bytes > _SLOT_BYTES_MAX:
            raise ConfigError(f"Blocks of {geometry.payload_bytes_max} bytes; the disk backend takes 1 GiB at most.")
        self.digest = namespace.digest
        self.engine = TransferEngine(self._disk, self._config.engine, threads=self._config.threads, name="disk")
        self.segments = SegmentFiles(self._disk, self.engine)
        try:
            await self.engine.call(partial(self._open_roots, namespace))
            await self._join()
            self.geometry = self._geometry(slot_bytes)
            await self.engine.call(self._take_owner)
            await self._begin(geometry, on_added, on_removed)
        except OSError as error:
            await self._release(1.0)
            raise BackendUnavailableError(
                f"{self._config.paths} can't be used now: {error.strerror or error}. Check the disk.", backend="file"
            ) from error
        except BaseException:
            await asyncio.shield(self._release(1.0))
            raise

    async def close(self, timeout_s: float) -> None:
        """Write a snapshot and let go of everything, if the disk answers."""
        self.followers.close_watch()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.space.close()
                await self._note_presence()
                await self._write_snapshot()
        await self._release(timeout_s)

    async def scan_others(self) -> list[Columns]:
        """Return the slots of all other owners, as their files say now."""
        others = list(self.followers.others.values())
        loaded = await self.engine.call(lambda: [other.load(self.digest) for other in others], priority=Priority.LOAD)
        return [columns for columns in loaded if columns is not None]

    def segment_ids(self, places: Sequence[int]) -> list[tuple[int, int]]:
        """Return owner and segment of each place."""
        own_slots = self.geometry.segment_slots
        found = []
        for place in places:
            owner, slot = place >> OWNER_SHIFT, place & ((1 << OWNER_SHIFT) - 1)
            other = self.followers.others.get(owner)
            found.append((owner, slot // (other.geometry.segment_slots if other else own_slots)))
        return found

    async def hold_own(self, segments: Sequence[SegmentId]) -> dict[SegmentId, int]:
        """Return descriptors of segments of ours, or minus the errno of why not; to be let go of."""
        return await self.segments.hold(segments, {0: self.owner.fds}, direct=self.roots[0].direct)

    def note_use(self, places: Sequence[int]) -> None:
        """Note a use of places, for the eviction of whoever owns them."""
        self.index.touch([place for place in places if 0 <= place < 1 << OWNER_SHIFT])
        for place in places:
            if place >> OWNER_SHIFT > 0 and (other := self.followers.others.get(place >> OWNER_SHIFT)) is not None:
                other.read_slots.add(place & ((1 << OWNER_SHIFT) - 1))

    def _open_roots(self, namespace: Namespace) -> None:
        for path in self._config.paths:
            self.roots.append(open_root(self._disk, path, self._config, namespace))

    async def _join(self) -> None:
        """Say that this engine uses the roots, waiting for one that does not share them."""
        deadline = time.monotonic() + self._config.lock_timeout
        while True:
            if await self.engine.call(lambda: all(r.join(exclusive=self._config.exclusive) for r in self.roots)):
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
                f"'capacity' is {str(self._config.capacity)!r}, which leaves {capacity} bytes for a root, and one "
                f"block takes {slot_bytes}. Give room for many blocks, such as '100GiB'."
            )
        wanted = min(_SEGMENT_BYTES_MAX, max(_SEGMENT_BYTES_MIN, capacity // _SEGMENTS_WANTED))
        wanted = min(wanted, capacity // _SEGMENTS_MIN)
        return Geometry(slot_bytes, max(1, wanted // slot_bytes), len(self.roots))

    def _take_owner(self) -> None:
        slots = sum(root.capacity_bytes for root in self.roots) // self.geometry.slot_bytes
        try:
            self.owner = take_owner(self._disk, self.roots, self.geometry, slots, self.digest)
        except OSError as error:
            raise BackendUnavailableError(
                f"no directory could be made in {self.roots[0].path!r}: {error.strerror or error}. Free some space or "
                "check the disk.",
                backend="file",
            ) from error

    async def _begin(
        self,
        geometry: RecordGeometry,
        on_added: Callable[[Sequence[BlockKey]], None],
        on_removed: Callable[[Sequence[BlockKey], RemovalCause], None],
    ) -> None:
        """Make the index, find the others, and start what keeps both true."""
        disk, owner = self._disk, self.owner
        self.engine.hold([lock.fd for lock in owner.locks])
        self.mover = RecordMover(owner.number, self.digest, geometry.header_bytes)
        self.journal = Journal(disk, self.engine, owner.number, owner.end, durable=self._config.durability == "data")
        expected = sum(root.capacity_bytes for root in self.roots) // self.geometry.slot_bytes
        self.index = await self.engine.call(partial(Index, owner.columns, expected))
        self.followers = Followers(disk, self.engine, self.roots, owner.name, self.digest, on_added, on_removed)
        self.followers.gone = self.segments.forget_owner
        self.followers.segment_gone = self.segments.forget
        found = await self.engine.call(self.followers.find)
        self.followers.take(found, self.index)
        self.space = Space(disk, self.engine, self.roots, owner, self.index, self.journal, self.segments, on_removed)
        if owner.intact:
            self.recovered.set()
        else:
            withheld = self.index.withhold()
            self._start(self._look_at_slots(withheld, on_added))
        await self._note_presence(owner.corrections)
        if self._config.exclusive:
            await self.space.preallocate()
        self._start(self.followers.run(self.index))
        self._start(self._keep_up())

    async def _keep_up(self) -> None:
        """Give room to others, and write snapshots, for ever; a failure is for the next round to overcome."""
        # A journal that is long from the start was left by an engine that was killed.
        self._snapshot_frames = -1 if self.journal.size_bytes > _JOURNAL_BYTES else 0
        snapshot_at = time.monotonic() + self._config.snapshot_interval
        while True:
            try:
                if not self.removed and await self.engine.call(self._is_removed):
                    _log.warning("%r was removed while in use; start the engine again", self.roots[0].path)
                    self.removed = True
                    # Their room is given back when nothing has them open.
                    self.segments.forget_owner(0)
                await self.space.count_uses()
                if not self._config.exclusive:
                    await self.space.give_up_excess()
                long = self.journal.size_bytes > max(_JOURNAL_BYTES, len(self.index) * RECORD.itemsize)
                due = bool(self._config.snapshot_interval) and time.monotonic() > snapshot_at
                if due:
                    await self._note_presence()
                if long or due:
                    snapshot_at = time.monotonic() + self._config.snapshot_interval
                    await self._write_snapshot()
            except (OSError, LedgerBusyError) as error:
                self.counts["upkeep_errors"] += 1
                _log.debug("upkeep failed: %s", error)
            await asyncio.sleep(_UPKEEP_S)

    async def _note_presence(self, rows: Sequence[Row] = ()) -> None:
        """Write a frame, also of nothing, so that the directory is newer than those that nobody has used since."""
        # Where there is no room for that, the next start finds the same.
        with contextlib.suppress(OSError):
            await self.journal.append(rows, lambda: None)

    async def _write_snapshot(self) -> None:
        """Begin a journal, write a snapshot, and remove the journals that it makes superfluous."""
        async with self._snapshotting:
            if self.journal.frames == self._snapshot_frames or not self.recovered.is_set():
                return
            disk, owner, geometry, digest = self._disk, self.owner, self.geometry, self.digest
            number = self.journal.end.number + 1
            try:
                to = await self.engine.call(
                    lambda: create_journal(disk, owner.home_fd, number, owner.number, geometry, digest)
                )
                await self.journal.switch(to)
                if self.journal.end.number != number:
                    return
                columns = self.index.columns.shallow()
                self._snapshot_frames = self.journal.frames
                await self.engine.call(
                    lambda: write_snapshot(disk, owner.home_fd, owner.number, geometry, digest, columns, number)
                )
                await self.engine.call(partial(self._remove_journals, number))
                self.counts["snapshots"] += 1
            except OSError as error:
                # The journals that there are tell all; a start takes a little longer.
                _log.warning("no snapshot could be written: %s", error)

    def _is_removed(self) -> bool:
        return self._disk.fstat(self.owner.home_fd).st_nlink == 0

    def _remove_journals(self, below: int) -> None:
        for name in names_in(self._disk, self.owner.home_fd):
            number = journal_number(name)
            if number is not None and number < below:
                self._disk.unlink(journal_name(number), self.owner.home_fd)

    async def _look_at_slots(self, slots: Sequence[int], on_added: Callable[[Sequence[BlockKey]], None]) -> None:
        """Read the headers of slots of which the journal does not tell: what is intact there is a block."""
        buffer = aligned_buffer(_SCAN_BATCH * PAGE)
        pages = [buffer[i : i + PAGE] for i in range(0, buffer.nbytes, PAGE)]
        for start in range(0, len(slots), _SCAN_BATCH):
            batch = slots[start : start + _SCAN_BATCH]
            found = await self._read_headers(batch, pages)
            rows = [(Kind.ADD, slot, size, digest_of(key), key) for key, slot, size in found]
            keys, taken = [key for key, _, _ in found], {slot for _, slot, _ in found}
            if rows:
                with contextlib.suppress(OSError):
                    await self.journal.append(rows, partial(self.index.add, rows))
                    on_added(keys)
                    self.counts["recovery_found_blocks"] += len(keys)
            self.counts["recovery_scanned_slots"] += len(batch)
            self.index.release([slot for slot in batch if slot not in taken])
            await asyncio.sleep(0)
        self.recovered.set()

    async def _read_headers(self, slots: Sequence[int], pages: Sequence[memoryview]) -> list[tuple[BlockKey, int, int]]:
        """Return key, slot and length of the blocks of ours in slots."""
        wanted = sorted({(0, self.index.segment_of(slot)) for slot in slots})
        fds = await self.hold_own(wanted)
        try:
            reads = {
                slot: Transfer(fd, self.geometry.offset_of(slot), [page], PAGE)
                for slot, page in zip(slots, pages, strict=False)
                if (fd := fds.get((0, self.index.segment_of(slot)), -1)) >= 0
            }
            await self.engine.read(list(reads.values()), Priority.STORE)
        finally:
            self.segments.let_go(wanted)
        found, seen = [], set()
        for slot, read in reads.items():
            if read.done_bytes != PAGE or (header := decode_descriptor(read.buffers[0])) is None:
                continue
            here = (header.owner, header.slot, header.namespace_digest) == (self.owner.number, slot, self.digest)
            fits = 0 < header.record_bytes <= self.geometry.slot_bytes
            if here and fits and header.key not in seen and self.index.slot(header.key) is None:
                seen.add(header.key)
                found.append((header.key, slot, header.record_bytes))
        return found

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work))

    async def _release(self, timeout_s: float) -> None:
        for task in self._tasks:
            task.cancel()
        # A thread that is stuck in the kernel still uses the files: they stay open, and locked, until it ends.
        if not await self.engine.close(timeout_s):
            return
        if hasattr(self, "followers"):
            self.followers.close()
        self.segments.close()
        if hasattr(self, "journal"):
            self.journal.close()
        elif hasattr(self, "owner"):
            with contextlib.suppress(OSError):
                self._disk.close(self.owner.end.fd)
        if hasattr(self, "owner"):
            self.owner.close()
        for root in self.roots:
            root.close()
