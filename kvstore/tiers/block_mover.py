"""Moves the blocks of a job between slots and records, in parts: buffers, headers, codecs, verification."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from kvstore.backends.base import Backend, RecordRead, RecordWrite, outcome_of
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
from kvstore.tiers.presence import RefusedRecords
from kvstore.types import BlockKey, Outcome

__all__ = ["BlockMover", "JobPart", "RunningJob"]

_PART_BYTES = 4 << 20
"""Least size of a job's parts, about: large enough to fill a medium's queue, small enough to verify one part while the
next is read, and to keep a load from waiting long behind stores."""

_PART_BYTES_MAX = 16 << 20

_TURN_BYTES = 16 << 20
"""Bytes hashed in one turn of the loop: xxh3 takes one or two milliseconds, and everything else waits."""

_PARTS_PER_JOB = 8
"""Intended number of parts of a job, within these bounds."""

_FIRST_PART = 4
"""Divisor of the first part of a store on an idle tier; each following part is twice as long as the one before. The
medium starts immediately and stays busy while the longer parts are hashed."""

_HEADERS_MAX = 1024
"""Header buffers, and so blocks, in flight per tier (4 MiB of them on disk)."""

_PAGE = 4096

_REPLACE_TIMEOUT_S = 0.5
"""Time limit for removing records before their replacements are put. A medium in recovery takes far longer, and records
that stay do no harm."""

_CODEC_THREADS = 2
"""Threads that encode and decode. Raw blocks are hashed and verified on the loop: xxh3 runs at memory speed and keeps
the GIL, so a thread would only add overhead."""


class RunningJob:
    """The state of a job in the I/O half. Parts write to it as they end, so a deadline keeps finished work.

    Args:
        job: As submitted.

    Attributes:
        outcomes: One byte per block of the job; TIMEOUT until known.
        faults: Records that failed verification, by cause.
        size_bytes: Payload bytes moved.
        error: Text of the first failure.
        suspects: Keys of records to quarantine.
        refused: Keys of records that may be intact but can't be read here.
        removed: Keys of blocks removed after their store was submitted: their records are deleted again.
        ended: Set when the job has ended.
    """

    def __init__(self, job: SubmitJob) -> None:
        self.job = job
        self.outcomes = bytearray([Outcome.TIMEOUT]) * len(job.keys)
        self.faults: Counter[str] = Counter()
        self.size_bytes = 0
        self.error = ""
        self.suspects: list[BlockKey] = []
        self.refused: list[BlockKey] = []
        self.removed: set[BlockKey] = set()
        self.ended = asyncio.Event()

    def note_error(self, error: str) -> None:
        """Keep the text of the first failure."""
        self.error = self.error or error

    def settle_rest(self, outcome: Outcome) -> None:
        """Set the outcome of the blocks without one."""
        self.outcomes = self.outcomes.replace(bytes([Outcome.TIMEOUT]), bytes([outcome]))


class JobPart:
    """A section of a job that moves as a unit, and the buffers lent to it meanwhile.

    Attributes:
        running: The job.
        start: Position of the part's first block in the job.
        keys: Keys of its blocks.
        slots: Their rows of the primary tier.
        headers: Header buffers, while it moves.
        rows: Views of the slots, while it moves.
        lent_bytes: Its share of the bytes in flight, while it moves.
    """

    __slots__ = ("headers", "keys", "lent_bytes", "rows", "running", "slots", "start")

    def __init__(self, running: RunningJob, start: int, end: int) -> None:
        self.running = running
        self.start = start
        self.keys: Sequence[BlockKey] = running.job.keys[start:end]
        self.slots: Sequence[int] = running.job.slots[start:end]
        self.headers: list[memoryview] = []
        self.rows: list[memoryview] = []
        self.lent_bytes = 0

    def fail(self, error: BaseException) -> None:
        """Settle every block with an error of the whole call."""
        self.running.outcomes[self.start : self.start + len(self.keys)] = bytes([outcome_of(error)]) * len(self.keys)
        self.running.note_error(f"{type(error).__name__}: {error}")

    def note_failures(self, outcomes: Sequence[Outcome], error: str) -> None:
        """Keep the medium's error text if one of the outcomes is a failure."""
        if any(outcome.is_failure for outcome in outcomes):
            self.running.note_error(error)

    def settle_loaded(self, index: int, size_bytes: int, error: RecordError | None) -> None:
        """Settle a block whose record was read: verified, or with the error of its verification."""
        if error is None:
            self.running.outcomes[self.start + index] = Outcome.OK
            self.running.size_bytes += size_bytes
            return
        fault = RecordFault(error.cause)
        self.settle_failed(index, Outcome.CORRUPT, fault, quarantine=fault.is_damage)
        self.running.note_error(str(error))

    def settle_failed(self, index: int, outcome: Outcome, fault: RecordFault, *, quarantine: bool) -> None:
        """Settle a block that was not loaded; ``fault`` and ``quarantine`` apply to CORRUPT."""
        self.running.outcomes[self.start + index] = outcome
        if outcome is Outcome.CORRUPT:
            self.running.faults[fault.value] += 1
            (self.running.suspects if quarantine else self.running.refused).append(self.keys[index])


class BlockMover:
    """Moves blocks between the slots of a primary tier and the records of a backend.

    Args:
        backend: Holds the records.
        namespace: Namespace of the blocks.
        slots: The rows of the primary tier.
        inflight_bytes: Most payload bytes in flight.
        on_put: Called on the loop thread, in order, with blocks that are now on the medium.
        on_found: Called likewise with blocks that were there before they could be put; by default ``on_put``.
        codecs: Encode and decode payloads; None: raw.
        refused: Records that earlier loads could not read; None: none.
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
        on_found: Callable[[Sequence[BlockKey]], None] | None = None,
    ) -> None:
        self._backend = backend
        self._slots = slots
        self._on_put, self._on_found = on_put, on_found or on_put
        self._codecs = codecs or TierCodecs("raw", namespace)
        self._refused = RefusedRecords() if refused is None else refused
        self._records = RecordCodec(namespace, header_bytes=backend.alignment)
        # With page-aligned headers the medium moves whole pages, and would copy a payload that ends within one.
        unit = backend.alignment if backend.alignment >= _PAGE else 1
        self._encoder = Encoder(self._records, self._codecs.chain, unit=unit)
        self._rows = PayloadRows(slots.slot_bytes)
        self._headers = BufferPool(backend.alignment, _HEADERS_MAX)
        self._bytes = Limiter(max(inflight_bytes, slots.slot_bytes))
        self._hashed_bytes = 0
        self._turn_ended = asyncio.Event()
        self._rereading = asyncio.Lock()
        self._workers = Workers(_CODEC_THREADS, "kvstore-codec")

    def cut(self, running: RunningJob) -> list[JobPart]:
        """Cut a job into parts that may run concurrently."""
        blocks, slot_bytes = len(running.job.keys), self._slots.slot_bytes
        wanted_bytes = min(_PART_BYTES_MAX, max(_PART_BYTES, blocks * slot_bytes // _PARTS_PER_JOB))
        size = longest = min(_HEADERS_MAX, max(1, wanted_bytes // slot_bytes))
        if running.job.kind is JobKind.STORE:
            if not self._codecs.chain.is_raw:
                size = longest = min(longest, self._rows.batch_blocks)
            elif not self._bytes.in_use:
                size = max(1, longest // _FIRST_PART)
        parts, start = [], 0
        while start < blocks:
            end = min(blocks, start + size)
            parts.append(JobPart(running, start, end))
            start, size = end, min(longest, 2 * size)
        return parts

    async def move(self, part: JobPart) -> None:
        """Load or store a part, and settle its blocks."""
        await (self._load(part) if part.running.job.kind is JobKind.LOAD else self._store(part))

    async def reread_damaged(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Read damaged records again, one at a time; return those that are damaged again.

        A read damaged in transit must not cost a block that many engines share. A record that cannot be read again is
        not returned.
        """
        damaged = []
        async with self._rereading:
            # Own buffers, because no lent row may be held while the medium is asked.
            buffers = memoryview(bytearray(self._backend.alignment)), memoryview(bytearray(self._slots.slot_bytes))
            for key in keys:
                read, running = RecordRead(key, buffers), RunningJob(SubmitJob(0, JobKind.LOAD, (key,), (0,), math.inf))
                try:
                    outcomes = await self._backend.get_into([read])
                except (KVStoreError, OSError):
                    continue
                part = JobPart(running, 0, 1)
                await self._decode(part, self._verify(part, [read], outcomes))
                damaged += running.suspects
        return damaged

    def codec_counts(self) -> dict[str, float]:
        """Return the codec counts, see ``TierStats.codec``."""
        return self._codecs.stats()

    def close(self) -> None:
        """Release every buffer; only when nothing moves. Idempotent."""
        self._workers.close()
        self._headers.close()
        self._rows.close()
        self._slots.release()

    async def _load(self, part: JobPart) -> None:
        await self._lend(part, Precedence.LOAD)
        try:
            triples = zip(part.keys, part.headers, part.rows, strict=True)
            reads = [RecordRead(key, (header, row)) for key, header, row in triples]
            try:
                with self._codecs.on_link(JobKind.LOAD) as moved:
                    outcomes = await self._backend.get_into(reads)
                    moved(sum([max(0, read.filled_bytes - self._records.header_bytes) for read in reads]))
            except (KVStoreError, OSError) as error:
                part.fail(error)
                return
            part.note_failures(outcomes, self._backend.last_error)
            await self._take_turn(len(reads))
            stored = self._verify(part, reads, outcomes)
            if stored:
                await self._decode(part, stored)
            done = part.running.outcomes[part.start : part.start + len(reads)]
            good = [key for key, outcome in zip(part.keys, done, strict=True) if outcome == Outcome.OK]
            self._backend.note_verified(good)
            if Outcome.CORRUPT in done:
                bad = [key for key, outcome in zip(part.keys, done, strict=True) if outcome == Outcome.CORRUPT]
                self._backend.note_damaged(bad)
        finally:
            self._take_back(part)

    async def _decode(self, part: JobPart, stored: Sequence[tuple[int, StoredBlock]]) -> None:
        """Decode verified payloads into their slots, and settle their blocks."""
        for start in range(0, len(stored), self._rows.batch_blocks):
            batch = stored[start : start + self._rows.batch_blocks]
            blocks = [block for _, block in batch]
            async with self._rows.scratch(2 * len(batch), Precedence.LOAD) as rows:
                lower, upper = rows[: len(batch)], rows[len(batch) :]
                errors, seconds = await self._workers.run(partial(self._codecs.decode, blocks, lower, upper))
            good = [block.header for block, error in zip(blocks, errors, strict=True) if error is None]
            in_bytes, out_bytes = sum(h.stored_bytes for h in good), sum(h.plain_bytes for h in good)
            self._codecs.counts.note_decoded(len(good), in_bytes, out_bytes, seconds)
            for (i, block), error in zip(batch, errors, strict=True):
                part.settle_loaded(i, block.header.plain_bytes, error)

    async def _store(self, part: JobPart) -> None:
        count = len(part.keys)
        encode = self._codecs.encode_next()
        needs_targets, needs_spares = self._encoder.needs_rows(encode=encode)
        await self._lend(part, Precedence.STORE)
        try:
            if needs_targets or needs_spares:
                async with self._rows.payloads(count if needs_targets else 0) as targets:
                    async with self._rows.scratch(count if needs_spares else 0, Precedence.STORE) as spares:
                        encoded = await self._encode(part, targets, spares, encode=encode)
                    outcomes = await self._put_by_deadline(part, encoded)
            else:
                encoded = await self._encode(part, [], [], encode=encode)
                outcomes = await self._put_by_deadline(part, encoded)
        finally:
            self._take_back(part)
        if outcomes is not None:
            self._settle_stored(part, outcomes)

    async def _encode(
        self, part: JobPart, targets: Sequence[memoryview], spares: Sequence[memoryview], *, encode: bool
    ) -> EncodedBatch:
        """Make the records of a part."""
        count = len(part.keys)
        work = partial(self._encoder.encode, part.keys, part.headers, part.rows, targets, spares, encode=encode)
        if self._codecs.chain.is_raw:
            await self._take_turn(count)
            encoded = work()
        else:
            encoded = await self._workers.run(work)
        self._codecs.note_encoded(encoded, count * self._slots.slot_bytes, encoded=encode)
        return encoded

    async def _put_by_deadline(self, part: JobPart, encoded: EncodedBatch) -> Sequence[Outcome] | None:
        """Put the records of a part; None if that failed as a whole, or the deadline has passed."""
        if time.monotonic() > part.running.job.deadline:
            # The scheduler may have abandoned the job and reused its slots, so the checksum may be of new blocks and
            # would confirm wrong bytes. A checksum from before the deadline makes such a record a miss.
            return None
        try:
            return await self._put(part, encoded)
        except (KVStoreError, OSError) as error:
            part.fail(error)
            return None
        finally:
            # Released like slots: their rows are lent to the next part now, and a traceback that kept a view would
            # keep the rows from being freed.
            for payload in encoded.payloads:
                if payload is not None:
                    payload.release()

    def _settle_stored(self, part: JobPart, outcomes: Sequence[Outcome]) -> None:
        """Settle the blocks of a part that was put, and report those on the medium."""
        running = part.running
        part.note_failures(outcomes, self._backend.last_error)
        if self._refused:
            put = zip(part.keys, outcomes, strict=True)
            self._refused.forget([key for key, outcome in put if outcome is Outcome.OK], replaced=True)
        hidden = self._refused.hidden_among(part.keys)
        put_now: list[BlockKey] = []
        found: list[BlockKey] = []
        for i, (key, outcome) in enumerate(zip(part.keys, outcomes, strict=True)):
            running.outcomes[part.start + i] = outcome
            if outcome is Outcome.OK:
                running.size_bytes += self._slots.slot_bytes
            # An existing but unreadable record must not be found: it would be promoted and refused again. Nor a
            # record that was removed meanwhile and is about to be deleted.
            if outcome.ok and key not in hidden and key not in running.removed:
                (put_now if outcome is Outcome.OK else found).append(key)
        # Reported immediately, so that a later eviction of the same block is reported after it.
        if put_now:
            self._on_put(put_now)
        if found:
            self._on_found(found)

    async def _put(self, part: JobPart, encoded: EncodedBatch) -> Sequence[Outcome]:
        """Put the records of a part; a block without a seal key is not stored, and never stored unsealed.

        A record that can't be read here is replaced. On a shared medium another engine may read it: it stays, and its
        block is not sent, until it has been refused once more after a pause.
        """
        unreadable = self._refused.among(part.keys) if self._backend.exclusive else self._refused.lasting(part.keys)
        kept = set() if self._backend.exclusive else self._refused.hidden_among(part.keys) - unreadable
        replaced = [
            key
            for key, payload in zip(part.keys, encoded.payloads, strict=True)
            if payload is not None and key in unreadable
        ]
        kept |= await self._remove_unreadable(replaced)
        writes = [
            RecordWrite(key, (header, payload))
            for key, header, payload in zip(part.keys, part.headers, encoded.payloads, strict=True)
            if payload is not None and key not in kept
        ]
        outcomes: Sequence[Outcome] = ()
        if writes:
            with self._codecs.on_link(JobKind.STORE) as moved:
                outcomes = await self._backend.put(writes)
                moved(encoded.stored_bytes)
        if len(writes) == len(part.keys):
            return outcomes
        if encoded.error:
            part.running.note_error(encoded.error)
        put = iter(outcomes)
        return [
            Outcome.SHED if payload is None else Outcome.EXISTS if key in kept else next(put)
            for key, payload in zip(part.keys, encoded.payloads, strict=True)
        ]

    async def _take_turn(self, blocks: int) -> None:
        """Wait for a turn of the loop that may hash this many blocks."""
        while self._hashed_bytes >= _TURN_BYTES:
            await self._turn_ended.wait()
        if not self._hashed_bytes:
            self._turn_ended.clear()
            asyncio.get_running_loop().call_soon(self._end_turn)
        self._hashed_bytes += blocks * self._slots.slot_bytes

    def _end_turn(self) -> None:
        self._hashed_bytes = 0
        self._turn_ended.set()

    async def _remove_unreadable(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        """Remove unreadable records before their blocks are put again; return the keys of those that remain."""
        if keys:
            try:
                async with asyncio.timeout(_REPLACE_TIMEOUT_S):
                    await self._backend.delete(keys)
            except TimeoutError:
                return set(keys)
        return set()

    async def _lend(self, part: JobPart, precedence: Precedence) -> None:
        """Wait for the header buffers and slots of a part; :meth:`_take_back` returns them.

        Not context managers: a part would need three, which is a tenth of the work for one short block.
        """
        part.lent_bytes = await self._bytes.enter(len(part.keys) * self._slots.slot_bytes, precedence)
        try:
            part.headers = await self._headers.take(len(part.keys), precedence)
            for slot in part.slots:
                part.rows.append(self._slots.view(slot))
        except BaseException:
            self._take_back(part)
            raise

    def _take_back(self, part: JobPart) -> None:
        # Released, not dropped: a backend that still uses a view gets an error instead of another block's bytes.
        for row in part.rows:
            row.release()
        self._headers.give_back(part.headers)
        self._bytes.leave(part.lent_bytes)
        part.headers, part.rows, part.lent_bytes = [], [], 0

    def _verify(
        self, part: JobPart, reads: Sequence[RecordRead], outcomes: Sequence[Outcome]
    ) -> list[tuple[int, StoredBlock]]:
        """Verify the records of a part and settle the raw ones.

        Returns:
            The others, by position in the part: verified, but still to be decoded.
        """
        slot_bytes = self._slots.slot_bytes
        stored = []
        for i, (read, outcome) in enumerate(zip(reads, outcomes, strict=True)):
            if outcome is not Outcome.OK:
                # CORRUPT from a backend means a record that does not fit the buffers: on a shared medium it may be
                # another engine's.
                part.settle_failed(i, outcome, RecordFault.LENGTH, quarantine=self._backend.exclusive)
                continue
            header, payload = read.buffers
            try:
                found = self._records.check(read.key, header, payload, read.filled_bytes, self._codecs.decoder.refusal)
                if found.plain_bytes != slot_bytes:
                    # The rest of the slot still holds another block: a shorter payload is not this block.
                    short = f"The block has {found.plain_bytes} bytes, the slot {slot_bytes}. It counts as a miss."
                    raise RecordError(short, RecordFault.GEOMETRY)
            except RecordError as error:
                part.settle_loaded(i, 0, error)
                continue
            if found.codec_chain:
                stored.append((i, StoredBlock(found, payload)))
            else:
                part.settle_loaded(i, slot_bytes, None)
        return stored
