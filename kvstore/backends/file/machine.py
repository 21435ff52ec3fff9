"""The parts of an open file backend, put together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Sequence
from typing import Final

from kvstore.backends.base import BackendStats, RemovalListener
from kvstore.backends.file.engine import FileEngine
from kvstore.backends.file.evictor import Evictor
from kvstore.backends.file.idle import IdleNamespaces
from kvstore.backends.file.index import Index
from kvstore.backends.file.intake import Intake
from kvstore.backends.file.layout import shard_of, tmp_name
from kvstore.backends.file.quarantine import Quarantine
from kvstore.backends.file.reader import BlockReader
from kvstore.backends.file.recovery import Recovery
from kvstore.backends.file.remover import BlockRemover
from kvstore.backends.file.scanner import Scanner
from kvstore.backends.file.session import Session
from kvstore.backends.file.snapshot import SnapshotBlock, read_snapshot, write_snapshot
from kvstore.backends.file.upkeep import Upkeep
from kvstore.backends.file.writer import BlockWriter
from kvstore.eviction import make_policy
from kvstore.types import BlockKey

__all__ = ["Machine"]

_log = logging.getLogger("kvstore.backends.file")

_WARN_AGAIN_S: Final = 60.0
"""Pause between two warnings of failing I/O; the counters tell the rest."""


class Machine:
    """What works between ``open`` and ``close``. Used from the loop thread only; starts upkeep when it is made.

    Args:
        engine: Where the I/O is done.
        session: What is held of the root.
        notify: Told of blocks that leave.
    """

    def __init__(self, engine: FileEngine, session: Session, notify: RemovalListener) -> None:
        disk, config, root, counters = session.disk, session.config, session.root, session.counters
        ledger, directories, name = session.ledger, session.directories, session.namespace.hex
        record_bytes_min = session.geometry.header_bytes
        self.engine = engine
        self.session = session
        self.counters = counters
        self.limits = session.limits
        self.index = Index(make_policy(config.eviction, session.limits.capacity_bytes // session.block_bytes))
        self.reader = BlockReader(disk, root, directories, counters, engine.rings, record_bytes_min=record_bytes_min)
        quarantine = Quarantine(
            disk, root.state_fd, ledger, blocks_max=config.quarantine_blocks, bytes_max=config.quarantine_bytes
        )
        self.remover = BlockRemover(disk, root, directories, counters, quarantine, engine.rings, name)
        self.recovery = Recovery(
            engine=engine,
            new_scanner=lambda: Scanner(disk, root, directories.fd, counters, record_bytes_min=record_bytes_min),
            directories=directories,
            ledger=ledger,
            index=self.index,
            counters=counters,
            load=lambda: read_snapshot(disk, root.state_fd, name),
            namespace_hex=name,
            fanout=root.fanout,
            notify=notify,
        )
        self.evictor = Evictor(
            engine=engine,
            ledger=ledger,
            limits=session.limits,
            index=self.index,
            remover=self.remover,
            quarantine=quarantine,
            idle=IdleNamespaces(disk, root, ledger, counters, name),
            counters=counters,
            shard_of=self.shard_of,
            notify=notify,
            shared=config.shared,
        )
        self.intake = Intake(
            engine=engine,
            ledger=ledger,
            limits=session.limits,
            index=self.index,
            evictor=self.evictor,
            recovery=self.recovery,
            writer=self._new_writer(),
            counters=counters,
            shard_of=self.shard_of,
            note_errors=self.note_errors,
            exclusive=not config.shared,
        )
        self.upkeep = Upkeep(
            config=config,
            engine=engine,
            ledger=ledger,
            index=self.index,
            recovery=self.recovery,
            evictor=self.evictor,
            reader=self.reader,
            counters=counters,
            write_snapshot=self._write_snapshot,
            shard_of=self.shard_of,
        )
        self._snapshots = 0
        self._warned_at = float("-inf")
        self.last_error = ""
        self._upkeep_task = asyncio.create_task(self.upkeep.run(), name="kvstore-file-upkeep")

    def shard_of(self, key: BlockKey) -> int:
        """Return the shard of a key."""
        return shard_of(key, self.session.root.fanout)

    def note_use(self, keys: Sequence[BlockKey]) -> None:
        """Note that blocks were used."""
        self.index.touch(keys)
        if self.session.config.shared:
            self.upkeep.note_use(keys)

    def note_errors(self, errors: Sequence[OSError], doing: str) -> None:
        """Count failed I/O, and warn of it now and then."""
        if not errors:
            return
        self.counters.add("io_errors", len(errors))
        path = self.session.root.path
        self.last_error = f"{doing} in {path} fails: {errors[0]}"
        if time.monotonic() - self._warned_at > _WARN_AGAIN_S:
            self._warned_at = time.monotonic()
            _log.warning("%s in %s fails (%d blocks of one batch): %s", doing, path, len(errors), errors[0])

    def stats(self) -> BackendStats:
        """Return a moment's view."""
        ledger, recovery = self.session.ledger, self.recovery
        return BackendStats(
            blocks=len(self.index),
            used_bytes=self.index.size_bytes,
            capacity_bytes=self.limits.capacity_bytes,
            counters=self.counters.snapshot(),
            gauges={
                "root_used_bytes": float(ledger.used_bytes),
                "filesystem_free_bytes": float(ledger.free_bytes),
                "reserve_bytes": float(self.limits.reserve_bytes),
                "recovering": float(not recovery.ended.is_set()),
                "recovery_seconds": recovery.seconds,
                "direct_io": float(self.session.root.direct_read and self.session.root.direct_write),
                "pending_units": float(self.engine.pending_units),
                "io_uring": float(self.engine.rings.used),
            },
        )

    async def close(self, timeout_s: float) -> None:
        """Stop, save the index, let go; each step takes ``timeout_s`` at most."""
        self._upkeep_task.cancel()
        await _within(timeout_s, _ended(self._upkeep_task))
        await _within(timeout_s, self.evictor.close())
        saved = await _within(timeout_s, self._save())
        # A thread that is stuck in the kernel still uses the descriptors: then they stay open until the process ends.
        if saved and await _within(timeout_s, self.engine.call(self.session.release)):
            await self.engine.close(timeout_s)
        else:
            _log.warning("%s does not answer; closing without it", self.session.root.path)
            await self.engine.close(0)

    async def _save(self) -> None:
        with contextlib.suppress(OSError):
            await self.upkeep.save()

    def _new_writer(self) -> BlockWriter:
        session = self.session
        return BlockWriter(
            session.disk,
            session.root,
            session.directories,
            session.counters,
            self.engine.rings,
            writer=session.writer,
            durability=session.config.durability,
            record_bytes_min=session.geometry.header_bytes,
            look_first=session.config.shared,
        )

    def _write_snapshot(self, blocks: list[SnapshotBlock]) -> None:
        self._snapshots += 1
        session = self.session
        tmp = tmp_name(session.writer, 0x80000000 + self._snapshots)
        write_snapshot(session.disk, session.root.state_fd, session.namespace.hex, blocks, tmp)


async def _ended(task: asyncio.Task[None]) -> None:
    await asyncio.gather(task, return_exceptions=True)


async def _within(timeout_s: float, work: Coroutine[None, None, None]) -> bool:
    """Wait for work, and leave it behind when that takes too long; return whether it ended."""
    task = asyncio.ensure_future(work)
    done, _ = await asyncio.wait({task}, timeout=timeout_s)
    if done:
        task.result()
    return bool(done)
