"""Services of SimpleBackend around its user's three methods: outcomes, errors, limits, cancellation."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from kvstore.backends.base import RecordGeometry, RecordRead, RecordWrite, outcome_of
from kvstore.backends.simple import SimpleBackend
from kvstore.config import TierConfig
from kvstore.errors import (
    BackendClosedError,
    BackendError,
    BackendUnavailableError,
    KVStoreError,
    NoSpaceError,
)
from kvstore.namespace import Namespace
from kvstore.testing.waiting import eventually_async
from kvstore.types import Outcome


class Scripted(SimpleBackend):
    """Calls the test's script for each key."""

    name = "scripted"

    def __init__(self, script: Callable[[bytes], Awaitable[Any]]) -> None:
        super().__init__(TierConfig())
        self.script = script
        self.running = 0
        self.running_max = 0
        self.calls: list[bytes] = []

    async def put_one(self, key: bytes, buffers: Sequence[memoryview]) -> bool:
        """Call the script."""
        return bool(await self._do(key))

    async def get_one_into(self, key: bytes, buffers: Sequence[memoryview]) -> int | None:
        """Call the script."""
        result: int | None = await self._do(key)
        return result

    async def exists_one(self, key: bytes) -> bool:
        """Call the script."""
        return bool(await self._do(key))

    async def _do(self, key: bytes) -> Any:
        self.calls.append(key)
        self.running += 1
        self.running_max = max(self.running_max, self.running)
        try:
            return await self.script(key)
        finally:
            self.running -= 1


def raising(errors: dict[bytes, BaseException]) -> Callable[[bytes], Awaitable[int]]:
    """Return a script that raises for some keys and returns 1 for the others."""

    async def script(key: bytes) -> int:
        await asyncio.sleep(0)
        if key in errors:
            raise errors[key]
        return 1

    return script


async def opened(script: Callable[[bytes], Awaitable[Any]]) -> Scripted:
    """Return an open backend."""
    backend = Scripted(script)
    await backend.open(Namespace({}), RecordGeometry(256, 4096))
    return backend


def reads(keys: Sequence[bytes]) -> list[RecordRead]:
    """Return reads into buffers of ten bytes."""
    return [RecordRead(key, [memoryview(bytearray(10))]) for key in keys]


def writes(keys: Sequence[bytes]) -> list[RecordWrite]:
    """Return writes of ten bytes."""
    return [RecordWrite(key, [memoryview(bytes(10))]) for key in keys]


KEYS = [bytes([number]) for number in range(8)]

FAILURES: list[tuple[BaseException, Outcome]] = [
    (NoSpaceError("full", backend="scripted"), Outcome.NO_SPACE),
    (OSError(errno.ENOSPC, "full"), Outcome.NO_SPACE),
    (OSError(errno.EDQUOT, "quota"), Outcome.NO_SPACE),
    (OSError(errno.EIO, "broken"), Outcome.IO_ERROR),
    (OSError(errno.EROFS, "read-only"), Outcome.REFUSED),
    (PermissionError(errno.EACCES, "no"), Outcome.REFUSED),
    (TimeoutError("late"), Outcome.TIMEOUT),
    (BackendUnavailableError("gone", backend="scripted"), Outcome.IO_ERROR),
    (ValueError("a defect"), Outcome.IO_ERROR),
    (asyncio.CancelledError(), Outcome.IO_ERROR),
]


@pytest.mark.parametrize(("error", "outcome"), FAILURES, ids=lambda value: repr(value))
async def test_a_failure_is_the_outcome_of_one_block(error: BaseException, outcome: Outcome) -> None:
    """An exception for one block becomes that block's outcome, and the others keep theirs."""
    backend = await opened(raising({KEYS[2]: error}))
    expected = [Outcome.OK] * 8
    expected[2] = outcome
    assert await backend.put(writes(KEYS)) == expected
    assert await backend.get_into(reads(KEYS)) == expected
    assert type(error).__name__ in backend.last_error


@pytest.mark.parametrize("error", [error for error, _ in FAILURES], ids=repr)
async def test_a_question_that_fails_costs_one_answer(error: BaseException) -> None:
    """After an exception for one key, ``exists`` has no answer for that key and answers the others."""
    backend = await opened(raising({KEYS[2]: error}))
    expected: list[bool | None] = [True] * 8
    expected[2] = None
    assert await backend.exists(KEYS) == expected
    assert backend.running == 0


@pytest.mark.parametrize("error", [error for error, _ in FAILURES], ids=repr)
async def test_questions_that_all_fail_raise_one_plain_error(error: BaseException) -> None:
    """``exists`` raises a ``KVStoreError`` with its cause if no key was answered, and soon stops trying."""
    keys = [bytes([number]) * 32 for number in range(200)]
    backend = await opened(raising(dict.fromkeys(keys, error)))
    backend.concurrency_max = 2  # type: ignore[misc]
    with pytest.raises(KVStoreError) as caught:
        await backend.exists(keys)
    assert caught.value is error or caught.value.__cause__ is error
    assert len(backend.calls) < len(keys), "all keys were asked although all failed"
    assert backend.running == 0


async def test_unexpected_errors_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A defect in a user's method is one log entry with its traceback, however many blocks it fails."""
    backend = await opened(raising(dict.fromkeys(KEYS, ZeroDivisionError("a defect"))))
    with caplog.at_level(logging.ERROR, "kvstore"):
        for _ in range(3):
            assert await backend.put(writes(KEYS)) == [Outcome.IO_ERROR] * 8
    (record,) = caplog.records
    assert "ZeroDivisionError: a defect" in record.getMessage() and "Traceback" in record.getMessage()
    assert record.exc_info is None, "a traceback in a log record keeps the buffers of its frames alive"


async def test_answers_of_get() -> None:
    """None is a miss, a length that fits is OK and returned, any other length is CORRUPT."""
    lengths = {b"miss": None, b"none": 0, b"full": 10, b"over": 11, b"minus": -1}

    async def script(key: bytes) -> int | None:
        return lengths[key]

    backend = await opened(script)
    asked = reads(list(lengths))
    outcomes = await backend.get_into(asked)
    assert outcomes == [Outcome.MISS, Outcome.OK, Outcome.OK, Outcome.CORRUPT, Outcome.CORRUPT]
    assert [read.filled_bytes for read in asked] == [0, 0, 10, 0, 0]


async def test_concurrency_is_bounded() -> None:
    """In a long batch exactly ``concurrency_max`` calls run at once."""

    async def script(key: bytes) -> int:
        for _ in range(3):
            await asyncio.sleep(0)
        return 1

    backend = await opened(script)
    await backend.put(writes([bytes([i, j]) for i in range(10) for j in range(10)]))
    assert backend.running_max == backend.concurrency_max


async def test_cancel_waits_for_every_call() -> None:
    """A cancelled batch ends only when all its calls have ended, even slow ones, and even if it is cancelled again."""
    stopping = asyncio.Event()
    may_end = asyncio.Event()

    async def script(key: bytes) -> int:
        try:
            await asyncio.Event().wait()
        finally:
            stopping.set()
            # For example the completion of a device, which cannot be hurried.
            while not may_end.is_set():
                try:
                    await may_end.wait()
                except asyncio.CancelledError:
                    continue
        return 1

    backend = await opened(script)
    batch = asyncio.ensure_future(backend.get_into(reads(KEYS)))
    await eventually_async(lambda: backend.running == 8)
    batch.cancel()
    await stopping.wait()
    batch.cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not batch.done(), "the batch has ended and its calls have not"
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await batch
    assert backend.running == 0


async def test_a_cancelled_batch_stays_cancelled() -> None:
    """Errors of calls during their cancellation do not hide the cancellation, and no further call begins."""

    async def script(key: bytes) -> int:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise OSError(errno.EIO, "interrupted") from None
        return 1

    backend = await opened(script)
    backend.concurrency_max = 3  # type: ignore[misc]
    batch = asyncio.ensure_future(backend.put(writes(KEYS)))
    await eventually_async(lambda: backend.running == 3)
    batch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await batch
    assert len(backend.calls) == 3


async def test_close_refuses_new_batches_and_waits_for_running_ones() -> None:
    """Once ``close`` has begun, batches raise; ``close`` ends when the running ones have ended."""
    gate = asyncio.Event()

    async def script(key: bytes) -> int:
        await gate.wait()
        return 1

    backend = await opened(script)
    batch = asyncio.ensure_future(backend.put(writes(KEYS)))
    await eventually_async(lambda: backend.running == 8)
    closing = asyncio.ensure_future(backend.close())
    await asyncio.sleep(0)
    with pytest.raises(BackendClosedError):
        await backend.exists(KEYS)
    assert not closing.done()
    gate.set()
    await closing
    assert await batch == [Outcome.OK] * 8


async def test_without_delete_one_nothing_is_deleted() -> None:
    """The default of ``delete_one`` reports that there was no block."""
    backend = await opened(raising({}))
    assert await backend.delete(KEYS) == [False] * 8
    await backend.quarantine(KEYS)


async def test_buffers_are_free_when_a_batch_has_failed() -> None:
    """No traceback or future keeps a view of the caller's memory after a batch of failures."""

    async def script(key: bytes) -> int:
        return 1 // 0

    backend = await opened(script)
    memory = bytearray(80)
    view = memoryview(memory)
    asked = [RecordRead(key, [view[10 * i : 10 * i + 10]]) for i, key in enumerate(KEYS)]
    await backend.get_into(asked)
    del asked, view
    memory.extend(b"x")  # Raises a BufferError if any view of the memory is left.


def test_outcome_of_an_unknown_error() -> None:
    """Any other exception is an I/O error."""
    assert outcome_of(BackendError("?", backend="x")) is Outcome.IO_ERROR
    assert outcome_of(RuntimeError()) is Outcome.IO_ERROR
