"""The disk backend: records in slots of segments, each described by a row of a table, and an index in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from kvstore.backends.base import BackendStats, RecordGeometry, RecordRead, RecordWrite, SharedMedium
from kvstore.backends.disk.blocks import Blocks
from kvstore.backends.disk.config import DiskConfig
from kvstore.backends.disk.limits import LIMITS, Limits
from kvstore.backends.disk.opening import check_root
from kvstore.backends.disk.segment import Segment
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

_SCAN_BATCH: Final = 1024

_COUNTS: Final = ("evicted_blocks", "segments_added", "segments_given_up", "upkeep_errors")
"""Counters reported from the start; all others appear with their first count."""


class DiskBackend(SharedMedium):
    """Blocks in preallocated segments of equal slots, in directories that engines share. See ``docs/disk.md``.

    Further guarantees: each engine writes only to segments that it holds. No store, load or lookup takes a lock of
    another process. A slot is not reused while this engine reads it. The segments of all engines together never exceed
    ``capacity``.

    In a forked process the backend is closed.

    With ``reads_only``, it holds no segment and takes no stores, and other engines do not see it.

    Tests replace ``disk`` to inject faults, and shorten ``limits``.
    """

    name: ClassVar[str] = "file"
    config_type: ClassVar[type[TierConfig]] = DiskConfig
    path_option: ClassVar[str] = "path"
    # The header is copied into our header page; payloads of whole pages are transferred without a copy.
    alignment: ClassVar[int] = HEADER_BYTES
    holdings_type: ClassVar[str] = "kvstore.backends.disk.holdings:DiskHoldings"
    authoritative: bool = True

    def __init__(
        self, config: DiskConfig, *, disk: OsDisk | None = None, reads_only: bool = False, limits: Limits = LIMITS
    ) -> None:
        super().__init__(config)
        self._limits = limits
        self.takes_stores = not reads_only
        self.config: DiskConfig = config
        self._disk = disk or OsDisk()
        self._open: Session | None = None
        self._opening: asyncio.Task[Session] | None = None
        self._counts = Counter(dict.fromkeys(_COUNTS, 0))
        self._calls = CallsUnderWay()
        self._closing = asyncio.Lock()
        self._of_parent: tuple[object, ...] = ()
        leave_at_fork(self)

    def check(self) -> None:
        for position in range(len(self.config.paths)):
            check_root(self._disk, position, self.config)

    def reader(self) -> DiskBackend:
        """Return a backend that finds the blocks of this one within about a second."""
        return DiskBackend(self.config, disk=self._disk, reads_only=True, limits=self._limits)

    async def open(self, namespace: Namespace, geometry: RecordGeometry) -> None:
        """Take the segments that no engine holds, and read their tables.

        Raises:
            ConfigError: A path or the capacity can't be used, or a root has another format.
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
                await asyncio.wait({self._opening}, timeout=self._limits.open_s)
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
        """Wait for running calls, close all files. Idempotent; also after a failed ``open``."""
        async with self._closing:
            session, self._open = self._open, None
            if session is None:
                await self._end_opening()
                return
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._limits.close_s):
                        await self._calls.ended()
                await session.close(self._limits.close_s)
            except asyncio.CancelledError:
                session.close_late()
                raise

    async def exists(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """Return for each key whether the index has it."""
        with self._working():
            index = self._opened().index
            return [index.place(key) != NOWHERE for key in keys]

    async def put(self, writes: Sequence[RecordWrite]) -> Sequence[Outcome]:
        """Publish records, evicting others if necessary. Records without a slot are NO_SPACE; a reader sheds all."""
        with self._working() as blocks:
            return await blocks.put(writes) if self.takes_stores else [Outcome.SHED] * len(writes)

    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:
        """Read records into their buffers, all in one batch."""
        with self._working() as blocks:
            return await blocks.get_into(reads)

    async def delete(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """Remove blocks, so that neither a restart nor another engine finds them again."""
        with self._working() as blocks:
            return await blocks.delete(keys)

    async def quarantine(self, keys: Sequence[BlockKey]) -> None:
        """Remove blocks that failed verification, and retire their slots: the medium may be bad there."""
        with self._working() as blocks:
            await blocks.quarantine(keys)

    async def scan(self) -> AsyncIterator[BlockInfo]:
        """Yield every block of the namespace, of each segment the coldest first."""
        async for segment, slots, keys in self._scanned():
            for slot, key in zip(slots.tolist(), keys, strict=True):
                yield BlockInfo(key, segment.size_view[slot])

    async def scan_keys(self) -> AsyncIterator[Sequence[BlockKey]]:
        """Yield the keys of :meth:`scan`, many at a time."""
        async for _, _, keys in self._scanned():
            yield keys

    async def probe(self) -> None:
        """Write the rows that could not be written so far, and see whether a disk answers.

        Raises:
            BackendError: Every disk fails.
        """
        with self._working():
            try:
                await self._opened().probe()
            except OSError as error:
                raise BackendUnavailableError(
                    f"{self.config.paths} can't be used: {error}", backend=self.name
                ) from error

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Record a use of blocks, for eviction."""
        if self._open is not None:
            session = self._open
            session.blocks.note_use([place for key in keys if (place := session.index.place(key)) != NOWHERE])

    def note(self, notes: Sequence[tuple[BlockKey, bytes]]) -> None:
        """Append notes of our own blocks to the files of their segments."""
        if self._open is not None:
            self._open.notes.add(notes)

    async def notes(self) -> Mapping[BlockKey, bytes]:
        """Return the notes of our own blocks."""
        with self._working():
            return await self._opened().notes.load()

    def own(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """Return for each block whether it is in one of our slots; other engines report their own blocks."""
        if self._open is None or not any(map(len, self._open.followers)):
            return [True] * len(keys)
        index = self._open.index
        places = [index.place(key) for key in keys]
        return [place != NOWHERE and index.at(place)[0].is_ours for place in places]

    def stats(self) -> BackendStats:
        """Return current figures. ``used_bytes`` counts our slots in full, ``foreign_blocks`` other engines' blocks."""
        if self._open is None:
            return BackendStats(counters=dict(self._counts))
        session = self._open
        segments = session.index.segments.values()
        blocks, used_bytes = session.index.used()
        return BackendStats(
            blocks=blocks,
            used_bytes=used_bytes,
            capacity_bytes=sum(root.capacity_bytes for root in session.roots),
            counters=dict(self._counts),
            gauges={
                "free_slots": float(session.index.free_slots()),
                "segments": float(len(segments)),
                "segment_bytes": float(sum(segment.head.segment_bytes for segment in segments)),
                # ``blocks`` includes those whose rows are being removed, which the index lacks already.
                "foreign_blocks": float(max(0, len(session.index) - blocks)),
                "unsettled_rows": float(len(session.tables.unsettled)),
                "io_uring": float(session.drives.name == "io_uring"),
            },
            ready=not session.removed,
            is_lost=session.removed,
        )

    def leave_to_parent(self) -> None:
        """Close this copy in a forked process, which has neither its threads nor its loop; the parent's goes on."""
        # Kept, because the end of a ring is the parent's, too.
        self._of_parent = self._open, self._opening, self._of_parent
        self._open = self._opening = None

    async def _scanned(self) -> AsyncIterator[tuple[Segment, npt.NDArray[np.int64], list[BlockKey]]]:
        """Yield blocks as segment, slots and keys."""
        index = self._opened().index
        for segment in list(index.known.values()):
            held = segment.held()
            held = held[segment.age[held].argsort(kind="stable")]
            for start in range(0, len(held), _SCAN_BATCH):
                # Some may have left since.
                slots = index.found(segment, held[start : start + _SCAN_BATCH])
                yield segment, slots, segment.keys(slots)
                # Other coroutines run between two pages.
                await asyncio.sleep(0)

    async def _end_opening(self) -> None:
        """Cancel a running ``open``, and close its files if the disk responds."""
        opening = self._opening
        if opening is None:
            return
        opening.cancel()
        await asyncio.wait({opening}, timeout=self._limits.close_s)
        if opening.done():
            self._opening = None
            if not opening.cancelled() and opening.exception() is None:
                await opening.result().close(self._limits.close_s)

    async def _open_session(self, namespace: Namespace, geometry: RecordGeometry) -> Session:
        listeners = self._report_added, self._report_removed
        session = Session(
            self._disk, self.config, self._counts, *listeners, self.tenants, self._limits,
            reads_only=not self.takes_stores,
        )  # fmt: skip
        await session.open(namespace, geometry)
        return session

    def _report_added(self, keys: Sequence[BlockKey]) -> None:
        self._arrival_listener(keys)

    def _report_removed(self, keys: Sequence[BlockKey], cause: RemovalCause) -> None:
        self._removal_listener(keys, cause)

    def _opened(self) -> Session:
        if self._open is None:
            text = OF_PARENT if self._of_parent else "not open: use it after open() and before close()"
            raise BackendClosedError(text, backend=self.name)
        return self._open

    @contextlib.contextmanager
    def _working(self) -> Iterator[Blocks]:
        """Hold the session open for a call."""
        session = self._opened()
        if session.removed:
            raise BackendUnavailableError(
                f"{self.config.paths} were deleted or renamed while in use. A tier makes them again.", backend=self.name
            )
        with self._calls:
            try:
                yield session.blocks
            finally:
                self.last_error = session.blocks.last_error or self.last_error
