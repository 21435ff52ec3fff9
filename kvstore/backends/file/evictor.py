"""The evictor: frees space in the background, and for stores that can't wait for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.backends.base import RemovalListener
from kvstore.backends.file.counters import Counters
from kvstore.backends.file.engine import FileEngine
from kvstore.backends.file.idle import IdleNamespaces
from kvstore.backends.file.index import Entry, Index
from kvstore.backends.file.ledger import Ledger, Removal
from kvstore.backends.file.quarantine import Quarantine
from kvstore.backends.file.remover import BlockRemover, RemoveOp
from kvstore.backends.file.space import Goal, Limits, goal
from kvstore.types import BlockKey, RemovalCause

__all__ = ["Evictor"]

_log = logging.getLogger("kvstore.backends.file")

_ROUND_BLOCKS: Final = 256
"""Blocks removed between two looks at the usage: other engines evict too, and loads want to go in between."""

_FRUITLESS_ROUNDS_MAX: Final = 4
"""Rounds in a row that free nothing (blocks turn out to be in use, or can't be removed) before it gives up."""

_HOT_S: Final = 120.0
"""A shared block is left alone if another engine has noted a use this much later than we knew of; engines note uses
once a minute, so less would mean nothing."""


class Evictor:
    """Evicts blocks of this root: quarantined ones first, then idle namespaces, then our own by policy.

    Used from the loop thread only. One eviction runs at a time.

    Args:
        engine: Where the I/O is done.
        ledger: What is used.
        limits: What must hold.
        index: Our blocks.
        remover: Removes their files.
        quarantine: Damaged blocks.
        idle: The other namespaces.
        counters: Where to count.
        shard_of: Shard of a key.
        notify: Told of each block that goes.
        shared: Whether others may use our blocks.
    """

    def __init__(
        self,
        *,
        engine: FileEngine,
        ledger: Ledger,
        limits: Limits,
        index: Index,
        remover: BlockRemover,
        quarantine: Quarantine,
        idle: IdleNamespaces,
        counters: Counters,
        shard_of: Callable[[BlockKey], int],
        notify: RemovalListener,
        shared: bool,
    ) -> None:
        self._engine = engine
        self._ledger = ledger
        self._limits = limits
        self._index = index
        self._remover = remover
        self._quarantine = quarantine
        self._idle = idle
        self._counters = counters
        self._shard_of = shard_of
        self._notify = notify
        self._shared = shared
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[bool]] = set()
        self.wants_recount = False
        """Set when nothing more could be evicted: the ledger may be too high."""

    async def make_room(self, charges: Sequence[int]) -> bool:
        """Evict until blocks with these charges may be written, and down to the low watermark.

        The eviction goes on when the caller is cancelled.

        Returns:
            Whether they may be written, as far as this process knows.
        """
        return await asyncio.shield(self._start(charges))

    def kick(self) -> None:
        """Start an eviction down to the low watermark, unless one is under way."""
        if not self._tasks:
            self._start(())

    def make_room_later(self, charges: Sequence[int]) -> None:
        """Start an eviction as :meth:`make_room` does, unless one is under way, and don't wait for it."""
        if not self._tasks:
            self._start(charges)

    async def close(self) -> None:
        """Stop, leaving what has not been evicted."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, charges: Sequence[int]) -> asyncio.Task[bool]:
        task = asyncio.create_task(self._run(charges), name="kvstore-file-evictor")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run(self, charges: Sequence[int]) -> bool:
        async with self._lock:
            try:
                return await self._evict(charges)
            except OSError as error:
                _log.warning("eviction stopped: %s", error)
                self._counters.add("eviction_errors")
                return False

    async def _evict(self, charges: Sequence[int]) -> bool:
        others_left, fruitless, started = True, 0, False
        while fruitless < _FRUITLESS_ROUNDS_MAX:
            usage = await self._engine.call(self._ledger.usage)
            wanted = goal(charges, usage, self._limits, started=started)
            if not wanted:
                return True
            started = True
            if others_left:
                # Again while they free anything: stores go on meanwhile, and may need more than was wanted.
                others_left = await self._engine.call(lambda wanted=wanted: self._evict_others(wanted))  # type: ignore[misc]
                if others_left:
                    continue
            blocks = await self._evict_own(wanted)
            if blocks is None:
                break
            fruitless = 0 if blocks else fruitless + 1
        self.wants_recount = True
        return False

    def _evict_others(self, wanted: Goal) -> bool:
        return self._quarantine.clear() > 0 or self._idle.evict(wanted) > 0

    async def _evict_own(self, wanted: Goal) -> int | None:
        """Evict some of our blocks; return how many went, or None if there are none."""
        victims = self._index.take_victims(wanted, _ROUND_BLOCKS)
        if not victims:
            return None
        ops = [
            RemoveOp(key, self._shard_of(key), entry.used_at + _HOT_S if self._shared else None)
            for key, entry in victims
        ]
        removal = Removal(sum(entry.size_bytes for _, entry in victims), len(victims))
        try:
            await self._engine.call(lambda: self._ledger.begin(removal))
            if not self._shared:
                # Before the first file goes, so that nobody asks for it any more.
                self._notify([key for key, _ in victims], RemovalCause.EVICTED)
            await self._engine.run_blocks(self._remover.unlink, ops)
        finally:
            removed = self._settle(victims, ops, removal)
        if self._shared and removed:
            self._notify(removed, RemovalCause.EVICTED)
        return len(removed)

    def _settle(
        self, victims: Sequence[tuple[BlockKey, Entry]], ops: Sequence[RemoveOp], removal: Removal
    ) -> list[BlockKey]:
        self._index.left(op.key for op in ops)
        removed, freed = [], 0
        for (key, entry), op in zip(victims, ops, strict=True):
            if op.removed:
                removed.append(key)
                freed += op.freed_bytes
            elif op.used_at is not None or op.removed is None:
                # Used by another engine lately, or not tried any more: it stays.
                self._index.add(key, entry.size_bytes, op.used_at or entry.used_at)
            elif op.error is not None:
                self._counters.add("eviction_errors")
        self._ledger.end(removal, (freed, len(removed)))
        self._counters.add("evicted_blocks", len(removed))
        self._counters.add("evicted_bytes", freed)
        return removed
