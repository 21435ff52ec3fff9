"""Housekeeping of a prefix: leader-elected eviction, usage reports, removal notices, snapshots."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final

from kvstore.backends.s3.capacity import EvictionPlan, OldNotes, Victim
from kvstore.backends.s3.client import ObjectClient
from kvstore.backends.s3.config import S3Config
from kvstore.backends.s3.failures import S3Error
from kvstore.backends.s3.lease import Lease
from kvstore.backends.s3.names import KeeperNames, read_name
from kvstore.backends.s3.presence import PresenceSnapshot, SnapshotMaker
from kvstore.backends.s3.removals import NOTES_AGE_S, REMOVALS_MAX, outdated, read_note, remove
from kvstore.backends.s3.uses import Uses, all_uses
from kvstore.bounded import BoundedDict
from kvstore.types import RemovalCause

__all__ = ["Keeper"]

logger = logging.getLogger("kvstore.backends.s3")

_NOTE_BYTES_MAX: Final = 1 << 20
"""Longest note that is read: a thousand names of the longest kind are a quarter of it."""

_SWEPT_MAX: Final = 100_000
"""Objects that are swept in one round; a round later it goes on."""

_OVERLAP_S: Final = 60.0
"""Names of notes are made by clocks of engines, which differ: so much is listed again."""

_KNOWN_NOTES_MAX: Final = 10_000

_GIVE_BACK_S: Final = 1.0
"""Time to give the lease back at the end: several answers long, and short for a caller that waits for the stop."""


class Keeper:
    """Keeps the bytes under a prefix below the capacity, and their age below the time to live.

    For one event loop; every engine has one.

    Args:
        client: Of the bucket.
        config: Prefix, capacity and interval.
        on_removed: Called with the names of objects that left, whichever engine removed them, and why.
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
        self._names = KeeperNames(config.prefix)
        self._own_uses = f"{self._names.uses}{os.urandom(8).hex()}"
        # Three rounds: one may fail, and one be late, before another engine takes over.
        self._lease = Lease(client, self._names.lease, 3 * config.keeper_interval, config.lookup_timeout)
        self._known: BoundedDict[str, None] = BoundedDict(_KNOWN_NOTES_MAX)
        self._known_until = time.time()
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
        """End the rounds, and give the lease back. Idempotent; a service that fails costs a second at most."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        with suppress(S3Error):
            await self._lease.give_back(min(_GIVE_BACK_S, self._config.lookup_timeout))

    async def round(self) -> None:
        """Publish uses, take in removals and, if this engine holds the lease, evict.

        Raises:
            S3Error: The service failed; the next round tries again.
        """
        try:
            await self._publish_uses()
            await self._take_in_removals()
            if await self._lease.hold():
                await self._evict()
        except Exception:
            # An engine without the right to write, say, would trust its first snapshot for ever.
            await self._refresh_snapshot()
            raise
        await self._refresh_snapshot()
        self.counters["keeper_rounds"] += 1

    async def _run(self) -> None:
        # At once: it is for cold engines.
        await self._tried(self._refresh_snapshot)
        while True:
            # Not all engines of a fleet at the same moment.
            await asyncio.sleep(self._config.keeper_interval * random.uniform(0.5, 1.0))
            await self._tried(self.round)

    async def _refresh_snapshot(self) -> None:
        if self._snapshot is not None:
            await self._snapshot.refresh()

    async def _tried(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except S3Error as error:
            self.counters["keeper_failures"] += 1
            if not self._warned:
                self._warned = True
                logger.warning("Housekeeping under %r does not succeed at present: %s", self._config.prefix, error)
        # An error of the program, such as of the removal listener, fails its round, and does not end all of them.
        except Exception as error:
            self.counters["keeper_failures"] += 1
            if type(error) not in self._logged:
                self._logged.add(type(error))
                logger.exception("A round of housekeeping under %r failed", self._config.prefix)

    async def _publish_uses(self) -> None:
        if not self.uses.changed:
            return
        body = self.uses.encode()
        try:
            await self._client.put(self._own_uses, [body])
        except BaseException:
            # The next round publishes them.
            self.uses.changed = True
            raise

    async def _evict(self) -> None:
        prefix, ttl = self._config.prefix, self._config.ttl
        used_at = await all_uses(self._client, prefix)
        plan = EvictionPlan(self._config.capacity, used_at, expire_before=time.time() - ttl if ttl else 0.0)
        maker = None if self._snapshot is None else SnapshotMaker(prefix)
        notes = OldNotes(time.time() - NOTES_AGE_S)
        async for info in self._client.listed(prefix):
            name = read_name(info.key.removeprefix(prefix))
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
            self.counters["snapshots_written"] += await maker.publish(self._client, may_write=self._lease.hold)
        await self._sweep(notes.names())

    async def _remove(self, victims: Sequence[Victim], cause: RemovalCause) -> None:
        """Delete objects; count them, and note them for this engine and the others."""
        sizes = {victim.name: victim.size_bytes for victim in victims}

        def note_gone(names: Sequence[str], note: str) -> None:
            size = sum(sizes[name] for name in names)
            self.counters[f"{cause}_objects"] += len(names)
            self.counters[f"{cause}_bytes"] += size
            self.used_bytes -= size
            self._on_removed(names, cause)
            self._known[note] = None

        await remove(self._client, self._config.prefix, list(sizes), cause, on_gone=note_gone)

    async def _take_in_removals(self) -> None:
        began = time.time()
        after = self._names.notes_since(self._known_until - _OVERLAP_S)
        async for info in self._client.listed(self._names.notes, start_after=after):
            if info.key in self._known:
                continue
            data = await self._client.get_start(info.key, min(info.size_bytes, _NOTE_BYTES_MAX))
            self._known[info.key] = None
            note = None if data is None else read_note(self._config.prefix, data)
            if note is not None:
                self._on_removed(*note)
        self._known_until = began

    async def _sweep(self, notes: Sequence[str]) -> None:
        """Delete expired housekeeping objects, and notes of packs that are gone."""
        old = list(notes)
        async for info, _ in outdated(self._client, self._config.prefix):
            if len(old) >= _SWEPT_MAX:
                break
            old.append(info.key)
        await self._client.delete_all(old)
