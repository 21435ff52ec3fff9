"""Small blocks: several of a job in one object, so that they cost one PUT, and one GET where they are read together."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from kvstore.backends.base import RecordRead, RecordWrite, outcome_of
from kvstore.backends.groups import grouped
from kvstore.backends.s3.client import ObjectClient, ObjectInfo
from kvstore.backends.s3.config import S3Config
from kvstore.backends.s3.failures import Cause, S3Error
from kvstore.backends.s3.pack_format import RECORD_BYTES_MAX, PackEntry, PackFormat, PackNames, Unreadable
from kvstore.backends.s3.pack_index import PackIndex, Place
from kvstore.backends.s3.pack_reader import PackReader
from kvstore.bounded import BoundedDict
from kvstore.namespace import Namespace
from kvstore.types import BlockKey, Outcome

__all__ = ["FanOut", "PackedBlocks"]

logger = logging.getLogger("kvstore.backends.s3")

_T = TypeVar("_T")
_R = TypeVar("_R")

_OVERLAP_S: Final = 60.0
"""Names are made by the clocks of engines, and seen when their objects are whole: what is newer than this, seen from
the newest name, is listed again. A pack of an engine whose clock is further behind is found at the next start."""

_GET_BYTES_MAX: Final = 4 << 20
"""Neighbours that are read by one request: long enough that a request's own cost is small, short enough that a job has
several streams, and that a broken one does not cost much."""

_PACK_BYTES_MAX: Final = 16 << 20
"""Longest pack: one stream of S3 gives about 90 MB/s."""

_HEADS_AT_ONCE: Final = 64
"""Heads of unknown packs that are read at the same time."""

_NOTE_ENTRIES_MAX: Final = 4096
"""Entries of a note: at some hundred bytes each, far below the longest head."""

_OF_THE_OBJECT: Final = frozenset({Cause.RANGE, Cause.LENGTH, Cause.REJECTED})
"""Failures that are this object's, and would be the same next time."""

_UNREADABLE_MAX: Final = 10_000
"""Names that turned out to be nothing for us, remembered so that they are not read again."""


class FanOut(Protocol):
    """Calls for each item, some at once; when it ends, all calls have ended (``SimpleBackend._fan_out``)."""

    def __call__(
        self,
        call: Callable[[_T], Awaitable[_R]],
        items: Sequence[_T],
        *,
        instead: Callable[[Exception], _R] | None = None,
    ) -> Awaitable[list[_R]]:
        """Call."""
        ...


@dataclass(slots=True)
class _Run:
    """Reads of neighbouring records of one pack."""

    pack: str
    offset: int
    reads: list[RecordRead]
    sizes: list[int]
    size_bytes: int


class PackedBlocks:
    """The blocks of one namespace in packs. For one event loop.

    Args:
        client: Sends requests, with retries.
        config: Times and sizes.
        namespace: Of the blocks.
        fan_out: Runs calls side by side.
        on_lost: Told of blocks whose pack is there no more.
    """

    def __init__(
        self,
        client: ObjectClient,
        config: S3Config,
        namespace: Namespace,
        fan_out: FanOut,
        on_lost: Callable[[Sequence[BlockKey]], None],
    ) -> None:
        self.index = PackIndex()
        self.names = PackNames(config.prefix, namespace)
        self._format = PackFormat(namespace)
        self._reader = PackReader(client, config, namespace)
        self._client = client
        self._config = config
        self._fan_out = fan_out
        self._on_lost = on_lost
        self._newest = 0.0
        self._fresh_until = 0.0
        self._refreshing: asyncio.Task[None] | None = None
        self._writing: dict[BlockKey, asyncio.Future[None]] = {}
        self._others: BoundedDict[str, None] = BoundedDict(_UNREADABLE_MAX)
        self._written = 0
        self._unreadable = 0
        self._ranges_read = 0

    @property
    def counters(self) -> dict[str, int]:
        """What was done so far, by name."""
        return {
            "packs_written": self._written,
            "packs_read": self._reader.reads,
            "packs_unreadable": self._unreadable,
            "pack_ranges_read": self._ranges_read,
        }

    async def close(self) -> None:
        """Stop looking for new packs. Idempotent."""
        task, self._refreshing = self._refreshing, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def put(self, writes: Sequence[RecordWrite]) -> list[Outcome]:
        """Write records, up to ``pack_blocks`` of them in one object; see :meth:`Backend.put`."""
        await self.refresh()
        outcomes = [Outcome.EXISTS] * len(writes)
        ours: dict[BlockKey, int] = {}
        waiting = []
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for i, write in enumerate(writes):
            if write.key in self.index:
                continue
            if write.size_bytes > RECORD_BYTES_MAX:
                outcomes[i] = Outcome.NO_SPACE
            elif write.key in self._writing:
                waiting.append((i, self._writing[write.key]))
            else:
                self._writing[write.key] = done
                ours[write.key] = i
        try:
            groups = list(grouped([writes[i] for i in ours.values()], self._config.pack_blocks, _PACK_BYTES_MAX))
            results = await self._fan_out(self._put_pack, groups, instead=_outcome_of)
        finally:
            for key in ours:
                del self._writing[key]
            done.set_result(None)
        for group, outcome in zip(groups, results, strict=True):
            for write in group:
                outcomes[ours[write.key]] = outcome
        for _, other in waiting:
            # Not awaited itself: whoever is cancelled meanwhile would cancel it, for its writer and all who wait.
            await asyncio.wait([other])
        # Also what was there at first and was removed meanwhile: that it is there must not be heard after it has gone.
        late = [i for i, _ in waiting]
        late += [i for i, write in enumerate(writes) if outcomes[i] is Outcome.EXISTS and write.key not in self.index]
        if late:
            again = await self.put([writes[i] for i in dict.fromkeys(late)])
            for i, outcome in zip(dict.fromkeys(late), again, strict=True):
                outcomes[i] = outcome
        return outcomes

    async def get_into(self, reads: Sequence[RecordRead]) -> list[Outcome]:
        """Read records by ranges of their packs; see :meth:`Backend.get_into`."""
        if any(read.key not in self.index for read in reads):
            await self.refresh()
        outcomes: dict[int, Outcome] = {}
        found: list[tuple[Place, RecordRead]] = []
        for read in reads:
            place = self.index.place(read.key)
            if place is None:
                outcomes[id(read)] = Outcome.MISS
            elif place.size_bytes > read.capacity_bytes:
                outcomes[id(read)] = Outcome.CORRUPT
            else:
                found.append((place, read))
        runs = list(_runs(found))
        for run, outcome in zip(runs, await self._fan_out(self._get_run, runs, instead=_outcome_of), strict=True):
            for read in run.reads:
                outcomes[id(read)] = outcome
        return [outcomes[id(read)] for read in reads]

    async def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Tell which blocks lie in a pack; no request, if what is new was asked for a moment ago."""
        if any(key not in self.index for key in keys):
            await self.refresh()
        return [key in self.index for key in keys]

    async def remove(self, keys: Sequence[BlockKey], *, damaged: bool = False) -> None:
        """Make blocks be gone, for every engine: by a note, as a pack can't be changed; empty packs are deleted.

        Args:
            keys: Of the blocks.
            damaged: Only the copies that are read go; of a block that lies in another pack, too, that one is read next.
        """
        copies = 1 if damaged else None
        removed = [(pack, key) for key in dict.fromkeys(keys) for pack in self.index.packs_of(key)[:copies]]
        if not removed:
            return
        # For this engine at once; a block that is put from now on lies in another pack, which the note does not name.
        empty = self.index.remove(removed)
        folder = len(self.names.folder)
        for start in range(0, len(removed), _NOTE_ENTRIES_MAX):
            part = removed[start : start + _NOTE_ENTRIES_MAX]
            note = self._format.gone_note([(pack[folder:], key) for pack, key in part])
            name = self.names.new(gone=True)
            await self._client.put(name, [note], timeout_s=self._config.store_timeout)
            self._others[name] = None
        await self._client.delete_all(empty, timeout_s=self._config.store_timeout)

    async def refresh(self) -> None:
        """Take in what other engines wrote, unless that was done a moment ago; one does it for all who wait.

        Raises:
            S3Error: The service could not be asked.
        """
        if self._refreshing is None:
            if time.monotonic() < self._fresh_until:
                return
            self._refreshing = asyncio.create_task(self._take_in())
            self._refreshing.add_done_callback(self._end_refresh)
        work = self._refreshing
        # It goes on for the others when this one is cancelled.
        await asyncio.wait([work])
        if work.cancelled():
            raise S3Error(Cause.CLOSED, "The backend was closed.")
        error = work.exception()
        if error is not None:
            raise error.with_traceback(None)

    def _end_refresh(self, task: asyncio.Task[None]) -> None:
        if self._refreshing is task:
            self._refreshing = None
        if not task.cancelled():
            # Read here, as those who waited may be gone.
            task.exception()

    async def _take_in(self) -> None:
        began = time.monotonic()
        after = self.names.after(self._newest - _OVERLAP_S)
        more = True
        while more:
            page = await self._client.list_page(
                self.names.folder, start_after=after, timeout_s=self._config.lookup_timeout
            )
            more = page.more and bool(page.objects)
            if page.objects:
                after = page.objects[-1].key
            unknown = [info for info in page.objects if self._is_unknown(info.key)]
            for start in range(0, len(unknown), _HEADS_AT_ONCE):
                await self._read_all(unknown[start : start + _HEADS_AT_ONCE])
            # Also past what this engine wrote itself, or it would be listed again each time. Not later than now: one
            # engine whose clock is ahead must not hide what all others write from then on.
            times = [self.names.time_of(info.key) or 0.0 for info in page.objects]
            self._newest = max(self._newest, min(max(times, default=0.0), time.time()))
        self._fresh_until = began + self._config.pack_refresh

    def _is_unknown(self, name: str) -> bool:
        return not self.index.knows(name) and name not in self._others

    async def _read_all(self, infos: Sequence[ObjectInfo]) -> None:
        """Read packs and notes, and take them in, in the order of their names."""
        tasks: list[asyncio.Task[list[PackEntry] | list[tuple[str, BlockKey]] | None]] = []
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._read_head(info)) for info in infos]
        except* S3Error as errors:
            raise errors.exceptions[0] from None
        for info, task in zip(infos, tasks, strict=True):
            found = task.result()
            if found is None:
                self._others[info.key] = None
            elif info.key.endswith("p"):
                self.index.add(info.key, [entry for entry in found if isinstance(entry, PackEntry)])
            else:
                pairs = [(self.names.folder + pair[0], pair[1]) for pair in found if isinstance(pair, tuple)]
                self.index.remove(pairs)
                self._others[info.key] = None

    async def _read_head(self, info: ObjectInfo) -> list[PackEntry] | list[tuple[str, BlockKey]] | None:
        """Return what a pack or a note holds; None if it is neither, or gone, or the service refuses this one."""
        if self.names.time_of(info.key) is None:
            return None
        is_note = info.key.endswith("r")
        try:
            return await (self._reader.note(info) if is_note else self._reader.pack(info))
        except Unreadable:
            self._unreadable += 1
            return None
        except S3Error as error:
            if error.cause not in _OF_THE_OBJECT:
                raise
            # An engine does without it, or none could work beside one such object.
            self._unreadable += 1
            return None

    async def _put_pack(self, writes: Sequence[RecordWrite]) -> Outcome:
        head, entries = self._format.pack_head([(write.key, write.size_bytes) for write in writes])
        buffers: list[bytes | memoryview] = [head]
        for write in writes:
            buffers += write.buffers
        size = sum(write.size_bytes for write in writes)
        name = self.names.new()
        timeout_s = self._config.store_timeout + size / self._config.bytes_per_second_min
        # Nobody else has this name, so that a second attempt writes the same once more.
        await self._client.put(name, buffers, timeout_s=timeout_s)
        self._written += 1
        self.index.add(name, entries)
        return Outcome.OK

    async def _get_run(self, run: _Run) -> Outcome:
        targets: list[memoryview] = []
        for read, size in zip(run.reads, run.sizes, strict=True):
            targets += _first_bytes(read.buffers, size)
        timeout_s = self._config.load_timeout + run.size_bytes / self._config.bytes_per_second_min
        try:
            found = await self._client.get_into(run.pack, targets, offset=run.offset, timeout_s=timeout_s)
        finally:
            for target in targets:
                target.release()
        self._ranges_read += 1
        if found is None:
            lost = self.index.forget(run.pack)
            if lost:
                self._on_lost(lost)
            return Outcome.MISS
        if found.size_bytes != run.size_bytes:
            return Outcome.CORRUPT
        for read, size in zip(run.reads, run.sizes, strict=True):
            read.filled_bytes = size
        return Outcome.OK


def _runs(found: Sequence[tuple[Place, RecordRead]]) -> Iterator[_Run]:
    """Coalesce reads of neighbours."""
    run: _Run | None = None
    for place, read in sorted(found, key=lambda pair: (pair[0].pack, pair[0].offset)):
        if (
            run is not None
            and (run.pack, run.offset + run.size_bytes) == (place.pack, place.offset)
            and run.size_bytes + place.size_bytes <= _GET_BYTES_MAX
        ):
            run.reads.append(read)
            run.sizes.append(place.size_bytes)
            run.size_bytes += place.size_bytes
            continue
        if run is not None:
            yield run
        run = _Run(place.pack, place.offset, [read], [place.size_bytes], place.size_bytes)
    if run is not None:
        yield run


def _first_bytes(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    found = []
    for buffer in buffers:
        piece = buffer[: min(count, buffer.nbytes)]
        count -= piece.nbytes
        if piece.nbytes:
            found.append(piece)
    return found


def _outcome_of(error: Exception) -> Outcome:
    return error.outcome if isinstance(error, S3Error) else outcome_of(error)
