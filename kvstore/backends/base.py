"""The backend: adapter to one medium. Async, batch-first, zero-copy.

A backend moves records, it does not understand them: headers, checksums and codecs belong to the tier's I/O side
(:mod:`kvstore.tiers.tier_io`). To write one for your own medium, subclass :class:`SimpleBackend` (three methods) or
:class:`Backend` (batches), and subclass :class:`kvstore.testing.BackendTests` to prove it.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import traceback
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar, cast

from kvstore.config import TierConfig
from kvstore.errors import BackendClosedError, BackendError, BackendUnavailableError, KVStoreError, NoSpaceError
from kvstore.namespace import Namespace
from kvstore.types import BlockInfo, BlockKey, Locality, Medium, Outcome, RemovalCause

__all__ = [
    "Backend",
    "BackendStats",
    "RecordGeometry",
    "RecordRead",
    "RecordWrite",
    "RemovalListener",
    "SimpleBackend",
    "outcome_of",
]

_log = logging.getLogger("kvstore.backends")

_T = TypeVar("_T")
_R = TypeVar("_R")

RemovalListener = Callable[[Sequence[BlockKey], RemovalCause], None]
"""Called on the loop thread with blocks that left the medium without the tier having asked for it."""


@dataclass(frozen=True, slots=True)
class RecordGeometry:
    """Sizes of the records of one tier.

    Attributes:
        header_bytes: Length of the header buffer in front of each payload (a multiple of ``Backend.alignment``).
        payload_bytes_max: Longest payload (the slot size of the primary tier).
    """

    header_bytes: int
    payload_bytes_max: int

    @property
    def record_bytes_max(self) -> int:
        """Longest record."""
        return self.header_bytes + self.payload_bytes_max


@dataclass(slots=True, eq=False)
class RecordWrite:
    """One record to put: the buffers, one after the other, are its bytes. They are not to be modified or copied."""

    key: BlockKey
    buffers: Sequence[memoryview]

    @property
    def size_bytes(self) -> int:
        """Length of the record."""
        return sum(b.nbytes for b in self.buffers)


@dataclass(slots=True, eq=False)
class RecordRead:
    """One record to get: its bytes go into the buffers, one after the other.

    Attributes:
        key: Key of the block.
        buffers: Writable targets; a record may be shorter than they are, never longer.
        filled_bytes: Set by the backend: how many bytes of the buffers now hold the record.
    """

    key: BlockKey
    buffers: Sequence[memoryview]
    filled_bytes: int = 0

    @property
    def capacity_bytes(self) -> int:
        """Longest record that fits."""
        return sum(b.nbytes for b in self.buffers)


@dataclass(frozen=True, slots=True)
class BackendStats:
    """A moment's view of a backend.

    Attributes:
        blocks: Blocks held, as far as known.
        used_bytes: Bytes they take on the medium.
        capacity_bytes: Limit for ``used_bytes``; 0 if there is none.
        counters: Monotonic counts by name, such as ``evicted_blocks`` or ``direct_io_fallbacks``.
        gauges: Other numbers by name.
    """

    blocks: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)


class Backend(ABC):
    """Adapter to one medium.

    Guarantees that every backend gives, and that ``kvstore.testing.BackendTests`` checks:

    * All methods run on one event loop, many at once; none blocks it.
    * Each block of a batch has an outcome of its own. A miss, a full medium or a failed block is an
      :class:`~kvstore.types.Outcome`, not an exception. An exception (a ``BackendError``) means that the call as a
      whole could not be made; the tier counts it for every block of the batch.
    * A record is visible whole or not at all; the first writer of a key wins (``Outcome.EXISTS`` for the others).
    * No buffer is touched once the call has returned or raised, also when it was cancelled: a cancelled call first
      waits for its medium to let go of the buffers.

    Attributes:
        name: Name in configurations and messages.
        config_type: Struct that its configuration is decoded into.
        exclusive: True if nobody else writes to this medium, so that what it does not hold after ``scan`` is absent.
        medium: Kind of device.
        locality: Whether a network lies between.
        alignment: Buffers whose address and length are multiples of this travel without a copy; the header buffer is
            padded to it.
        last_error: Text of the latest failure of a block, for statistics and logs; outcomes carry none.
    """

    name: ClassVar[str]
    config_type: ClassVar[type[TierConfig]] = TierConfig
    alignment: ClassVar[int] = 256
    medium: Medium = Medium.STORAGE
    locality: Locality = Locality.LOCAL
    exclusive: bool = False
    last_error: str = ""

    def __init__(self, config: TierConfig) -> None:
        self.config = config
        self._removal_listener: RemovalListener = _ignore_removals

    def set_removal_listener(self, listener: RemovalListener) -> None:
        """Register who is told of blocks that leave on the backend's own account (evicted, expired, lost)."""
        self._removal_listener = listener

    @abstractmethod
    async def open(self, namespace: Namespace, geometry: RecordGeometry) -> None:
        """Get ready; quick, as an engine waits for it: what takes long (recovery) goes on in the background.

        Raises:
            ConfigError: The configuration can't be used here (no such directory, capacity below one block, …).
            BackendError: The medium refuses.
        """

    @abstractmethod
    async def close(self) -> None:
        """Finish what runs, release everything. Idempotent; also after a failed ``open``."""

    @abstractmethod
    async def exists(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """Tell for each key whether its record can be read.

        Raises:
            BackendError: The medium could not be asked (this is never reported as absence).
        """

    @abstractmethod
    async def put(self, writes: Sequence[RecordWrite]) -> Sequence[Outcome]:
        """Publish records; OK, EXISTS, NO_SPACE, IO_ERROR, REFUSED or TIMEOUT for each."""

    @abstractmethod
    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:
        """Read records into their buffers and set ``filled_bytes``; OK, MISS, CORRUPT, IO_ERROR, … for each.

        A record longer than the buffers is CORRUPT. What is OK here is not verified yet: the tier does that.
        """

    @abstractmethod
    async def delete(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """Remove records; True where there was one. The removal listener is not called for them."""

    @abstractmethod
    def scan(self) -> AsyncIterator[BlockInfo]:
        """Yield every block of the namespace, coldest first where the medium knows; waits for recovery to end."""

    async def quarantine(self, keys: Sequence[BlockKey]) -> None:
        """Take records that failed verification out of the way, so that the next lookup misses.

        The default deletes them. A backend that can keep evidence, or that shares its medium with other writers,
        does what is right there.
        """
        await self.delete(keys)

    async def probe(self) -> None:
        """Raise a ``BackendError`` if the medium can't be used now. The default asks for a key that nobody has."""
        await self.exists([b"\0kvstore-probe"])

    def touch(self, keys: Sequence[BlockKey]) -> None:  # noqa: B027 - not every medium evicts.
        """Note a use of blocks, for eviction. The default does nothing. Must not block or fail."""

    def stats(self) -> BackendStats:
        """Return a moment's view; cheap."""
        return BackendStats()


class SimpleBackend(Backend):
    """A backend by three methods; the batch forms fan out under a limit.

    Write ``put_one``, ``get_one_into`` and ``exists_one`` (and ``delete_one`` if the medium can). Extend ``open`` to
    connect and ``close`` to disconnect, and call theirs (``super().open(…)`` first, ``super().close()`` first too: it
    waits for what still runs).

    What the three methods have to do, and what is done for them:

    * Raise ``NoSpaceError`` for a full medium, any other ``BackendError`` or ``OSError`` (``TimeoutError`` too) for a
      failure: of a batch, only that block fails, with an outcome of its own. Any other exception is an error of the
      program: the block fails with IO_ERROR, and the traceback is logged once per method and type of exception.
    * ``put_one`` publishes whole or not at all, and never replaces: of several callers of one key, one gets True.
    * At a deadline they are cancelled, and must have let go of their buffers when ``CancelledError`` leaves them. The
      batch form waits for that, for all of its blocks.
    * Once ``close`` was called, the batch forms raise ``BackendClosedError`` without calling them.
    """

    concurrency_max: ClassVar[int] = 16
    """Single calls in flight per batch; enough to hide the latency of most media without flooding them."""

    def __init__(self, config: TierConfig) -> None:
        super().__init__(config)
        self._is_open = False
        self._batches = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._logged: set[tuple[str, type[BaseException]]] = set()

    async def open(self, namespace: Namespace, geometry: RecordGeometry) -> None:
        """Remember ``self.namespace`` and ``self.geometry``; extend it to connect."""
        self.namespace = namespace
        self.geometry = geometry
        self._is_open = True

    async def close(self) -> None:
        """Refuse new batches and wait for the running ones to end; extend it to disconnect."""
        self._is_open = False
        await self._idle.wait()

    @abstractmethod
    async def put_one(self, key: BlockKey, buffers: Sequence[memoryview]) -> bool:
        """Publish one record; False if one was there already."""

    @abstractmethod
    async def get_one_into(self, key: BlockKey, buffers: Sequence[memoryview]) -> int | None:
        """Read one record into the buffers; return its length, or None for a miss.

        Of a record that is longer than the buffers, return the length and leave the buffers alone: it is CORRUPT.
        """

    @abstractmethod
    async def exists_one(self, key: BlockKey) -> bool:
        """Tell whether there is a record."""

    async def delete_one(self, key: BlockKey) -> bool:
        """Remove one record; the default can't, and says that there was none."""
        return False

    async def exists(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """See :meth:`Backend.exists`."""
        return await self._fan_out(self.exists_one, keys)

    async def put(self, writes: Sequence[RecordWrite]) -> Sequence[Outcome]:
        """See :meth:`Backend.put`."""
        return await self._fan_out(self._put_outcome, writes, instead=outcome_of)

    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:
        """See :meth:`Backend.get_into`."""
        return await self._fan_out(self._get_outcome, reads, instead=outcome_of)

    async def delete(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """See :meth:`Backend.delete`."""
        return await self._fan_out(self.delete_one, keys)

    async def scan(self) -> AsyncIterator[BlockInfo]:
        """Yield nothing: a simple backend is asked by ``exists``."""
        self._check_open()
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
        """Call for each item; when this ends, in whatever way, all calls have ended.

        Args:
            call: What to call.
            items: For what.
            instead: Makes the result of a failed call; without it no more calls begin, and the failure is raised.
        """
        self._check_open()
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
                    # What the program of somebody else raises is the failure of one block, not of the tier; so is a
                    # CancelledError, unless it was this task that was cancelled.
                    if isinstance(error, asyncio.CancelledError) and task.cancelling():
                        raise
                    # The failure is not kept in a local variable: that and its traceback would hold each other, and
                    # so the buffers in its frames, until the garbage collector comes by.
                    if instead is None:
                        failures.append(self._failure(call, error))
                    else:
                        results[index] = instead(self._failure(call, error))

        self._batches += 1
        self._idle.clear()
        try:
            # Nothing but cancellation leaves a worker, so that no ExceptionGroup leaves the group.
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self.concurrency_max, len(items))):
                    group.create_task(work())
        finally:
            self._batches -= 1
            if not self._batches:
                self._idle.set()
        if failures and isinstance(failures[0], OSError):
            raise BackendUnavailableError(self.last_error, backend=self.name) from failures[0]
        if failures:
            raise failures[0]
        return [results[index] for index in range(len(items))]

    def _check_open(self) -> None:
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
            # As text: a handler that kept the traceback would keep the buffers in its frames alive.
            text = "".join(traceback.format_exception(error))
            _log.error("[%s] %s raised what it may not; such blocks count as failed\n%s", self.name, name, text)


def outcome_of(error: BaseException) -> Outcome:
    """Map a failure to the outcome it is counted under."""
    if isinstance(error, NoSpaceError):
        return Outcome.NO_SPACE
    if isinstance(error, TimeoutError):
        return Outcome.TIMEOUT
    if isinstance(error, OSError):
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return Outcome.NO_SPACE
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return Outcome.REFUSED
    return Outcome.IO_ERROR


def _ignore_removals(keys: Sequence[BlockKey], cause: RemovalCause) -> None:
    """Listener of a backend that nobody listens to."""
