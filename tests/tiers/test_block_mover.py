"""The block mover with records that are intact but not the requested block."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvstore.backends.base import RecordGeometry, RecordRead, RecordWrite
from kvstore.backends.memory import MemoryBackend, MemoryConfig
from kvstore.backends.simple import SimpleBackend
from kvstore.codec import RecordCodec, RecordFault
from kvstore.config import TierConfig
from kvstore.errors import BackendUnavailableError
from kvstore.namespace import Namespace
from kvstore.runtime.buffers import SlotBuffers
from kvstore.runtime.messages import JobKind, SubmitJob
from kvstore.tiers.block_mover import BlockMover, Limits, RunningJob
from kvstore.tiers.codecs import TierCodecs
from kvstore.tiers.presence import RefusedRecords
from kvstore.types import BlockKey, Outcome

SLOT = 8192
OURS, THEIRS = Namespace({"layout": 1}), Namespace({"layout": 2})


class Noting(MemoryBackend):
    """Records the verdicts on records that were read."""

    def __init__(self) -> None:
        super().__init__(MemoryConfig())
        self.verified: list[BlockKey] = []
        self.damaged: list[BlockKey] = []

    def note_read(self, intact: Sequence[BlockKey], damaged: Sequence[BlockKey]) -> None:
        self.verified += intact
        self.damaged += damaged


async def load_record(
    namespace: Namespace,
    payload: bytes,
    key: bytes,
    change: Callable[[bytearray], None],
    backend: MemoryBackend | None = None,
) -> RunningJob:
    """Put a record in place of ``b"key"``, load that block, and return the job."""
    backend = backend or MemoryBackend(MemoryConfig())
    await backend.open(OURS, RecordGeometry(backend.alignment, SLOT))
    record = bytearray(backend.alignment) + payload
    with memoryview(record) as view:
        codec = RecordCodec(namespace, header_bytes=backend.alignment)
        codec.encode_header(view[: backend.alignment], key, view[backend.alignment :])
    change(record)
    await backend.put([RecordWrite(b"key", [memoryview(bytes(record))])])
    return await loaded_from(backend)


async def loaded_from(backend: MemoryBackend) -> RunningJob:
    """Load ``b"key"`` from an open backend, close it, and return the job."""
    mover = BlockMover(backend, OURS, SlotBuffers(memoryview(bytearray(SLOT)), SLOT), SLOT, lambda keys: None)
    job = RunningJob(SubmitJob(1, JobKind.LOAD, (b"key",), (0,), 0.0))
    try:
        (part,) = mover.cut(job)
        await mover.move(part)
    finally:
        mover.close()
        await backend.close()
    return job


def leave(record: bytearray) -> None:
    """Change nothing."""


def flip(record: bytearray) -> None:
    """Change a bit of the payload."""
    record[-1] ^= 1


def cut(record: bytearray) -> None:
    """Remove the last byte."""
    del record[-1]


@pytest.mark.parametrize(
    ("namespace", "size", "key", "change", "fault", "set_aside"),
    [
        (OURS, SLOT - 1, b"key", leave, RecordFault.GEOMETRY, False),
        (OURS, 0, b"key", leave, RecordFault.GEOMETRY, False),
        (THEIRS, SLOT, b"key", leave, RecordFault.NAMESPACE, False),
        (OURS, SLOT, b"yek", leave, RecordFault.KEY, True),
        (OURS, SLOT, b"key", flip, RecordFault.PAYLOAD, True),
        (OURS, SLOT, b"key", cut, RecordFault.LENGTH, True),
    ],
    ids=["shorter", "empty", "namespace", "key", "bit flip", "cut"],
)
async def test_record_of_another_block_is_a_miss(
    namespace: Namespace,
    size: int,
    key: bytes,
    change: Callable[[bytearray], None],
    fault: RecordFault,
    set_aside: bool,
) -> None:
    """A record that does not fill the slot with the right bytes is corrupt; only damaged records are set aside."""
    tally = await load_record(namespace, b"\x07" * size, key, change)
    assert list(tally.outcomes) == [Outcome.CORRUPT]
    assert tally.faults == {fault.value: 1}
    assert tally.suspects == ([b"key"] if set_aside else [])
    assert tally.size_bytes == 0
    assert tally.error


async def test_the_right_record_is_loaded() -> None:
    """The unchanged record is OK (so that the test above can fail)."""
    tally = await load_record(OURS, b"\x07" * SLOT, b"key", leave)
    assert (list(tally.outcomes), tally.size_bytes, tally.error) == ([Outcome.OK], SLOT, "")


@pytest.mark.parametrize("change", [leave, flip, cut])
async def test_the_backend_is_notified_of_the_verdict(change: Callable[[bytearray], None]) -> None:
    """A backend with several sources of a block, such as peers, is notified of those that send damaged records."""
    backend = Noting()
    await load_record(OURS, b"\x07" * SLOT, b"key", change, backend)
    assert (backend.verified, backend.damaged) == (([b"key"], []) if change is leave else ([], [b"key"]))


async def test_store_counts_only_written_blocks() -> None:
    """A block that the medium already has does not count as written."""
    backend = MemoryBackend(MemoryConfig())
    await backend.open(OURS, RecordGeometry(backend.alignment, SLOT))
    mover = BlockMover(backend, OURS, SlotBuffers(memoryview(bytearray(3 * SLOT)), SLOT), SLOT, lambda keys: None)
    for keys, outcomes, count in (
        ((b"a",), [Outcome.OK], 1),
        ((b"a", b"b", b"c"), [Outcome.EXISTS] + [Outcome.OK] * 2, 2),
    ):
        job = RunningJob(SubmitJob(1, JobKind.STORE, keys, tuple(range(len(keys))), time.monotonic() + 60))
        for part in mover.cut(job):
            await mover.move(part)
        assert (list(job.outcomes), job.size_bytes) == (outcomes, count * SLOT)
    mover.close()
    await backend.close()


@pytest.mark.parametrize(("alignment", "ends"), [(4096, {0}), (512, set(range(1, 4096)))])
async def test_payloads_end_with_a_page_where_headers_do(alignment: int, ends: set[int]) -> None:
    """With headers of a page, the encoded payload is padded to a page for direct I/O; elsewhere it is not padded."""
    lengths = []

    class Paged(MemoryBackend):
        async def put(self, writes: Sequence[RecordWrite]) -> Sequence[Outcome]:
            lengths.extend(write.size_bytes for write in writes)
            return await super().put(writes)

    backend = Paged(MemoryConfig())
    backend.alignment = alignment  # type: ignore[misc]
    await backend.open(OURS, RecordGeometry(alignment, SLOT))
    slots = SlotBuffers(memoryview(bytearray(b"numbers" * SLOT)[:SLOT]), SLOT)
    mover = BlockMover(backend, OURS, slots, SLOT, lambda keys: None, TierCodecs("zstd", OURS))
    job = RunningJob(SubmitJob(1, JobKind.STORE, (b"a",), (0,), time.monotonic() + 60))
    for part in mover.cut(job):
        await mover.move(part)
    assert list(job.outcomes) == [Outcome.OK]
    assert len(lengths) == 1 and lengths[0] % 4096 in ends
    mover.close()
    await backend.close()


class Misfit(MemoryBackend):
    """A medium of this engine alone, whose records never fit the buffers."""

    authoritative = True

    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:
        return [Outcome.CORRUPT] * len(reads)


class SharedMisfit(Misfit):
    """The same on a shared medium."""

    authoritative = False


@pytest.mark.parametrize("medium", [Misfit, SharedMisfit])
async def test_record_of_another_length_is_set_aside_if_authoritative(medium: type[Misfit]) -> None:
    """On a shared medium it may be an intact record of an engine with longer blocks."""
    backend = medium(MemoryConfig())
    await backend.open(OURS, RecordGeometry(backend.alignment, SLOT))
    job = await loaded_from(backend)
    assert list(job.outcomes) == [Outcome.CORRUPT]
    assert (job.suspects, job.refused) == (([b"key"], []) if medium.authoritative else ([], [b"key"]))


class Stuck(MemoryBackend):
    """Its deletions do not end."""

    async def delete(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        await asyncio.Event().wait()
        return []


async def test_a_medium_that_does_not_delete_keeps_its_record_and_the_store_ends() -> None:
    """An unreadable record that can't be removed stays; its block is not stored beside it, and nothing waits for it."""
    backend = Stuck(MemoryConfig())
    await backend.open(OURS, RecordGeometry(backend.alignment, SLOT))
    refused = RefusedRecords()
    refused.note([b"key"])
    put: list[BlockKey] = []
    slots, limits = SlotBuffers(memoryview(bytearray(2 * SLOT)), SLOT), Limits(replace_timeout_s=0.01)
    mover = BlockMover(backend, OURS, slots, 2 * SLOT, put.extend, refused=refused, limits=limits)
    job = RunningJob(SubmitJob(1, JobKind.STORE, (b"key", b"other"), (0, 1), time.monotonic() + 60))
    try:
        async with asyncio.timeout(60):
            for part in mover.cut(job):
                await mover.move(part)
    finally:
        mover.close()
        await backend.close()
    assert list(job.outcomes) == [Outcome.EXISTS, Outcome.OK]
    assert put == [b"other"], "an unreadable record is not reported as present"


class Down(MemoryBackend):
    """Its reads fail."""

    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:
        raise BackendUnavailableError("down", backend="memory")


@pytest.mark.parametrize("trouble", ["down", "gone", None])
async def test_record_damaged_on_a_second_read_is_set_aside(trouble: str | None) -> None:
    """A damaged record is not reported if it is gone or unreadable by now; one that is still damaged is."""
    backend = (Down if trouble == "down" else MemoryBackend)(MemoryConfig())
    await backend.open(OURS, RecordGeometry(backend.alignment, SLOT))
    if trouble != "gone":
        await backend.put([RecordWrite(b"key", [memoryview(bytes(backend.alignment)), memoryview(bytes(SLOT))])])
    mover = BlockMover(backend, OURS, SlotBuffers(memoryview(bytearray(SLOT)), SLOT), SLOT, lambda keys: None)
    assert await mover.reread_damaged([b"key"]) == ([] if trouble else [b"key"])
    mover.close()
    await backend.close()


@pytest.mark.parametrize(("seconds_left", "stored"), [(-0.001, False), (60.0, True)])
async def test_record_hashed_after_the_deadline_is_never_put(seconds_left: float, stored: bool) -> None:
    """An abandoned store's slot may hold another block, whose checksum must not validate the record."""
    backend = MemoryBackend(MemoryConfig())
    await backend.open(OURS, RecordGeometry(backend.alignment, SLOT))
    mover = BlockMover(backend, OURS, SlotBuffers(memoryview(bytearray(SLOT)), SLOT), SLOT, lambda keys: None)
    job = RunningJob(SubmitJob(1, JobKind.STORE, (b"key",), (0,), time.monotonic() + seconds_left))
    (part,) = mover.cut(job)
    await mover.move(part)
    assert list(await backend.exists([b"key"])) == [stored]
    assert list(job.outcomes) == [Outcome.OK if stored else Outcome.TIMEOUT]
    mover.close()
    await backend.close()


class Hanging(SimpleBackend):
    """Its writes never end; an event reports the start of one."""

    async def put_one(self, key: BlockKey, buffers: Sequence[memoryview]) -> bool:
        self.begun.set()
        await asyncio.Event().wait()
        return True

    async def get_one_into(self, key: BlockKey, buffers: Sequence[memoryview]) -> int | None:
        return None

    async def exists_one(self, key: BlockKey) -> bool:
        return False

    begun: asyncio.Event


@pytest.mark.parametrize("codec", ["raw", "zstd"])
async def test_cancelled_store_releases_all_memory(codec: str) -> None:
    """A store cancelled in the medium keeps no reference to slots or rows, even through its traceback."""
    backend = Hanging(TierConfig())
    backend.begun = asyncio.Event()
    await backend.open(OURS, RecordGeometry(backend.alignment, SLOT))
    primary = bytearray(SLOT)
    codecs = TierCodecs(codec, OURS)
    mover = BlockMover(backend, OURS, SlotBuffers(memoryview(primary), SLOT), SLOT, lambda keys: None, codecs)
    (part,) = mover.cut(RunningJob(SubmitJob(1, JobKind.STORE, (b"key",), (0,), time.monotonic() + 60)))
    gc.disable()  # It would end the reference cycle of a traceback at an arbitrary time.
    try:
        task = asyncio.create_task(mover.move(part))
        await backend.begun.wait()
        task.cancel()
        await asyncio.wait([task])
        del task
        await backend.close()
        mover.close()
        primary.append(0)  # A BufferError while any view exists.
    finally:
        gc.enable()


@pytest.mark.parametrize("codec", ["raw", "zstd"])
async def test_cancelled_parts_return_their_bytes_and_buffers(codec: str) -> None:
    """One part is cancelled while it waits for a buffer, one during its store; a leak would stop every later job."""
    backend = Hanging(TierConfig())
    backend.begun = asyncio.Event()
    await backend.open(OURS, RecordGeometry(backend.alignment, SLOT))
    slots = SlotBuffers(memoryview(bytearray(2 * SLOT)), SLOT)
    codecs, limits = TierCodecs(codec, OURS), Limits(headers_max=1)
    mover = BlockMover(backend, OURS, slots, 2 * SLOT, lambda keys: None, codecs, limits=limits)
    tasks = []
    for slot in (0, 1):
        job = SubmitJob(1, JobKind.STORE, (b"key",), (slot,), time.monotonic() + 60)
        (part,) = mover.cut(RunningJob(job))
        tasks.append(asyncio.create_task(mover.move(part)))
    await backend.begun.wait()
    for _ in range(10):
        await asyncio.sleep(0)
    moving = mover._bytes
    assert moving.in_use == 2 * SLOT, "the second part does not wait for the only header"
    for task in reversed(tasks):
        task.cancel()
    await asyncio.wait(tasks)
    assert (moving.in_use, mover._headers.free_count) == (0, 1)
    rows = mover._payload_rows
    assert rows.free_count == rows.count
    await backend.close()
    mover.close()


@pytest.mark.parametrize("kind", JobKind)
@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_parts_of_tiny_blocks_are_bounded(kind: JobKind, codec: str) -> None:
    """No part of a long job has more blocks than there are header buffers, or rows for encoding."""
    mover = BlockMover(
        MemoryBackend(MemoryConfig()),
        OURS,
        SlotBuffers(memoryview(bytearray(1024)), 1024),
        1 << 20,
        lambda keys: None,
        TierCodecs(codec, OURS),
    )
    keys = tuple(b"%d" % number for number in range(10_000))
    parts = mover.cut(RunningJob(SubmitJob(1, kind, keys, (0,) * len(keys), 0.0)))
    longest = 256 if codec == "zstd" and kind is JobKind.STORE else 1024
    assert max(len(part.keys) for part in parts) == longest
    assert [key for part in parts for key in part.keys] == list(keys)
    mover.close()


class Watched(MemoryBackend):
    """Records the maximum number of concurrent reads."""

    running = most = 0

    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:
        """Read, after a turn of the loop."""
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        try:
            return await super().get_into(reads)
        finally:
            self.running -= 1


async def test_damaged_records_are_read_again_one_at_a_time() -> None:
    """Each read has a buffer as long as a slot, and thousands of loads may find damage at the same time."""
    backend = Watched(MemoryConfig())
    await backend.open(OURS, RecordGeometry(backend.alignment, SLOT))
    mover = BlockMover(backend, OURS, SlotBuffers(memoryview(bytearray(SLOT)), SLOT), SLOT, lambda keys: None)
    await asyncio.gather(*(mover.reread_damaged([b"a", b"b"]) for _ in range(4)))
    assert backend.most == 1
    mover.close()
    await backend.close()


async def test_a_turn_of_the_loop_verifies_a_bounded_number_of_bytes() -> None:
    """One turn of the loop verifies a bounded number of bytes, because everything else on the loop waits."""
    loop, verified = asyncio.get_running_loop(), [0]  # By the end of each turn.
    backend = Noting()
    await backend.open(OURS, RecordGeometry(backend.alignment, SLOT))
    keys = [b"%d" % number for number in range(12)]
    slots = SlotBuffers(memoryview(bytearray(len(keys) * SLOT)), SLOT)
    limits = Limits(turn_bytes=2 * SLOT)
    mover = BlockMover(backend, OURS, slots, len(keys) * SLOT, lambda keys: None, limits=limits)

    def end_turn() -> None:
        verified.append(len(backend.verified))
        loop.call_soon(end_turn)

    end_turn()
    for kind in (JobKind.STORE, JobKind.LOAD):
        jobs = [RunningJob(SubmitJob(1, kind, (key,), (slot,), math.inf)) for slot, key in enumerate(keys)]
        await asyncio.gather(*(mover.move(mover.cut(job)[0]) for job in jobs))
    assert len(backend.verified) == len(keys)
    assert max(now - before for before, now in itertools.pairwise(verified)) == 2
    mover.close()
    await backend.close()


class Damaging(MemoryBackend):
    """Changes the last byte of some records when they are read."""

    def __init__(self, damaged: Sequence[BlockKey]) -> None:
        super().__init__(MemoryConfig())
        self.damaged = damaged

    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:
        outcomes = await super().get_into(reads)
        for read in reads:
            if read.key in self.damaged:
                read.buffers[-1][-1] ^= 1
        return outcomes


async def test_long_blocks_beyond_a_turn_are_hashed_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A medium faster than the loop hashes costs the loop no more time; damage is found on threads as well."""
    slot, blocks = 1 << 20, 8
    check, threads = RecordCodec.check, set[int]()

    def noted(*args: Any, **options: Any) -> Any:
        threads.add(threading.get_ident())
        return check(*args, **options)

    monkeypatch.setattr(RecordCodec, "check", noted)
    keys = [b"%d" % number for number in range(blocks)]
    backend = Damaging(keys[1::2])
    await backend.open(OURS, RecordGeometry(backend.alignment, slot))
    memory = bytearray(random.Random(1).randbytes(blocks * slot))
    stored = bytes(memory)
    slots, limits = SlotBuffers(memoryview(memory), slot), Limits(turn_bytes=slot)
    mover = BlockMover(backend, OURS, slots, blocks * slot, lambda keys: None, limits=limits)

    async def moved(kind: JobKind) -> list[int]:
        jobs = [RunningJob(SubmitJob(1, kind, (key,), (i,), math.inf)) for i, key in enumerate(keys)]
        await asyncio.gather(*(mover.move(mover.cut(job)[0]) for job in jobs))
        return [job.outcomes[0] for job in jobs]

    assert await moved(JobKind.STORE) == [Outcome.OK] * blocks
    memory[:] = bytes(blocks * slot)
    assert await moved(JobKind.LOAD) == [Outcome.OK, Outcome.CORRUPT] * (blocks // 2)
    for start in range(0, blocks * slot, 2 * slot):
        assert memory[start : start + slot] == stored[start : start + slot]
    assert len(threads) > 1
    mover.close()
    await backend.close()
