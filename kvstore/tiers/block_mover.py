"""Blocks on their way between slots and records: batches, headers, verification."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvstore.backends.base import Backend, RecordRead, RecordWrite, outcome_of
from kvstore.codec.record import RecordCodec, RecordFault
from kvstore.errors import KVStoreError, RecordError
from kvstore.namespace import Namespace
from kvstore.runtime.buffers import BufferPool, SlotBuffers
from kvstore.runtime.limits import Limiter, Precedence
from kvstore.runtime.messages import JobKind, SubmitJob
from kvstore.runtime.workers import Workers
from kvstore.types import BlockKey, Outcome

__all__ = ["BlockMover", "Tally"]

_BATCH_BYTES = 4 << 20
"""A job is cut into batches of about this size: big enough to fill a medium's queue, small enough that one batch is
verified while the next is read, and that a load need not wait long behind stores."""

_BATCHES_PER_JOB_MAX = 8
_HEADERS_MAX = 1024
"""Header buffers, and so blocks, in flight per tier (4 MiB of them on disk)."""

_HASH_THREADS = 2
"""Threads that hash and verify; xxh3 runs at memory speed, so two keep up with any medium."""


class Tally:
    """What became of a job so far; batches write to it as they end, so that a deadline keeps what was done.

    Attributes:
        outcomes: One byte per block of the job; TIMEOUT until something else is known.
        faults: Records that failed verification, by cause.
        size_bytes: Payload bytes moved.
        error: Text of the first failure.
        suspects: Keys of records that are to be set aside.
    """

    def __init__(self, blocks: int) -> None:
        self.outcomes = bytearray([Outcome.TIMEOUT]) * blocks
        self.faults: Counter[str] = Counter()
        self.size_bytes = 0
        self.error = ""
        self.suspects: list[BlockKey] = []

    def note_error(self, error: str) -> None:
        """Keep the text of the first failure."""
        self.error = self.error or error

    def note_failures(self, outcomes: Sequence[Outcome], error: str) -> None:
        """Keep the text of the first failure of the medium, if one of the outcomes is one."""
        if any(outcome.is_failure for outcome in outcomes):
            self.note_error(error)

    def settle_rest(self, outcome: Outcome) -> None:
        """Give the blocks of which nothing is known yet an outcome."""
        self.outcomes = self.outcomes.replace(bytes([Outcome.TIMEOUT]), bytes([outcome]))


@dataclass(frozen=True, slots=True)
class Batch:
    """A part of a job: which blocks, until when their slots are the job's, and where it keeps their outcomes."""

    keys: Sequence[BlockKey]
    slots: Sequence[int]
    start: int
    tally: Tally
    deadline: float

    def fail(self, error: BaseException) -> None:
        """Count an error that concerns every block of the batch."""
        self.tally.outcomes[self.start : self.start + len(self.keys)] = bytes([outcome_of(error)]) * len(self.keys)
        self.tally.note_error(f"{type(error).__name__}: {error}")


class BlockMover:
    """Moves batches of blocks between the slots of a primary tier and the records of a backend.

    Args:
        backend: Where the records are.
        namespace: Namespace of the blocks.
        slots: The rows of the primary tier.
        inflight_bytes: Most payload bytes on their way at once.
        on_put: Told, on the loop thread and in order, which blocks are on the medium from now on.
    """

    def __init__(
        self,
        backend: Backend,
        namespace: Namespace,
        slots: SlotBuffers,
        inflight_bytes: int,
        on_put: Callable[[Sequence[BlockKey]], None],
    ) -> None:
        self._backend = backend
        self._slots = slots
        self._on_put = on_put
        self._codec = RecordCodec(namespace, header_bytes=backend.alignment)
        self._headers = BufferPool(backend.alignment, _HEADERS_MAX)
        self._bytes = Limiter(max(inflight_bytes, slots.slot_bytes))
        self._workers = Workers(_HASH_THREADS, "kvstore-hash")

    def cut(self, job: SubmitJob, tally: Tally) -> list[Batch]:
        """Cut a job into batches that may run at the same time."""
        blocks = len(job.keys)
        parts = min(_BATCHES_PER_JOB_MAX, max(1, blocks * self._slots.slot_bytes // _BATCH_BYTES))
        size = min(_HEADERS_MAX, -(-blocks // parts))
        return [
            Batch(job.keys[i : i + size], job.slots[i : i + size], i, tally, job.deadline)
            for i in range(0, blocks, size)
        ]

    async def move(self, kind: JobKind, batch: Batch) -> None:
        """Load or store a batch, writing what became of it to its tally."""
        await (self._load(batch) if kind is JobKind.LOAD else self._store(batch))

    def close(self) -> None:
        """Release every buffer; only when nothing moves. Idempotent."""
        self._workers.close()
        self._headers.close()
        self._slots.release()

    async def _load(self, batch: Batch) -> None:
        async with self._buffers(batch, Precedence.LOAD) as buffers:
            reads = [RecordRead(key, pair) for key, pair in zip(batch.keys, buffers, strict=True)]
            try:
                outcomes = await self._backend.get_into(reads)
            except (KVStoreError, OSError) as error:
                batch.fail(error)
                return
            batch.tally.note_failures(outcomes, self._backend.last_error)
            await self._workers.run(lambda: self._verify(batch, reads, outcomes))

    async def _store(self, batch: Batch) -> None:
        async with self._buffers(batch, Precedence.STORE) as buffers:
            writes = [RecordWrite(key, pair) for key, pair in zip(batch.keys, buffers, strict=True)]
            await self._workers.run(lambda: self._encode(writes))
            if time.monotonic() > batch.deadline:
                # The scheduler may have given the job up and its slots to other blocks, and these may be what was
                # hashed. A checksum from before the deadline makes such a record a miss; this one would prove it.
                return
            try:
                outcomes = await self._backend.put(writes)
            except (KVStoreError, OSError) as error:
                batch.fail(error)
                return
        batch.tally.note_failures(outcomes, self._backend.last_error)
        added = []
        for i, outcome in enumerate(outcomes):
            batch.tally.outcomes[batch.start + i] = outcome
            if outcome is Outcome.OK:
                batch.tally.size_bytes += self._slots.slot_bytes
            if outcome.ok:
                added.append(batch.keys[i])
        if added:
            # Told at once, so that a later eviction of the same block is heard after it.
            self._on_put(added)

    @asynccontextmanager
    async def _buffers(
        self, batch: Batch, precedence: Precedence
    ) -> AsyncIterator[list[tuple[memoryview, memoryview]]]:
        """Hold header buffer and slot of each block of a batch."""
        count = len(batch.keys)
        async with (
            self._bytes.hold(count * self._slots.slot_bytes, precedence),
            self._headers.lease(count, precedence) as headers,
        ):
            views = [self._slots.view(slot) for slot in batch.slots]
            try:
                yield list(zip(headers, views, strict=True))
            finally:
                # Released, not dropped: a backend that still uses one gets an error instead of somebody's block.
                for view in views:
                    view.release()

    def _encode(self, writes: Sequence[RecordWrite]) -> None:
        """Write the headers of a batch; on a worker thread."""
        for write in writes:
            header, payload = write.buffers
            self._codec.encode_header(header, write.key, payload)

    def _verify(self, batch: Batch, reads: Sequence[RecordRead], outcomes: Sequence[Outcome]) -> None:
        """Prove a batch of records and write its outcomes; on a worker thread."""
        tally = batch.tally
        for i, (read, outcome) in enumerate(zip(reads, outcomes, strict=True)):
            # What a backend calls corrupt itself does not fit the buffers: on a shared medium that may be another's.
            fault, ours = RecordFault.LENGTH, self._backend.exclusive
            if outcome is Outcome.OK:
                header, payload = read.buffers
                try:
                    size = self._codec.verify(read.key, header, payload, read.filled_bytes)
                    if size != self._slots.slot_bytes:
                        # The rest of the slot still holds another block: a shorter payload is not this block.
                        short = f"The payload has {size} bytes, the slot {self._slots.slot_bytes}. It counts as a miss."
                        raise RecordError(short, RecordFault.GEOMETRY)
                    tally.size_bytes += size
                except RecordError as error:
                    outcome, fault = Outcome.CORRUPT, RecordFault(error.cause)
                    ours = fault.is_damage
                    tally.note_error(str(error))
            if outcome is Outcome.CORRUPT:
                tally.faults[fault.value] += 1
                if ours:
                    tally.suspects.append(read.key)
            tally.outcomes[batch.start + i] = outcome
