"""Store, load and removal of blocks, each with a fixed order of steps.

- Store: write the slot, ``fdatasync`` it if stores are durable, write the row, report the block.
- Eviction (:mod:`kvstore.backends.disk.space`): write the row; only then may the slot be written again.
- Removal: hide the block, write the row, zero the slot's header page, report the removal.
- Load: read the slot, which is not reused meanwhile; deliver the record if it has the row's mark. Other engines may
  reuse their slots, so their rows are read again after the slots; a row that has changed is a miss.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from kvstore.backends.base import RecordRead, RecordWrite, outcome_of
from kvstore.backends.disk.claims import Claims
from kvstore.backends.disk.drives import Drives
from kvstore.backends.disk.followers import Followers
from kvstore.backends.disk.index import Index
from kvstore.backends.disk.layout import PAGE, ROW_BYTES, State, digest_of, encode_rows, mark_of
from kvstore.backends.disk.records import RecordMover, SlotRead, SlotWrite, aligned_buffer
from kvstore.backends.disk.rows import RowChange, TableWriter
from kvstore.backends.disk.segment import Segment
from kvstore.backends.disk.space import Space
from kvstore.backends.disk.table import NOWHERE
from kvstore.diskio import Transfer, bare
from kvstore.runtime.workers import to_the_end
from kvstore.types import KEY_BYTES_MAX, BlockKey, Outcome, RemovalCause

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})

_log = logging.getLogger("kvstore.backends.disk")


class Blocks:
    """Puts, reads and removes blocks. Used from the loop thread.

    Args:
        record_bytes_max: Longest record.
        durable: Whether a stored block survives a power cut.
        on_removed: Called with blocks that are not in their slots.
    """

    def __init__(
        self,
        drives: Drives,
        index: Index,
        tables: TableWriter,
        space: Space,
        followers: Sequence[Followers],
        claims: Claims,
        counts: Counter[str],
        record_bytes_max: int,
        durable: bool,
        on_removed: Callable[[Sequence[BlockKey], RemovalCause], None],
    ) -> None:
        self.last_error = ""  # Text of the latest failure of a block.
        self._drives = drives
        self._index = index
        self._tables = tables
        self._space = space
        self._followers = followers
        self._claims = claims
        self._counts = counts
        self._record_bytes_max = record_bytes_max
        self._durable = durable
        self._on_removed = on_removed
        self._mover = RecordMover()

    async def put(self, writes: Sequence[RecordWrite]) -> Sequence[Outcome]:
        outcomes: list[Outcome | None] = [None] * len(writes)
        while None in outcomes:
            mine, others = self._choose(writes, outcomes)
            if mine:
                with self._claims.held(mine):
                    await self._put_claimed(writes, list(mine.values()), outcomes)
            if others:
                # Other puts of these keys are running. A key exists if its put succeeds; otherwise this call puts it.
                await asyncio.wait(others)
        return [outcome for outcome in outcomes if outcome is not None]

    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:
        index = self._index
        outcomes = [Outcome.MISS] * len(reads)
        wanted = [(i, place) for i, read in enumerate(reads) if (place := index.place(read.key)) != NOWHERE]
        if wanted:
            places = [place for _, place in wanted]
            index.pin(places)
            try:
                await self._read(reads, wanted, outcomes)
            except OSError as error:
                for i, _ in wanted:
                    outcomes[i] = self._failed(error)
            finally:
                index.unpin(places)
        return outcomes

    async def delete(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        removed = await self._remove(keys, State.FREE)
        # Of a key that is given twice, the first removes the block.
        return [removed.pop(key, NOWHERE) != NOWHERE for key in keys]

    async def quarantine(self, keys: Sequence[BlockKey]) -> None:
        places = (await self._remove(keys, State.RETIRED)).values()
        self._counts["quarantined_blocks"] += sum(map(self._is_ours, places))

    def note_use(self, places: Sequence[int]) -> None:
        """Record uses of blocks, for eviction by the engines that hold them."""
        self._index.touch(places)
        for each in self._followers:
            each.note_use(places)

    def _choose(
        self, writes: Sequence[RecordWrite], outcomes: list[Outcome | None]
    ) -> tuple[dict[BlockKey, tuple[int, int, int]], set[asyncio.Future[None]]]:
        """Select the records to put; return position, length and digest by key, and running operations to wait for."""
        index = self._index
        mine: dict[BlockKey, tuple[int, int, int]] = {}
        others: set[asyncio.Future[None]] = set()
        for i, write in enumerate(writes):
            if outcomes[i] is not None:
                continue
            key = write.key
            digest = digest_of(key)
            if (place := index.place(key, digest)) != NOWHERE:
                self.note_use((place,))
                outcomes[i] = Outcome.EXISTS
            elif not 0 < len(key) <= KEY_BYTES_MAX or (size_bytes := write.size_bytes) > self._record_bytes_max:
                self.last_error = f"key of {len(key)} bytes, record of {write.size_bytes}: too long for a slot"
                outcomes[i] = Outcome.REFUSED
            elif (other := self._claims.of(key)) is not None:
                others.add(other)
            else:
                # Of several writes of one key in a call, the first is put now; the others follow in the next round.
                mine.setdefault(key, (i, size_bytes, digest))
        return mine, others

    async def _put_claimed(
        self, writes: Sequence[RecordWrite], mine: Sequence[tuple[int, int, int]], outcomes: list[Outcome | None]
    ) -> None:
        """Write claimed records; afterwards every slot is used, free or unsettled, even if this fails."""
        index = self._index
        places: list[int] = []
        ops: list[SlotWrite] = []
        done: set[int] = set()
        try:
            found = await self._space.take([size_bytes for _, size_bytes, _ in mine])
            places = [place for place in found if place != NOWHERE]
            if len(places) < len(mine):
                self.last_error = f"no slot is free: {self._space.described()}"
            for (i, _, digest), place in zip(mine, found, strict=True):
                if place == NOWHERE:
                    outcomes[i] = Outcome.NO_SPACE
                    continue
                segment, slot = index.at(place)
                offset = slot * segment.head.slot_bytes
                ops.append(self._mover.write(i, writes[i], digest, place, segment.file.fd, offset))
            await self._drives.write(ops)
            if self._durable:
                await self._sync(ops)
            # Written records are published even if this call is cancelled.
            publishing = self._publish(ops, outcomes, done)
            await to_the_end(asyncio.get_running_loop().create_task(publishing))
        except OSError as error:
            for i, _, _ in mine:
                outcomes[i] = self._failed(error)
        finally:
            self._mover.release(ops)
            if len(done) < len(places):
                # A write that was cancelled says nothing of its slot.
                failures = {op.place: op.failure for op in ops if op.done_bytes >= 0}
                bad = [place for place, error in failures.items() if error is not None and error.errno not in _FULL]
                index.rest(bad)
                index.release([place for place in places if place not in done and place not in bad])

    async def _sync(self, ops: Sequence[SlotWrite]) -> None:
        """Flush written records to the device; those of a segment that can't be flushed count as not written."""
        for fd in {op.fd for op in ops}:
            try:
                await self._drives.sync(fd)
            except OSError as error:
                for op in ops:
                    if op.fd == fd:
                        op.error = bare(error)

    async def _publish(self, ops: Sequence[SlotWrite], outcomes: list[Outcome | None], done: set[int]) -> None:
        """Write the rows of written records; add their places, which are no longer the caller's, to ``done``."""
        good: list[SlotWrite] = []
        changes: list[RowChange] = []
        for op in ops:
            if (failure := op.failure) is not None:
                outcomes[op.index] = self._failed(failure)
            else:
                good.append(op)
                changes.append(RowChange(op.place, State.USED, op.record_bytes, mark_of(op.page.view), op.key))
                done.add(op.place)
        failed = dict.fromkeys(done, OSError("the write was cancelled"))
        try:
            failed = await self._tables.write(changes)
        finally:
            # Their records are intact, so another engine that has read such a row may load the block.
            if failed:
                self._tables.settle_later(failed)
                self._index.note_failures(failed)
            for op, change in zip(good, changes, strict=True):
                if (error := failed.get(op.place)) is not None:
                    outcomes[op.index] = self._failed(error)
                elif self._is_ours(self._index.place(op.key, op.digest)):
                    # A segment with this block was taken meanwhile.
                    self._tables.settle_later((op.place,))
                    outcomes[op.index] = Outcome.EXISTS
                else:
                    is_there = self._index.add(op.place, op.record_bytes, change.mark, op.digest, op.key)
                    # The segment of another one was given to another engine meanwhile, so it is put once more.
                    outcomes[op.index] = Outcome.OK if is_there else None

    def _is_ours(self, place: int) -> bool:
        return place != NOWHERE and self._index.at(place)[0].is_ours

    async def _read(
        self, reads: Sequence[RecordRead], wanted: Sequence[tuple[int, int]], outcomes: list[Outcome]
    ) -> None:
        index = self._index
        ops: list[SlotRead] = []
        try:
            for i, place in wanted:
                ops.append(self._mover.read(i, reads[i], place, *index.at(place)))
            theirs = [op for op in ops if not index.at(op.place)[0].is_ours]
            await self._drives.read(ops)
            reused = await self._reused(theirs) if theirs else ()
            lost: list[SlotRead] = []
            for op in ops:
                if op not in reused:
                    outcomes[op.index] = self._read_outcome(op, lost)
        finally:
            self._mover.release(ops)
        if lost:
            await self._lose(lost)
        self.note_use([op.place for op in ops if outcomes[op.index] is Outcome.OK])

    async def _reused(self, ops: Sequence[SlotRead]) -> set[SlotRead]:
        """Return the reads during which another engine may have given the slot to another block.

        It writes the row before that, so the row is read again. A row that can't be read fails the read.
        """
        at = [self._index.at(op.place) for op in ops]
        looks = [
            Transfer(segment.table.fd, segment.head.row_at(slot), [memoryview(bytearray(ROW_BYTES))], ROW_BYTES)
            for segment, slot in at
        ]
        await self._drives.read(looks)
        values = [(op.generation, State.USED, op.record_bytes, op.mark, op.read.key) for op in ops]
        expected = encode_rows(values, [slot for _, slot in at], [segment.head.segment for segment, _ in at])
        reused: set[SlotRead] = set()
        for op, look, row in zip(ops, looks, expected.view(f"V{ROW_BYTES}"), strict=True):
            op.error = op.error or look.error
            if op.error is None and look.buffers[0] != row.tobytes():
                reused.add(op)
        for each in self._followers:
            each.note_change([op.place for op in reused])
        return reused

    def _read_outcome(self, op: SlotRead, lost: list[SlotRead]) -> Outcome:
        if op.error is not None:
            return self._failed(op.error)
        if not self._mover.is_asked_for(op):
            lost.append(op)
            return Outcome.MISS
        if op.record_bytes > op.read.capacity_bytes:
            return Outcome.CORRUPT
        # The tier verifies every byte.
        self._mover.deliver(op)
        return Outcome.OK

    async def _lose(self, lost: Sequence[SlotRead]) -> None:
        """Remove blocks whose slots hold other records: a power cut lost them, or the segment was changed by hand.

        Blocks of a segment that another engine has removed are reported by the next look at the directory.
        """
        theirs = {each for op in lost if not (each := self._index.at(op.place)[0]).is_ours}
        if theirs:
            gone = {each for each in theirs if await self._drives.of(each.root).call(partial(self._is_gone, each))}
            # One that this engine has taken meanwhile is another object.
            lost = [op for op in lost if self._index.at(op.place)[0] not in gone]
        keys = [op.read.key for op in lost if self._index.place(op.read.key) == op.place]
        removed = await self._remove(keys, State.FREE)
        self._counts["stale_blocks"] += len(removed)
        if removed:
            self._on_removed(list(removed), RemovalCause.LOST)

    def _is_gone(self, segment: Segment) -> bool:
        """Return whether the table of a segment was removed; on a thread."""
        return segment.table.fd >= 0 and not self._drives.disk.fstat(segment.table.fd).st_nlink

    async def _remove(self, keys: Sequence[BlockKey], state: int) -> dict[BlockKey, int]:
        """Remove blocks; return the place of each that was there. Their slots get this state.

        A block of another engine is only hidden from lookups here, so that it can be stored again.
        """
        index = self._index
        # Earlier puts of these keys end first; their blocks are then removed.
        await self._claims.ended(keys)
        found = {key: place for key in keys if (place := index.place(key)) != NOWHERE}
        places = list(filter(self._is_ours, found.values()))
        index.depart(places)
        index.hide(found.values())
        index.pin(places)
        try:
            # Puts of these keys wait, so that the tier is notified of the removal before the new block.
            with self._claims.held(list(found)):
                # Even if this call is cancelled: a block whose row stays could be found again.
                await to_the_end(asyncio.get_running_loop().create_task(self._free(places, state)))
        finally:
            index.unpin(places)
        return found

    async def _free(self, places: Sequence[int], state: int) -> None:
        """Write the rows of hidden blocks; zero their header pages, unless the slots are retired."""
        if not places:
            return
        failed = dict.fromkeys(places, OSError("the write was cancelled"))
        try:
            failed = await self._tables.write([RowChange(place, state) for place in places])
        except OSError as error:
            failed = dict.fromkeys(places, error)
        finally:
            self._tables.settle_later(failed, state)
            self._index.leave([place for place in places if place not in failed], state)
        if failed:
            # After a restart, such a block may be found again if its page was not zeroed.
            self._counts["wipe_errors"] += len(failed)
            _log.warning(
                "the removal of %d blocks is not on the disk yet: %s", len(failed), next(iter(failed.values()))
            )
        if state == State.FREE:
            await self._wipe(places)

    async def _wipe(self, places: Sequence[int]) -> None:
        zeros = aligned_buffer(PAGE)
        wipes: list[Transfer] = []
        for place in places:
            segment, slot = self._index.at(place)
            wipes.append(Transfer(segment.file.fd, slot * segment.head.slot_bytes, [zeros], PAGE))
        try:
            await self._drives.write(wipes)
        except OSError as error:
            self.last_error = str(error)
        self._counts["wipe_errors"] += sum(wipe.done_bytes != PAGE for wipe in wipes)

    def _failed(self, error: OSError) -> Outcome:
        """Count a failed block; return its outcome."""
        self.last_error = str(error)
        self._counts["io_errors"] += 1
        return outcome_of(error)
