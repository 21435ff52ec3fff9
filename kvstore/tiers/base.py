"""The interface of a secondary tier, as the multi-tier offloading RFC has it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

from kvstore.tiers.stats import TierStats
from kvstore.types import (
    BlockKey,
    JobResult,
    Locality,
    LookupResult,
    Medium,
    RemovalCause,
    RequestContext,
    TierEvent,
    TransferJob,
)

__all__ = ["SecondaryTierManager"]


class SecondaryTierManager(ABC):
    """A storage level below the primary tier, as its owner (a scheduler thread) sees it.

    Every method returns in microseconds, does no I/O, and is called from one thread at a time. What takes time is
    submitted as a job and reported by :meth:`get_finished`, exactly once and within its deadline.

    Attributes:
        name: Name of this tier in statistics and policies.
        medium: Kind of device.
        locality: Whether a network lies between.
    """

    name: str
    medium: Medium
    locality: Locality

    @abstractmethod
    def lookup(self, key: BlockKey, ctx: RequestContext | None = None) -> LookupResult:
        """Tell whether the tier holds a block: HIT, MISS, or RETRY (ask again in the next step)."""

    @abstractmethod
    def submit_store(self, job: TransferJob) -> None:
        """Store blocks. Their slots must stay as they are until the job is reported."""

    @abstractmethod
    def submit_load(self, job: TransferJob) -> None:
        """Load blocks into their slots, which must belong to nobody else until the job is reported."""

    @abstractmethod
    def flush(self) -> None:
        """Hand over what was submitted since the last call; once at the end of each step."""

    @abstractmethod
    def get_finished(self) -> Sequence[JobResult]:
        """Return the jobs that ended since the last call, each exactly once."""

    @abstractmethod
    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Note a use of blocks, for the tier's own eviction."""

    def remove(self, keys: Sequence[BlockKey], cause: RemovalCause = RemovalCause.REMOVED) -> None:  # noqa: B027
        """Drop blocks: from now on they are MISS until stored again. The default can't, and does nothing.

        Args:
            keys: The blocks; those that the tier does not hold are ignored.
            cause: Why, for the event.
        """

    def begin_epoch(self) -> bool:
        """Begin a new epoch: no block that was stored before is found again, nor what a store still writes.

        An engine calls it when its caches are reset, after :meth:`drain`, because its weights may have changed. It
        returns at once; until the epoch has begun every lookup is MISS.

        Returns:
            Whether the tier can do so. The default can't: its owner then never asks it for a block again.
        """
        return False

    @abstractmethod
    def on_request_finished(self, ctx: RequestContext) -> None:
        """Forget what is known of a request."""

    @abstractmethod
    def take_events(self) -> Sequence[TierEvent]:
        """Return the blocks that entered or left since the last call."""

    @abstractmethod
    def stats(self) -> TierStats:
        """Return a moment's view."""

    @abstractmethod
    def drain(self, timeout_s: float | None = None) -> bool:
        """Block until no submitted job touches the primary tier; results stay for :meth:`get_finished`.

        Returns:
            Whether all ended in time. (The one call that may wait; an engine makes it to reset, never while serving.)
        """

    @abstractmethod
    def close(self, timeout_s: float | None = None) -> None:
        """End all work within a deadline, release every view of the primary tier. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()
