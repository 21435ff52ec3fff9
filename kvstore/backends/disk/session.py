"""A session: the open files of a disk backend from ``open`` to ``close``, with their upkeep."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final

from kvstore.backends.base import RecordGeometry
from kvstore.backends.disk.blocks import Blocks
from kvstore.backends.disk.claims import Claims
from kvstore.backends.disk.config import DiskConfig
from kvstore.backends.disk.drives import Drives
from kvstore.backends.disk.followers import Followers
from kvstore.backends.disk.index import Index, News
from kvstore.backends.disk.layout import PAGE, SLOTS_MAX, slot_lengths
from kvstore.backends.disk.ledger import LedgerBusyError
from kvstore.backends.disk.limits import LIMITS, Limits
from kvstore.backends.disk.notes import SegmentNotes
from kvstore.backends.disk.opening import check_drives, open_root
from kvstore.backends.disk.root import Root
from kvstore.backends.disk.rows import TableWriter
from kvstore.backends.disk.space import Space
from kvstore.codec.record import HEADER_BYTES
from kvstore.diskio import OsDisk
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
_ABANDON_S: Final = 1.0
"""Time limit for each step of closing after a failed start."""


def segment_slots(capacity_bytes: int, slot_bytes: int) -> int:
    """Return the number of slots of a new segment in a root of this capacity."""
    wanted = min(_SEGMENT_BYTES_MAX, max(_SEGMENT_BYTES_MIN, capacity_bytes // _SEGMENTS_WANTED))
    wanted = min(wanted, capacity_bytes // _SEGMENTS_MIN)
    return min(SLOTS_MAX, max(1, wanted // slot_bytes))


class Session:
    """Roots, index, tables and engine of an open backend; created by :meth:`open`."""

    drives: Drives
    index: Index
    tables: TableWriter
    space: Space
    followers: list[Followers]
    notes: SegmentNotes
    blocks: Blocks

    def __init__(
        self,
        disk: OsDisk,
        config: DiskConfig,
        counts: Counter[str],
        on_added: Callable[[Sequence[BlockKey]], None],
        on_removed: Callable[[Sequence[BlockKey], RemovalCause], None],
        tenants: Tenants | None = None,
        limits: Limits = LIMITS,
        *,
        reads_only: bool = False,
    ) -> None:
        self.roots: list[Root] = []
        self.followers = []
        self.disk = disk
        self.config = config
        self._counts = counts
        self._on_added = on_added
        self._on_removed = on_removed
        self._tenants = tenants
        self._limits = limits
        self._reads_only = reads_only
        self._tasks: list[asyncio.Task[None]] = []
        self._removed: set[int] = set()  # Positions of roots whose directory was deleted.

    async def open(self, namespace: Namespace, geometry: RecordGeometry) -> None:
        """Open the roots, and take the segments that no engine holds.

        Raises:
            ConfigError: The configuration can't be used here.
            BackendError: A disk fails.
        """
        if geometry.header_bytes > HEADER_BYTES:
            raise ConfigError(f"Headers of {geometry.header_bytes} bytes; the disk backend takes {HEADER_BYTES}.")
        lengths = slot_lengths(geometry.payload_bytes_max)
        slot_bytes = lengths[0]
        if slot_bytes > _SLOT_BYTES_MAX:
            raise ConfigError(f"Blocks of {geometry.payload_bytes_max} bytes; the disk backend takes 1 GiB at most.")
        config = self.config
        self.drives = Drives(
            self.disk, config.engine, len(config.paths), threads=config.threads, frozen_s=self._limits.frozen_s
        )
        try:
            await self._open_roots(namespace)
            # The header has a page of its own.
            await self._begin(lengths, geometry.header_bytes + slot_bytes - PAGE)
        except OSError as error:
            await self._abandon()
            raise BackendUnavailableError(
                f"{self.config.paths} can't be used now: {error.strerror or error}. Free some space or check the disk.",
                backend="file",
            ) from error
        except BaseException:
            await asyncio.shield(self._abandon())
            raise

    async def close(self, timeout_s: float) -> None:
        """Finish all pending writes and close everything, if the disk responds."""
        self._stop()
        await _for_a_while(self._end(), timeout_s)
        await self._release(timeout_s)

    def close_late(self) -> None:
        """Close the files once the last thread has left the kernel, without waiting for that."""
        self._stop()
        self.drives.release(self._close_root)

    def _stop(self) -> None:
        """End upkeep, except for work under way, which may hold locks."""
        for task in self._tasks:
            task.cancel()
        for each in self.followers:
            # Here, because the files may be closed on a thread, and a loop's readers are its own.
            each.close()

    async def _end(self) -> None:
        await self.space.close()
        await self.notes.settle()
        for root in self.roots:
            with contextlib.suppress(OSError):
                await self.tables.settle(root.position)
        await self.tables.end()
        await self._leave()

    async def _leave(self) -> None:
        """Remove this engine's files in the roots, on a thread: a frozen disk would block the loop."""
        for root in self.roots:
            await self.drives.of(root.position).call(root.members.leave)

    async def _abandon(self) -> None:
        """Close what a failed :meth:`open` has opened."""
        await _for_a_while(self._leave(), _ABANDON_S)
        await self._release(_ABANDON_S)

    async def _open_roots(self, namespace: Namespace) -> None:
        """Open each root with its own engine, at whose end its files are closed."""
        await self.drives.of(0).call(partial(check_drives, self.disk, self.config))
        for position in range(len(self.config.paths)):
            await self.drives.of(position).call(partial(self._open_root, position, namespace))
        for root in () if self._reads_only else self.roots:
            await self.drives.of(root.position).call(partial(root.note_roots, len(self.roots)))
            await self.drives.of(root.position).call(partial(root.members.state, 0))

    def _open_root(self, position: int, namespace: Namespace) -> None:
        self.roots.append(open_root(self.disk, position, self.config, namespace))

    def _close_root(self, position: int) -> None:
        # One that was not opened is not there.
        for root in self.roots[position : position + 1]:
            root.close()

    def _segment_bytes(self, slot_bytes: int) -> int:
        """Return the length of the longest segment."""
        capacity = min(root.capacity_bytes for root in self.roots)
        if capacity < slot_bytes:
            raise ConfigError(
                f"'capacity' is {str(self.config.capacity)!r}, which leaves {capacity} bytes for a root, and one "
                f"block takes {slot_bytes}. Give room for many blocks, such as '100GiB'."
            )
        return segment_slots(capacity, slot_bytes) * slot_bytes

    async def _begin(self, lengths: Sequence[int], record_bytes_max: int) -> None:
        """Create the index, take segments, and start the upkeep."""
        durable = self.config.durability == "data"
        slots_max = sum(root.capacity_bytes for root in self.roots) // lengths[0]
        claims = Claims()
        self.index = Index(slots_max, self._tenants)
        self.tables = TableWriter(self.drives, self.index, self._is_alone, durable=durable)
        self.followers = [Followers(self.drives, root, self.index, self._report) for root in self.roots]
        self.notes = SegmentNotes(self.drives, self.roots, self.index)
        self.space = Space(
            self.drives, self.roots, self.index, self.tables, self.followers, self.notes, claims, self._counts,
            lengths, self._segment_bytes(lengths[0]), self._limits, self._on_added, self._on_removed,
        )  # fmt: skip
        self.blocks = Blocks(
            self.drives, self.index, self.tables, self.space, self.followers, claims, self._counts, record_bytes_max,
            durable, self._on_removed,
        )  # fmt: skip
        for root in () if self._reads_only else self.roots:
            # The ledger may be free in the first round of upkeep.
            with contextlib.suppress(LedgerBusyError):
                await self.space.take_segments(root, report=False)
        for each in self.followers:
            # A scan reports the other engines' blocks.
            await each.refresh(report=False)
        loop = asyncio.get_running_loop()
        work = [*map(self._keep_up, self.roots), *[each.run() for each in self.followers]]
        self._tasks = [loop.create_task(each) for each in work]

    async def _keep_up(self, root: Root) -> None:
        """Perform the duties of upkeep until cancelled; each fails alone, and the next round retries it.

        Each root has its own, so that one that fails or freezes stops no other one.
        """
        while True:
            for name, duty in self.duties(root).items():
                try:
                    with contextlib.suppress(LedgerBusyError):
                        await duty()
                except Exception as error:  # A failing duty must not end the others.
                    level = logging.DEBUG if self._counts[f"upkeep_{name}_errors"] else logging.WARNING
                    _log.log(level, "upkeep (%s) failed: %s", name, error)
                    self._counts[f"upkeep_{name}_errors"] += 1
                    self._counts["upkeep_errors"] += 1
            await asyncio.sleep(self._limits.upkeep_s)

    def duties(self, root: Root) -> dict[str, Callable[[], Awaitable[None]]]:
        """Return the duties of upkeep of a root by name."""
        directory: dict[str, Callable[[], Awaitable[None]]] = {"directory": partial(self._notice_removal, root)}
        if self._reads_only:
            return directory
        return directory | {
            "rows": partial(self.tables.settle, root.position),
            "uses": partial(self._count_uses, root),
            "files": partial(self.space.drop_lost, root),
            "shares": partial(self.space.share, root),
            "segments": partial(self.space.take_segments, root, report=True),
        }

    async def probe(self) -> None:
        """Write the rows that could not be written so far, and see whether a disk answers.

        Raises:
            OSError: Every root fails.
        """
        # All at once, because a frozen root doesn't answer.
        pending = {asyncio.get_running_loop().create_task(self._probe(root)) for root in self.roots}
        try:
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                errors = [error for task in done if (error := task.exception()) is not None]
                if len(errors) < len(done):
                    return
            raise errors[0]
        finally:
            for task in pending:
                task.cancel()

    async def _probe(self, root: Root) -> None:
        await self.tables.settle(root.position)
        await self.drives.of(root.position).call(root.free_bytes)

    @property
    def removed(self) -> bool:
        """Whether the directories of all roots were deleted."""
        return len(self._removed) == len(self.roots)

    async def _count_uses(self, root: Root) -> None:
        """Count the uses of our blocks by other engines."""
        segments = self.index.segments_in(root.position)
        marked = await self.drives.of(root.position).call(lambda: [root.take_uses(each) for each in segments])
        for segment, slots in zip(segments, marked, strict=True):
            self.index.touch([segment.first + slot for slot in slots])

    def _is_alone(self) -> bool:
        return not any(root.members.are_there for root in self.roots)

    def _report(self, news: News) -> None:
        if news.added:
            self._on_added(news.added)
        if news.removed:
            self._on_removed(news.removed, RemovalCause.EVICTED)

    async def _notice_removal(self, root: Root) -> None:
        is_gone = await self.drives.of(root.position).call(partial(self._is_gone, root))
        if is_gone and root.position not in self._removed:
            _log.warning("%r was removed while in use; its blocks are lost", root.path)
            self._removed.add(root.position)

    def _is_gone(self, root: Root) -> bool:
        """Return whether a root was deleted or, for a reader, left by all engines for another one; on a thread."""
        if root.is_gone():
            return True
        if not self._reads_only:
            return False
        # Another directory has its name, which the next I/O process of the engine opens.
        with contextlib.suppress(FileNotFoundError):
            fd = self.disk.open_root(root.path)
            try:
                is_other = not os.path.samestat(self.disk.fstat(fd), self.disk.fstat(root.fd))
            finally:
                self.disk.close(fd)
            return is_other and not root.members.others()
        return False

    async def _release(self, timeout_s: float) -> None:
        self._stop()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        if await self.drives.close(timeout_s):
            for root in self.roots:
                root.close()
        else:
            self.close_late()


async def _for_a_while(work: Coroutine[Any, Any, None], timeout_s: float) -> None:
    """Do work until the timeout; a call that hangs in the kernel is left behind."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
    finally:
        task.cancel()
