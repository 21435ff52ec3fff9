"""A session: everything that an open nvme backend holds, from ``open`` to ``close``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final

from kvstore.backends.base import RecordGeometry
from kvstore.backends.nvme.config import NvmeConfig
from kvstore.backends.nvme.index import Index
from kvstore.backends.nvme.layout import slot_bytes_for
from kvstore.backends.nvme.records import RecordMover
from kvstore.backends.nvme.recovery import Recovery, RecoveryCounts
from kvstore.backends.nvme.slab import Slab
from kvstore.backends.nvme.snapshot import Snapshot, read_snapshot, write_snapshot
from kvstore.codec.record import HEADER_BYTES
from kvstore.diskio import OsDisk
from kvstore.diskio.transfers import TransferEngine
from kvstore.errors import ConfigError
from kvstore.eviction import make_policy
from kvstore.namespace import Namespace
from kvstore.types import BlockKey

__all__ = ["Session"]

_log = logging.getLogger("kvstore.backends.nvme")

_SLOT_BYTES_MAX: Final = 1 << 31
"""Longest slot: what one vectored transfer moves."""

_SETTLE_AFTER_S: Final = 1.0
"""When the eviction policy is told of restored blocks, unless somebody needs the room earlier."""

LostListener = Callable[[Sequence[BlockKey]], None]


class Session:
    """Slabs, index and engine of an open backend; made by :meth:`open`.

    Attributes:
        slabs: One per path.
        index: Which block is where.
        engine: Does the I/O.
        mover: Makes transfers.
        recovered: Set when the index says what the slabs say.
        recovery: Counts of the scan.
    """

    def __init__(self, disk: OsDisk, config: NvmeConfig) -> None:
        self.slabs: list[Slab] = []
        self.recovered = asyncio.Event()
        self.recovery = RecoveryCounts()
        self.engine: TransferEngine
        self.index: Index
        self.mover: RecordMover
        self._disk = disk
        self._config = config
        self._tasks: list[asyncio.Task[None]] = []
        self._snapshot_changes = 0

    async def open(self, namespace: Namespace, geometry: RecordGeometry, on_lost: LostListener) -> None:
        """Open the slabs and fill the index from their snapshots; what these don't know is scanned from now on.

        Raises:
            ConfigError: The configuration can't be used here.
            BackendError: A slab is locked, has no room, or its disk fails.
        """
        if geometry.header_bytes > HEADER_BYTES:
            raise ConfigError(f"Headers of {geometry.header_bytes} bytes; the nvme backend takes {HEADER_BYTES}.")
        slot_bytes = slot_bytes_for(geometry.payload_bytes_max)
        if slot_bytes > _SLOT_BYTES_MAX:
            raise ConfigError(f"Blocks of {geometry.payload_bytes_max} bytes; the nvme backend takes 2 GiB at most.")
        config = self._config
        self.engine = TransferEngine(self._disk, config.engine, threads=config.threads, name="nvme")
        try:
            snapshots = await self.engine.call(lambda: self._open_slabs(slot_bytes))
            self._fill(snapshots, namespace, geometry, on_lost)
        except BaseException:
            await self._release()
            raise

    def _fill(
        self,
        snapshots: Sequence[Snapshot | None],
        namespace: Namespace,
        geometry: RecordGeometry,
        on_lost: LostListener,
    ) -> None:
        """Make the index from the snapshots, and start what keeps it true."""
        slots = [slab.superblock.slots for slab in self.slabs]
        self.index = Index(make_policy(self._config.eviction, sum(slots)), slots, namespace.digest)
        self.mover = RecordMover(self.slabs, namespace.digest, geometry.header_bytes)
        dirty = []
        for number, (slab, snapshot) in enumerate(zip(self.slabs, snapshots, strict=True)):
            if snapshot is not None:
                self.index.restore(number, snapshot)
            found = slab.found
            exact = found is None or (found.clean and snapshot is not None and snapshot.epoch == found.epoch)
            if exact:
                self.index.open_free_slots(number)
            else:
                dirty.append(number)
        self._start(self._settle())
        if dirty:
            # From now on, so that nothing is stored or evicted without the scan knowing.
            self.index.touched_while_scanning = set()
            self._start(self._recover(dirty, on_lost))
        else:
            self.recovered.set()
        self._start(self._write_snapshots_for_ever())

    async def close(self, timeout_s: float) -> None:
        """Write the snapshots, say that they are the whole truth (if recovery had ended), let go of everything."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        snapshots = self._snapshots()
        clean = self.recovered.is_set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.engine.call(partial(self._write_snapshots, snapshots, clean=clean))
        await self._release(timeout_s)

    def _open_slabs(self, slot_bytes: int) -> list[Snapshot | None]:
        """Open all slabs and return their snapshots; on a thread."""
        config, snapshots = self._config, []
        for path in config.path_list:
            slab = Slab(self._disk, path)
            self.slabs.append(slab)
            slab.open(config.lock_timeout)
        for slab in self.slabs:
            slab.enter(slot_bytes, config.capacity, len(self.slabs), config.unknown_format)
            self.engine.admit(slab.fd)
            snapshots.append(self._read_snapshot(slab))
        return snapshots

    def _read_snapshot(self, slab: Slab) -> Snapshot | None:
        if slab.found is None:
            return None
        return read_snapshot(self._disk, slab.dir_fd, slab.superblock.slab_id, slab.superblock.slots)

    async def _settle(self) -> None:
        # First the engine is told what is there, which it waits for.
        await asyncio.sleep(_SETTLE_AFTER_S)
        for _ in self.index.settle():
            await asyncio.sleep(0)

    async def _recover(self, dirty: Sequence[int], on_lost: LostListener) -> None:
        recovery = Recovery(self.engine, self.index, self.slabs, on_lost)
        self.recovery = recovery.counts
        await recovery.run(dirty)
        self.recovered.set()

    async def _write_snapshots_for_ever(self) -> None:
        while self._config.snapshot_interval:
            await asyncio.sleep(self._config.snapshot_interval)
            if self.index.changes != self._snapshot_changes:
                self._snapshot_changes = self.index.changes
                await self.engine.call(partial(self._write_snapshots, self._snapshots(), clean=False))

    def _snapshots(self) -> list[Snapshot]:
        return [
            self.index.snapshot(number, slab.superblock.slab_id, slab.superblock.epoch)
            for number, slab in enumerate(self.slabs)
        ]

    def _write_snapshots(self, snapshots: Sequence[Snapshot], *, clean: bool) -> None:
        """Write the snapshots of all slabs; on a thread."""
        for slab, snapshot in zip(self.slabs, snapshots, strict=True):
            try:
                write_snapshot(self._disk, slab.dir_fd, snapshot)
                if clean:
                    slab.write_superblock(clean=True)
            except OSError as error:
                # The next start scans, which costs time and nothing else.
                _log.warning("the snapshot of %s could not be written: %s", slab.path, error)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work))

    async def _release(self, timeout_s: float = 5.0) -> None:
        # A thread that is stuck in the kernel still uses the files: they stay open, and locked, until it ends.
        if await self.engine.close(timeout_s):
            for slab in self.slabs:
                slab.close()
