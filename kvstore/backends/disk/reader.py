"""How blocks are read: from our slots and from others', all of a batch at once."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.backends.base import RecordRead, outcome_of
from kvstore.backends.disk.index import OWNER_SHIFT
from kvstore.backends.disk.layout import digest_of
from kvstore.backends.disk.records import ReadOp
from kvstore.backends.disk.session import Session
from kvstore.backends.disk.table import NOWHERE
from kvstore.types import BlockKey, Outcome, RemovalCause

__all__ = ["Reader"]

_SLOT_MASK: Final = (1 << OWNER_SHIFT) - 1
_GONE: Final = frozenset({errno.ENOENT, errno.EPERM, errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENOTDIR})
"""Why a segment can't be opened if it is not there; anything else may pass."""


class Reader:
    """Reads blocks of one session. Used from the loop thread.

    Args:
        session: Where from.
        counters: Of the backend.
        on_removed: Told of blocks that turn out not to be there.

    Attributes:
        last_error: Text of the latest failure of a block.
    """

    def __init__(
        self,
        session: Session,
        counters: Counter[str],
        on_removed: Callable[[Sequence[BlockKey], RemovalCause], None],
    ) -> None:
        self.last_error = ""
        self._session = session
        self._counters = counters
        self._on_removed = on_removed

    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:
        """See :meth:`Backend.get_into`."""
        index = self._session.index
        outcomes = [Outcome.MISS] * len(reads)
        wanted: list[tuple[int, int]] = []
        for i, read in enumerate(reads):
            place = index.place(read.key)
            if place == NOWHERE:
                continue
            if place <= _SLOT_MASK and index.columns.size_bytes(place) > read.capacity_bytes:
                outcomes[i] = Outcome.CORRUPT
                continue
            wanted.append((i, place))
        if not wanted:
            return outcomes
        own = [place for _, place in wanted if place <= _SLOT_MASK]
        for slot in own:
            index.pin(slot)
        try:
            await self._read(reads, wanted, outcomes)
        finally:
            for slot in own:
                index.unpin(slot)
        return outcomes

    async def _read(
        self, reads: Sequence[RecordRead], wanted: Sequence[tuple[int, int]], outcomes: list[Outcome]
    ) -> None:
        session = self._session
        ids = session.segment_ids([place for _, place in wanted])
        held = sorted(set(ids))
        directories = {0: session.owner.fds, **session.followers.directories()}
        fds = await session.segments.hold(held, directories, direct=session.roots[0].direct)
        ops: list[ReadOp] = []
        try:
            for (i, place), segment in zip(wanted, ids, strict=True):
                if fds[segment] >= 0:
                    ops.append(self._op(i, reads[i], place, fds[segment]))
                elif -fds[segment] in _GONE:
                    self._note_lost(reads[i].key, place)
                else:
                    outcomes[i] = self._failed(OSError(-fds[segment], "the segment can't be opened"))
            await session.engine.read([op.transfer for op in ops])
            others = {op.place >> OWNER_SHIFT for op in ops} - {0}
            unsure: OSError | None = None
            if others:
                try:
                    # A slot is written only after the journal has told that it holds nothing any more.
                    await session.followers.refresh(session.index, others)
                except OSError as error:
                    unsure = error
            for op in ops:
                is_unsure = unsure is not None and op.place > _SLOT_MASK
                outcomes[op.index] = self._failed(unsure) if unsure and is_unsure else self._outcome(op)
        finally:
            session.segments.let_go(held)
            session.mover.release(ops)
        session.note_use([op.place for op in ops if outcomes[op.index] is Outcome.OK])

    def _op(self, i: int, read: RecordRead, place: int, fd: int) -> ReadOp:
        session = self._session
        other = session.followers.others.get(place >> OWNER_SHIFT)
        geometry = other.geometry if other else session.geometry
        size = session.index.columns.size_bytes(place) if place <= _SLOT_MASK else 0
        offset = geometry.offset_of(place & _SLOT_MASK)
        return session.mover.read(i, read, place, size, fd, offset, geometry.slot_bytes)

    def _outcome(self, op: ReadOp) -> Outcome:
        session, key = self._session, op.read.key
        if op.transfer.error is not None:
            return self._failed(op.transfer.error)
        if op.place > _SLOT_MASK and (
            op.place >> OWNER_SHIFT not in session.followers.others or session.index.place(key) != op.place
        ):
            # Its owner gave the slot up while it was read, or can't be asked whether it did.
            return Outcome.MISS
        if not session.mover.is_asked_for(op):
            self._note_lost(key, op.place)
            return Outcome.MISS
        if op.size_bytes > op.read.capacity_bytes:
            return Outcome.CORRUPT
        # Whether it is intact is for the tier to say, which checks every byte.
        session.mover.deliver(op)
        return Outcome.OK

    def _note_lost(self, key: BlockKey, place: int) -> None:
        """Forget a block that is not where it was thought to be."""
        index = self._session.index
        if index.place(key) != place:
            return
        self._counters["stale_blocks"] += 1
        if place <= _SLOT_MASK:
            slot = index.remove(key)
            if slot is not None:
                index.release((slot,))
        else:
            index.table.remove(digest_of(key), place)
        self._on_removed([key], RemovalCause.LOST)

    def _failed(self, error: OSError) -> Outcome:
        self.last_error = str(error)
        self._counters["io_errors"] += 1
        return outcome_of(error)
