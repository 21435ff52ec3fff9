"""A tier as the manager calls it: counted, with its exceptions contained."""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar, cast

from kvstore.tiers.base import SecondaryTierManager, TierStats
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

_STRIKES_MAX: Final = 3
"""Consecutive exceptions of one method after which a tier gets no more work. The tiers of kvstore raise none; this is
for third-party tiers."""

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _contained(fallback: Callable[[TierLink], Any]) -> Callable[[_Method], _Method]:
    """Make a method count an exception of its tier and return ``fallback(link)`` instead."""

    def wrap(method: _Method) -> _Method:
        name = method.__name__

        @functools.wraps(method)
        def call(self: TierLink, *args: Any) -> Any:
            try:
                result = method(self, *args)
            except Exception as error:  # Any failure of a tier is a miss or a failed job, and never ends the engine.
                self._note_exception(name, error)
                return fallback(self)
            if self._strikes:
                self._strikes.pop(name, None)
            return result

        return cast(_Method, call)

    return wrap


class TierLink:
    """Calls one tier, counts its blocks, and turns its exceptions into misses and failed jobs.

    Attributes:
        tier: The tier.
        name: Its name.
        index: Its place among the tiers.
        bit: Its bit in masks of tiers.
        takes_stores: Whether blocks are stored to it.
        storing: Blocks of unfinished stores; each pins a slot.
        loading: Blocks of unfinished loads.
        loaded_at: Time of the last report of a load, on the owner's clock.
        dead: Whether it gets no more work, because it raised repeatedly or can't begin an epoch.
        stored_blocks: Blocks reported as stored, including those that it held already.
        loaded_blocks: Blocks reported as loaded.
        failed_stores: Blocks reported as not stored.
        failed_loads: Blocks reported as not loaded.
        waiting: Blocks that wait for room in its share of the primary tier, oldest first.
        dropped_blocks: Blocks that left the primary tier while they waited, or could not wait for a dead tier.
        errors: Exceptions and invalid results.
    """

    def __init__(self, tier: SecondaryTierManager, index: int) -> None:
        self.tier = tier
        self.name = tier.name
        self.index = index
        self.bit = 1 << index
        self.takes_stores = tier.takes_stores
        self.storing = 0
        self.loading = 0
        self.loaded_at = 0.0
        self.dead = False
        self.stored_blocks = 0
        self.loaded_blocks = 0
        self.failed_stores = 0
        self.failed_loads = 0
        self.dropped_blocks = 0
        self.waiting: OrderedDict[BlockKey, None] = OrderedDict()
        self.errors = 0
        self._strikes: dict[str, int] = {}

    @_contained(lambda link: LookupResult.MISS)
    def lookup(self, key: BlockKey, ctx: RequestContext) -> LookupResult:
        """Return the tier's answer; MISS if it is dead."""
        return LookupResult.MISS if self.dead else self.tier.lookup(key, ctx)

    @_contained(lambda link: False)
    def submit_store(self, job: TransferJob) -> bool:
        """Submit a store; False if the tier raised, and may or may not have accepted it."""
        self.storing += len(job.keys)
        self.tier.submit_store(job)
        return True

    @_contained(lambda link: False)
    def submit_load(self, job: TransferJob) -> bool:
        """Submit a load; False if the tier raised, and may or may not have accepted it."""
        self.loading += len(job.keys)
        self.tier.submit_load(job)
        return True

    @_contained(lambda link: [])
    def get_finished(self) -> Sequence[JobResult]:
        """Return the finished jobs, also those of a dead tier: their slots are still in use."""
        return [self._valid(result) for result in self.tier.get_finished()]

    @_contained(lambda link: None)
    def flush(self) -> None:
        """See :meth:`SecondaryTierManager.flush`."""
        self.tier.flush()

    @_contained(lambda link: None)
    def touch(self, keys: Sequence[BlockKey]) -> None:
        """See :meth:`SecondaryTierManager.touch`."""
        self.tier.touch(keys)

    @_contained(lambda link: None)
    def remove(self, keys: Sequence[BlockKey], cause: RemovalCause) -> None:
        """See :meth:`SecondaryTierManager.remove`."""
        self.tier.remove(keys, cause)

    @_contained(lambda link: link.dead)
    def forget(self, prefix: bytes) -> bool:
        """Remove the blocks of a prefix; return whether all are gone, or the tier can't do it, which is logged."""
        gone = self.tier.forget(prefix)
        if gone is None:
            logger.error(
                "Tier %s can't forget the blocks of a tenant, and will find them again. Give it a forget(), or remove "
                "them from its medium.",
                self.name,
            )
        return gone is not False

    @_contained(lambda link: None)
    def on_request_finished(self, ctx: RequestContext) -> None:
        """See :meth:`SecondaryTierManager.on_request_finished`."""
        self.tier.on_request_finished(ctx)

    @_contained(lambda link: [])
    def take_events(self) -> Sequence[TierEvent]:
        """See :meth:`SecondaryTierManager.take_events`."""
        return self.tier.take_events()

    @_contained(lambda link: None)
    def repeat_events(self) -> None:
        """See :meth:`SecondaryTierManager.repeat_events`."""
        self.tier.repeat_events()

    @_contained(lambda link: TierStats(link.name, ready=False))
    def stats(self) -> TierStats:
        """See :meth:`SecondaryTierManager.stats`. A dead tier is not ready."""
        stats = self.tier.stats()
        return replace(stats, ready=False) if self.dead else stats

    @_contained(lambda link: False)
    def drain(self, timeout_s: float | None) -> bool:
        """Wait for the tier's I/O to end; False if it did not, or may not have."""
        return self.tier.drain(timeout_s)

    @_contained(lambda link: False)
    def close(self, timeout_s: float | None) -> bool:
        """Close the tier; False if it raised."""
        self.tier.close(timeout_s)
        return True

    @_contained(lambda link: False)
    def begin_epoch(self) -> bool:
        """See :meth:`SecondaryTierManager.begin_epoch`."""
        return self.tier.begin_epoch()

    def reset(self) -> None:
        """Begin a new epoch, also in a dead tier. A tier without epochs gets no more work: its blocks may be wrong."""
        self.dead = False
        self._strikes.clear()
        if not self.begin_epoch():
            self.dead = True
            logger.error(
                "Tier %s gets no more work: it can't separate the blocks stored before this reset from later ones. "
                "Give it a begin_epoch() that returns True.",
                self.name,
            )

    def note_invalid(self, fault: str) -> None:
        """Count an invalid result, which is ignored: the tier has a defect."""
        if not self.errors:
            logger.error("Tier %s: %s; ignored, as are further ones, which are counted only", self.name, fault)
        self.errors += 1

    def _valid(self, result: JobResult) -> JobResult:
        if isinstance(result.successful_keys, Collection):
            return result
        self.note_invalid(f"job {result.job_id} succeeded for {result.successful_keys!r}")
        return JobResult(result.job_id, result.success, ())

    def _note_exception(self, method: str, error: Exception) -> None:
        self.errors += 1
        strikes = self._strikes[method] = self._strikes.get(method, 0) + 1
        if strikes == 1:
            logger.error("Tier %s raised in %s", self.name, method, exc_info=error)
        if strikes == _STRIKES_MAX and not self.dead:
            self.dead = True
            logger.error("Tier %s gets no more work: %s raised %d times in a row", self.name, method, strikes)
