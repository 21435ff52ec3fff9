"""The intake: how records get in, from the question whether there is room to the index that knows them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kvstore.backends.base import RecordWrite, outcome_of
from kvstore.backends.file.counters import Counters
from kvstore.backends.file.engine import FileEngine
from kvstore.backends.file.evictor import Evictor
from kvstore.backends.file.index import Index
from kvstore.backends.file.layout import is_key
from kvstore.backends.file.ledger import Ledger
from kvstore.backends.file.recovery import Recovery
from kvstore.backends.file.space import Limits, charge, granted, is_over_high
from kvstore.backends.file.writer import BlockWriter, WriteOp
from kvstore.diskio import bare, flat
from kvstore.types import BlockKey, Outcome

__all__ = ["Intake"]

_RESERVE_TRIES_MAX: Final = 3
"""Times that a store asks for space, with an eviction in between; other engines may take what it has freed."""


class Intake:
    """Enters blocks into the ledger, evicts if need be, writes them, and takes over what came of it.

    Used from the loop thread only.

    Args:
        engine: Where the I/O is done.
        ledger: Where blocks are entered first.
        limits: What must hold.
        index: What learns of them.
        evictor: Makes room.
        recovery: Counts a root that was never counted.
        writer: Writes them.
        counters: Where to count.
        shard_of: Shard of a key.
        note_errors: Told of what failed.
        exclusive: Whether the index is right about what is there.
    """

    def __init__(
        self,
        *,
        engine: FileEngine,
        ledger: Ledger,
        limits: Limits,
        index: Index,
        evictor: Evictor,
        recovery: Recovery,
        writer: BlockWriter,
        counters: Counters,
        shard_of: Callable[[BlockKey], int],
        note_errors: Callable[[Sequence[OSError], str], None],
        exclusive: bool,
    ) -> None:
        self._engine = engine
        self._ledger = ledger
        self._limits = limits
        self._index = index
        self._evictor = evictor
        self._recovery = recovery
        self._writer = writer
        self._counters = counters
        self._shard_of = shard_of
        self._note_errors = note_errors
        self._exclusive = exclusive

    async def put(self, writes: Sequence[RecordWrite]) -> list[Outcome]:
        """Publish records; see :meth:`kvstore.backends.base.Backend.put`."""
        # Blocks whose old files are being removed would look as if they had been stored already.
        await self._index.wait_left(write.key for write in writes)
        outcomes = [self._decide(write.key) for write in writes]
        ops = [
            WriteOp(write.key, self._shard_of(write.key), flat(write.buffers), charge(write.size_bytes))
            for write, outcome in zip(writes, outcomes, strict=True)
            if outcome is None
        ]
        with self._index.pinned([op.key for op in ops]):
            try:
                await self._write(ops)
            finally:
                self._settle(ops)
        written = iter(ops)
        outcomes = [next(written).outcome if outcome is None else outcome for outcome in outcomes]
        return [Outcome.IO_ERROR if outcome is None else outcome for outcome in outcomes]

    def _decide(self, key: BlockKey) -> Outcome | None:
        """Return the outcome of a write that needs no I/O, or None."""
        if not is_key(key):
            return Outcome.REFUSED
        return Outcome.EXISTS if self._exclusive and key in self._index else None

    async def _write(self, ops: Sequence[WriteOp]) -> None:
        if not ops:
            return
        try:
            left = await self._enter_all(ops)
            for op in left:
                op.outcome = Outcome.NO_SPACE
        except OSError as error:
            for op in ops:
                if not op.entered:
                    op.error, op.outcome = bare(error), outcome_of(error)
        entered = [op for op in ops if op.entered]
        in_batches = self._writer.writes_in_batches(entered)
        await self._engine.run_blocks(self._writer.write, entered, in_batches=in_batches)
        if any(op.entered and op.outcome is Outcome.NO_SPACE for op in ops):
            # The filesystem is fuller than it says (a quota): make room for the next store.
            self._evictor.make_room_later([op.charge_bytes for op in ops])

    async def _enter_all(self, ops: Sequence[WriteOp]) -> Sequence[WriteOp]:
        """Enter blocks into the ledger, evicting others for them; return those that found no room."""
        if not self._ledger.is_counted:
            # The root was never counted (or its ledger got damaged): what room there is, only the scan can tell.
            await self._recovery.ended.wait()
        left = await self._enter(ops)
        for _ in range(_RESERVE_TRIES_MAX - 1):
            if not left:
                break
            has_room = await self._evictor.make_room([op.charge_bytes for op in left])
            left = await self._enter(left)
            if not has_room:
                break
        return left

    async def _enter(self, ops: Sequence[WriteOp]) -> Sequence[WriteOp]:
        """Enter blocks, as many as fit now; return the others."""

        def enter() -> bool:
            count, usage = self._ledger.reserve(
                [op.charge_bytes for op in ops], lambda charges, usage: granted(charges, usage, self._limits)
            )
            for op in ops[:count]:
                op.entered = True
            return is_over_high(usage, self._limits)

        if await self._engine.call(enter):
            self._evictor.kick()
        return [op for op in ops if not op.entered]

    def _settle(self, ops: Sequence[WriteOp]) -> None:
        """Take over what writes have led to, also when they were cancelled half way."""
        entered = [op for op in ops if op.entered]
        failed = [op for op in entered if op.outcome is not Outcome.OK]
        for op in ops:
            if op.outcome is Outcome.OK:
                self._index.add(op.key, op.charge_bytes)
            elif op.outcome is Outcome.EXISTS:
                self._index.add(op.key, op.found_bytes)
        self._ledger.finish(_total(entered), _total(failed))
        self._note_errors([op.error for op in ops if op.error is not None], "storing")
        self._counters.add("no_space_blocks", sum(op.outcome is Outcome.NO_SPACE for op in ops))


def _total(ops: Sequence[WriteOp]) -> tuple[int, int]:
    return sum(op.charge_bytes for op in ops), len(ops)
