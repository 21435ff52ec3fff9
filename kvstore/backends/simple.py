"""A backend with three methods, for media where one call moves one block."""

from __future__ import annotations

import asyncio
import logging
import traceback
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import ClassVar, Final, TypeVar, cast

from kvstore.backends.base import Backend, RecordGeometry, RecordRead, RecordWrite, outcome_of
from kvstore.config import TierConfig
from kvstore.errors import BackendClosedError, BackendError, BackendUnavailableError, KVStoreError
from kvstore.namespace import Namespace
from kvstore.runtime.limits import CallsUnderWay
from kvstore.types import BlockInfo, BlockKey, Outcome

_log = logging.getLogger("kvstore.backends")

_FUTILE_MAX: Final = 16
"""Failed queries after which one ``exists`` call stops querying the medium, if none was answered before."""

_T = TypeVar("_T")
_R = TypeVar("_R")


class SimpleBackend(Backend):
    """A backend with three methods per block; the batch methods call them concurrently, within a limit.

    Implement ``put_one``, ``get_one_into`` and ``exists_one`` (and ``delete_one`` if the medium can delete). Extend
    ``open`` to connect and ``close`` to disconnect, and call the base class first in both: ``super().close()`` waits
    for running calls.

    Rules for these methods:

    * Raise ``NoSpaceError`` for a full medium, and any other ``BackendError`` or ``OSError`` (also ``TimeoutError``)
      for a failure: only that block of a batch fails, with its own outcome. Any other exception is a defect: the block
      fails with IO_ERROR, and the traceback is logged once per method and type of exception.
    * ``put_one`` publishes whole or not at all, and never replaces: of several callers of one key, one gets True.
    * They are cancelled at a deadline, and must have released their buffers when ``CancelledError`` leaves them. The
      batch method waits for this, for all of its blocks.
    * After ``close`` the batch methods raise ``BackendClosedError`` without calling them.
    """

    concurrency_max: ClassVar[int] = 16
    """Single calls in flight per batch; enough to hide the latency of most media without flooding them."""

    def __init__(self, config: TierConfig) -> None:
        super().__init__(config)
        self.scans = self.scans and type(self).scan is not SimpleBackend.scan
        self._is_open = False
        self._under_way = CallsUnderWay()
        self._logged: set[tuple[str, type[BaseException]]] = set()

    async def open(self, namespace: Namespace, geometry: RecordGeometry) -> None:
        """Remember ``self.namespace`` and ``self.geometry``; extend it to connect."""
        self.namespace = namespace
        self.geometry = geometry
        self._is_open = True

    async def close(self) -> None:
        """Refuse new batches and wait for the running ones to end; extend it to disconnect."""
        self._is_open = False
        await self._under_way.ended()

    @abstractmethod
    async def put_one(self, key: BlockKey, buffers: Sequence[memoryview]) -> bool:
        """Publish one record; False if the key exists already."""

    @abstractmethod
    async def get_one_into(self, key: BlockKey, buffers: Sequence[memoryview]) -> int | None:
        """Read one record into the buffers; return its length, or None for a miss.

        If the record is longer than the buffers, return its length and leave the buffers unchanged: it is CORRUPT.
        """

    @abstractmethod
    async def exists_one(self, key: BlockKey) -> bool:
        """Return whether a record exists."""

    async def delete_one(self, key: BlockKey) -> bool:
        """Remove one record; return whether it existed. The default removes nothing and returns False."""
        return False

    async def exists(self, keys: Sequence[BlockKey]) -> Sequence[bool | None]:
        """It fails only if no key was answered."""
        answered = False
        failures: list[Exception] = []

        async def ask(key: BlockKey) -> bool | None:
            nonlocal answered
            if not answered and len(failures) >= _FUTILE_MAX:
                return None
            there = await self.exists_one(key)
            answered = True
            return there

        def note(error: Exception) -> None:
            failures.append(error)

        answers = await self._fan_out(ask, keys, instead=note)
        if failures and not answered:
            await self._on_all_refused(failures[0])
        return answers

    async def _on_all_refused(self, failure: Exception) -> None:
        """Raise the failure of a query without any answered key; subclasses may override it."""
        if isinstance(failure, OSError):
            raise BackendUnavailableError(self.last_error, backend=self.name) from failure
        raise failure

    async def put(self, writes: Sequence[RecordWrite]) -> Sequence[Outcome]:
        return await self._fan_out(self._put_outcome, writes, instead=outcome_of)

    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:
        return await self._fan_out(self._get_outcome, reads, instead=outcome_of)

    async def delete(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        return await self._fan_out(self.delete_one, keys)

    async def scan(self) -> AsyncIterator[BlockInfo]:
        """Yield nothing: a simple backend is queried by ``exists``."""
        self.check_open()
        return
        yield

    async def _put_outcome(self, write: RecordWrite) -> Outcome:
        return Outcome.OK if await self.put_one(write.key, write.buffers) else Outcome.EXISTS

    async def _get_outcome(self, read: RecordRead) -> Outcome:
        filled = await self.get_one_into(read.key, read.buffers)
        if filled is None:
            return Outcome.MISS
        if not 0 <= filled <= read.capacity_bytes:
            return Outcome.CORRUPT
        read.filled_bytes = filled
        return Outcome.OK

    async def _fan_out(
        self,
        call: Callable[[_T], Awaitable[_R]],
        items: Sequence[_T],
        *,
        instead: Callable[[Exception], _R] | None = None,
    ) -> list[_R]:
        """Call for each item; when this returns or raises, all calls have ended.

        Args:
            call: The function.
            items: Its arguments.
            instead: Returns the result for a failed call; without it no more calls begin, and the failure is raised.
        """
        self.check_open()
        results: dict[int, _R] = {}
        failures: list[Exception] = []
        pending = iter(enumerate(items))

        async def work() -> None:
            task = cast("asyncio.Task[None]", asyncio.current_task())
            for index, item in pending:
                # A call that swallowed its cancellation must not be followed by another one.
                if failures or task.cancelling():
                    return
                try:
                    results[index] = await call(item)
                except (Exception, asyncio.CancelledError) as error:
                    # An exception of third-party code is the failure of one block, not of the tier; so is a
                    # CancelledError, unless this task was cancelled.
                    if isinstance(error, asyncio.CancelledError) and task.cancelling():
                        raise
                    # The failure is not kept in a local variable: it and its traceback would be a reference cycle,
                    # which keeps the buffers in its frames until the next garbage collection.
                    if instead is None:
                        failures.append(self._failure(call, error))
                    else:
                        results[index] = instead(self._failure(call, error))

        with self._under_way:
            # A worker raises nothing but CancelledError, so the group raises no ExceptionGroup.
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self.concurrency_max, len(items))):
                    group.create_task(work())
        if failures and isinstance(failures[0], OSError):
            raise BackendUnavailableError(self.last_error, backend=self.name) from failures[0]
        if failures:
            raise failures[0]
        return [results[index] for index in range(len(items))]

    def check_open(self) -> None:
        """Raise ``BackendClosedError`` before ``open`` and after ``close``; call it first in a ``scan`` of your own."""
        if not self._is_open:
            raise BackendClosedError("not open: use it after open() and before close()", backend=self.name)

    def _failure(self, call: Callable[..., object], error: BaseException) -> Exception:
        self.last_error = f"{type(error).__name__}: {error}"
        if isinstance(error, (KVStoreError, OSError)):
            return error
        self._log_once(getattr(call, "__name__", "call"), error)
        failure = BackendError(self.last_error, backend=self.name)
        failure.__cause__ = error
        return failure

    def _log_once(self, name: str, error: BaseException) -> None:
        if (name, type(error)) not in self._logged:
            self._logged.add((name, type(error)))
            # As text: a handler that keeps the traceback would keep the buffers in its frames.
            text = "".join(traceback.format_exception(error))
            _log.error("[%s] %s raised what it may not; such blocks count as failed\n%s", self.name, name, text)
