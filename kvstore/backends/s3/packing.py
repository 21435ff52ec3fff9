"""Small blocks: several blocks of a job share one object, so they cost one PUT, and one GET if read together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from kvstore.backends.base import RecordRead, RecordWrite, outcome_of
from kvstore.backends.groups import grouped
from kvstore.backends.s3.client import ObjectClient
from kvstore.backends.s3.config import S3Config
from kvstore.backends.s3.failures import Cause, S3Error
from kvstore.backends.s3.packs import RECORD_BYTES_MAX, Pack, PackEntry, PackReader
from kvstore.backends.vectored import cut
from kvstore.bounded import BoundedDict
from kvstore.namespace import Namespace
from kvstore.types import BlockKey, Outcome

_OVERLAP_S: Final = 60.0
"""Part of the listing that each refresh repeats: names contain their writer's time, and an object appears only when
it is complete. Packs of an engine whose clock lags further are found at the next start."""

_GET_BYTES_MAX: Final = 4 << 20
"""Longest range of adjacent records read by one request: long enough to amortize the request, short enough that a job
uses several streams and a broken stream costs little."""

_PACK_BYTES_MAX: Final = 16 << 20
"""Longest pack: one S3 stream reaches about 90 MB/s."""

_NOTE_ENTRIES_MAX: Final = 4096
"""Maximum entries of a note: at about a hundred bytes each, far below the longest head."""

_OBJECT_CAUSES: Final = frozenset({Cause.RANGE, Cause.LENGTH, Cause.REJECTED})
"""Failures of one object, which a retry would repeat."""

_UNREADABLE_MAX: Final = 10_000
"""Names of notes and unreadable objects, remembered so that they are not read again."""

_BLOCKS_MAX: Final = 1_000_000
"""Maximum blocks in the index, about 300 MB of memory. Beyond that, the index drops the packs that it added first, and
their blocks are misses."""

_EMPTIED_MAX: Final = 10_000
"""Packs without blocks that the index remembers, so that they are not read again while they are still listed."""

_GONE_MAX: Final = 100_000
"""Maximum removals from unknown packs: clocks differ, so a note may be listed before its pack."""


class Place(NamedTuple):
    """Location of a record: its pack, and offset and length within the pack."""

    pack: str
    offset: int
    size_bytes: int


_Found = tuple[Place, RecordRead]


class PackedBlocks:
    """The blocks of one namespace in packs. For one event loop.

    ``fan_out``: runs a call for each item with bounded concurrency (the backend's). ``on_lost``: called with the blocks
    of a pack that no longer exists.
    """

    def __init__(
        self,
        client: ObjectClient,
        config: S3Config,
        namespace: Namespace,
        fan_out: Callable[..., Awaitable[list[Any]]],
        on_lost: Callable[[Sequence[BlockKey]], None],
    ) -> None:
        self.index = PackIndex()
        self._reader = PackReader(client, config.prefix, namespace)
        self._format = self._reader.format
        self._names = self._reader.names
        self._client = client
        self._config = config
        self._fan_out = fan_out
        self._on_lost = on_lost
        self._newest = 0.0
        self._fresh_until = 0.0
        self._refreshing: asyncio.Task[None] | None = None
        self._writing: dict[BlockKey, asyncio.Future[None]] = {}
        self._skipped: BoundedDict[str, None] = BoundedDict(_UNREADABLE_MAX)
        self._counted = dict.fromkeys(("packs_written", "packs_unreadable", "pack_ranges_read"), 0)

    @property
    def counters(self) -> dict[str, int]:
        """Counters by name, for statistics."""
        return {**self._counted, "packs_read": self._reader.reads}

    async def close(self) -> None:
        """Stop looking for new packs. Idempotent."""
        task, self._refreshing = self._refreshing, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def put(self, writes: Sequence[RecordWrite]) -> list[Outcome]:
        """Write records, up to ``pack_blocks`` of them in one object."""
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
            results = await self._fan_out(self._put_pack, groups, instead=outcome_of)
        finally:
            for key in ours:
                del self._writing[key]
            done.set_result(None)
        for group, outcome in zip(groups, results, strict=True):
            for write in group:
                outcomes[ours[write.key]] = outcome
        for _, other in waiting:
            # asyncio.wait, because a cancelled direct await would cancel the future for the writer and all waiters.
            await asyncio.wait([other])
        # Also blocks that were in the index above and have been removed since: they must not be reported as EXISTS.
        late = [i for i, _ in waiting]
        late += [i for i, write in enumerate(writes) if outcomes[i] is Outcome.EXISTS and write.key not in self.index]
        if late:
            again = await self.put([writes[i] for i in dict.fromkeys(late)])
            for i, outcome in zip(dict.fromkeys(late), again, strict=True):
                outcomes[i] = outcome
        return outcomes

    async def get_into(self, reads: Sequence[RecordRead]) -> list[Outcome]:
        """Read records by ranges of their packs."""
        if any(read.key not in self.index for read in reads):
            await self.refresh()
        outcomes: dict[int, Outcome] = {}
        found: list[_Found] = []
        for read in reads:
            place = self.index.place(read.key)
            if place is None:
                outcomes[id(read)] = Outcome.MISS
            elif place.size_bytes > read.capacity_bytes:
                outcomes[id(read)] = Outcome.CORRUPT
            else:
                found.append((place, read))
        runs = _runs(found)
        for run, outcome in zip(runs, await self._fan_out(self._get_run, runs, instead=outcome_of), strict=True):
            outcomes |= {id(read): outcome for _, read in run}
        return [outcomes[id(read)] for read in reads]

    async def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Return which blocks are in a pack; sends no request if packs were listed within ``pack_refresh``."""
        if any(key not in self.index for key in keys):
            await self.refresh()
        return [key in self.index for key in keys]

    async def remove(self, keys: Sequence[BlockKey], *, damaged: bool = False) -> None:
        """Remove blocks for all engines. Packs are immutable, so a note lists the removals; empty packs are deleted.

        ``damaged``: remove only the copy used by reads; a copy in another pack then replaces it.
        """
        copies = 1 if damaged else None
        removed = [(pack, key) for key in dict.fromkeys(keys) for pack in self.index.packs_of(key)[:copies]]
        if not removed:
            return
        # The note first: a block that left the index without a note could be neither found nor removed again. A block
        # put from now on goes to a new pack, so the note does not affect it.
        empty: list[str] = []
        folder = len(self._names.packs)
        for start in range(0, len(removed), _NOTE_ENTRIES_MAX):
            part = removed[start : start + _NOTE_ENTRIES_MAX]
            note = self._format.gone_note([(pack[folder:], key) for pack, key in part])
            name = self._names.new_note()
            await self._client.put(name, [note])
            self._skipped[name] = None
            empty += self.index.remove(part)
        await self._client.delete_all(empty)

    async def refresh(self) -> None:
        """Read new packs and notes, unless the last refresh is recent; one task serves all waiters.

        Raises:
            S3Error: A request failed.
        """
        if self._refreshing is None:
            if time.monotonic() < self._fresh_until:
                return
            self._refreshing = asyncio.create_task(self._read_new())
            self._refreshing.add_done_callback(self._end_refresh)
        work = self._refreshing
        # A cancelled waiter does not cancel the task.
        await asyncio.wait([work])
        if work.cancelled():
            raise S3Error(Cause.CLOSED, "The backend was closed.")
        error = work.exception()
        if error is not None:
            raise error.with_traceback(None)

    async def refresh_now(self) -> None:
        """Read all packs and notes written so far, even if the last refresh is recent; errors as of :meth:`refresh`."""
        if self._refreshing is not None:
            await asyncio.wait([self._refreshing])
        self._fresh_until = 0.0
        await self.refresh()

    def _end_refresh(self, task: asyncio.Task[None]) -> None:
        if self._refreshing is task:
            self._refreshing = None
        if not task.cancelled():
            # Retrieves the exception, because all waiters may be gone.
            task.exception()

    async def _read_new(self) -> None:
        began = time.monotonic()
        after = self._names.packs_since(self._newest - _OVERLAP_S)
        more = True
        while more:
            page = await self._client.list_page(self._names.packs, start_after=after)
            more = page.more and bool(page.objects)
            if page.objects:
                after = page.objects[-1].key
            names = {info.key: self._names.read(info.key) for info in page.objects}
            unknown = [info for info in page.objects if names[info.key] is not None and self._is_unknown(info.key)]
            async for pack in self._reader.read_all(unknown):
                self._add_pack(pack)
            # Includes this engine's own packs, to avoid listing them each time. Capped at the current time, so that an
            # engine whose clock is ahead does not hide later packs of the others.
            newest = max((name.made_at for name in names.values() if name is not None), default=0.0)
            self._newest = max(self._newest, min(newest, time.time()))
        self._fresh_until = began + self._config.pack_refresh

    def _is_unknown(self, name: str) -> bool:
        return not self.index.knows(name) and name not in self._skipped

    def _add_pack(self, pack: Pack) -> None:
        if isinstance(pack.fault, S3Error) and pack.fault.cause not in _OBJECT_CAUSES:
            raise pack.fault
        # Unreadable objects are skipped; otherwise one such object would stop all engines.
        self._counted["packs_unreadable"] += pack.fault is not None
        if pack.entries is not None:
            self.index.add(pack.info.key, pack.entries)
            return
        if pack.gone is None and pack.fault is None:
            # Deleted since it was listed. If it does exist, a later refresh lists and reads it.
            return
        self.index.remove(pack.gone or ())
        self._skipped[pack.info.key] = None

    async def _put_pack(self, writes: Sequence[RecordWrite]) -> Outcome:
        head, entries = self._format.pack_head([(write.key, write.size_bytes) for write in writes])
        buffers: list[bytes | memoryview] = [head]
        for write in writes:
            buffers += write.buffers
        name = self._names.new_pack()
        # The name is unique: a retry rewrites the same bytes.
        await self._client.put(name, buffers)
        self._counted["packs_written"] += 1
        self.index.add(name, entries)
        return Outcome.OK

    async def _get_run(self, run: Sequence[_Found]) -> Outcome:
        first = run[0][0]
        targets = [target for place, read in run for target in cut(read.buffers, place.size_bytes)]
        try:
            found = await self._client.get_into(first.pack, targets, offset=first.offset)
        finally:
            for target in targets:
                target.release()
        self._counted["pack_ranges_read"] += 1
        if found is None:
            lost = self.index.forget(first.pack)
            if lost:
                self._on_lost(lost)
            return Outcome.MISS
        if found.size_bytes != sum(place.size_bytes for place, _ in run):
            return Outcome.CORRUPT
        for place, read in run:
            read.filled_bytes = place.size_bytes
        return Outcome.OK


class PackIndex:
    """Known places by key. If a key is in several packs, reads use the pack with the last name."""

    def __init__(self, blocks_max: int = _BLOCKS_MAX, emptied_max: int = _EMPTIED_MAX) -> None:
        self._blocks_max = blocks_max
        # The last pack first. Engines may write a block concurrently, so a key may have several places.
        self._places: dict[BlockKey, tuple[Place, ...]] = {}
        self._packs: dict[str, dict[BlockKey, None]] = {}
        self._emptied: BoundedDict[str, None] = BoundedDict(emptied_max)
        self._gone: BoundedDict[tuple[str, BlockKey], None] = BoundedDict(_GONE_MAX)
        self._entries = 0

    def __repr__(self) -> str:
        """Show the number of known blocks and of packs with any of them."""
        return f"PackIndex({len(self._places)} blocks in {len(self._packs)} packs)"

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def knows(self, pack: str) -> bool:
        """Return whether a pack was added already."""
        return pack in self._packs or pack in self._emptied

    def place(self, key: BlockKey) -> Place | None:
        """Return the location of a block; None if unknown."""
        places = self._places.get(key)
        return places[0] if places else None

    def packs_of(self, key: BlockKey) -> list[str]:
        """Return all known packs of a block; reads use the first."""
        return [place.pack for place in self._places.get(key, ())]

    def add(self, pack: str, entries: Iterable[PackEntry]) -> None:
        """Add a pack, without the blocks that a note already listed as removed from it."""
        if self.knows(pack):
            return
        keys = self._packs[pack] = {}
        for key, offset, size_bytes in entries:
            if (pack, key) in self._gone:
                del self._gone[pack, key]
                continue
            if key in keys:
                continue
            keys[key] = None
            places = (*self._places.get(key, ()), Place(pack, offset, size_bytes))
            self._places[key] = places if len(places) == 1 else tuple(sorted(places, reverse=True))
        self._entries += len(keys)
        if not keys:
            self._note_emptied(pack)
        while self._entries > self._blocks_max and len(self._packs) > 1:
            self.forget(next(iter(self._packs)))

    def remove(self, removed: Sequence[tuple[str, BlockKey]]) -> list[str]:
        """Remove blocks from packs; return the packs that became empty.

        Empty packs stay known, because they may be listed again before their deletion.
        """
        empty = []
        for pack, key in removed:
            keys = self._packs.get(pack)
            if keys is None:
                self._gone[pack, key] = None
            elif key in keys:
                del keys[key]
                self._entries -= 1
                self._drop(pack, key)
                if not keys:
                    empty.append(pack)
                    self._note_emptied(pack)
        return empty

    def forget(self, pack: str) -> list[BlockKey]:
        """Drop a pack; return its blocks that are in no other pack."""
        keys = self._packs.pop(pack, {})
        self._entries -= len(keys)
        return [key for key in keys if self._drop(pack, key)]

    def _note_emptied(self, pack: str) -> None:
        del self._packs[pack]
        self._emptied[pack] = None

    def _drop(self, pack: str, key: BlockKey) -> bool:
        """Remove one place of a block; return whether it was the last one."""
        left = tuple(place for place in self._places.pop(key) if place.pack != pack)
        if left:
            self._places[key] = left
        return not left


def _runs(found: Sequence[_Found]) -> list[list[_Found]]:
    """Coalesce reads of adjacent records."""
    runs: list[list[_Found]] = []
    room, end = 0, ("", 0)
    for place, read in sorted(found, key=lambda pair: pair[0]):
        if place.size_bytes > room or (place.pack, place.offset) != end:
            runs.append([])
            room = _GET_BYTES_MAX
        runs[-1].append((place, read))
        room -= place.size_bytes
        end = place.pack, place.offset + place.size_bytes
    return runs
