"""How blocks enter and leave: claimed, written into slots, told to the journal, noted in the index."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Final

from kvstore.backends.base import RecordWrite, outcome_of
from kvstore.backends.disk.index import OWNER_SHIFT
from kvstore.backends.disk.layout import Kind, Row, digest_of
from kvstore.backends.disk.records import WriteOp
from kvstore.backends.disk.segments import SegmentId
from kvstore.backends.disk.session import Session
from kvstore.backends.disk.table import NOWHERE
from kvstore.diskio import OsDisk, Priority
from kvstore.diskio.transfers import Transfer
from kvstore.types import KEY_BYTES_MAX, BlockKey, Outcome

__all__ = ["Intake"]

_log = logging.getLogger("kvstore.backends.disk")

_SLOT_MASK: Final = (1 << OWNER_SHIFT) - 1


class Intake:
    """Puts and removes blocks of one session. Used from the loop thread.

    Args:
        disk: What to call the system with.
        session: Where to.
        counters: Of the backend.
        durable: Whether a block counts as stored only when it would survive a power cut.

    Attributes:
        last_error: Text of the latest failure of a block.
    """

    def __init__(self, disk: OsDisk, session: Session, counters: Counter[str], *, durable: bool) -> None:
        self.last_error = ""
        self._disk = disk
        self._session = session
        self._counters = counters
        self._durable = durable
        self._pending: dict[BlockKey, asyncio.Future[None]] = {}
        self._publishing: set[asyncio.Task[None]] = set()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way in or out."""
        return not self._publishing and not self._pending

    async def put(self, writes: Sequence[RecordWrite]) -> Sequence[Outcome]:
        """See :meth:`Backend.put`."""
        outcomes: list[Outcome | None] = [None] * len(writes)
        while True:
            mine, others = self._claim(writes, outcomes)
            if mine:
                await self._put_claimed(writes, mine, outcomes)
            if not others:
                return [Outcome.IO_ERROR if outcome is None else outcome for outcome in outcomes]
            # Somebody else is putting these keys: they exist if he succeeds, and are ours to put if he fails.
            await asyncio.wait(others)

    async def delete(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """See :meth:`Backend.delete`."""
        # Whoever is putting one of them was asked to before, so it is removed when it is there.
        while others := {self._pending[key] for key in keys if key in self._pending}:
            await asyncio.wait(others)
        removed = [self._forget(key) for key in keys]
        await self._wipe([(k, s) for k, s in zip(keys, removed, strict=True) if s is not None and s >= 0])
        return [slot is not None for slot in removed]

    async def quarantine(self, keys: Sequence[BlockKey]) -> None:
        """See :meth:`Backend.quarantine`."""
        found = [(key, slot) for key in keys if (slot := self._forget(key)) is not None and slot >= 0]
        self._counters["quarantined_blocks"] += len(found)
        await self._wipe(found, retire=True)

    async def settled(self) -> None:
        """Wait until what was written is published."""
        if self._publishing:
            await asyncio.wait(set(self._publishing))

    def note_failure(self, error: OSError) -> None:
        """Keep the text of a failure, and count it."""
        self.last_error = str(error)
        self._counters["io_errors"] += 1

    def _claim(
        self, writes: Sequence[RecordWrite], outcomes: list[Outcome | None]
    ) -> tuple[list[int], set[asyncio.Future[None]]]:
        """Decide what to put; return the places of what is ours to put, and whom to wait for besides."""
        index = self._session.index
        done: asyncio.Future[None] | None = None
        mine: list[int] = []
        others: set[asyncio.Future[None]] = set()
        for i, write in enumerate(writes):
            if outcomes[i] is not None:
                continue
            key = write.key
            if (place := index.place(key)) != NOWHERE:
                self._session.note_use((place,))
                outcomes[i] = Outcome.EXISTS
            elif not 0 < len(key) <= KEY_BYTES_MAX or write.size_bytes > self._session.geometry.slot_bytes:
                self.last_error = f"key of {len(key)} bytes, record of {write.size_bytes}: too long for a slot"
                outcomes[i] = Outcome.REFUSED
            elif (other := self._pending.get(key)) is not None:
                others.add(other)
            else:
                done = done or asyncio.get_running_loop().create_future()
                self._pending[key] = done
                mine.append(i)
        return mine, others

    async def _put_claimed(
        self, writes: Sequence[RecordWrite], mine: Sequence[int], outcomes: list[Outcome | None]
    ) -> None:
        """Write claimed records; whatever happens, the claims end and every slot is used or free again."""
        index = self._session.index
        keys = [writes[i].key for i in mine]
        slots: list[int] = []
        ops: list[WriteOp] = []
        held: list[SegmentId] = []
        publishing: asyncio.Task[None] | None = None
        try:
            try:
                slots = await self._session.space.take(len(mine))
            except OSError as error:
                self.note_failure(error)
                outcomes_of_all = outcome_of(error)
                for i in mine:
                    outcomes[i] = outcomes_of_all
                return
            for i in mine[len(slots) :]:
                outcomes[i] = Outcome.NO_SPACE
            wanted = sorted({(0, index.segment_of(slot)) for slot in slots})
            fds = await self._session.hold_own(wanted)
            held = wanted
            placed = [
                (i, slot, fd)
                for i, slot in zip(mine, slots, strict=False)
                if (fd := fds.get((0, index.segment_of(slot)), -1)) >= 0
            ]
            offset_of = self._session.geometry.offset_of
            ops = [
                self._session.mover.write(writes[i], digest_of(writes[i].key), slot, fd, offset_of(slot))
                for i, slot, fd in placed
            ]
            await self._session.engine.write([op.transfer for op in ops])
            if self._durable:
                await self._sync(ops)
            # What is written is published, also when nobody wants to know any more.
            work = self._publish([i for i, *_ in placed], ops, outcomes, keys, slots, held)
            publishing = asyncio.get_running_loop().create_task(work)
            self._publishing.add(publishing)
            publishing.add_done_callback(self._publishing.discard)
            await _to_the_end(publishing)
        finally:
            self._session.mover.release(ops)
            if publishing is None:
                self._end_claims(keys, slots, slots, held)

    async def _publish(
        self,
        at: Sequence[int],
        ops: Sequence[WriteOp],
        outcomes: list[Outcome | None],
        keys: Sequence[BlockKey],
        slots: Sequence[int],
        held: Sequence[SegmentId],
    ) -> None:
        """Tell the journal and the index of records that were written."""
        good = []
        for i, op in zip(at, ops, strict=True):
            failure = op.failure
            if failure is None:
                good.append((i, op))
            else:
                self.note_failure(failure)
                outcomes[i] = outcome_of(failure)
        published: list[int] = []
        try:
            if good:
                rows: list[Row] = [(Kind.ADD, op.slot, op.size_bytes, op.digest, op.key) for _, op in good]
                await self._session.journal.append(rows, partial(self._session.index.add, rows))
                published = [op.slot for _, op in good]
                for i, _ in good:
                    outcomes[i] = Outcome.OK
        except OSError as error:
            self.note_failure(error)
            for i, _ in good:
                outcomes[i] = outcome_of(error)
        finally:
            used = set(published)
            self._end_claims(keys, slots, [slot for slot in slots if slot not in used], held)

    def _end_claims(
        self,
        keys: Sequence[BlockKey],
        slots: Sequence[int],
        unused: Sequence[int],
        held: Sequence[SegmentId],
    ) -> None:
        self._session.segments.let_go(held)
        self._session.index.release(unused)
        for slot in slots:
            self._session.index.unpin(slot)
        done = self._pending[keys[0]]
        for key in keys:
            del self._pending[key]
        done.set_result(None)

    def _forget(self, key: BlockKey) -> int | None:
        """Forget a block; return our slot of it, -1 if it is another engine's, None if there is none."""
        place = self._session.index.place(key)
        if place == NOWHERE:
            return None
        if place > _SLOT_MASK:
            self._session.index.table.remove(digest_of(key), place)
            return -1
        return self._session.index.remove(key)

    async def _wipe(self, found: Sequence[tuple[BlockKey, int]], *, retire: bool = False) -> None:
        """Tell the journal of blocks that the index has forgotten, and wipe their slots.

        Whoever puts one of them meanwhile has to wait, so that the tier hears first that it left and then that it came.
        """
        if not found:
            return
        index = self._session.index
        slots = [slot for _, slot in found]
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.update({key: done for key, _ in found})
        for slot in slots:
            index.pin(slot)
        held = sorted({(0, index.segment_of(slot)) for slot in slots})
        kind = Kind.BAD if retire else Kind.REMOVE
        rows: list[Row] = [(kind, slot, 0, digest_of(key), key) for key, slot in found]
        try:
            fds = await self._session.hold_own(held)
            try:
                offset_of = self._session.geometry.offset_of
                wipes: list[Transfer] = [
                    self._session.mover.wipe(fds[segment], offset_of(slot))
                    for slot in slots
                    if fds[segment := (0, index.segment_of(slot))] >= 0
                ]
                await self._session.engine.write(wipes)
            finally:
                self._session.segments.let_go(held)
            await self._session.journal.append(rows, lambda: None)
            failed = [wipe.error for wipe in wipes if wipe.error is not None]
            if failed:
                self._counters["wipe_errors"] += len(failed)
        except OSError as error:
            # Gone from the index all the same; a start may find such a block again, if its slot was not wiped.
            self._counters["wipe_errors"] += len(found)
            _log.warning("%d removed blocks could not be noted: %s", len(found), error)
        finally:
            for key, slot in found:
                if retire:
                    index.retire(slot)
                else:
                    index.release((slot,))
                index.unpin(slot)
                del self._pending[key]
            done.set_result(None)

    async def _sync(self, ops: Sequence[WriteOp]) -> None:
        """Bring what was written to the device; where that fails, all of it counts as not written."""
        fds = {op.transfer.fd for op in ops}
        try:
            for fd in fds:
                await self._session.engine.call(partial(self._disk.fdatasync, fd), priority=Priority.STORE)
        except OSError as error:
            for op in ops:
                op.transfer.error = error


async def _to_the_end(task: asyncio.Task[None]) -> None:
    """Wait for a task that goes on when this is cancelled, also then, so that nothing happens behind anybody's back."""
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError:
                continue
        raise
