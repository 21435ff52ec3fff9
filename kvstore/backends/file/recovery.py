"""Recovery: what earlier runs (and, in a shared root, others) left, found while the backend is already at work."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.backends.base import RemovalListener
from kvstore.backends.file.counters import Counters
from kvstore.backends.file.directories import Directories
from kvstore.backends.file.engine import FileEngine
from kvstore.backends.file.index import Index
from kvstore.backends.file.ledger import Ledger
from kvstore.backends.file.scanner import NamespaceScan, Scanner, ShardScan
from kvstore.backends.file.snapshot import SnapshotBlock
from kvstore.types import RemovalCause

__all__ = ["Recovery"]

_log = logging.getLogger("kvstore.backends.file")

_SHARDS_AT_ONCE: Final = 16
"""Shards scanned before the loop takes over what was found."""

_MERGE_BLOCKS: Final = 2000
"""Blocks put into the index before other tasks of the loop get a turn: about two milliseconds."""


class Recovery:
    """Fills the index from the snapshot, then from the files; and scans again when that is needed.

    Used from the loop thread only.

    Args:
        engine: Where the I/O is done.
        new_scanner: Makes a scanner for one scan.
        directories: Those of our namespace.
        ledger: Set right after each scan.
        index: What is filled.
        counters: Where to count.
        load: Reads the last snapshot (blocking).
        namespace_hex: Our namespace.
        fanout: Number of shards.
        notify: Told of blocks that were there once and are not any more.
    """

    def __init__(
        self,
        *,
        engine: FileEngine,
        new_scanner: Callable[[], Scanner],
        directories: Directories,
        ledger: Ledger,
        index: Index,
        counters: Counters,
        load: Callable[[], list[SnapshotBlock]],
        namespace_hex: str,
        fanout: int,
        notify: RemovalListener,
    ) -> None:
        self._engine = engine
        self._new_scanner = new_scanner
        self._directories = directories
        self._ledger = ledger
        self._index = index
        self._counters = counters
        self._load = load
        self._namespace_hex = namespace_hex
        self._fanout = fanout
        self._notify = notify
        self.snapshot_loaded = asyncio.Event()
        """Set when the index holds what the snapshot says."""
        self.ended = asyncio.Event()
        """Set when the first scan has ended, however."""
        self.is_complete = False
        """Whether a scan has got through, so that the index holds all there is."""
        self.scanned_at = float("-inf")
        """Monotonic time of the last scan's end."""
        self._made_at = time.time()
        self.seconds = 0.0
        """What the first scan took."""

    async def run(self) -> None:
        """Recover; sets the events also when that fails or is cancelled."""
        started = time.monotonic()
        try:
            blocks = await self._engine.call(self._load)
            for start in range(0, len(blocks), _MERGE_BLOCKS):
                self._index.restore(blocks[start : start + _MERGE_BLOCKS])
                await asyncio.sleep(0)
            self._counters.add("recovered_from_snapshot", len(blocks))
            del blocks
            self.snapshot_loaded.set()
            await self.scan()
        finally:
            self.seconds = time.monotonic() - started
            self.snapshot_loaded.set()
            self.ended.set()

    async def scan(self) -> bool:
        """Look at every file of the root; make index and ledger agree with them.

        Returns:
            Whether it got through; otherwise what was found is in the index, and nothing was taken out.
        """
        self._index.begin_scan()
        try:
            is_complete = await self._scan()
        except OSError as error:
            self._counters.add("scan_errors")
            _log.warning("scanning the cache directory failed: %s", error)
            is_complete = False
        finally:
            self._index.end_scan()
            self.scanned_at = time.monotonic()
        self.is_complete = self.is_complete or is_complete
        return is_complete

    async def _scan(self) -> bool:
        # Blocks stored since the backend was opened are warmer than all that earlier runs left.
        started_at = time.time() if self.ended.is_set() else self._made_at
        scanner = self._new_scanner()
        await self._engine.call(self._directories.renew_removed)
        before = await self._engine.call(self._ledger.flush)
        dead = await self._engine.call(scanner.sweep_state)
        others = await self._engine.call(lambda: scanner.other_namespaces(self._namespace_hex))
        size_bytes, files, news, is_complete = 0, 0, list[SnapshotBlock](), True
        for first in range(0, self._fanout, _SHARDS_AT_ONCE):
            shards = range(first, min(first + _SHARDS_AT_ONCE, self._fanout))
            scans = [ShardScan(shard) for shard in shards]
            await self._engine.run(scanner.scan_shards, scans, unit_items_max=1)
            for scan in scans:
                size_bytes += scan.size_bytes
                files += scan.files
                is_complete = is_complete and scan.is_complete
                news += await self._confirm(scan.blocks)
        await self._add(news, started_at)
        if is_complete:
            self._forget_lost()
        await self._engine.run(scanner.scan_namespaces, others, unit_items_max=1)
        # Last, so that a block that is moved there meanwhile is seen at one place at least.
        others.append(NamespaceScan(""))
        await self._engine.run(scanner.scan_namespaces, others[-1:])
        size_bytes += sum(scan.size_bytes for scan in others)
        files += sum(scan.files for scan in others)
        if is_complete and all(scan.is_complete for scan in others):
            dead += await self._engine.call(lambda: scanner.find_dead(list(before.work)))
            await self._engine.call(lambda: self._ledger.reconcile(before, (size_bytes, files), dead))
            return True
        return False

    async def _confirm(self, blocks: Sequence[SnapshotBlock]) -> list[SnapshotBlock]:
        """Note that blocks are there; return those that the index did not know."""
        news = []
        for number, block in enumerate(blocks):
            if block[0] in self._index:
                self._index.add(block[0], block[1])
            elif self._index.is_news(block[0]):
                news.append(block)
            if number % _MERGE_BLOCKS == _MERGE_BLOCKS - 1:
                await asyncio.sleep(0)
        return news

    async def _add(self, news: list[SnapshotBlock], started_at: float) -> None:
        """Add found blocks, coldest first, below those that were used since the scan began."""
        if not news:
            return
        news.sort(key=_used_at)
        for number, (key, size_bytes, used_at) in enumerate(news):
            if self._index.is_news(key):
                self._index.add(key, size_bytes, min(used_at, started_at))
            if number % _MERGE_BLOCKS == _MERGE_BLOCKS - 1:
                await asyncio.sleep(0)
        self._counters.add("recovered_from_scan", len(news))
        self._index.reheat(self._index.used_since(started_at))

    def _forget_lost(self) -> None:
        lost = list(self._index.unseen())
        for key in lost:
            self._index.remove(key)
        if lost:
            self._counters.add("lost_blocks", len(lost))
            self._notify(lost, RemovalCause.LOST)


def _used_at(block: SnapshotBlock) -> float:
    return block[2]
