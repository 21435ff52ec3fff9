"""What the block mover makes of records that are intact and yet not the block asked for."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence

import pytest

from kvstore.backends.base import RecordGeometry, RecordWrite
from kvstore.backends.memory import MemoryBackend, MemoryConfig
from kvstore.backends.simple import SimpleBackend
from kvstore.codec import RecordCodec, RecordFault
from kvstore.config import TierConfig
from kvstore.namespace import Namespace
from kvstore.runtime.buffers import SlotBuffers
from kvstore.runtime.messages import JobKind, SubmitJob
from kvstore.tiers.block_mover import BlockMover
from kvstore.tiers.codecs import TierCodecs
from kvstore.tiers.tally import Tally
from kvstore.types import BlockKey, Outcome

SLOT = 8192
OURS, THEIRS = Namespace({"layout": 1}), Namespace({"layout": 2})


async def load_record(namespace: Namespace, payload: bytes, key: bytes, change: Callable[[bytearray], None]) -> Tally:
    """Put a record at the place of ``b"key"``, load that block, and return what became of it."""
    backend = MemoryBackend(MemoryConfig())
    await backend.open(OURS, RecordGeometry(backend.alignment, SLOT))
    record = bytearray(backend.alignment) + payload
    with memoryview(record) as view:
        codec = RecordCodec(namespace, header_bytes=backend.alignment)
        codec.encode_header(view[: backend.alignment], key, view[backend.alignment :])
    change(record)
    await backend.put([RecordWrite(b"key", [memoryview(bytes(record))])])
    mover = BlockMover(backend, OURS, SlotBuffers(memoryview(bytearray(SLOT)), SLOT), SLOT, lambda keys: None)
    tally = Tally(1)
    try:
        (batch,) = mover.cut(SubmitJob(1, JobKind.LOAD, (b"key",), (0,), 0.0), tally)
        await mover.move(JobKind.LOAD, batch)
    finally:
        mover.close()
        await backend.close()
    return tally


def leave(record: bytearray) -> None:
    """Change nothing."""


def flip(record: bytearray) -> None:
    """Change a bit of the payload."""
    record[-1] ^= 1


def cut(record: bytearray) -> None:
    """Take the last byte away."""
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
async def test_what_is_not_the_block_is_a_miss(
    namespace: Namespace,
    size: int,
    key: bytes,
    change: Callable[[bytearray], None],
    fault: RecordFault,
    set_aside: bool,
) -> None:
    """A record that does not fill the slot with the right bytes is corrupt; only damage is set aside."""
    tally = await load_record(namespace, b"\x07" * size, key, change)
    assert list(tally.outcomes) == [Outcome.CORRUPT]
    assert tally.faults == {fault.value: 1}
    assert tally.suspects == ([b"key"] if set_aside else [])
    assert tally.size_bytes == 0
    assert tally.error


async def test_the_right_record_is_loaded() -> None:
    """The same, unharmed, is OK (so that the test above can fail)."""
    tally = await load_record(OURS, b"\x07" * SLOT, b"key", leave)
    assert (list(tally.outcomes), tally.size_bytes, tally.error) == ([Outcome.OK], SLOT, "")


@pytest.mark.parametrize(("seconds_left", "stored"), [(-0.001, False), (60.0, True)])
async def test_what_was_hashed_after_the_deadline_is_never_put(seconds_left: float, stored: bool) -> None:
    """A store that was given up may find another block in its slot: a checksum of that must not prove it."""
    backend = MemoryBackend(MemoryConfig())
    await backend.open(OURS, RecordGeometry(backend.alignment, SLOT))
    mover = BlockMover(backend, OURS, SlotBuffers(memoryview(bytearray(SLOT)), SLOT), SLOT, lambda keys: None)
    tally = Tally(1)
    deadline = time.monotonic() + seconds_left
    (batch,) = mover.cut(SubmitJob(1, JobKind.STORE, (b"key",), (0,), deadline), tally)
    await mover.move(JobKind.STORE, batch)
    assert list(await backend.exists([b"key"])) == [stored]
    assert list(tally.outcomes) == [Outcome.OK if stored else Outcome.TIMEOUT]
    mover.close()
    await backend.close()


class Hanging(SimpleBackend):
    """Its writes never end; says when one has begun."""

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
async def test_a_store_that_is_given_up_lets_go_of_all_memory(codec: str) -> None:
    """A store cancelled on the medium's side holds neither slots nor rows, whatever its traceback holds."""
    backend = Hanging(TierConfig())
    backend.begun = asyncio.Event()
    await backend.open(OURS, RecordGeometry(backend.alignment, SLOT))
    primary = bytearray(SLOT)
    codecs = TierCodecs(codec, OURS)
    mover = BlockMover(backend, OURS, SlotBuffers(memoryview(primary), SLOT), SLOT, lambda keys: None, codecs)
    (batch,) = mover.cut(SubmitJob(1, JobKind.STORE, (b"key",), (0,), time.monotonic() + 60), Tally(1))
    gc.disable()  # It would end the cycle of a traceback and what it holds, at a time of its own.
    try:
        task = asyncio.create_task(mover.move(JobKind.STORE, batch))
        await backend.begun.wait()
        task.cancel()
        await asyncio.wait([task])
        del task
        await backend.close()
        mover.close()
        primary.append(0)  # A BufferError while anything views it.
    finally:
        gc.enable()
