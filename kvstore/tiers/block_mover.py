"""Moves the blocks of a job between slots and records, in parts: buffers, headers, codecs, verification."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

from kvstore.backends.base import Backend, RecordRead, RecordWrite, outcome_of
from kvstore.codec.checksum import LONG_BYTES
from kvstore.codec.coding import Encoder
from kvstore.codec.record import RecordCodec, RecordFault, RecordHeader
from kvstore.errors import KVStoreError, RecordError
from kvstore.namespace import Namespace
from kvstore.runtime.buffers import BufferPool, SlotBuffers
from kvstore.runtime.limits import Limiter, Precedence
from kvstore.runtime.messages import JobKind, SubmitJob
from kvstore.runtime.workers import Workers
from kvstore.tiers.codecs import TierCodecs
from kvstore.tiers.presence import RefusedRecords
from kvstore.types import FAILURES, BlockKey, Outcome

_T = TypeVar("_T")

_PART_BYTES = 4 << 20
"""Approximate minimum size of a job's parts: large enough to fill a medium's queue, small enough to verify one part
while the next is read, and to keep loads from waiting long behind stores."""

_PART_BYTES_MAX = 16 << 20

_PARTS_PER_JOB = 8
"""Target number of parts of a job, within these bounds."""

_FIRST_PART = 4
"""Divisor of the first part of a store on an idle tier; each following part is twice as long as the one before. The
medium starts immediately and stays busy while the longer parts are hashed."""

_PAGE = 4096

_THREADS = 2
"""Threads for encoding, for decoding, and for hashing more long blocks than the loop can. Otherwise raw blocks are
hashed on the loop: xxh3 runs at memory speed, so a thread would only add overhead."""

_BATCH_BLOCKS_MAX = 256
"""Maximum blocks encoded together, because views of all rows exist at once."""

_SCRATCH_BATCHES = 4
"""Batches of scratch memory: two threads, each with two buffers between which the steps of a chain alternate."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a tier's block mover."""

    # Maximum bytes hashed on the loop per iteration: xxh3 then blocks it for one or two milliseconds.
    turn_bytes: int = 16 << 20
    # Maximum header buffers, and therefore blocks, in flight per tier (4 MiB of buffers for disk tiers).
    headers_max: int = 1024
    # Time limit for removing records before their replacements are put. A medium in recovery takes far longer, and
    # remaining records do no harm.
    replace_timeout_s: float = 0.5
    # Approximate bytes of blocks encoded together: enough to make the wait for the GIL at the end negligible, and few
    # enough for two threads to share a job.
    batch_bytes: int = 4 << 20
    # Batches of encoded payloads in flight to the medium: one is written while the next is encoded, and a network needs
    # several.
    payload_batches: int = 8


class RunningJob:
    """The state of a job in the I/O half. Parts write to it as they end, so finished work survives a deadline."""

    def __init__(self, job: SubmitJob) -> None:
        self.job = job
        # One byte per block of the job; TIMEOUT until known.
        self.outcomes = bytearray([Outcome.TIMEOUT]) * len(job.keys)
        self.faults: Counter[str] = Counter()
        self.size_bytes = 0
        self.error = ""
        self.suspects: list[BlockKey] = []  # Keys of records to quarantine.
        self.refused: list[BlockKey] = []  # Keys of records that may be intact but can't be read here.
        # Keys of blocks removed after the submission of their store; their records are deleted again.
        self.removed: set[BlockKey] = set()
        self.ended = asyncio.Event()

    def note_error(self, error: str) -> None:
        """Keep the text of the first failure."""
        self.error = self.error or error

    def settle_rest(self, outcome: Outcome) -> None:
        """Set the outcome of the blocks without one."""
        self.outcomes = self.outcomes.replace(bytes([Outcome.TIMEOUT]), bytes([outcome]))


class JobPart:
    """A section of a job that moves as a unit, with its leased resources.

    These are header buffers, views of the slots (``rows``), buffers for encoded payloads (``targets``) and a share of
    the bytes in flight.
    """

    __slots__ = ("headers", "keys", "lent_bytes", "rows", "running", "slots", "start", "targets")

    def __init__(self, running: RunningJob, start: int, end: int) -> None:
        self.running = running
        self.start = start
        self.keys: Sequence[BlockKey] = running.job.keys[start:end]
        self.slots: Sequence[int] = running.job.slots[start:end]
        self.headers: list[memoryview] = []
        self.rows: list[memoryview] = []
        self.targets: list[memoryview] = []
        self.lent_bytes = 0

    def fail(self, error: BaseException) -> None:
        """Settle every block with an error of the whole call."""
        self.running.outcomes[self.start : self.start + len(self.keys)] = bytes([outcome_of(error)]) * len(self.keys)
        self.running.note_error(f"{type(error).__name__}: {error}")

    def note_failures(self, outcomes: Sequence[Outcome], error: str) -> None:
        """Keep the medium's error text if one of the outcomes is a failure."""
        if not FAILURES.isdisjoint(outcomes):
            self.running.note_error(error)

    def settle_loaded(self, index: int, size_bytes: int, error: RecordError | None) -> None:
        """Settle a block whose record was read; ``error`` is the failure of its verification, or None."""
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
        inflight_bytes: Maximum payload bytes in flight.
        on_put: Called on the loop thread, in order, with blocks that are now on the medium.
        on_found: Called likewise with blocks that already existed on the medium; by default ``on_put``.
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
        limits: Limits = Limits(),
    ) -> None:
        self._backend = backend
        self._limits = limits
        self._slots = slots
        self._on_put, self._on_found = on_put, on_found or on_put
        self.codecs = codecs or TierCodecs("raw", namespace)
        self._refused = RefusedRecords() if refused is None else refused
        self._is_raw = self.codecs.chain.is_raw
        self._records = RecordCodec(namespace, header_bytes=backend.alignment)
        # With page-aligned headers, the medium moves whole pages, and would copy a payload that ends within a page.
        unit = backend.alignment if backend.alignment >= _PAGE else 1
        self._encoder = Encoder(self._records, self.codecs.chain, unit=unit)
        self._batch_blocks = min(_BATCH_BLOCKS_MAX, max(1, limits.batch_bytes // slots.slot_bytes))
        self._headers = BufferPool(backend.alignment, limits.headers_max)
        self._bytes = Limiter(max(inflight_bytes, slots.slot_bytes))
        self._hashed_bytes = 0
        self._turn_ended = asyncio.Event()
        self._rereading = asyncio.Lock()
        self._workers = Workers(_THREADS, "kvstore-codec")

    def cut(self, running: RunningJob) -> list[JobPart]:
        """Cut a job into parts that may run concurrently."""
        blocks, slot_bytes = len(running.job.keys), self._slots.slot_bytes
        wanted_bytes = min(_PART_BYTES_MAX, max(_PART_BYTES, blocks * slot_bytes // _PARTS_PER_JOB))
        size = longest = min(self._limits.headers_max, max(1, wanted_bytes // slot_bytes))
        if running.job.kind is JobKind.STORE:
            if not self._is_raw:
                size = longest = min(longest, self._batch_blocks)
            elif not self._bytes.in_use:
                size = max(1, longest // _FIRST_PART)
        parts, start = [], 0
        while start < blocks:
            end = min(blocks, start + size)
            parts.append(JobPart(running, start, end))
            start, size = end, min(longest, 2 * size)
        return parts

    def move(self, part: JobPart) -> Coroutine[Any, Any, None]:
        """Load or store a part, and settle its blocks."""
        return self._load(part) if part.running.job.kind is JobKind.LOAD else self._store(part)

    async def reread_damaged(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Read damaged records again, one at a time; return those still damaged.

        A read damaged in transit must not remove a block that many engines share. A record whose second read fails is
        not returned.
        """
        damaged = []
        async with self._rereading:
            # Own buffers, because no leased row may be held during the query.
            buffers = memoryview(bytearray(self._backend.alignment)), memoryview(bytearray(self._slots.slot_bytes))
            for key in keys:
                read, running = RecordRead(key, buffers), RunningJob(SubmitJob(0, JobKind.LOAD, (key,), (0,), math.inf))
                try:
                    outcomes = await self._backend.get_into([read])
                except (KVStoreError, OSError):
                    continue
                part = JobPart(running, 0, 1)
                part.rows = [buffers[1]]
                await self._decode(part, self._settle_read(part, outcomes, self._check([read], outcomes)))
                damaged += running.suspects
        return damaged

    def close(self) -> None:
        """Release every buffer; only when nothing moves. Idempotent."""
        self._workers.stop()
        self._headers.close()
        for name in ("_payload_rows", "_scratch"):
            if name in vars(self):
                getattr(self, name).close()
        self._slots.release()

    async def _load(self, part: JobPart) -> None:
        await self._lend(part, Precedence.LOAD)
        try:
            triples = zip(part.keys, part.headers, part.rows, strict=True)
            reads = [RecordRead(key, (header, row)) for key, header, row in triples]
            try:
                with self.codecs.on_link(JobKind.LOAD) as moved:
                    outcomes = await self._backend.get_into(reads)
                    moved(sum([max(0, read.filled_bytes - self._records.header_bytes) for read in reads]))
            except (KVStoreError, OSError) as error:
                part.fail(error)
                return
            part.note_failures(outcomes, self._backend.last_error)
            found = await self._hash(len(reads), partial(self._check, reads, outcomes), Precedence.LOAD)
            stored = self._settle_read(part, outcomes, found)
            if stored:
                await self._decode(part, stored)
            done = part.running.outcomes[part.start : part.start + len(reads)]
            good = [key for key, outcome in zip(part.keys, done, strict=True) if outcome == Outcome.OK]
            bad = []
            if Outcome.CORRUPT in done:
                bad = [key for key, outcome in zip(part.keys, done, strict=True) if outcome == Outcome.CORRUPT]
            self._backend.note_read(good, bad)
        finally:
            self._take_back(part)

    @cached_property
    def _payload_rows(self) -> BufferPool:
        """Rows for payloads until they have been put."""
        return BufferPool(self._row_bytes, self._batch_blocks * self._limits.payload_batches)

    @cached_property
    def _scratch(self) -> BufferPool:
        """Rows for one call on a worker thread. Their holder waits for no other resource, so there is no deadlock."""
        return BufferPool(self._row_bytes, self._batch_blocks * _SCRATCH_BATCHES)

    @property
    def _row_bytes(self) -> int:
        return -(-self._slots.slot_bytes // _PAGE) * _PAGE

    async def _decode(self, part: JobPart, stored: Sequence[tuple[int, RecordHeader]]) -> None:
        """Decode verified payloads into their slots, and settle their blocks."""
        for start in range(0, len(stored), self._batch_blocks):
            batch = stored[start : start + self._batch_blocks]
            headers, slots = [header for _, header in batch], [part.rows[i] for i, _ in batch]
            async with self._scratch.lease(2 * len(batch), Precedence.LOAD) as rows:
                lower, upper = rows[: len(batch)], rows[len(batch) :]
                errors, seconds = await self._workers.call(partial(self.codecs.decode, headers, slots, lower, upper))
            good = [header for header, error in zip(headers, errors, strict=True) if error is None]
            self.codecs.note_decoded(good, seconds)
            for (i, header), error in zip(batch, errors, strict=True):
                part.settle_loaded(i, header.plain_bytes, error)

    async def _store(self, part: JobPart) -> None:
        encode = self.codecs.encode_next()
        needs_targets, needs_spares = self._encoder.needs_rows(encode=encode)
        outcomes: Sequence[Outcome] | None = None
        await self._lend(part, Precedence.STORE, needs_targets=needs_targets)
        try:
            if needs_spares:
                async with self._scratch.lease(len(part.keys), Precedence.STORE) as spares:
                    payloads = await self._encode(part, spares, encode=encode)
            else:
                payloads = await self._encode(part, [], encode=encode)
            outcomes = await self._put_by_deadline(part, payloads)
        finally:
            self._take_back(part)
        if outcomes is not None:
            self._settle_stored(part, outcomes)

    async def _encode(self, part: JobPart, spares: Sequence[memoryview], *, encode: bool) -> list[memoryview | None]:
        """Make the headers and payloads of a part."""
        work = partial(self._encoder.encode, part.keys, part.headers, part.rows, part.targets, spares, encode=encode)
        if self._is_raw:
            return (await self._hash(len(part.keys), work, Precedence.STORE))[0]
        (payloads, error), seconds = await self._workers.call(partial(_timed, work))
        if error:
            part.running.note_error(error)
        self.codecs.note_encoded(payloads, self._slots.slot_bytes, seconds, encoded=encode)
        return payloads

    async def _put_by_deadline(self, part: JobPart, payloads: Sequence[memoryview | None]) -> Sequence[Outcome] | None:
        """Put the records of a part; None if the whole call failed, or the deadline has passed."""
        if time.monotonic() > part.running.job.deadline:
            # The scheduler may have abandoned the job and reused its slots before they were hashed: the checksum would
            # then confirm another block's bytes. A checksum made before the deadline detects a later change.
            return None
        try:
            return await self._put(part, payloads)
        except (KVStoreError, OSError) as error:
            part.fail(error)
            return None
        finally:
            # Released like slots: the rows go to the next part, and a traceback could keep the memory alive.
            for payload in payloads:
                if payload is not None:
                    payload.release()

    def _settle_stored(self, part: JobPart, outcomes: Sequence[Outcome]) -> None:
        """Settle the blocks of a part that was put, and report those on the medium."""
        running = part.running
        part.note_failures(outcomes, self._backend.last_error)
        hidden: Collection[BlockKey] = ()
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
            # Unreadable records must not be reported: they would be promoted and refused again. The same applies to
            # blocks removed meanwhile, whose records are about to be deleted.
            if outcome.ok and key not in hidden and key not in running.removed:
                (put_now if outcome is Outcome.OK else found).append(key)
        # Reported immediately, so that a later eviction of the same block is reported after it.
        if put_now:
            self._on_put(put_now)
        if found:
            self._on_found(found)

    async def _put(self, part: JobPart, payloads: Sequence[memoryview | None]) -> Sequence[Outcome]:
        """Put the records of a part; a block without a payload, for lack of a seal key, is shed."""
        keys = part.keys
        kept = await self._kept(keys, payloads) if self._refused else ()
        writes = [
            RecordWrite(key, (header, payload))
            for key, header, payload in zip(keys, part.headers, payloads, strict=True)
            if payload is not None and key not in kept
        ]
        outcomes: Sequence[Outcome] = ()
        if writes:
            with self.codecs.on_link(JobKind.STORE) as moved:
                outcomes = await self._backend.put(writes)
                moved(sum([payload.nbytes for payload in payloads if payload is not None]))
        if len(writes) == len(keys):
            return outcomes
        put = iter(outcomes)
        return [
            Outcome.SHED if payload is None else Outcome.EXISTS if key in kept else next(put)
            for key, payload in zip(keys, payloads, strict=True)
        ]

    async def _hash(self, blocks: int, work: Callable[[], _T], precedence: Precedence) -> _T:
        """Hash blocks by ``work`` on the loop, in an iteration with room for them.

        Without room, long blocks are hashed on a thread: their medium is faster than the loop.
        """
        if self._hashed_bytes >= self._limits.turn_bytes and self._slots.slot_bytes >= LONG_BYTES:
            return await self._workers.call(work, precedence=precedence)
        while self._hashed_bytes >= self._limits.turn_bytes:
            await self._turn_ended.wait()
        if not self._hashed_bytes:
            self._turn_ended.clear()
            asyncio.get_running_loop().call_soon(self._end_turn)
        self._hashed_bytes += blocks * self._slots.slot_bytes
        return work()

    def _end_turn(self) -> None:
        self._hashed_bytes = 0
        self._turn_ended.set()

    async def _kept(self, keys: Sequence[BlockKey], payloads: Sequence[memoryview | None]) -> set[BlockKey]:
        """Remove records that can't be read here before their blocks are put again; return the keys of the others.

        On a shared medium another engine may read such a record: it stays, and its block is not sent, until it has been
        refused once more after a pause.
        """
        refused, is_authoritative = self._refused, self._backend.authoritative
        unreadable = refused.among(keys) if is_authoritative else refused.lasting(keys)
        kept = set() if is_authoritative else refused.hidden_among(keys) - unreadable
        pairs = zip(keys, payloads, strict=True)
        if replaced := [key for key, payload in pairs if payload is not None and key in unreadable]:
            try:
                async with asyncio.timeout(self._limits.replace_timeout_s):
                    await self._backend.delete(replaced)
            except TimeoutError:
                kept |= set(replaced)
        return kept

    async def _lend(self, part: JobPart, precedence: Precedence, *, needs_targets: bool = False) -> None:
        """Wait for the buffers and slots of a part; :meth:`_take_back` returns them.

        Three context managers instead would take a tenth of the work for one short block.
        """
        part.lent_bytes = await self._bytes.enter(len(part.keys) * self._slots.slot_bytes, precedence)
        try:
            part.headers = await self._headers.take(len(part.keys), precedence)
            if needs_targets:
                part.targets = await self._payload_rows.take(len(part.keys), precedence)
            for slot in part.slots:
                part.rows.append(self._slots.view(slot))
        except BaseException:
            self._take_back(part)
            raise

    def _take_back(self, part: JobPart) -> None:
        # Released instead of dropped: a backend that still uses a view gets an error instead of another block's bytes.
        for row in part.rows:
            row.release()
        if part.targets:
            self._payload_rows.give_back(part.targets)
        self._headers.give_back(part.headers)
        self._bytes.leave(part.lent_bytes)
        part.headers, part.rows, part.targets, part.lent_bytes = [], [], [], 0

    def _check(
        self, reads: Sequence[RecordRead], outcomes: Sequence[Outcome]
    ) -> list[RecordHeader | RecordError | None]:
        """Verify records that were read; None for the others."""
        found: list[RecordHeader | RecordError | None] = []
        for read, outcome in zip(reads, outcomes, strict=True):
            if outcome is not Outcome.OK:
                found.append(None)
                continue
            header, payload = read.buffers
            try:
                found.append(
                    self._records.check(read.key, header, payload, read.filled_bytes, self.codecs.decoder.refusal)
                )
            except RecordError as error:
                found.append(error)
        return found

    def _settle_read(
        self, part: JobPart, outcomes: Sequence[Outcome], found: Sequence[RecordHeader | RecordError | None]
    ) -> list[tuple[int, RecordHeader]]:
        """Settle the raw blocks of a part, and those that were not read or failed verification.

        Returns:
            The encoded or sealed ones, by position in the part: verified, but still to be decoded.
        """
        slot_bytes = self._slots.slot_bytes
        stored = []
        for i, (outcome, record) in enumerate(zip(outcomes, found, strict=True)):
            if record is None:
                # A backend's CORRUPT is a record that does not fit the buffers: on a shared medium, possibly another
                # engine's.
                part.settle_failed(i, outcome, RecordFault.LENGTH, quarantine=self._backend.authoritative)
            elif isinstance(record, RecordError):
                part.settle_loaded(i, 0, record)
            elif record.plain_bytes != slot_bytes:
                # The rest of the slot still holds another block: a shorter payload is not this block.
                short = f"The block has {record.plain_bytes} bytes, the slot {slot_bytes}. It counts as a miss."
                part.settle_loaded(i, 0, RecordError(short, RecordFault.GEOMETRY))
            elif record.codec_chain:
                stored.append((i, record))
            else:
                part.settle_loaded(i, slot_bytes, None)
        return stored


def _timed(work: Callable[[], _T]) -> tuple[_T, float]:
    """Call ``work``; return its result and its duration in seconds."""
    started = time.perf_counter()
    return work(), time.perf_counter() - started
