"""Housekeeping of a prefix: leader-elected eviction, usage reports, removal notices."""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec

from kvstore.backends.s3.client import DELETES_MAX, ObjectClient, ObjectInfo
from kvstore.backends.s3.config import S3Config
from kvstore.backends.s3.failures import S3Error
from kvstore.backends.s3.names import KeeperNames, ObjectName, read_name, stamp
from kvstore.backends.s3.notes import NOTES_AGE_S, Uses, all_uses, name_digest, outdated, read_note, remove
from kvstore.bounded import BoundedDict
from kvstore.types import RemovalCause

logger = logging.getLogger("kvstore.backends.s3")

_LOW_WATERMARK: Final = 0.9
"""Evictions stop at this fraction of the capacity, low enough that the next round need not evict again."""

_VICTIMS_MAX: Final = 100_000
_NOTES_MAX: Final = 100_000
_SWEPT_MAX: Final = 100_000
"""Limits of a round, 15 to 30 MB of memory each: objects removed, old notes found, objects swept. The next round
continues."""

_NOTE_BYTES_MAX: Final = 1 << 20
"""Longest note that is read: four times a thousand names of maximum length."""

_SKEW_S: Final = 3600.0
_OVERLAP_S: Final = 60.0
"""Allowances for clock differences between engines, because names of packs and notes contain their time. Notes are
deleted only if they are older than all packs by the first. Each round repeats a part of the last listing of notes, as
long as the second; an engine that misses a note gets a 404 for the removed objects."""

_KNOWN_NOTES_MAX: Final = 10_000

_GIVE_BACK_S: Final = 1.0
"""Timeout to release the lease on close: several response times, but short for the caller of close()."""


class Keeper:
    """Keeps the bytes under a prefix below the capacity, and their age below the time to live.

    For one event loop; every engine has a keeper.

    Args:
        on_removed: Called with the names of objects removed by any engine, and the cause.
    """

    def __init__(
        self,
        client: ObjectClient,
        config: S3Config,
        on_removed: Callable[[Sequence[str], RemovalCause], None],
    ) -> None:
        self._client = client
        self._config = config
        self._on_removed = on_removed
        self._names = KeeperNames(config.prefix)
        self._own_uses = f"{self._names.uses}{os.urandom(8).hex()}"
        # Three rounds: one may fail and one may be late before another engine takes over.
        self._lease = Lease(client, self._names.lease, 3 * config.keeper_interval, config.lookup_timeout)
        self._known: BoundedDict[str, None] = BoundedDict(_KNOWN_NOTES_MAX)
        self._known_until = time.time()
        self._task: asyncio.Task[None] | None = None
        self._logged: set[type[Exception]] = set()
        self.uses = Uses()
        counted = [f"{cause}_{what}" for cause in ("evicted", "expired") for what in ("objects", "bytes")]
        self.counters = dict.fromkeys((*counted, "keeper_rounds", "keeper_failures"), 0)
        self.used_bytes = 0

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop the rounds and release the lease, which takes at most a second if the service fails. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        with suppress(S3Error):
            await self._lease.give_back(min(_GIVE_BACK_S, self._config.lookup_timeout))

    async def round(self) -> None:
        """Publish uses, process removals and, if this engine holds the lease, evict.

        Raises:
            S3Error: The service failed; the next round tries again.
        """
        await self._publish_uses()
        await self._take_in_removals()
        if await self._lease.hold():
            await self._evict()
        self.counters["keeper_rounds"] += 1

    async def _run(self) -> None:
        while True:
            # Jitter spreads the engines of a fleet.
            await asyncio.sleep(self._config.keeper_interval * random.uniform(0.5, 1.0))
            try:
                await self.round()
            # A bug, such as in the removal listener, fails one round but does not end the loop.
            except Exception as error:
                self.counters["keeper_failures"] += 1
                if type(error) in self._logged:
                    continue
                self._logged.add(type(error))
                if isinstance(error, S3Error):
                    logger.warning("Housekeeping under %r failed and will try again: %s", self._config.prefix, error)
                else:
                    logger.exception("Housekeeping under %r failed and will try again", self._config.prefix)

    async def _publish_uses(self) -> None:
        if not self.uses.changed:
            return
        body = self.uses.encode()
        try:
            await self._client.put(self._own_uses, [body])
        except BaseException:
            # The next round tries again.
            self.uses.changed = True
            raise

    async def _evict(self) -> None:
        prefix, ttl = self._config.prefix, self._config.ttl
        used_at = await all_uses(self._client, prefix)
        plan = EvictionPlan(self._config.capacity, used_at, expire_before=time.time() - ttl if ttl else 0.0)
        notes = OldNotes(time.time() - NOTES_AGE_S)
        async for info in self._client.listed(prefix):
            name = read_name(info.key.removeprefix(prefix))
            plan.see(info, name)
            notes.see(info, name)
        self.used_bytes = plan.used_bytes
        victims = plan.victims()
        for cause in (RemovalCause.EXPIRED, RemovalCause.EVICTED):
            leaving = [victim for victim in victims if victim.cause is cause]
            for start in range(0, len(leaving), DELETES_MAX):
                # A long round can outlast its lease, and two evicting engines would remove too much.
                if not await self._lease.hold():
                    return
                await self._remove(leaving[start : start + DELETES_MAX], cause)
        await self._sweep(notes.names())

    async def _remove(self, victims: Sequence[Victim], cause: RemovalCause) -> None:
        """Delete and count objects; notify this engine directly and the others by notes."""
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
        after = self._names.notes + stamp(self._known_until - _OVERLAP_S)
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
        """Delete expired housekeeping objects and notes about deleted packs."""
        old = list(notes)
        async for info, _ in outdated(self._client, self._config.prefix):
            if len(old) >= _SWEPT_MAX:
                break
            old.append(info.key)
        await self._client.delete_all(old)


class _LeaseBody(msgspec.Struct, frozen=True):
    """Content of the lease object. Other engines check for changes, and for an empty owner."""

    owner: str
    renewals: int


class Lease:
    """An object that its holder rewrites regularly; another engine takes it over after ``length_s`` without a change.

    Clocks are never compared: each engine measures from the time at which it first saw the holder's last write. The
    holder must renew the lease before each batch of work, and stop if that fails. Kubernetes' leader election uses the
    same scheme. Needs conditional writes. A request may take ``timeout_s``.
    """

    def __init__(
        self,
        client: ObjectClient,
        name: str,
        length_s: float,
        timeout_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._name = name
        self._length_s = length_s
        self._timeout_s = timeout_s
        self._clock = clock
        self._owner = os.urandom(8).hex()
        self._renewals = 0
        self._etag = ""
        self._seen = ""
        self._seen_at = 0.0

    async def hold(self) -> bool:
        """Take or renew the lease; False if another engine holds it.

        Raises:
            S3Error: The request failed; the next call tries again.
        """
        if self._etag:
            if await self._write(if_match=self._etag):
                return True
            self._etag = ""
        body = memoryview(bytearray(4096))
        found = await self._client.get_into(self._name, [body], timeout_s=self._timeout_s)
        if found is None:
            return await self._write(if_absent=True)
        now = self._clock()
        if found.etag != self._seen:
            self._seen, self._seen_at = found.etag, now
        try:
            owner = msgspec.json.decode(body[: found.size_bytes], type=_LeaseBody).owner
        except (msgspec.DecodeError, UnicodeDecodeError):
            # Not in our format; it expires like any other lease.
            owner = None
        # Released, or written by us with a lost response.
        is_free = owner in ("", self._owner)
        if not is_free and now - self._seen_at < self._length_s:
            return False
        return await self._write(if_match=found.etag)

    async def give_back(self, timeout_s: float) -> None:
        """Release a held lease; if the service fails, other engines wait for its expiry."""
        etag, self._etag = self._etag, ""
        if etag:
            body = msgspec.json.encode(_LeaseBody("", self._renewals + 1))
            await self._client.put(self._name, [body], timeout_s=timeout_s, if_match=etag)

    async def _write(self, *, if_match: str = "", if_absent: bool = False) -> bool:
        self._renewals += 1
        body = msgspec.json.encode(_LeaseBody(self._owner, self._renewals))
        etag = await self._client.put(
            self._name, [body], timeout_s=self._timeout_s, if_match=if_match, if_absent=if_absent
        )
        self._etag = etag or ""
        return bool(etag)


class Victim(NamedTuple):
    """An object to remove, for space or because it expired."""

    name: str
    size_bytes: int
    cause: RemovalCause


class EvictionPlan:
    """Selects expired objects and, over capacity, the least recently written or used ones.

    The caller passes every object of a prefix once.

    Args:
        capacity_bytes: Maximum total bytes; 0 for no limit.
        used_at: Time of the last use, seconds since the epoch, by digest of the object's name.
        expire_before: Objects neither written nor used since this time expire, in seconds since the epoch.
        victims_max: Maximum number of victims.
    """

    def __init__(
        self,
        capacity_bytes: int,
        used_at: Mapping[int, int],
        *,
        expire_before: float = 0.0,
        victims_max: int = _VICTIMS_MAX,
    ) -> None:
        self._capacity_bytes = capacity_bytes
        self._used_at = used_at
        self._expire_before = expire_before
        self._victims_max = victims_max
        # Heap of the coldest objects so far with the warmest of them on top, so memory is bounded.
        self._coldest: list[tuple[float, str, int]] = []
        self.used_bytes = 0

    def see(self, info: ObjectInfo, name: ObjectName | None) -> None:
        """Add an object and its parsed name.

        Only blocks and packs are evicted, never housekeeping objects or objects of other programs or of a tier with a
        longer prefix.
        """
        self.used_bytes += info.size_bytes
        if not (self._capacity_bytes or self._expire_before) or name is None or name.kind == "note":
            return
        # Objects of unknown age never expire, and are evicted last.
        last = max(info.modified_at, float(self._used_at.get(name_digest(info.key), 0))) or math.inf
        entry = (-last, info.key, info.size_bytes)
        if len(self._coldest) < self._victims_max:
            heapq.heappush(self._coldest, entry)
        elif entry > self._coldest[0]:
            heapq.heapreplace(self._coldest, entry)

    def victims(self) -> list[Victim]:
        """Return the objects to remove, the coldest first."""
        excess = 0
        if 0 < self._capacity_bytes < self.used_bytes:
            excess = self.used_bytes - int(self._capacity_bytes * _LOW_WATERMARK)
        found = []
        for coldness, name, size in sorted(self._coldest, key=lambda entry: (-entry[0], entry[1])):
            expired = -coldness < self._expire_before
            if excess <= 0 and not expired:
                break
            found.append(Victim(name, size, RemovalCause.EXPIRED if expired else RemovalCause.EVICTED))
            excess -= size
        return found


class OldNotes:
    """Finds notes older than all packs of their namespace.

    The caller passes every object of a prefix once, in the order of names. Names of packs and notes begin with their
    time, so notes before a namespace's first pack concern deleted packs. Notes written after ``written_before``, in
    seconds since the epoch, stay.
    """

    def __init__(self, written_before: float, notes_max: int = _NOTES_MAX) -> None:
        self._written_before, self._notes_max = written_before, notes_max
        self._first_packs: dict[str, float] = {}
        self._notes: list[tuple[str, ObjectName]] = []

    def see(self, info: ObjectInfo, name: ObjectName | None) -> None:
        """Add an object and its parsed name."""
        if name is None or name.namespace in self._first_packs:
            return
        if name.kind == "pack":
            self._first_packs[name.namespace] = name.made_at
        elif name.kind == "note" and 0 < info.modified_at < self._written_before and len(self._notes) < self._notes_max:
            self._notes.append((info.key, name))

    def names(self) -> list[str]:
        """Return the names of the old notes; call it after the last object."""
        first_packs = self._first_packs
        return [key for key, name in self._notes if name.made_at + _SKEW_S < first_packs.get(name.namespace, math.inf)]
