"""A session: the open files of a disk backend from ``open`` to ``close``, with their upkeep."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final

from kvstore.backends.base import RecordGeometry
from kvstore.backends.slots.blocks import Blocks
from kvstore.backends.slots.claims import Claims
from kvstore.backends.slots.config import SlotsConfig
from kvstore.backends.slots.followers import Followers
from kvstore.backends.slots.index import Index, News
from kvstore.backends.slots.layout import PAGE, SLOTS_MAX, slot_lengths
from kvstore.backends.slots.notes import SegmentNotes
from kvstore.backends.slots.root import Root, open_root
from kvstore.backends.slots.rows import TableWriter
from kvstore.backends.slots.segment import Segment
from kvstore.backends.slots.space import Space
from kvstore.codec.record import HEADER_BYTES
from kvstore.diskio import OsDisk, TransferEngine
from kvstore.errors import BackendUnavailableError, ConfigError
from kvstore.namespace import Namespace
from kvstore.tenants import Tenants
from kvstore.types import BlockKey, RemovalCause

_log = logging.getLogger("kvstore.backends.disk")

_SEGMENT_BYTES_MIN: Final = 64 << 20
_SEGMENT_BYTES_MAX: Final = 16 << 30
_SEGMENTS_WANTED: Final = 64
_SEGMENTS_MIN: Final = 16
"""A capacity is divided into 64 segments of 64 MiB to 16 GiB; a small one into 16 smaller segments. A segment that is
held takes two descriptors."""

_SLOT_BYTES_MAX: Final = 1 << 30
_UPKEEP_S: Final = 1.0


class Session:
    """Roots, index, tables and engine of an open backend; created by :meth:`open`."""

    engine: TransferEngine
    index: Index
    tables: TableWriter
    space: Space
    followers: Followers
    notes: SegmentNotes
    blocks: Blocks

    def __init__(
        self,
        disk: OsDisk,
        config: SlotsConfig,
        counts: Counter[str],
        on_added: Callable[[Sequence[BlockKey]], None],
        on_removed: Callable[[Sequence[BlockKey], RemovalCause], None],
        tenants: Tenants | None = None,
    ) -> None:
        self.roots: list[Root] = []
        self.removed = False  # Whether our directory was deleted.
        self.disk = disk
        self.config = config
        self._counts = counts
        self._on_added = on_added
        self._on_removed = on_removed
        self._tenants = tenants
        self._files = contextlib.ExitStack()
        self._tasks: set[asyncio.Task[None]] = set()
        self._gone: list[Segment] = []

    async def open(self, namespace: Namespace, geometry: RecordGeometry) -> None:
        """Open the roots, and take the segments that no engine holds.

        Raises:
            ConfigError: The configuration can't be used here.
            BackendError: A disk fails.
        """
        if geometry.header_bytes > HEADER_BYTES:
            raise ConfigError(f"Headers of {geometry.header_bytes} bytes; the disk backend takes {HEADER_BYTES}.")
        slot_bytes = slot_lengths(geometry.payload_bytes_max)[0]
        if slot_bytes > _SLOT_BYTES_MAX:
            raise ConfigError(f"Blocks of {geometry.payload_bytes_max} bytes; the disk backend takes 1 GiB at most.")
        self.engine = TransferEngine(self.disk, self.config.engine, threads=self.config.threads)
        try:
            await self.engine.call(partial(self._open_roots, namespace))
            slots = self._segment_slots(slot_bytes)
            # The header has a page of its own.
            await self._begin(slot_bytes, slots, geometry.header_bytes + slot_bytes - PAGE)
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
        """Finish all pending writes and close everything, if the disk responds."""
        ending = asyncio.get_running_loop().create_task(self._end())
        try:
            await asyncio.wait({ending}, timeout=timeout_s)
        finally:
            ending.cancel()
        await self._release(timeout_s)

    def close_late(self) -> None:
        """Close the files once the last thread has left the kernel, without waiting for that."""
        for task in self._tasks:
            task.cancel()
        self.engine.release(self._files.close)

    async def _end(self) -> None:
        await self.space.close()
        await self.notes.settle()
        with contextlib.suppress(OSError):
            await self.tables.settle()
        await self.tables.end()

    def _open_roots(self, namespace: Namespace) -> None:
        for position in range(len(self.config.paths)):
            self.roots.append(open_root(self.disk, position, self.config, namespace))
            self._files.callback(self.roots[-1].close)

    def _segment_slots(self, slot_bytes: int) -> int:
        """Return the number of slots of a new segment."""
        capacity = min(root.capacity_bytes for root in self.roots)
        if capacity < slot_bytes:
            raise ConfigError(
                f"'capacity' is {str(self.config.capacity)!r}, which leaves {capacity} bytes for a root, and one "
                f"block takes {slot_bytes}. Give room for many blocks, such as '100GiB'."
            )
        wanted = min(_SEGMENT_BYTES_MAX, max(_SEGMENT_BYTES_MIN, capacity // _SEGMENTS_WANTED))
        wanted = min(wanted, capacity // _SEGMENTS_MIN)
        return min(SLOTS_MAX, max(1, wanted // slot_bytes))

    async def _begin(self, slot_bytes: int, slots: int, record_bytes_max: int) -> None:
        """Create the index, take segments, and start the upkeep."""
        durable = self.config.durability == "data"
        slots_max = sum(root.capacity_bytes for root in self.roots) // slot_bytes
        claims = Claims()
        self.index = Index(slots_max, self._tenants)
        self._files.callback(self._close_segments)
        self.tables = TableWriter(self.engine, self.index, durable=durable)
        self.followers = Followers(self.engine, self.roots, self.index, self._report, self._close_later)
        self._files.callback(self.followers.close)
        self.space = Space(
            self.engine, self.roots, self.index, self.tables, self.followers, claims, self._counts, slot_bytes, slots,
            self._on_removed,
        )  # fmt: skip
        self.notes = SegmentNotes(self.engine, self.roots, self.index)
        self.blocks = Blocks(
            self.engine, self.index, self.tables, self.space, self.followers, claims, self._counts, record_bytes_max,
            durable, self._on_removed,
        )  # fmt: skip
        await self._take_segments(report=False)
        # A scan reports the other engines' blocks.
        await self.followers.refresh(report=False)
        self._start(self._keep_up())
        self._start(self.followers.run())

    async def _keep_up(self) -> None:
        """Perform the duties of upkeep until cancelled; each fails alone, and the next round retries it."""
        while True:
            for name, duty in self.duties().items():
                try:
                    with self.index.running:
                        await duty()
                except OSError as error:
                    level = logging.DEBUG if self._counts[f"upkeep_{name}_errors"] else logging.WARNING
                    _log.log(level, "upkeep (%s) failed: %s", name, error)
                    self._counts[f"upkeep_{name}_errors"] += 1
                    self._counts["upkeep_errors"] += 1
            await asyncio.sleep(_UPKEEP_S)

    def duties(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """Return the duties of upkeep by name."""
        return {
            "directory": self._notice_removal,
            "rows": self.tables.settle,
            "uses": self._count_uses,
            "files": self._match_files,
            "segments": self._take_segments,
        }

    async def _take_segments(self, *, report: bool = True) -> None:
        """Take segments that no engine holds, and report their blocks: their engines may have ended since."""
        for root in self.roots:
            ours = {each.number for each in self.index.segments.values() if each.root == root.position}
            # One at a time, because the content of all tables together is as large as the index.
            segments = root.take_segments(ours)
            while (taken := await self.engine.call(partial(next, segments, None))) is not None:
                if (keys := self.space.admit(*taken)) and report:
                    self._on_added(keys)

    async def _count_uses(self) -> None:
        """Count the uses of our blocks by other engines."""
        segments = list(self.index.segments.values())
        marked = await self.engine.call(lambda: [self.roots[each.root].take_uses(each) for each in segments])
        for segment, slots in zip(segments, marked, strict=True):
            self.index.touch([segment.first + slot for slot in slots])

    async def _notice_removal(self) -> None:
        status = await self.engine.call(partial(self.disk.fstat, self.roots[0].namespace_fd))
        if not status.st_nlink and not self.removed:
            _log.warning("%r was removed while in use; its blocks are lost", self.roots[0].path)
            self.removed = True

    async def _match_files(self) -> None:
        """Drop segments whose files were deleted or have another length: nobody else could read new blocks there."""
        segments = list(self.index.segments.values())
        intact = await self.engine.call(lambda: [self.roots[each.root].has_files_of(each) for each in segments])
        for segment in [segment for segment, good in zip(segments, intact, strict=True) if not good]:
            if keys := self.index.close_segment(segment):
                self._on_removed(keys, RemovalCause.LOST)
            self._close_later(segment)

    def _report(self, news: News) -> None:
        if news.added:
            self._on_added(news.added)
        if news.removed:
            self._on_removed(news.removed, RemovalCause.EVICTED)

    def _close_later(self, segment: Segment) -> None:
        """Close the files of a segment that is gone once no operation uses them any more."""
        self._gone.append(segment)
        self.notes.forget(segment)
        if len(self._gone) == 1:
            self._start(self._close_gone())

    async def _close_gone(self) -> None:
        while gone := list(self._gone):
            await self.index.turn()
            for segment in gone:
                segment.close()
                if self.index.known.get(segment.id) is segment:
                    del self.index.known[segment.id]
            del self._gone[: len(gone)]

    def _close_segments(self) -> None:
        for segment in [*self.index.known.values(), *self._gone]:
            segment.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _release(self, timeout_s: float) -> None:
        if tasks := set(self._tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=timeout_s)
        if await self.engine.close(timeout_s):
            self._files.close()
        else:
            self.close_late()
