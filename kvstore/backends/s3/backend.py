"""The S3 backend: records as objects of a bucket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from typing import ClassVar, Final
from weakref import WeakValueDictionary

from kvstore.backends.base import BackendStats, RecordGeometry, RecordRead, RecordWrite
from kvstore.backends.s3.client import ObjectClient, make_client
from kvstore.backends.s3.config import S3Config
from kvstore.backends.s3.failures import Cause, S3Error
from kvstore.backends.s3.keeper import Keeper
from kvstore.backends.s3.names import ObjectNames
from kvstore.backends.s3.packing import PackedBlocks
from kvstore.backends.simple import SimpleBackend
from kvstore.config import TierConfig
from kvstore.errors import BackendClosedError, KVStoreError
from kvstore.namespace import Namespace
from kvstore.types import BlockKey, Locality, Medium, Outcome, RemovalCause

logger = logging.getLogger("kvstore.backends.s3")

_HEAD_SHARE: Final = 0.9
"""Fraction of ``lookup_timeout`` that one HEAD may take."""

_MAYBE_OF_THE_OBJECT: Final = frozenset({Cause.FORBIDDEN, Cause.REJECTED, Cause.CREDENTIALS})
"""Causes of a refused HEAD that may concern one object or all of them: the status alone does not say which."""

_UNCONDITIONAL = "The service does not know If-None-Match: blocks are looked for before they are written."


class S3Backend(SimpleBackend):
    """Records in a bucket, one object each. Engines share the bucket, so lookups query the service."""

    name: ClassVar[str] = "s3"
    config_type: ClassVar[type[TierConfig]] = S3Config
    holdings_type: ClassVar[str] = "kvstore.backends.s3.holdings:S3Holdings"
    medium = Medium.STORAGE
    locality = Locality.REMOTE
    # Bounds the tasks of one batch; the client bounds the concurrent requests of all batches.
    concurrency_max: ClassVar[int] = 256

    def __init__(self, config: S3Config) -> None:
        super().__init__(config)
        self.config: S3Config = config
        # Kept after close() and a failed open() for its statistics, and opened again.
        self._client: ObjectClient | None = None
        self._names = ObjectNames(config.prefix, Namespace({}))
        self._description = b""  # Of the namespace, until it is stored.
        self._packs: PackedBlocks | None = None
        self._keeper: Keeper | None = None
        self._conditional = config.conditional_put != "no"
        self._locks: WeakValueDictionary[BlockKey, asyncio.Lock] = WeakValueDictionary()

    def check(self) -> None:
        make_client(self.config).check()

    async def open(self, namespace: Namespace, geometry: RecordGeometry) -> None:
        """Find credentials, and check bucket, region, credentials and clock with one request.

        Raises:
            ConfigError: The configuration can't be used.
            S3Error: The service refuses, or does not answer.
        """
        self._names, self._description = ObjectNames(self.config.prefix, namespace), namespace.description()
        client = self._client = self._client or make_client(self.config)
        try:
            await client.open()
            await client.probe(self._names.probe, timeout_s=self.config.timeout + self.config.connect_timeout)
        except BaseException:
            await client.close()
            raise
        if geometry.record_bytes_max < self.config.pack_below:
            self._packs = PackedBlocks(client, self.config, namespace, self._fan_out, self._on_lost)
        await super().open(namespace, geometry)
        if self.config.capacity or self.config.ttl:
            self._keeper = Keeper(client, self.config, self._on_removed)
            self._keeper.start()
        logger.debug("Bucket %s answers; requests are sent by %s", self.config.bucket, self.config.chosen_client)

    async def close(self) -> None:
        self._is_open = False
        # In reverse order, each also if this is cancelled, because the service does not answer.
        async with AsyncExitStack() as closing:
            closing.push_async_callback(super().close)
            if self._client is not None:
                # Running calls fail with cause CLOSED and return soon.
                closing.push_async_callback(self._client.close)
            if self._keeper is not None:
                closing.push_async_callback(self._keeper.close)
            if self._packs is not None:
                closing.push_async_callback(self._packs.close)

    async def put(self, writes: Sequence[RecordWrite]) -> Sequence[Outcome]:
        self.check_open()
        outcomes = await (super().put(writes) if self._packs is None else self._packs.put(writes))
        if self._description and Outcome.OK in outcomes:
            description, self._description = self._description, b""
            # Only the admin tools read it, so its loss is no failure of the batch.
            with suppress(KVStoreError):
                await self._ready().put(self._names.fields, [description])
        return outcomes

    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:
        self.check_open()
        outcomes = await (super().get_into(reads) if self._packs is None else self._packs.get_into(reads))
        if self._keeper is not None:
            self.touch([read.key for read, outcome in zip(reads, outcomes, strict=True) if outcome is Outcome.OK])
        return outcomes

    async def exists(self, keys: Sequence[BlockKey]) -> Sequence[bool | None]:
        self.check_open()
        return await (super().exists(keys) if self._packs is None else self._packs.exists(keys))

    async def delete(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """S3 does not report which objects existed, so a lookup precedes the removal."""
        self.check_open()
        unique = list(dict.fromkeys(keys))
        if self._packs is not None:
            # Another engine may have stored further copies.
            await self._packs.refresh_now()
        there = dict(zip(unique, await self.exists(unique), strict=True))
        removed = [key for key in unique if there[key] is not False]
        await (self.quarantine(removed) if self._packs is None else self._packs.remove(removed))
        # Only the first of two equal keys counts as removed.
        return [bool(there.pop(key, False)) for key in keys]

    async def quarantine(self, keys: Sequence[BlockKey]) -> None:
        """Damaged objects are deleted for all engines."""
        client = self._ready()
        if self._packs is not None:
            await self._packs.remove(keys, damaged=True)
            return
        async with AsyncExitStack() as held:
            # Without the locks, a running put could find the object and report EXISTS after its deletion.
            for key in sorted(set(keys)):
                await held.enter_async_context(self._lock(key))
            await client.delete_all([self._names.block(key) for key in keys])

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Uses are published for the evicting engine."""
        if self._keeper is None:
            return
        if self._packs is None:
            self._keeper.uses.note([self._names.block(key) for key in keys])
        else:
            places = [self._packs.index.place(key) for key in keys]
            self._keeper.uses.note({place.pack for place in places if place is not None})

    async def probe(self) -> None:
        await self._ready().probe(self._names.probe, timeout_s=self.config.timeout)

    async def put_one(self, key: BlockKey, buffers: Sequence[memoryview]) -> bool:
        client, name = self._ready(), self._names.block(key)
        # One writer per key at a time in this process.
        async with self._lock(key):
            if self._conditional:
                try:
                    return await client.put(name, buffers, if_absent=True) is not None
                except S3Error as error:
                    if error.cause is not Cause.UNSUPPORTED or self.config.conditional_put == "yes":
                        raise
                if self._conditional:
                    self._conditional = False
                    logger.warning(_UNCONDITIONAL)
            # An engine elsewhere may write the same bytes at the same time.
            if await client.head(name, timeout_s=self.config.store_timeout) is not None:
                return False
            await client.put(name, buffers)
            return True

    async def get_one_into(self, key: BlockKey, buffers: Sequence[memoryview]) -> int | None:
        found = await self._ready().get_into(self._names.block(key), buffers)
        return None if found is None else found.size_bytes

    async def exists_one(self, key: BlockKey) -> bool:
        client, name = self._ready(), self._names.block(key)
        # Shorter than the batch's timeout, so that one unanswered request does not fail the batch.
        return await client.head(name, timeout_s=_HEAD_SHARE * self.config.lookup_timeout) is not None

    async def _on_all_refused(self, failure: Exception) -> None:
        """The service may refuse one object, such as for its KMS key."""
        if isinstance(failure, S3Error) and failure.cause in _MAYBE_OF_THE_OBJECT:
            # A HEAD response has no body with the reason; if the probe passes, the service works.
            await self.probe()
            return
        await super()._on_all_refused(failure)

    def stats(self) -> BackendStats:
        client = self._client
        if client is None:
            return BackendStats()
        used_bytes = 0 if self._keeper is None else self._keeper.used_bytes
        counters = client.counters()
        for part in (self._packs, self._keeper):
            counters |= {} if part is None else part.counters
        gauges = {
            "requests_running": float(client.limiter.in_use),
            "requests_waiting": float(client.limiter.waiting),
            "requests_allowed": float(client.limiter.total),
        }
        for what, usd in client.traffic.costs_usd(self.config.prices, used_bytes).items():
            gauges[f"cost_usd_{what}"] = usd
        if self._packs is not None:
            gauges["packed_blocks_known"] = float(len(self._packs.index))
        return BackendStats(
            used_bytes=used_bytes, capacity_bytes=self.config.capacity, counters=counters, gauges=gauges
        )

    def _on_lost(self, keys: Sequence[BlockKey]) -> None:
        self._removal_listener(keys, RemovalCause.LOST)

    def _on_removed(self, names: Sequence[str], cause: RemovalCause) -> None:
        if self._packs is not None:
            keys = [key for name in names for key in self._packs.index.forget(name)]
        else:
            found = [self._names.read(name) for name in names]
            keys = [name.key for name in found if name is not None and name.kind == "block"]
        if keys:
            self._removal_listener(keys, cause)

    def _lock(self, key: BlockKey) -> asyncio.Lock:
        """Return the lock for changes of a block; it exists only while it is in use."""
        return self._locks.setdefault(key, asyncio.Lock())

    def _ready(self) -> ObjectClient:
        self.check_open()
        if self._client is None:
            raise BackendClosedError("not open: use it after open() and before close()", backend=self.name)
        return self._client
