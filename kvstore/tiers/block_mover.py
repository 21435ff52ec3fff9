"""Blocks on their way between slots and records: batches, headers, verification."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from kvstore.backends.base import Backend, RecordRead, RecordWrite
from kvstore.codec.decoder import StoredBlock
from kvstore.codec.encoder import EncodedBatch, Encoder
from kvstore.codec.record import RecordCodec, RecordFault
from kvstore.errors import KVStoreError, RecordError
from kvstore.namespace import Namespace
from kvstore.runtime.buffers import BufferPool, SlotBuffers
from kvstore.runtime.limits import Limiter, Precedence
from kvstore.runtime.messages import JobKind, SubmitJob
from kvstore.runtime.workers import Workers
from kvstore.tiers.codecs import TierCodecs
from kvstore.tiers.payload_rows import PayloadRows
from kvstore.tiers.refused import RefusedRecords
from kvstore.tiers.tally import Batch, Tally
from kvstore.types import BlockKey, Outcome

__all__ = ["BlockMover"]

_BATCH_BYTES = 4 << 20
"""A job is cut into batches of at least about this size: big enough to fill a medium's queue, small enough that one
batch is verified while the next is read, and that a load need not wait long behind stores."""

_BATCH_BYTES_MAX = 16 << 20
"""And at most of this."""

_TURN_BYTES = 16 << 20
"""So much is hashed in one turn of the loop, about: xxh3 takes one or two milliseconds, and all else waits."""

_BATCHES_PER_JOB = 8
"""A job becomes about so many batches, between these bounds."""

_FIRST_PART = 4
"""The first batch of a store is so many times shorter, and the next twice as long as that, where nothing else is on its
way: the medium gets to work at once, and has enough to do while the longer ones are hashed."""

_HEADERS_MAX = 1024
"""Header buffers, and so blocks, in flight per tier (4 MiB of them on disk)."""

_PAGE = 4096

_REPLACE_TIMEOUT_S = 0.5
"""What a medium gets to remove records that new ones are to replace. One that is being recovered takes far longer, and
nothing is lost if they stay."""

_CODEC_THREADS = 2
"""Threads that encode and decode. Raw blocks are hashed and verified on the loop: xxh3 runs at memory speed and keeps
the GIL, so a thread would add no more than the way there and back."""


class _Lent(NamedTuple):
    """What a batch holds while it moves."""

    headers: list[memoryview]
    slots: list[memoryview]
    size_bytes: int


class BlockMover:
    """Moves batches of blocks between the slots of a primary tier and the records of a backend.

    Args:
        backend: Where the records are.
        namespace: Namespace of the blocks.
        slots: The rows of the primary tier.
        inflight_bytes: Most payload bytes on their way at once.
        on_put: Told, on the loop thread and in order, which blocks are on the medium from now on.
        codecs: What payloads are encoded and decoded with; None: written as they are.
        refused: Records that can't be read here, as loads have told; None: none are known.
    """

    def __init__(
        self,
        backend: Backend,
        namespace: Namespace,
        slots: SlotBuffers,
        inflight_bytes: int,
        on_put: Callable[[Sequence[BlockKey]], None],
        codecs: TierCodecs | None = None,
        refused: RefusedRecords | None = None,
    ) -> None:
        self._backend = backend
        self._slots = slots
        self._on_put = on_put
        self._codecs = codecs or TierCodecs("raw", namespace)
        self._refused = RefusedRecords() if refused is None else refused
        self._records = RecordCodec(namespace, header_bytes=backend.alignment)
        # Where headers have pages of their own the medium moves whole pages, and would copy what ends between them.
        unit = backend.alignment if backend.alignment >= _PAGE else 1
        self._encoder = Encoder(self._records, self._codecs.chain, unit=unit)
        self._rows = PayloadRows(slots.slot_bytes)
        self._headers = BufferPool(backend.alignment, _HEADERS_MAX)
        self._bytes = Limiter(max(inflight_bytes, slots.slot_bytes))
        self._hashed_bytes = 0
        self._turn_ended = asyncio.Event()
        self._rereading = asyncio.Lock()
        self._workers = Workers(_CODEC_THREADS, "kvstore-codec")

    def cut(self, job: SubmitJob, tally: Tally) -> list[Batch]:
        """Cut a job into batches that may run at the same time."""
        blocks, slot_bytes = len(job.keys), self._slots.slot_bytes
        wanted_bytes = min(_BATCH_BYTES_MAX, max(_BATCH_BYTES, blocks * slot_bytes // _BATCHES_PER_JOB))
        size = longest = min(_HEADERS_MAX, max(1, wanted_bytes // slot_bytes))
        if job.kind is JobKind.STORE:
            if not self._codecs.chain.is_raw:
                size = longest = min(longest, self._rows.batch_blocks)
            elif not self._bytes.in_use:
                size = max(1, longest // _FIRST_PART)
        batches, start = [], 0
        while start < blocks:
            end = min(blocks, start + size)
            batches.append(Batch(job.keys[start:end], job.slots[start:end], start, tally, job.deadline))
            start, size = end, min(longest, 2 * size)
        return batches

    async def move(self, kind: JobKind, batch: Batch) -> None:
        """Load or store a batch, writing what became of it to its tally."""
        await (self._load(batch) if kind is JobKind.LOAD else self._store(batch))

    async def damaged_still(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Read records again that were found damaged, one after the other; return those that are damaged still.

        One answer that was damaged on its way must not cost a block that many engines share. A record that can't be
        read this time is not among them.
        """
        damaged = []
        async with self._rereading:
            # Of its own: no rows that others wait for are held while a medium is asked.
            buffers = memoryview(bytearray(self._backend.alignment)), memoryview(bytearray(self._slots.slot_bytes))
            for key in keys:
                read, tally = RecordRead(key, buffers), Tally(1)
                try:
                    outcomes = await self._backend.get_into([read])
                except (KVStoreError, OSError):
                    continue
                batch = Batch([key], [0], 0, tally, math.inf)
                await self._decode(batch, self._verify(batch, [read], outcomes))
                damaged += tally.suspects
        return damaged

    def codec_counts(self) -> dict[str, float]:
        """Return what the codecs did, as ``TierStats.codec`` describes."""
        return self._codecs.stats()

    def close(self) -> None:
        """Release every buffer; only when nothing moves. Idempotent."""
        self._workers.close()
        self._headers.close()
        self._rows.close()
        self._slots.release()

    async def _load(self, batch: Batch) -> None:
        lent = await self._lend(batch, Precedence.LOAD)
        try:
            pairs = zip(batch.keys, lent.headers, lent.slots, strict=True)
            reads = [RecordRead(key, (header, slot)) for key, header, slot in pairs]
            try:
                with self._codecs.on_link(JobKind.LOAD) as moved:
                    outcomes = await self._backend.get_into(reads)
                    moved(sum([max(0, read.filled_bytes - self._records.header_bytes) for read in reads]))
            except (KVStoreError, OSError) as error:
                batch.fail(error)
                return
            batch.tally.note_failures(outcomes, self._backend.last_error)
            await self._take_turn(len(reads))
            stored = self._verify(batch, reads, outcomes)
            if stored:
                await self._decode(batch, stored)
            done = batch.tally.outcomes[batch.start : batch.start + len(reads)]
            good = [key for key, outcome in zip(batch.keys, done, strict=True) if outcome == Outcome.OK]
            self._backend.note_verified(good)
        finally:
            self._take_back(lent)

    async def _decode(self, batch: Batch, stored: Sequence[tuple[int, StoredBlock]]) -> None:
        """Decode what was found good but is not the block yet, in its slot, and write its outcomes."""
        for start in range(0, len(stored), self._rows.batch_blocks):
            part = stored[start : start + self._rows.batch_blocks]
            blocks = [block for _, block in part]
            async with self._rows.scratch(2 * len(part), Precedence.LOAD) as rows:
                lower, upper = rows[: len(part)], rows[len(part) :]
                errors, seconds = await self._workers.run(partial(self._codecs.decode, blocks, lower, upper))
            good = [block.header for block, error in zip(blocks, errors, strict=True) if error is None]
            in_bytes, out_bytes = sum(h.stored_bytes for h in good), sum(h.plain_bytes for h in good)
            self._codecs.counts.note_decoded(len(good), in_bytes, out_bytes, seconds)
            for (i, block), error in zip(part, errors, strict=True):
                batch.settle_loaded(i, block.header.plain_bytes, error)

    async def _store(self, batch: Batch) -> None:
        count = len(batch.keys)
        encode = self._codecs.encode_next(count * self._slots.slot_bytes)
        needs_targets, needs_spares = self._encoder.needs_rows(encode=encode)
        lent = await self._lend(batch, Precedence.STORE)
        try:
            if needs_targets or needs_spares:
                async with self._rows.payloads(count if needs_targets else 0) as targets:
                    async with self._rows.scratch(count if needs_spares else 0, Precedence.STORE) as spares:
                        made = await self._encoded(batch, lent, targets, spares, encode=encode)
                    outcomes = await self._put_by_deadline(batch, lent, made)
            else:
                made = await self._encoded(batch, lent, [], [], encode=encode)
                outcomes = await self._put_by_deadline(batch, lent, made)
        finally:
            self._take_back(lent)
        if outcomes is not None:
            self._settle_stored(batch, outcomes)

    async def _encoded(
        self,
        batch: Batch,
        lent: _Lent,
        targets: Sequence[memoryview],
        spares: Sequence[memoryview],
        *,
        encode: bool,
    ) -> EncodedBatch:
        """Make records of the blocks of a batch."""
        count = len(batch.keys)
        work = partial(self._encoder.encode, batch.keys, lent.headers, lent.slots, targets, spares, encode=encode)
        if self._codecs.chain.is_raw:
            await self._take_turn(count)
            made = work()
        else:
            made = await self._workers.run(work)
        self._codecs.note_encoded(made, count * self._slots.slot_bytes, encoded=encode)
        return made

    async def _put_by_deadline(self, batch: Batch, lent: _Lent, made: EncodedBatch) -> Sequence[Outcome] | None:
        """Put the records of a batch; None if that failed as a whole, or there is no time left for it."""
        if time.monotonic() > batch.deadline:
            # The scheduler may have given the job up and its slots to other blocks, and these may be what was
            # hashed. A checksum from before the deadline makes such a record a miss; this one would prove it.
            return None
        try:
            return await self._put(batch, lent.headers, made)
        except (KVStoreError, OSError) as error:
            batch.fail(error)
            return None
        finally:
            # As with slots: they are parts of rows that go to the next batch now, and a traceback that kept one
            # would keep the rows from being given back.
            for payload in made.payloads:
                if payload is not None:
                    payload.release()

    def _settle_stored(self, batch: Batch, outcomes: Sequence[Outcome]) -> None:
        """Write what became of the blocks of a batch that was put, and tell which are there from now on."""
        batch.tally.note_failures(outcomes, self._backend.last_error)
        if self._refused:
            put = zip(batch.keys, outcomes, strict=True)
            self._refused.forget([key for key, outcome in put if outcome is Outcome.OK], replaced=True)
        hidden = self._refused.hidden_among(batch.keys)
        added = []
        for i, outcome in enumerate(outcomes):
            batch.tally.outcomes[batch.start + i] = outcome
            if outcome is Outcome.OK:
                batch.tally.size_bytes += self._slots.slot_bytes
            # A record that exists and can't be read must not be found: it would be promoted, and refused again.
            # Nor one that was removed meanwhile, and will be gone in a moment.
            if outcome.ok and batch.keys[i] not in hidden and batch.keys[i] not in batch.tally.removed:
                added.append(batch.keys[i])
        if added:
            # Told at once, so that a later eviction of the same block is heard after it.
            self._on_put(added)

    async def _put(self, batch: Batch, headers: Sequence[memoryview], made: EncodedBatch) -> Sequence[Outcome]:
        """Put the records of a batch; what has no key is not stored, and never unsealed.

        A record that can't be read here is replaced. On a shared medium another engine may read it: it stays, and is
        not sent again, until it was refused once more after a pause; what can't be read even then is in the way.
        """
        unreadable = self._refused.among(batch.keys) if self._backend.exclusive else self._refused.lasting(batch.keys)
        kept = set() if self._backend.exclusive else self._refused.hidden_among(batch.keys) - unreadable
        pairs = zip(batch.keys, made.payloads, strict=True)
        kept |= await self._make_way([key for key, payload in pairs if payload is not None and key in unreadable])
        writes = [
            RecordWrite(key, (header, payload))
            for key, header, payload in zip(batch.keys, headers, made.payloads, strict=True)
            if payload is not None and key not in kept
        ]
        outcomes: Sequence[Outcome] = ()
        if writes:
            with self._codecs.on_link(JobKind.STORE) as moved:
                outcomes = await self._backend.put(writes)
                moved(made.stored_bytes)
        if len(writes) == len(batch.keys):
            return outcomes
        if made.error:
            batch.tally.note_error(made.error)
        put = iter(outcomes)
        return [
            Outcome.SHED if payload is None else Outcome.EXISTS if key in kept else next(put)
            for key, payload in zip(batch.keys, made.payloads, strict=True)
        ]

    async def _take_turn(self, blocks: int) -> None:
        """Wait until this turn of the loop may hash so many blocks."""
        while self._hashed_bytes >= _TURN_BYTES:
            await self._turn_ended.wait()
        if not self._hashed_bytes:
            self._turn_ended.clear()
            asyncio.get_running_loop().call_soon(self._end_turn)
        self._hashed_bytes += blocks * self._slots.slot_bytes

    def _end_turn(self) -> None:
        self._hashed_bytes = 0
        self._turn_ended.set()

    async def _make_way(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        """Remove records that can't be read, for blocks that are about to be put; return those that are still there."""
        if keys:
            try:
                async with asyncio.timeout(_REPLACE_TIMEOUT_S):
                    await self._backend.delete(keys)
            except TimeoutError:
                return set(keys)
        return set()

    async def _lend(self, batch: Batch, precedence: Precedence) -> _Lent:
        """Wait for header buffer and slot of each block of a batch, which :meth:`_take_back` takes back.

        A pair of calls and no context manager: there are three of these per batch, and of a batch of one short block
        they would be a tenth of the work.
        """
        size_bytes = await self._bytes.enter(len(batch.keys) * self._slots.slot_bytes, precedence)
        headers: list[memoryview] = []
        views: list[memoryview] = []
        try:
            headers = await self._headers.take(len(batch.keys), precedence)
            for slot in batch.slots:
                views.append(self._slots.view(slot))
        except BaseException:
            self._take_back(_Lent(headers, views, size_bytes))
            raise
        return _Lent(headers, views, size_bytes)

    def _take_back(self, lent: _Lent) -> None:
        # Released, not dropped: a backend that still uses one gets an error instead of somebody's block.
        for view in lent.slots:
            view.release()
        self._headers.give_back(lent.headers)
        self._bytes.leave(lent.size_bytes)

    def _verify(
        self, batch: Batch, reads: Sequence[RecordRead], outcomes: Sequence[Outcome]
    ) -> list[tuple[int, StoredBlock]]:
        """Prove a batch of records and write the outcomes of those that are raw.

        Returns:
            The others, by place in the batch: proved, but to be decoded.
        """
        slot_bytes = self._slots.slot_bytes
        stored = []
        for i, (read, outcome) in enumerate(zip(reads, outcomes, strict=True)):
            if outcome is not Outcome.OK:
                # What a backend calls corrupt itself does not fit the buffers: that may be another's, if it is shared.
                batch.settle_failed(i, outcome, RecordFault.LENGTH, set_aside=self._backend.exclusive)
                continue
            header, payload = read.buffers
            try:
                found = self._records.check(read.key, header, payload, read.filled_bytes, self._codecs.decoder.refusal)
                if found.plain_bytes != slot_bytes:
                    # The rest of the slot still holds another block: a shorter payload is not this block.
                    short = f"The block has {found.plain_bytes} bytes, the slot {slot_bytes}. It counts as a miss."
                    raise RecordError(short, RecordFault.GEOMETRY)
            except RecordError as error:
                batch.settle_loaded(i, 0, error)
                continue
            if found.codec_chain:
                stored.append((i, StoredBlock(found, payload)))
            else:
                batch.settle_loaded(i, slot_bytes, None)
        return stored
