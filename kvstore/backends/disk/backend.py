"""The disk backend: records in slots of segments, an index in memory, and the journals of other engines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import ClassVar, Final

from kvstore.backends.base import Backend, BackendStats, RecordGeometry, RecordRead, RecordWrite
from kvstore.backends.disk.blocks import Blocks
from kvstore.backends.disk.columns import OUT_OF_USE
from kvstore.backends.disk.config import DiskConfig, NvmeConfig
from kvstore.backends.disk.layout import SLOT_MASK
from kvstore.backends.disk.root import check_root
from kvstore.backends.disk.session import Session
from kvstore.backends.disk.table import NOWHERE
from kvstore.codec.record import HEADER_BYTES
from kvstore.config import TierConfig
from kvstore.diskio import OsDisk
from kvstore.errors import BackendClosedError, BackendUnavailableError
from kvstore.namespace import Namespace
from kvstore.runtime.forks import OF_PARENT, leave_at_fork
from kvstore.runtime.limits import CallsUnderWay
from kvstore.types import BlockInfo, BlockKey, Outcome, RemovalCause

_log = logging.getLogger("kvstore.backends.disk")

_CLOSE_TIMEOUT_S: Final = 5.0
"""Time limit for each step of closing, so that a frozen disk cannot block the shutdown of an engine."""

_OPEN_TIMEOUT_S: Final = 45.0
"""Time limit for opening. It is below the tier's own limit, so that an optional tier starts without its medium."""

_SCAN_BATCH: Final = 1024

_COUNTS: Final = (
    "recovery_scanned_slots", "recovery_found_blocks", "evicted_blocks", "segments_made", "segments_given_up",
    "snapshots", "upkeep_errors",
)  # fmt: skip
"""Counters reported from the start; all others appear with their first count."""


class DiskBackend(Backend):
    """Blocks in preallocated segments of equal slots, in directories that engines share. See ``docs/disk.md``.

    Further guarantees: each engine writes only to its own directory. No store, load or lookup takes a lock of another
    process. A slot is not reused while this engine reads it; if another engine reuses one of its slots during a read,
    the read is a miss. The segments of all engines together never exceed ``capacity``.

    In a forked process the backend is closed.

    Tests replace ``disk`` to inject faults.
    """

    name: ClassVar[str] = "file"
    config_type: ClassVar[type[TierConfig]] = DiskConfig
    holdings_type: ClassVar[str] = "kvstore.backends.disk.holdings:DiskHoldings"
    path_option: ClassVar[str] = "path"
    # The header is copied into our header page; payloads of whole pages are transferred without a copy.
    alignment: ClassVar[int] = HEADER_BYTES
    # True even with other engines in the directories, because their changes are followed and reported.
    exclusive: bool = True

    def __init__(self, config: DiskConfig, *, disk: OsDisk | None = None) -> None:
        super().__init__(config)
        self.config: DiskConfig = config
        self._disk = disk or OsDisk()
        self._open: Blocks | None = None
        self._opening: asyncio.Task[Blocks] | None = None
        self._counts = Counter(dict.fromkeys(_COUNTS, 0))
        self._calls = CallsUnderWay()
        self._closing = asyncio.Lock()
        self._of_parent: tuple[object, ...] = ()
        leave_at_fork(self)

    def check(self) -> None:
        for position in range(len(self.config.paths)):
            check_root(self._disk, position, self.config)

    async def open(self, namespace: Namespace, geometry: RecordGeometry) -> None:
        """Adopt the directory of an engine that has ended, or create one, and read the index of every directory.

        Raises:
            ConfigError: A path or the capacity can't be used, or a root has another format.
            LockedError: Another engine uses a root, and one of the two is exclusive.
            BackendUnavailableError: A disk fails.
        """
        if self._of_parent:
            raise BackendClosedError(OF_PARENT, backend=self.name)
        if self._open is not None:
            raise BackendUnavailableError("open was called twice. Close the backend first.", backend=self.name)
        # While an earlier attempt hangs in a system call, which cannot be cancelled, no new one starts.
        if self._opening is None or self._opening.done():
            self._opening = asyncio.create_task(self._open_session(namespace, geometry))
            try:
                await asyncio.wait({self._opening}, timeout=_OPEN_TIMEOUT_S)
            except asyncio.CancelledError:
                await asyncio.shield(self._end_opening())
                raise
        if not self._opening.done():
            self._opening.cancel()
            raise BackendUnavailableError(
                f"{self.config.paths} do not answer. Check the disk, or the server that it is on.", backend=self.name
            )
        opening, self._opening = self._opening, None
        self._open = opening.result()

    async def close(self) -> None:
        """Wait for running calls, write a snapshot, close all files. Idempotent; also after a failed ``open``."""
        async with self._closing:
            blocks, self._open = self._open, None
            if blocks is None:
                await self._end_opening()
                return
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                        await self._calls.ended()
                await blocks.session.close(_CLOSE_TIMEOUT_S)
            except asyncio.CancelledError:
                blocks.session.close_late()
                raise

    async def exists(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """Return for each key whether the index has it, as our block or another engine's."""
        with self._working() as blocks:
            return [blocks.session.index.place(key) != NOWHERE for key in keys]

    async def put(self, writes: Sequence[RecordWrite]) -> Sequence[Outcome]:
        """Publish records, evicting others if necessary. Records without a slot are NO_SPACE."""
        with self._working() as blocks:
            return await blocks.put(writes)

    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:
        """Read records into their buffers, all in one batch."""
        with self._working() as blocks:
            return await blocks.get_into(reads)

    async def delete(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """Remove our own blocks, so that neither a restart nor another engine finds them again.

        Blocks of other engines are only removed from our index.
        """
        with self._working() as blocks:
            await blocks.session.recovered.wait()
            return await blocks.delete(keys)

    async def quarantine(self, keys: Sequence[BlockKey]) -> None:
        """Remove blocks that failed verification, and retire their slots: the medium may be bad there."""
        with self._working() as blocks:
            await blocks.quarantine(keys)

    async def scan(self) -> AsyncIterator[BlockInfo]:
        """Yield every block of the namespace, of all engines: first our own, coldest first."""
        session = self._opened().session
        slot_bytes = session.geometry.slot_bytes
        async for keys in self.scan_keys():
            for key in keys:
                slot = session.index.slot(key)
                yield BlockInfo(key, slot_bytes if slot is None else session.index.columns.size_view[slot])

    async def scan_keys(self) -> AsyncIterator[Sequence[BlockKey]]:
        """Yield the keys of :meth:`scan`, many at a time."""
        session = self._opened().session
        index = session.index
        # Blocks found later are reported by recovery.
        held = index.columns.held()
        held = held[index.columns.age[held].argsort(kind="stable")]
        for start in range(0, len(held), _SCAN_BATCH):
            slots = held[start : start + _SCAN_BATCH]
            sizes = index.columns.size[slots]
            yield index.columns.keys_in(slots[(sizes != 0) & (sizes != OUT_OF_USE)])
            # Other coroutines run between two pages.
            await asyncio.sleep(0)
        await session.recovered.wait()
        seen: set[BlockKey] = set()
        for columns in await session.followers.scan():
            held = columns.held()
            for start in range(0, len(held), _SCAN_BATCH):
                keys = columns.keys_in(held[start : start + _SCAN_BATCH])
                keys = [key for key in keys if index.place(key) > SLOT_MASK and key not in seen]
                seen.update(keys)
                yield keys
                await asyncio.sleep(0)

    async def probe(self) -> None:
        """Write an empty frame to the journal.

        Raises:
            BackendError: The disk fails.
        """
        with self._working() as blocks:
            try:
                await blocks.session.journal.append([])
            except OSError as error:
                raise BackendUnavailableError(
                    f"{blocks.session.roots[0].path!r} can't be written: {error}", backend=self.name
                ) from error

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Record a use of blocks, for eviction."""
        if self._open is not None:
            session = self._open.session
            session.note_use([session.index.place(key) for key in keys])

    def note(self, notes: Sequence[tuple[BlockKey, bytes]]) -> None:
        """Append notes of our own blocks to a file in our directory."""
        if self._open is not None:
            session = self._open.session
            session.notes.add([note for note in notes if session.index.slot(note[0]) is not None])

    async def notes(self) -> Mapping[BlockKey, bytes]:
        """Return the notes of our own blocks."""
        return await self._opened().session.notes.load()

    def own(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """Return for each block whether it is in one of our slots; other engines report their own blocks."""
        if self._open is None or not self._open.session.followers.others:
            return [True] * len(keys)
        session = self._open.session
        return [0 <= session.index.place(key) <= SLOT_MASK for key in keys]

    def stats(self) -> BackendStats:
        """Return current figures. ``used_bytes`` counts our slots in full, ``foreign_blocks`` other engines' blocks."""
        if self._open is None:
            return BackendStats(counters=dict(self._counts))
        session = self._open.session
        index, geometry = session.index, session.geometry
        segments = int((index.columns.segments != 0).sum())
        return BackendStats(
            blocks=len(index),
            used_bytes=len(index) * geometry.slot_bytes,
            capacity_bytes=sum(root.capacity_bytes for root in session.roots),
            counters=dict(self._counts),
            gauges={
                "free_slots": float(index.free_slots),
                "segments": float(segments),
                "segment_bytes": float(segments * geometry.segment_bytes),
                "foreign_blocks": float(len(index.table) - len(index)),
                "other_owners": float(len(session.followers.others)),
                "io_uring": float(session.engine.name == "io_uring"),
            },
            ready=not session.removed,
            is_lost=session.removed,
        )

    def leave_to_parent(self) -> None:
        """Close this copy in a forked process, which has neither its threads nor its loop; the parent's goes on."""
        # Kept, because the end of a ring is the parent's, too.
        self._of_parent = self._open, self._opening, self._of_parent
        self._open = self._opening = None

    async def _end_opening(self) -> None:
        """Cancel a running ``open``, and close its files if the disk responds."""
        opening = self._opening
        if opening is None:
            return
        opening.cancel()
        await asyncio.wait({opening}, timeout=_CLOSE_TIMEOUT_S)
        if opening.done():
            self._opening = None
            if not opening.cancelled() and opening.exception() is None:
                await opening.result().session.close(_CLOSE_TIMEOUT_S)

    async def _open_session(self, namespace: Namespace, geometry: RecordGeometry) -> Blocks:
        listeners = self._report_added, self._report_removed, self._report_doubt
        session = Session(self._disk, self.config, self._counts, *listeners, self.tenants)
        await session.open(namespace, geometry)
        return Blocks(session)

    def _report_added(self, keys: Sequence[BlockKey]) -> None:
        self._counts["foreign_added_blocks"] += len(keys)
        self._arrival_listener(keys)

    def _report_removed(self, keys: Sequence[BlockKey], cause: RemovalCause) -> None:
        self._removal_listener(keys, cause)

    def _report_doubt(self) -> None:
        self._doubt_listener()

    def _opened(self) -> Blocks:
        if self._open is None:
            text = OF_PARENT if self._of_parent else "not open: use it after open() and before close()"
            raise BackendClosedError(text, backend=self.name)
        return self._open

    @contextlib.contextmanager
    def _working(self) -> Iterator[Blocks]:
        """Hold the session open for a call."""
        blocks = self._opened()
        if blocks.session.removed:
            raise BackendUnavailableError(
                f"{self.config.paths} were deleted while in use. A tier makes them again.", backend=self.name
            )
        with self._calls:
            try:
                yield blocks
            finally:
                self.last_error = blocks.last_error or self.last_error


class NvmeBackend(DiskBackend):
    """The disk backend for a single engine; the whole capacity is preallocated at start."""

    name: ClassVar[str] = "nvme"
    config_type: ClassVar[type[TierConfig]] = NvmeConfig
