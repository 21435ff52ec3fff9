"""Housekeeping of a prefix: all tell what they use, one engine at a time evicts, and all hear what left and what is."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Final

from kvstore.backends.s3.capacity import EvictionPlan, Victim
from kvstore.backends.s3.client import ObjectClient, ObjectInfo
from kvstore.backends.s3.config import S3Config
from kvstore.backends.s3.failures import S3Error
from kvstore.backends.s3.keys import ObjectName, read_name
from kvstore.backends.s3.lease import Lease
from kvstore.backends.s3.presence import PresenceSnapshot, SnapshotMaker
from kvstore.backends.s3.removals import NOTES_AGE_S, REMOVALS_MAX, notes_folder, outdated, read_note, remove
from kvstore.backends.s3.uses import Uses, all_uses, uses_folder
from kvstore.bounded import BoundedDict
from kvstore.types import RemovalCause

__all__ = ["Keeper", "OldNotes"]

logger = logging.getLogger("kvstore.backends.s3")

_NOTE_BYTES_MAX: Final = 1 << 20
"""Longest note that is read: a thousand names of the longest kind are a quarter of it."""

_SWEPT_MAX: Final = 100_000
"""Objects that are swept in one round; a round later it goes on."""

_OVERLAP_S: Final = 60.0
"""Names of notes are made by clocks of engines, which differ: so much is listed again."""

_HEARD_MAX: Final = 10_000

_GIVE_BACK_S: Final = 1.0
"""Time to give the lease back at the end: several answers long, and short for whoever waits for an engine to stop."""


_TIME_BYTES: Final = 6
"""Of the beginning of what names a pack or a note: when it was made, in milliseconds."""

_SKEW_MS: Final = 3_600_000
"""A note speaks of packs that were there when it was made, but the clocks of the engines that named them may differ: by
much less than this."""

_NOTES_MAX: Final = 100_000
"""Notes that are found in one round, about 15 MB of memory; a round later it goes on."""


class Keeper:
    """Keeps the bytes under a prefix below the capacity, and their age below the time to live.

    For one event loop; every engine has one.

    Args:
        client: Sends requests, with retries.
        config: Prefix, capacity and interval.
        on_removed: Told the names of objects that left, whichever engine removed them, and why.
        snapshot: Read once a round, and made by the elected engine; None for none.
    """

    def __init__(
        self,
        client: ObjectClient,
        config: S3Config,
        on_removed: Callable[[Sequence[str], RemovalCause], None],
        snapshot: PresenceSnapshot | None = None,
    ) -> None:
        self._client = client
        self._config = config
        self._on_removed = on_removed
        self._snapshot = snapshot
        self._folder = f"{config.prefix}_keeper/"
        self._notes = notes_folder(config.prefix)
        self._own_uses = f"{uses_folder(config.prefix)}{os.urandom(8).hex()}"
        # Three rounds: one may fail, and one be late, before another engine takes over.
        self._lease = Lease(client, f"{self._folder}lease", 3 * config.keeper_interval, config.lookup_timeout)
        self._heard: BoundedDict[str, None] = BoundedDict(_HEARD_MAX)
        self._heard_from = time.time()
        self._task: asyncio.Task[None] | None = None
        self._warned = False
        self._logged: set[type[Exception]] = set()
        self.uses = Uses()
        counted = [f"{cause}_{what}" for cause in ("evicted", "expired") for what in ("objects", "bytes")]
        self.counters = dict.fromkeys((*counted, "keeper_rounds", "keeper_failures", "snapshots_written"), 0)
        self.used_bytes = 0

    @property
    def is_elected(self) -> bool:
        """Whether it is this engine that evicts."""
        return self._lease.is_held

    def start(self) -> None:
        """Begin the rounds."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """End the rounds, and give the lease back. Idempotent; a service that fails is left alone after a second."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        with suppress(S3Error):
            await self._lease.give_back(min(_GIVE_BACK_S, self._config.lookup_timeout))

    async def round(self) -> None:
        """Tell what was used, hear what left, and, if it is this engine's turn, evict.

        Raises:
            S3Error: The service failed; the next round tries again.
        """
        try:
            await self._tell_uses()
            await self._hear()
            if await self._lease.hold():
                await self._evict()
        except Exception:
            # Whatever it was: an engine that may not write, say, would believe its first snapshot for ever.
            if self._snapshot is not None:
                await self._snapshot.refresh()
            raise
        if self._snapshot is not None:
            await self._snapshot.refresh()
        self.counters["keeper_rounds"] += 1

    async def _run(self) -> None:
        if self._snapshot is not None:
            # At once: a cold engine is what it is for.
            await self._tried(self._snapshot.refresh)
        while True:
            # Not all engines of a fleet at the same moment.
            await asyncio.sleep(self._config.keeper_interval * random.uniform(0.5, 1.0))
            await self._tried(self.round)

    async def _tried(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except S3Error as error:
            self.counters["keeper_failures"] += 1
            if not self._warned:
                self._warned = True
                logger.warning("Housekeeping under %r does not succeed at present: %s", self._config.prefix, error)
        # An error of the program, be it of who is told of removals, fails its round, and does not end all of them.
        except Exception as error:
            self.counters["keeper_failures"] += 1
            if type(error) not in self._logged:
                self._logged.add(type(error))
                logger.exception("A round of housekeeping under %r failed", self._config.prefix)

    async def _tell_uses(self) -> None:
        if not self.uses.changed:
            return
        body = self.uses.encode()
        try:
            await self._client.put(self._own_uses, [body], timeout_s=self._config.store_timeout)
        except BaseException:
            # Nobody has heard of them; the next round tells them.
            self.uses.changed = True
            raise

    async def _evict(self) -> None:
        ttl = self._config.ttl
        plan = EvictionPlan(
            self._config.capacity,
            await all_uses(self._client, self._config),
            expire_before=time.time() - ttl if ttl else 0.0,
        )
        maker = None if self._snapshot is None else SnapshotMaker(self._config.prefix)
        notes = OldNotes(time.time() - NOTES_AGE_S)
        async for info in self._listed(self._config.prefix):
            name = read_name(info.key.removeprefix(self._config.prefix))
            plan.see(info, name)
            notes.see(info, name)
            if maker is not None:
                maker.see(info, name)
        self.used_bytes = plan.used_bytes
        victims = plan.victims()
        for cause in (RemovalCause.EXPIRED, RemovalCause.EVICTED):
            leaving = [victim for victim in victims if victim.cause is cause]
            for start in range(0, len(leaving), REMOVALS_MAX):
                # Long rounds outlast a lease, and two that evict would evict too much.
                if not await self._lease.hold():
                    return
                await self._remove(leaving[start : start + REMOVALS_MAX], cause)
        if maker is not None:
            written = await maker.publish(self._client, self._config.store_timeout, may_write=self._lease.hold)
            self.counters["snapshots_written"] += written
        await self._sweep(notes.names())

    async def _remove(self, victims: Sequence[Victim], cause: RemovalCause) -> None:
        """Delete objects, and tell this engine and the others."""
        sizes = {victim.name: victim.size_bytes for victim in victims}

        def note_gone(names: Sequence[str], note: str) -> None:
            size = sum(sizes[name] for name in names)
            self.counters[f"{cause}_objects"] += len(names)
            self.counters[f"{cause}_bytes"] += size
            self.used_bytes -= size
            self._on_removed(names, cause)
            self._remember(note)

        await remove(self._client, self._config, list(sizes), cause, on_gone=note_gone)

    async def _hear(self) -> None:
        """Read the notes that are new."""
        after = f"{self._notes}{max(0, int((self._heard_from - _OVERLAP_S) * 1000)):012x}"
        began = time.time()
        async for info in self._listed(self._notes, after):
            if info.key in self._heard:
                continue
            size_bytes = min(info.size_bytes, _NOTE_BYTES_MAX)
            data = await self._client.get_start(info.key, size_bytes, timeout_s=self._config.load_timeout)
            self._remember(info.key)
            note = None if data is None else read_note(self._config.prefix, data)
            if note is not None:
                self._on_removed(*note)
        self._heard_from = began

    async def _sweep(self, notes: Sequence[str]) -> None:
        """Delete what engines told each other long ago, and notes of packs that are gone."""
        old = list(notes)
        async with aclosing(outdated(self._client, self._config)) as found:
            async for info, _ in found:
                if len(old) >= _SWEPT_MAX:
                    break
                old.append(info.key)
        await self._client.delete_all(old, timeout_s=self._config.store_timeout)

    async def _listed(self, prefix: str, after: str = "") -> AsyncIterator[ObjectInfo]:
        pages = self._client.list_pages(prefix, start_after=after, timeout_s=self._config.lookup_timeout)
        async with aclosing(pages):
            async for objects in pages:
                for info in objects:
                    yield info

    def _remember(self, note: str) -> None:
        self._heard[note] = None


class OldNotes:
    """Sees every object of a prefix once, in the order of names, and finds notes that are older than all packs.

    Names of packs and notes begin with their time, so the notes of a namespace that come before its first pack speak of
    packs that are gone.

    Args:
        written_before: Notes that were written later stay, in seconds since the epoch.
    """

    def __init__(self, written_before: float) -> None:
        self._written_before = written_before
        self._namespace = ""
        self._found: list[str] = []
        # Of the namespace that is being listed: name and time in milliseconds, until its first pack is seen.
        self._waiting: list[tuple[str, int]] | None = []

    def see(self, info: ObjectInfo, name: ObjectName | None) -> None:
        """Take note of an object, and of what its name says."""
        if name is None or name.kind == "block":
            return
        if name.namespace != self._namespace:
            self._take(None)
            self._namespace, self._waiting = name.namespace, []
        if self._waiting is None:
            return
        made_ms = int.from_bytes(name.key[:_TIME_BYTES], "big")
        if name.kind == "pack":
            self._take(made_ms)
            self._waiting = None
        elif 0 < info.modified_at < self._written_before and len(self._found) + len(self._waiting) < _NOTES_MAX:
            self._waiting.append((info.key, made_ms))

    def names(self) -> Sequence[str]:
        """Return the names of the notes; the list of objects has come to its end."""
        self._take(None)
        self._waiting = None
        return self._found

    def _take(self, first_pack_ms: int | None) -> None:
        for name, made_ms in self._waiting or ():
            if first_pack_ms is None or made_ms + _SKEW_MS < first_pack_ms:
                self._found.append(name)
