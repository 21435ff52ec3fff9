"""The backend: adapter to one medium. Async, batch-first, zero-copy.

A backend moves records without interpreting them: headers, checksums and codecs belong to the tier's I/O side
(:mod:`kvstore.tiers.tier_io`). To write one for your own medium, subclass
:class:`~kvstore.backends.simple.SimpleBackend` (three methods) or :class:`Backend` (batches), and subclass
:class:`kvstore.testing.BackendTests` to test it.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from kvstore.config import TierConfig
from kvstore.errors import NoSpaceError
from kvstore.namespace import Namespace
from kvstore.types import BlockInfo, BlockKey, Found, Locality, Medium, NamespaceInfo, Outcome, RemovalCause, Source

if TYPE_CHECKING:
    # For annotations only, so that `import kvstore` stays fast.
    from kvstore.primary.lending import Lender
    from kvstore.tenants import Tenants

_SCAN_BATCH = 1024
"""Keys per batch of a scan; the scheduler processes one batch per step, in some tenths of a millisecond."""

ArrivalListener = Callable[[Sequence[BlockKey]], None]
"""Called on the loop thread with blocks that other engines put on the medium."""

RemovalListener = Callable[[Sequence[BlockKey], RemovalCause], None]
"""Called on the loop thread with blocks that left the medium without a request of the tier."""


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
    """One record to put.

    Attributes:
        key: Key of the block.
        buffers: Its bytes, in order. Each is one-dimensional, of bytes, C-contiguous, and may be read-only;
            they are lent for the duration of the call and must not be modified.
    """

    key: BlockKey
    buffers: Sequence[memoryview]

    @property
    def size_bytes(self) -> int:
        """Length of the record."""
        return sum([b.nbytes for b in self.buffers])


@dataclass(slots=True, eq=False)
class RecordRead:
    """One record to get: its bytes fill the buffers in order.

    Attributes:
        key: Key of the block.
        buffers: Writable targets; a record may be shorter than they are, never longer. Each is one-dimensional, of
            bytes, C-contiguous; they are lent for the duration of the call.
        filled_bytes: Set by the backend: length of the record in the buffers.
    """

    key: BlockKey
    buffers: Sequence[memoryview]
    filled_bytes: int = 0

    @property
    def capacity_bytes(self) -> int:
        """Longest record that fits."""
        return sum([b.nbytes for b in self.buffers])


@dataclass(frozen=True, slots=True)
class BackendStats:
    """A snapshot of a backend.

    Attributes:
        blocks: Blocks held, as far as known.
        used_bytes: Bytes they take on the medium.
        capacity_bytes: Limit for ``used_bytes``; 0 for none.
        counters: Monotonic counts by name, such as ``evicted_blocks`` or ``direct_io_fallbacks``.
        gauges: Other numbers by name.
        ready: False while it can serve nothing, although calls return (no peer answers, its directory was deleted).
        is_lost: Whether the opened medium is gone for good. The tier then closes and opens the backend again.
    """

    blocks: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    ready: bool = True
    is_lost: bool = False


class Backend(ABC):
    """Adapter to one medium.

    Every backend gives these guarantees, and ``kvstore.testing.BackendTests`` checks them:

    * All methods run on one event loop, many at the same time; none blocks it.
    * Each block of a batch has its own outcome. A miss, a full medium or a failed block is an
      :class:`~kvstore.types.Outcome`, not an exception. An exception (a ``BackendError``) means that the call as a
      whole failed; the tier counts it for every block of the batch.
    * A record is visible whole or not at all; the first writer of a key wins (``Outcome.EXISTS`` for the others).
    * No buffer is touched after the call has returned or raised, even if it was cancelled: a cancelled call waits
      until its medium no longer uses the buffers.

    Attributes:
        name: Name in configurations and messages.
        config_type: Struct that its configuration is decoded into.
        authoritative: True if blocks not found by ``scan`` are absent: there are no other writers, or the arrival
            listener receives the blocks of other writers.
        takes_stores: False if others fill the medium: its tier then receives no stores.
        scans: False if the medium can't list its blocks: ``scan`` yields none, and a tenant can't be forgotten.
        evicts_silently: True if blocks leave the medium without any notice, and ``exists`` is cheap. Blocks reported in
            events are then looked up from time to time.
        medium: Kind of device.
        locality: Whether the medium is local or behind a network.
        holdings_type: ``"module:class"`` of the :class:`~kvstore.backends.holdings.Holdings` through which the admin
            tools read the medium. The default needs ``namespaces``, ``scan``, ``get_into`` and ``delete``.
        path_option: Option that names the directory, or the list of directories, that the backend makes and fills
            alone. It is then checked before an engine starts (the parent exists, no other user may write to it), and
            kvstore-bench measures in a directory below it. Empty: no such option, whatever the options are called.
        alignment: Buffers whose address and length are multiples of this are moved without a copy; the header buffer is
            padded to it.
        last_error: Text of the latest failure of a block, for statistics and logs; outcomes carry none.
        tenants: Tenants that share the medium; set before ``open``. A backend that evicts blocks applies their shares.
    """

    name: ClassVar[str]
    config_type: ClassVar[type[TierConfig]] = TierConfig
    holdings_type: ClassVar[str] = "kvstore.backends.holdings:Holdings"
    path_option: ClassVar[str] = ""
    alignment: ClassVar[int] = 256
    medium: Medium = Medium.STORAGE
    locality: Locality = Locality.LOCAL
    authoritative: bool = False
    takes_stores: bool = True
    scans: bool = True
    evicts_silently: bool = False
    last_error: str = ""
    tenants: Tenants | None = None

    def __init__(self, config: TierConfig) -> None:
        self.config = config
        self._removal_listener: RemovalListener = _ignore_removals
        self._arrival_listener: ArrivalListener = _ignore_arrivals

    def set_removal_listener(self, listener: RemovalListener) -> None:
        """Set the listener for blocks that leave without a request (evicted, expired, lost)."""
        self._removal_listener = listener

    def set_arrival_listener(self, listener: ArrivalListener) -> None:
        """Set the listener for blocks put by other engines, for backends that track other engines."""
        self._arrival_listener = listener

    def own(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """Return for each block on the medium whether this engine alone reports it to consumers of events.

        A block that several engines see is therefore reported once. The default: all blocks of an authoritative medium,
        and none of others, where the engine that puts a block reports it. Must not block or fail.
        """
        return [self.authoritative] * len(keys)

    def check(self) -> None:  # noqa: B027 - many have nothing to check.
        """Refuse a configuration that ``open`` would refuse on this machine; called before an engine loads weights.

        Reads at most local files; connects to nothing and changes nothing. The default accepts every configuration.

        Raises:
            ConfigError: The configuration can't be used here.
        """

    @abstractmethod
    async def open(self, namespace: Namespace, geometry: RecordGeometry) -> None:
        """Prepare the medium; fast, because an engine waits for it. Recovery continues in the background.

        Raises:
            ConfigError: The configuration can't be used here (missing directory, capacity below one block, …).
            BackendError: The medium refuses.
        """

    @abstractmethod
    async def close(self) -> None:
        """Finish running calls, release everything. Idempotent; also after a failed ``open``."""

    @abstractmethod
    async def exists(self, keys: Sequence[BlockKey]) -> Sequence[bool | None]:
        """Return for each key whether its record can be read; None if the medium could not answer for this key.

        A failure of one key, or of one node of several, must not affect the others.

        Raises:
            BackendError: The medium as a whole did not answer (this never counts as absence).
        """

    @abstractmethod
    async def put(self, writes: Sequence[RecordWrite]) -> Sequence[Outcome]:
        """Publish records; OK, EXISTS, NO_SPACE, IO_ERROR, REFUSED or TIMEOUT for each."""

    @abstractmethod
    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:
        """Read records into their buffers and set ``filled_bytes``; OK, MISS, CORRUPT, IO_ERROR, … for each.

        A record longer than the buffers is CORRUPT. OK records are not verified yet: the tier verifies them.
        """

    @abstractmethod
    async def delete(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """Remove records; True for each that existed. The removal listener is not called for them."""

    @abstractmethod
    def scan(self) -> AsyncIterator[BlockInfo]:
        """Yield every block of the namespace, coldest first if known; waits for recovery to end."""

    async def namespaces(self) -> Sequence[NamespaceInfo] | None:
        """Return the namespaces on the medium; None if it cannot list them.

        The admin tools call it on a backend that is not open, so it must connect itself.

        Raises:
            BackendError: The medium cannot be read.
        """
        return None

    async def scan_keys(self) -> AsyncIterator[Sequence[BlockKey]]:
        """Yield the keys of :meth:`scan`, about a thousand at a time. Override it if they are in memory."""
        batch: list[BlockKey] = []
        async for info in self.scan():
            batch.append(info.key)
            if len(batch) == _SCAN_BATCH:
                yield batch
                batch = []
        if batch:
            yield batch

    async def quarantine(self, keys: Sequence[BlockKey]) -> None:
        """Take records that failed verification out of use, so that the next lookup misses.

        The default deletes them. Override it to keep evidence, or for a medium shared with other writers.
        """
        await self.delete(keys)

    async def probe(self) -> None:
        """Raise a ``BackendError`` if the medium can't be used now. The default looks up a key that never exists."""
        await self.exists([b"\0kvstore-probe"])

    def touch(self, keys: Sequence[BlockKey]) -> None:  # noqa: B027 - not every medium evicts.
        """Record a use of blocks, for eviction. The default does nothing. Must not block or fail."""

    def note_read(self, intact: Sequence[BlockKey], damaged: Sequence[BlockKey]) -> None:  # noqa: B027 - as for touch.
        """Note blocks that were read, by the result of their verification, before damaged ones are quarantined.

        For backends that count only good reads as uses, or trust where blocks came from. The default does nothing. Must
        not block or fail.
        """

    def stats(self) -> BackendStats:
        """Return a snapshot; cheap."""
        return BackendStats()


class SharedMedium(Backend):
    """A medium whose blocks other engines find at the same time, and the next engine after a restart."""

    @abstractmethod
    def reader(self) -> Backend:
        """Return a backend, not open yet, that only reads the same medium, from another process at the same time.

        Its raw records are then sent to peers.
        """

    @abstractmethod
    def note(self, notes: Sequence[tuple[BlockKey, bytes]]) -> None:
        """Store a few bytes for each of our blocks, for the engine that finds the block at its start; may be lost.

        Must not block or fail.
        """

    @abstractmethod
    async def notes(self) -> Mapping[BlockKey, bytes]:
        """Return the notes of blocks found at the start. Must not fail."""


class PeerMedium(Backend):
    """The memory of other engines, to which this engine lends its own blocks."""

    @abstractmethod
    def set_lender(self, lender: Lender) -> bool:
        """Set the source of blocks to serve to other engines, before ``open``.

        Returns:
            Whether this backend serves any, and must therefore run in the engine's process.
        """

    @abstractmethod
    async def exists_at(
        self, keys: Sequence[BlockKey], sources: Sequence[Source]
    ) -> tuple[Sequence[Found], Sequence[Found]]:
        """Do the same as ``exists`` for requests that name another engine as holder or producer of the blocks.

        Args:
            keys: As for ``exists``.
            sources: Hand-overs of this engine.

        Returns:
            The answer for each key; and for each source COMING if the engine does not know the blocks of its hand-over
            yet, UNKNOWN if the engine did not answer, else ABSENT.
        """


def outcome_of(error: BaseException) -> Outcome:
    """Map a failure to its outcome; a custom exception may have one as its attribute ``outcome``."""
    outcome = getattr(error, "outcome", None)
    if isinstance(outcome, Outcome):
        return outcome
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
    """Default listener."""


def _ignore_arrivals(keys: Sequence[BlockKey]) -> None:
    """Default listener."""
