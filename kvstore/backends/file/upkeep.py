"""Upkeep: what has to be done now and then while a file backend is open."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from typing import Final

from kvstore.backends.file.config import FileConfig
from kvstore.backends.file.counters import Counters
from kvstore.backends.file.engine import FileEngine
from kvstore.backends.file.evictor import Evictor
from kvstore.backends.file.index import Index
from kvstore.backends.file.ledger import Ledger
from kvstore.backends.file.reader import BlockReader, StatOp
from kvstore.backends.file.recovery import Recovery
from kvstore.backends.file.snapshot import SnapshotBlock
from kvstore.types import BlockKey

__all__ = ["Upkeep"]

_log = logging.getLogger("kvstore.backends.file")

_TICK_S: Final = 1.0
"""How soon other processes learn what we have finished or removed; a store tells them anyway."""

_RECOUNT_PAUSE_S: Final = 60.0
"""Shortest time between scans that something went wrong asks for; a scan of a full root is not free."""

_MARK_AGAIN_S: Final = 60.0
"""How often the use of one shared block is noted in its file's times: eviction thinks in hours."""

_MARKS_MAX: Final = 10_000
"""Uses waiting to be noted; more are dropped, since eviction only needs to know of most."""


class Upkeep:
    """Ticks once a second: ledger, times of shared files, snapshots, scans.

    Used from the loop thread only.

    Args:
        config: How often.
        engine: Where the I/O is done.
        ledger: Flushed.
        index: Snapshots are made of it.
        recovery: Scans.
        evictor: Tells when a scan is wanted.
        reader: Notes uses.
        counters: Where to count.
        write_snapshot: Writes a snapshot (blocking).
        shard_of: Shard of a key.
    """

    def __init__(
        self,
        *,
        config: FileConfig,
        engine: FileEngine,
        ledger: Ledger,
        index: Index,
        recovery: Recovery,
        evictor: Evictor,
        reader: BlockReader,
        counters: Counters,
        write_snapshot: Callable[[list[SnapshotBlock]], None],
        shard_of: Callable[[BlockKey], int],
    ) -> None:
        self._config = config
        self._engine = engine
        self._ledger = ledger
        self._index = index
        self._recovery = recovery
        self._evictor = evictor
        self._reader = reader
        self._counters = counters
        self._write_snapshot = write_snapshot
        self._shard_of = shard_of
        self._marks: dict[BlockKey, float] = {}
        self._snapshot_at = time.monotonic()
        self._snapshot_changes = -1

    def note_use(self, keys: Iterable[BlockKey]) -> None:
        """Note that shared blocks were used, so that other engines leave them alone."""
        now = time.time()
        for key in keys:
            entry = self._index.get(key)
            if entry is not None and now - entry.marked_at >= _MARK_AGAIN_S and len(self._marks) < _MARKS_MAX:
                entry.marked_at = now
                self._marks[key] = now

    async def run(self) -> None:
        """Recover, then tick until cancelled."""
        await self._recovery.run()
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                await self._tick()
            except (OSError, TimeoutError) as error:
                self._counters.add("upkeep_errors")
                _log.debug("upkeep: %s", error)

    async def save(self) -> None:
        """Write a snapshot if anything has changed since the last one.

        Raises:
            OSError: It could not be written.
        """
        if self._index.changes == self._snapshot_changes or not self._recovery.is_complete:
            return
        changes, blocks = self._index.changes, self._index.items()
        self._snapshot_at = time.monotonic()
        await self._engine.call(lambda: self._write_snapshot(blocks))
        self._snapshot_changes = changes
        self._counters.add("snapshots")

    async def _tick(self) -> None:
        # Also when there is nothing to enter: the gauges tell what others have done.
        await self._engine.call(self._ledger.usage)
        if self._marks:
            marks, self._marks = self._marks, {}
            ops = [StatOp(key, self._shard_of(key), used_at=used_at) for key, used_at in marks.items()]
            await self._engine.run(self._reader.mark_used, ops)
        if self._wants_scan():
            self._evictor.wants_recount = False
            await self._recovery.scan()
        interval = self._config.snapshot_interval
        if interval and time.monotonic() - self._snapshot_at >= interval:
            with contextlib.suppress(OSError):
                await self.save()

    def _wants_scan(self) -> bool:
        age = time.monotonic() - self._recovery.scanned_at
        interval = self._config.rescan_interval
        if self._config.shared and interval and age >= interval:
            return True
        ledger = self._ledger
        wanted = self._evictor.wants_recount or ledger.wants_recount or not ledger.is_counted
        return (wanted or not self._recovery.is_complete) and age >= _RECOUNT_PAUSE_S
