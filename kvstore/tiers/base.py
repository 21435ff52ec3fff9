"""The interface of a secondary tier, as in vLLM's multi-tier offloading RFC, and its statistics."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from kvstore.types import (
    BlockKey,
    JobResult,
    Locality,
    LookupResult,
    Medium,
    MissCause,
    RemovalCause,
    RequestContext,
    TierEvent,
    TransferJob,
)


@dataclass(frozen=True, slots=True)
class JobSample:
    """One job (``"store"`` or ``"load"``) that ended, for latency histograms: blocks requested, bytes moved, time."""

    kind: str
    blocks: int
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TierStats:
    """A snapshot of a tier. Counts are monotonic since the tier was opened.

    Attributes:
        name: Name of the tier.
        epoch: Name of the present epoch; empty: the base epoch; None while it changes.
        ready: Whether lookups are answered from the medium: the I/O side is up, the epoch has begun, the medium is open
            and can serve something, and the breaker of loads is closed. A tier is ready during recovery.
        recovering: Whether the scan of blocks from earlier runs is still running.
        blocks: Known number of blocks.
        used_bytes: Their bytes on the medium.
        capacity_bytes: Limit for ``used_bytes``; 0 for none.
        lookups: Lookup answers by result (``hit``, ``miss``, ``retry``).
        outcomes: Blocks by ``"store.ok"``, ``"load.miss"``, … (job kind and outcome).
        faults: Records that failed verification, by cause.
        removals: Removed blocks by cause.
        bytes_stored: Payload bytes moved to the medium.
        bytes_loaded: Payload bytes moved from the medium.
        jobs_in_flight: Jobs submitted but not reported.
        bytes_in_flight: Their payload bytes.
        shed_blocks: Blocks not stored because too much was in flight, or because the store breaker was open.
        load_breaker: ``"closed"``, ``"open"`` or ``"half_open"``.
        store_breaker: The same for stores.
        last_error: Text of the last failure, or empty.
        backend_counters: The backend's own counts.
        backend_gauges: The backend's own gauges, and ``unreadable_blocks``: records on the medium that can't be read
            here.
        codec: Counts of the codecs; empty before the first encoded or decoded block. ``encoded_blocks`` and
            ``raw_blocks``: blocks stored shorter, and not shorter; ``decoded_blocks``. ``encode_in_bytes``,
            ``encode_out_bytes``, ``encode_seconds``, and the same for ``decode``. ``ratio``: bytes out / bytes in, of
            stores.
    """

    name: str
    epoch: str | None = ""
    ready: bool = True
    recovering: bool = False
    blocks: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0
    lookups: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    removals: dict[str, int] = field(default_factory=dict)
    bytes_stored: int = 0
    bytes_loaded: int = 0
    jobs_in_flight: int = 0
    bytes_in_flight: int = 0
    shed_blocks: int = 0
    load_breaker: str = "closed"
    store_breaker: str = "closed"
    last_error: str = ""
    backend_counters: dict[str, int] = field(default_factory=dict)
    backend_gauges: dict[str, float] = field(default_factory=dict)
    codec: dict[str, float] = field(default_factory=dict)


class SecondaryTierManager(ABC):
    """A storage level below the primary tier: the interface for its owner, a scheduler thread.

    Every method except :meth:`drain` and :meth:`close` returns in microseconds and does no I/O. Calls come from one
    thread at a time. I/O is submitted as jobs, and :meth:`get_finished` reports each exactly once.

    Attributes:
        name: Name of this tier in statistics and policies.
        medium: Kind of device.
        locality: Whether the medium is local or behind a network.
        takes_stores: Whether blocks are stored to it; False for a tier that other engines fill.
        store_blocks_max: Most blocks of unfinished stores (0 counts as 1); it fails to store further ones.
        miss_cause: Cause of the last MISS that :meth:`lookup` returned.
    """

    name: str
    medium: Medium
    locality: Locality
    takes_stores: bool = True
    store_blocks_max: int = sys.maxsize
    miss_cause: MissCause = MissCause.ABSENT

    @abstractmethod
    def lookup(self, key: BlockKey, ctx: RequestContext | None = None) -> LookupResult:
        """Return whether the tier holds a block: HIT, MISS, or RETRY (repeat the call in the next step)."""

    @abstractmethod
    def submit_store(self, job: TransferJob) -> None:
        """Store blocks. Their slots must not change until the job is reported."""

    @abstractmethod
    def submit_load(self, job: TransferJob) -> None:
        """Load blocks into their slots, which must have no other use until the job is reported."""

    @abstractmethod
    def flush(self) -> None:
        """Send the jobs submitted since the last call; called once at the end of each step."""

    @abstractmethod
    def get_finished(self) -> Sequence[JobResult]:
        """Return the jobs that ended since the last call, each exactly once."""

    @abstractmethod
    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Note a use of blocks, for the tier's own eviction."""

    def remove(self, keys: Sequence[BlockKey], cause: RemovalCause = RemovalCause.REMOVED) -> None:  # noqa: B027
        """Drop blocks: they are MISS until stored again. The default does nothing.

        Args:
            keys: The blocks; absent ones are ignored.
            cause: Cause in the event.
        """

    def forget(self, prefix: bytes) -> bool | None:
        """Remove all blocks whose keys begin with ``prefix``; called again in each step until all are gone.

        The caller stores and looks up no such blocks meanwhile.

        Returns:
            Whether all are gone; None if the tier can't remove blocks (the default).
        """
        return None

    def begin_epoch(self) -> bool:
        """Begin a new epoch: blocks stored before it, or by unfinished stores, are never found again.

        Called after :meth:`drain` when an engine resets its caches, because its weights may have changed. Returns
        immediately; until the epoch has begun every lookup is MISS.

        Returns:
            Whether the tier supports epochs. If not (the default), its owner no longer uses it.
        """
        return False

    @abstractmethod
    def on_request_finished(self, ctx: RequestContext) -> None:
        """Forget a request."""

    @abstractmethod
    def take_events(self) -> Sequence[TierEvent]:
        """Return the blocks that entered or left since the last call.

        Blocks from earlier runs count as stored, at a bounded rate. A block that left and returned is not reported.
        """

    def restate_events(self) -> None:  # noqa: B027
        """Note that consumers of events have dropped all blocks, such as after vLLM's ``AllBlocksCleared``.

        The next calls of :meth:`take_events` report all blocks as stored, at a bounded rate. The default does nothing.
        """

    @abstractmethod
    def stats(self) -> TierStats:
        """Return a snapshot."""

    @abstractmethod
    def drain(self, timeout_s: float | None = None) -> bool:
        """Block until no submitted job touches the primary tier; results stay for :meth:`get_finished`.

        Returns:
            Whether all ended in time. The only call that may wait; an engine makes it at a reset, never while serving.
        """

    @abstractmethod
    def close(self, timeout_s: float | None = None) -> None:
        """End all work within a deadline and release every view of the primary tier. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()
