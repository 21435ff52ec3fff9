"""A tier as the manager calls it: whatever it does, nothing gets out."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Sequence

from kvstore.tiers.base import SecondaryTierManager
from kvstore.tiers.stats import TierStats
from kvstore.types import (
    BlockKey,
    JobResult,
    LookupResult,
    RemovalCause,
    RequestContext,
    TierEvent,
    TransferJob,
)

__all__ = ["TierLink"]

logger = logging.getLogger("kvstore.tiering")

_STRIKES_MAX = 3
"""Exceptions in a row out of one method, after which a tier gets no more work: it is broken, not unlucky. The tiers
of kvstore raise none; this is for tiers of others."""


class TierLink:
    """Calls one tier, counts what passes, and turns exceptions into misses and failed jobs.

    Attributes:
        tier: The tier.
        name: Its name.
        bit: A power of two that stands for it in masks.
        storing: Blocks of unfinished stores; each pins a slot.
        loading: Blocks of unfinished loads.
        dead: Whether it gets no more work, because it raised again and again.
        stored_blocks: Blocks that it reported as stored, those it held already included.
        loaded_blocks: Blocks that it reported as loaded.
        failed_stores: Blocks that it reported as not stored.
        failed_loads: Blocks that it reported as not loaded.
        waiting: Blocks that wait until unfinished stores leave room in its share of the primary tier; oldest first.
        dropped_blocks: Blocks that left the primary tier while they waited, or could not wait as it is dead.
        errors: Exceptions out of its methods, and results that made no sense.
    """

    def __init__(self, tier: SecondaryTierManager, index: int) -> None:
        self.tier = tier
        self.name = tier.name
        self.bit = 1 << index
        self.storing = 0
        self.loading = 0
        self.dead = False
        self.stored_blocks = 0
        self.loaded_blocks = 0
        self.failed_stores = 0
        self.failed_loads = 0
        self.dropped_blocks = 0
        self.waiting: OrderedDict[BlockKey, None] = OrderedDict()
        self.errors = 0
        self._strikes: dict[str, int] = {}

    def lookup(self, key: BlockKey, ctx: RequestContext) -> LookupResult:
        """Ask the tier; MISS if it is dead or raises."""
        if self.dead:
            return LookupResult.MISS
        try:
            result = self.tier.lookup(key, ctx)
        except Exception as error:  # Whatever a tier raises is its failure, and no reason to end the engine.
            self._failed("lookup", error)
            return LookupResult.MISS
        if self._strikes:
            self._strikes.pop("lookup", None)
        return result

    def submit_store(self, job: TransferJob) -> bool:
        """Hand over a store; False if the tier raised, and may or may not have taken it."""
        self.storing += len(job.keys)
        try:
            self.tier.submit_store(job)
        except Exception as error:  # As in lookup.
            self._failed("submit_store", error)
            return False
        self._strikes.pop("submit_store", None)
        return True

    def submit_load(self, job: TransferJob) -> bool:
        """Hand over a load; False if the tier raised, and may or may not have taken it."""
        self.loading += len(job.keys)
        try:
            self.tier.submit_load(job)
        except Exception as error:  # As in lookup.
            self._failed("submit_load", error)
            return False
        self._strikes.pop("submit_load", None)
        return True

    def get_finished(self) -> Sequence[JobResult]:
        """Return the jobs that ended, also of a dead tier: their slots are waited for."""
        try:
            finished = [self._sound(result) for result in self.tier.get_finished()]
        except Exception as error:  # As in lookup.
            self._failed("get_finished", error)
            return ()
        if self._strikes:
            self._strikes.pop("get_finished", None)
        return finished

    def flush(self) -> None:
        """Hand over what was submitted."""
        try:
            self.tier.flush()
        except Exception as error:  # As in lookup.
            self._failed("flush", error)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Note uses."""
        try:
            self.tier.touch(keys)
        except Exception as error:  # As in lookup.
            self._failed("touch", error)

    def remove(self, keys: Sequence[BlockKey], cause: RemovalCause) -> None:
        """Let the tier drop blocks."""
        try:
            self.tier.remove(keys, cause)
        except Exception as error:  # As in lookup.
            self._failed("remove", error)

    def on_request_finished(self, ctx: RequestContext) -> None:
        """Let the tier forget a request."""
        try:
            self.tier.on_request_finished(ctx)
        except Exception as error:  # As in lookup.
            self._failed("on_request_finished", error)

    def take_events(self) -> Sequence[TierEvent]:
        """Return the tier's events."""
        try:
            return self.tier.take_events()
        except Exception as error:  # As in lookup.
            self._failed("take_events", error)
            return ()

    def stats(self) -> TierStats:
        """Return the tier's own statistics; empty ones if it raises."""
        try:
            return self.tier.stats()
        except Exception as error:  # As in lookup.
            self._failed("stats", error)
            return TierStats(self.name)

    def drain(self, timeout_s: float | None) -> bool:
        """Wait for the tier's I/O to end; False if it did not, or nobody knows."""
        try:
            return self.tier.drain(timeout_s)
        except Exception as error:  # As in lookup.
            self._failed("drain", error)
            return False

    def close(self, timeout_s: float | None) -> bool:
        """Close the tier; False if it raised."""
        try:
            self.tier.close(timeout_s)
        except Exception as error:  # As in lookup.
            self._failed("close", error)
            return False
        return True

    def revive(self) -> None:
        """Give a dead tier another chance."""
        self.dead = False
        self._strikes.clear()

    def begin_epoch(self) -> None:
        """Let the tier begin a new epoch. One that can't gets no work until it can: what it holds may be wrong."""
        begun = False
        try:
            begun = self.tier.begin_epoch()
        except Exception as error:  # As in lookup.
            self._failed("begin_epoch", error)
        if not begun:
            self.dead = True
            logger.error(
                "Tier %s gets no more work: it can't separate the blocks stored before this reset from later ones. "
                "Give it a begin_epoch() that returns True.",
                self.name,
            )

    def note_nonsense(self, what: str) -> None:
        """Count a result that makes no sense; the tier has a defect, and what it said is ignored."""
        if not self.errors:
            logger.error("Tier %s: %s; ignored, as are further ones, which are counted only", self.name, what)
        self.errors += 1

    def _sound(self, result: JobResult) -> JobResult:
        if isinstance(result.successful_keys, Collection):
            return result
        self.note_nonsense(f"job {result.job_id} succeeded for {result.successful_keys!r}")
        return JobResult(result.job_id, result.success, ())

    def _failed(self, method: str, error: Exception) -> None:
        self.errors += 1
        strikes = self._strikes[method] = self._strikes.get(method, 0) + 1
        if strikes == 1:
            logger.error("Tier %s raised in %s", self.name, method, exc_info=error)
        if strikes == _STRIKES_MAX and not self.dead:
            self.dead = True
            logger.error("Tier %s gets no more work: %s raised %d times in a row", self.name, method, strikes)
