"""Backend that keeps records in the memory of the I/O process: for tests, and as a minimal example of the contract."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from kvstore.backends.base import Backend, BackendStats, RecordGeometry, RecordRead, RecordWrite
from kvstore.backends.vectored import scatter
from kvstore.config import ByteSize, TierConfig
from kvstore.errors import BackendClosedError, ConfigError, LockedError
from kvstore.eviction import EvictionPolicy, make_policy
from kvstore.namespace import Namespace
from kvstore.types import BlockInfo, BlockKey, Medium, NamespaceInfo, Outcome, RemovalCause


class MemoryConfig(TierConfig, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Blocks in the memory of the process; for tests and examples."""

    capacity: ByteSize = ByteSize(1 << 30)  # Enough to be useful, too little to hurt any host that runs an engine.
    """Bytes of all records together; at the limit, blocks are evicted."""
    eviction: str = "lru"  # Eviction policy: ``"lru"``, ``"arc"`` or ``"adaptive"``.
    shelf: str = ""
    """Name under which records survive ``close``, for the next backend of this process with the same name; one backend
    at a time. Without a name, records are lost at ``close``."""


@dataclass(slots=True, eq=False)
class _Shelf:
    """The records of one namespace."""

    policy: EvictionPolicy
    records: dict[BlockKey, bytes] = field(default_factory=dict)
    used_bytes: int = 0
    is_taken: bool = False


class MemoryBackend(Backend):
    """Copies of records in a dict, evicted by a policy when they exceed the capacity.

    Puts and gets copy on the loop, one block at a time; other tasks run between two blocks of a batch.
    """

    name: ClassVar[str] = "memory"
    config_type: ClassVar[type[TierConfig]] = MemoryConfig
    medium = Medium.CPU
    authoritative = True

    def __init__(self, config: MemoryConfig) -> None:
        super().__init__(config)
        self.config: MemoryConfig = config
        self._shelf: _Shelf | None = None
        self._evicted_blocks = 0

    def check(self) -> None:
        make_policy(self.config.eviction)

    async def open(self, namespace: Namespace, geometry: RecordGeometry) -> None:
        capacity = self.config.capacity
        if capacity < geometry.record_bytes_max:
            raise ConfigError(
                f"capacity {capacity} is below one block of {geometry.record_bytes_max} bytes. "
                "Give at least that, better room for thousands of blocks."
            )
        policy = make_policy(self.config.eviction, capacity // geometry.record_bytes_max, self.tenants)
        if not self.config.shelf:
            self._shelf = _Shelf(policy)
            return
        shelf = _shelves.setdefault((self.config.shelf, namespace.digest), _Shelf(policy))
        if shelf.is_taken:
            raise LockedError(
                f"shelf {self.config.shelf!r} is in use by another backend. Close that one, or name another shelf.",
                backend=self.name,
            )
        if shelf.policy is not policy:
            for key in shelf.policy:
                policy.insert(key)
            shelf.policy = policy
        shelf.is_taken = True
        self._shelf = shelf
        self._evict(shelf, 0)

    async def close(self) -> None:
        if self._shelf is not None:
            self._shelf.is_taken = False
            self._shelf = None

    async def exists(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        records = self._open_shelf().records
        return [key in records for key in keys]

    async def put(self, writes: Sequence[RecordWrite]) -> Sequence[Outcome]:
        outcomes: list[Outcome] = []
        for write in writes:
            outcomes.append(self._put_one(self._open_shelf(), write))
            await asyncio.sleep(0)
        return outcomes

    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:
        outcomes: list[Outcome] = []
        for read in reads:
            outcomes.append(self._get_one(self._open_shelf(), read))
            await asyncio.sleep(0)
        return outcomes

    async def delete(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        shelf = self._open_shelf()
        return [_take_out(shelf, key) for key in keys]

    async def scan(self) -> AsyncIterator[BlockInfo]:
        shelf = self._open_shelf()
        # A copy of the order, because blocks change while the caller iterates.
        for key in list(shelf.policy):
            record = shelf.records.get(key)
            if record is not None:
                yield BlockInfo(key, len(record))

    async def namespaces(self) -> Sequence[NamespaceInfo]:
        """Returns those on the shelf.

        Raises:
            ConfigError: The tier has no shelf, so its blocks are lost with its backend.
        """
        if not self.config.shelf:
            raise ConfigError("A memory tier without a shelf ends with its engine, so there is nothing to inspect.")
        return [
            NamespaceInfo(digest.hex(), holder="an engine" if shelf.is_taken else "")
            for (name, digest), shelf in _shelves.items()
            if name == self.config.shelf and shelf.records
        ]

    def touch(self, keys: Sequence[BlockKey]) -> None:
        if self._shelf is not None:
            for key in keys:
                self._shelf.policy.touch(key)

    def stats(self) -> BackendStats:
        shelf = self._shelf
        return BackendStats(
            blocks=len(shelf.records) if shelf else 0,
            used_bytes=shelf.used_bytes if shelf else 0,
            capacity_bytes=self.config.capacity,
            counters={"evicted_blocks": self._evicted_blocks},
        )

    def _open_shelf(self) -> _Shelf:
        if self._shelf is None:
            raise BackendClosedError("not open: use it after open() and before close()", backend=self.name)
        return self._shelf

    def _put_one(self, shelf: _Shelf, write: RecordWrite) -> Outcome:
        if write.key in shelf.records:
            return Outcome.EXISTS
        if write.size_bytes > self.config.capacity:
            return Outcome.NO_SPACE
        self._evict(shelf, write.size_bytes)
        # A copy, because the buffers belong to the caller again as soon as the call returns.
        shelf.records[write.key] = b"".join(write.buffers)
        shelf.used_bytes += write.size_bytes
        shelf.policy.insert(write.key)
        return Outcome.OK

    def _get_one(self, shelf: _Shelf, read: RecordRead) -> Outcome:
        record = shelf.records.get(read.key)
        if record is None:
            return Outcome.MISS
        if scatter(record, read.buffers) > read.capacity_bytes:
            return Outcome.CORRUPT
        shelf.policy.touch(read.key)
        read.filled_bytes = len(record)
        return Outcome.OK

    def _evict(self, shelf: _Shelf, incoming_bytes: int) -> None:
        too_much = shelf.used_bytes + incoming_bytes - self.config.capacity
        if too_much <= 0:
            return
        victims = shelf.policy.victims(too_much, weight=lambda key: len(shelf.records[key]))
        for key in victims:
            shelf.used_bytes -= len(shelf.records.pop(key))
        self._evicted_blocks += len(victims)
        self._removal_listener(victims, RemovalCause.EVICTED)


_shelves: dict[tuple[str, bytes], _Shelf] = {}
"""Named shelves by name and namespace; they live as long as the process."""


def _take_out(shelf: _Shelf, key: BlockKey) -> bool:
    record = shelf.records.pop(key, None)
    if record is None:
        return False
    shelf.used_bytes -= len(record)
    shelf.policy.remove(key)
    return True
