"""Store, load and removal of blocks, each with a fixed order of steps.

- Store: write the slot, ``fdatasync`` it if stores are durable, write the journal frame, report the block.
- Eviction (:mod:`kvstore.backends.disk.space`): write the journal frame; only then is the block not found any more, and
  only then may the slot be reused.
- Removal: hide the block, write the journal frame, zero the slot's header page, report the removal.
- Load: read the slot; if it belongs to another engine, read that engine's journal again; only then deliver the block.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import Sequence
from functools import partial
from typing import Final

from kvstore.backends.base import RecordRead, RecordWrite, outcome_of
from kvstore.backends.disk.layout import OWNER_SHIFT, PAGE, SLOT_MASK, Kind, Row, digest_of
from kvstore.backends.disk.records import SlotRead, SlotWrite, aligned_buffer
from kvstore.backends.disk.session import Session
from kvstore.backends.disk.table import NOWHERE
from kvstore.diskio import Transfer, bare
from kvstore.runtime.workers import to_the_end
from kvstore.types import KEY_BYTES_MAX, BlockKey, Outcome, RemovalCause

_log = logging.getLogger("kvstore.backends.disk")

_GONE: Final = frozenset({errno.ENOENT, errno.EPERM, errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENOTDIR})
"""Errors meaning that a segment does not exist; all others may be temporary."""

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class Blocks:
    """Puts, reads and removes blocks of one session. Used from the loop thread."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.last_error = ""  # Text of the latest failure of a block.
        self._counts = session.counts
        self._claims = session.claims

    async def put(self, writes: Sequence[RecordWrite]) -> Sequence[Outcome]:
        outcomes: list[Outcome | None] = [None] * len(writes)
        while None in outcomes:
            mine, others = self._choose(writes, outcomes)
            if mine:
                with self.session.claimed(mine):
                    await self._put_claimed(writes, list(mine.values()), outcomes)
            if others:
                # Other puts of these keys are running. A key exists if its put succeeds; otherwise this call puts it.
                await asyncio.wait(others)
        return [outcome for outcome in outcomes if outcome is not None]

    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:
        index = self.session.index
        outcomes = [Outcome.MISS] * len(reads)
        wanted = [(i, place) for i, read in enumerate(reads) if (place := index.place(read.key)) != NOWHERE]
        if wanted:
            own = [place for _, place in wanted if place <= SLOT_MASK]
            index.pin(own)
            try:
                await self._read(reads, wanted, outcomes)
            except OSError as error:
                for i, _ in wanted:
                    outcomes[i] = self._failed(error)
            finally:
                index.unpin(own)
        return outcomes

    async def delete(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        return [place != NOWHERE for place in await self._remove(keys, Kind.REMOVE)]

    async def quarantine(self, keys: Sequence[BlockKey]) -> None:
        places = await self._remove(keys, Kind.BAD)
        self._counts["quarantined_blocks"] += sum(0 <= place <= SLOT_MASK for place in places)

    def _choose(
        self, writes: Sequence[RecordWrite], outcomes: list[Outcome | None]
    ) -> tuple[dict[BlockKey, tuple[int, int]], set[asyncio.Future[None]]]:
        """Select the records to put; return position and digest by key, and the running puts to wait for."""
        session, index = self.session, self.session.index
        mine: dict[BlockKey, tuple[int, int]] = {}
        others: set[asyncio.Future[None]] = set()
        for i, write in enumerate(writes):
            if outcomes[i] is not None:
                continue
            key = write.key
            digest = digest_of(key)
            if (place := index.place(key, digest)) != NOWHERE:
                session.note_use((place,))
                outcomes[i] = Outcome.EXISTS
            elif not 0 < len(key) <= KEY_BYTES_MAX or write.size_bytes > session.record_bytes_max:
                self.last_error = f"key of {len(key)} bytes, record of {write.size_bytes}: too long for a slot"
                outcomes[i] = Outcome.REFUSED
            elif (other := self._claims.get(key)) is not None:
                others.add(other)
            else:
                # Of several writes of one key in a call, the first is put now; the others follow in the next round.
                mine.setdefault(key, (i, digest))
        return mine, others

    async def _put_claimed(
        self, writes: Sequence[RecordWrite], mine: Sequence[tuple[int, int]], outcomes: list[Outcome | None]
    ) -> None:
        """Write claimed records; afterwards every slot is used or free, even if this fails."""
        session = self.session
        slots: list[int] = []
        ops: list[SlotWrite] = []
        entered: set[int] = set()
        failed: list[int] = []
        try:
            slots = await session.space.take(len(mine))
            if len(slots) < len(mine):
                self.last_error = "no slot is free: other engines use the capacity, or the disk is full"
            for i, _ in mine[len(slots) :]:
                outcomes[i] = Outcome.NO_SPACE
            async with session.segments.files_of(slots) as fds:
                for (i, digest), slot, fd in zip(mine, slots, fds, strict=False):
                    if fd >= 0:
                        offset = session.geometry.offset_of(slot)
                        ops.append(session.mover.write(i, writes[i], digest, slot, fd, offset))
                    else:
                        outcomes[i] = self._failed(OSError(-fd, "the segment can't be opened"))
                        failed.append(slot)
                await session.engine.write(ops)
                if session.config.durability == "data":
                    await self._sync(ops)
            # Written records are published even if this call is cancelled.
            failed += [op.slot for op in ops if op.failure is not None and op.failure.errno not in _FULL]
            publishing = self._publish(ops, outcomes, entered)
            await to_the_end(asyncio.get_running_loop().create_task(publishing))
        except OSError as error:
            for i, _ in mine:
                outcomes[i] = self._failed(error)
        finally:
            session.mover.release(ops)
            session.index.give_back([slot for slot in slots if slot not in entered and slot not in failed])
            session.index.rest(failed)

    async def _sync(self, ops: Sequence[SlotWrite]) -> None:
        """Flush written records to the device; those of a segment that can't be flushed count as not written."""
        for fd in {op.fd for op in ops}:
            try:
                await self.session.engine.call(partial(self.session.disk.fdatasync, fd))
            except OSError as error:
                for op in ops:
                    if op.fd == fd:
                        op.error = bare(error)

    async def _publish(self, ops: Sequence[SlotWrite], outcomes: list[Outcome | None], entered: set[int]) -> None:
        """Enter the written records; add their slots, which are then no longer the caller's, to ``entered``."""
        good: list[SlotWrite] = []
        for op in ops:
            if (failure := op.failure) is not None:
                outcomes[op.index] = self._failed(failure)
            else:
                good.append(op)
        if not good:
            return
        rows: list[Row] = [(Kind.ADD, op.slot, op.record_bytes, op.digest, op.key) for op in good]
        result = Outcome.OK
        entered.update([op.slot for op in good])
        try:
            await self.session.space.enter(rows)
        except OSError as error:
            result = self._failed(error)
        for op in good:
            outcomes[op.index] = result

    async def _read(
        self, reads: Sequence[RecordRead], wanted: Sequence[tuple[int, int]], outcomes: list[Outcome]
    ) -> None:
        session = self.session
        ops: list[SlotRead] = []
        lost: list[tuple[BlockKey, int]] = []
        size_of = session.index.columns.size_view
        # Before the files are opened: meanwhile a block may be removed, or its slot retired.
        sizes = [size_of[place] if place <= SLOT_MASK else 0 for _, place in wanted]
        try:
            async with session.segments.files_of([place for _, place in wanted]) as fds:
                for (i, place), size, fd in zip(wanted, sizes, fds, strict=True):
                    if fd >= 0:
                        other = session.followers.others.get(place >> OWNER_SHIFT)
                        geometry = other.geometry if other else session.geometry
                        offset = geometry.offset_of(place & SLOT_MASK)
                        ops.append(session.mover.read(i, reads[i], place, size, fd, offset, geometry.slot_bytes))
                    elif -fd in _GONE:
                        lost.append((reads[i].key, place))
                    else:
                        outcomes[i] = self._failed(OSError(-fd, "the segment can't be opened"))
                await session.engine.read(ops)
                of_others = [op for op in ops if op.place > SLOT_MASK]
                if of_others:
                    try:
                        # An owner reuses a slot only after its journal has freed it.
                        await session.followers.refresh({op.place >> OWNER_SHIFT for op in of_others})
                    except OSError as error:
                        for op in of_others:
                            op.error = bare(error)
            for op in ops:
                outcomes[op.index] = self._read_outcome(op, lost)
        finally:
            session.mover.release(ops)
        if lost:
            await self._lose(lost)
        session.note_use([op.place for op in ops if outcomes[op.index] is Outcome.OK])

    def _read_outcome(self, op: SlotRead, lost: list[tuple[BlockKey, int]]) -> Outcome:
        session, key = self.session, op.read.key
        if op.error is not None:
            return self._failed(op.error)
        if op.place > SLOT_MASK and (
            op.place >> OWNER_SHIFT not in session.followers.others or session.index.place(key) != op.place
        ):
            # The owner freed the slot during the read, or its journal is no longer readable.
            return Outcome.MISS
        # A short read: the segment of an ended owner was removed meanwhile, and a torn journal can't record that.
        is_cut = op.place > SLOT_MASK and op.done_bytes < op.size_bytes
        if is_cut or not session.mover.is_asked_for(op):
            lost.append((key, op.place))
            return Outcome.MISS
        if op.record_bytes > op.read.capacity_bytes:
            return Outcome.CORRUPT
        # The tier verifies every byte.
        session.mover.deliver(op)
        return Outcome.OK

    async def _lose(self, lost: Sequence[tuple[BlockKey, int]]) -> None:
        """Remove blocks that are not in their slots, unless they have been stored elsewhere since."""
        index = self.session.index
        gone = [(key, place) for key, place in lost if index.place(key) == place]
        self._counts["stale_blocks"] += len(gone)
        for key, _ in gone:
            index.hide(key)
        if others := [key for key, place in gone if place > SLOT_MASK]:
            self.session.on_removed(others, RemovalCause.LOST)
        with contextlib.suppress(OSError):
            await self.session.space.leave(
                index.depart([place for _, place in gone if place <= SLOT_MASK]), RemovalCause.LOST
            )

    async def _remove(self, keys: Sequence[BlockKey], kind: int) -> list[int]:
        """Remove blocks; return their places. ``kind`` may retire their slots."""
        # Wait for earlier puts of these keys; their blocks are then removed.
        while others := {self._claims[key] for key in keys if key in self._claims}:
            await asyncio.wait(others)
        index = self.session.index
        places = [index.hide(key) for key in keys]
        slots = [place for place in places if 0 <= place <= SLOT_MASK]
        index.pin(slots)
        rows = index.depart(slots, kind)
        try:
            # Puts of these keys wait, so that the tier is notified of the removal before the new block.
            with self.session.claimed([key for *_, key in rows]):
                # Even if this call is cancelled: a block whose header page stays could be found again.
                await to_the_end(asyncio.get_running_loop().create_task(self._wipe(slots, rows)))
        finally:
            index.unpin(slots)
        return places

    async def _wipe(self, slots: Sequence[int], rows: Sequence[Row]) -> None:
        """Journal the removal of hidden blocks and zero their header pages.

        The header pages of blocks that were already about to leave are zeroed, too: their frames may be unwritten.
        """
        session = self.session
        try:
            await session.space.leave(rows, None)
        except OSError as error:
            # After a restart, a recovery scan may find a block again if its slot was not zeroed.
            self._counts["wipe_errors"] += len(rows)
            _log.warning("the removal of %d blocks is not yet in the journal: %s", len(rows), error)
        zeros = aligned_buffer(PAGE)
        wipes: list[Transfer] = []
        with contextlib.suppress(OSError):
            async with session.segments.files_of(slots) as fds:
                wipes = [
                    Transfer(fd, session.geometry.offset_of(slot), [zeros], PAGE)
                    for slot, fd in zip(slots, fds, strict=True)
                    if fd >= 0
                ]
                await session.engine.write(wipes)
        self._counts["wipe_errors"] += sum(wipe.done_bytes != PAGE for wipe in wipes)

    def _failed(self, error: OSError) -> Outcome:
        """Count a failed block; return its outcome."""
        self.last_error = str(error)
        self._counts["io_errors"] += 1
        return outcome_of(error)
