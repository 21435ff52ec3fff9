"""The manager's wrapper around a tier, which counts its blocks and contains its exceptions."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, TypeVar, TypeVarTuple

from kvstore.tiering.tally import TierTally
from kvstore.tiers.base import SecondaryTierManager, TierStats
from kvstore.types import BlockKey, JobResult, LookupResult, MissCause, RequestContext

logger = logging.getLogger("kvstore.tiering")

RAISED: Final = object()
"""Stands for the result of a method that raised."""

_STRIKES_MAX: Final = 3
"""Consecutive exceptions of one method after which a tier gets no more work."""

_REASONS_MAX: Final = 1 << 16
"""Blocks of each tier with a known reason for their absence (some 10 MB)."""

_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")
_Otherwise = TypeVar("_Otherwise")


@dataclass(slots=True)
class TierFlow:
    """Blocks moved between the primary tier and another tier since the start; see also the tier's own statistics."""

    name: str
    storing: int = 0  # Blocks of unfinished stores.
    loading: int = 0  # Blocks of unfinished loads, except loads without a report after ``load_s_max``.
    stored: int = 0  # Blocks stored, including blocks that the tier held already.
    loaded: int = 0  # Blocks loaded.
    failed_stores: int = 0  # Blocks not stored.
    failed_loads: int = 0  # Blocks not loaded.
    waiting: int = 0  # Blocks that wait for room in the tier's backlog or share of the primary tier.
    dropped: int = 0  # Blocks that left the primary tier before there was room, or that a dead tier did not take.
    saved_writes: int = 0  # Estimate of the writes that ``"min_uses": "auto"`` saved.
    lost_hits: int = 0  # Estimate of the hits that this lost; below zero: gained.
    errors: int = 0  # Exceptions and invalid results of the tier.
    dead: bool = False  # Whether the tier gets no more work because of errors.
    store_jobs: int = 0  # Unfinished stores.
    load_jobs: int = 0  # Unfinished loads.


class Reasons(OrderedDict[BlockKey, MissCause]):
    """Why blocks are not in a tier. Those of the oldest ones are forgotten."""

    def note(self, keys: Sequence[BlockKey], cause: MissCause) -> None:
        """Note the reason for the absence of blocks. Faster than a :class:`BoundedDict`, for whole prompts."""
        self.update(dict.fromkeys(keys, cause))
        while len(self) > _REASONS_MAX:
            self.popitem(last=False)


class TierLink(TierFlow):
    """Calls one tier, counts its blocks, and turns its exceptions into misses and failed jobs.

    kvstore's own tiers raise only by a defect, which costs no more than that of any other tier.
    """

    __eq__, __hash__ = object.__eq__, object.__hash__

    def __init__(self, tier: SecondaryTierManager, index: int) -> None:
        super().__init__(tier.name)
        self.tier = tier
        self.index = index  # Its position among the tiers.
        self.bit = 1 << index  # Its bit in masks of tiers.
        self.takes_stores = tier.takes_stores  # Whether blocks are stored to it.
        self.store_blocks_max = max(1, tier.store_blocks_max)  # Most blocks of unfinished stores that it accepts.
        self.loaded_at = 0.0  # Time of the last report of a load, on the owner's clock.
        # Blocks that wait for room in its backlog or share of the primary tier, oldest first.
        self.queue: OrderedDict[BlockKey, None] = OrderedDict()
        self.tally = TierTally()  # Its counts for the engine's metrics.
        self.miss_cause = MissCause.ABSENT  # Cause of the last MISS that lookup() returned.
        # Blocks that the engine computed and did not store in it, with the reason. A store removes them.
        self.unstored = Reasons()
        self._strikes: dict[Callable[..., Any], int] = {}

    def flow(self) -> TierFlow:
        """Return a snapshot of its counts."""
        self.waiting = len(self.queue)
        return TierFlow(**{each.name: getattr(self, each.name) for each in fields(TierFlow)})

    def call(
        self, method: Callable[[*_Arguments], _Result], *args: *_Arguments, otherwise: _Otherwise
    ) -> _Result | _Otherwise:
        """Call a method of the tier. If it raises, count the exception and return ``otherwise``."""
        try:
            result = method(*args)
        except Exception as error:  # A tier's failure is a miss or a failed job, and must never stop the engine.
            self._note_exception(method, error)
            return otherwise
        if self._strikes:
            self._strikes.pop(method, None)
        return result

    def lookup(self, key: BlockKey, ctx: RequestContext) -> LookupResult:
        """Return the tier's answer; MISS if it is dead. Inlines :meth:`call`, because it runs for each block."""
        if self.dead:
            self.miss_cause = MissCause.DOWN
            return LookupResult.MISS
        try:
            result = self.tier.lookup(key, ctx)
            if result is LookupResult.MISS:
                self.miss_cause = self.tier.miss_cause
        except Exception as error:  # As in call().
            self._note_exception(self.tier.lookup, error)
            self.miss_cause = MissCause.FAILED
            return LookupResult.MISS
        if self._strikes:
            self._strikes.pop(self.tier.lookup, None)
        return result

    def get_finished(self) -> Sequence[JobResult]:
        """Return the finished jobs, including those of a dead tier, because their slots are still in use."""
        try:
            found = self.tier.get_finished()
            results = [self._valid(result) for result in found] if found else ()
        except Exception as error:  # As in call().
            self._note_exception(self.tier.get_finished, error)
            return ()
        if self._strikes:
            self._strikes.pop(self.tier.get_finished, None)
        return results

    def forget(self, prefix: bytes) -> bool:
        """Remove the blocks with a key prefix. Return true if all are gone, or if the tier cannot do so (logged)."""
        gone = self.call(self.tier.forget, prefix, otherwise=self.dead)
        if gone is None:
            logger.error(
                "Tier %s can't forget the blocks of a tenant, and will find them again. Give it a forget(), or remove "
                "them from its medium.",
                self.name,
            )
        return gone is not False

    def stats(self) -> TierStats:
        """A dead tier is not ready."""
        stats = self.call(self.tier.stats, otherwise=None)
        if not isinstance(stats, TierStats):
            return TierStats(self.name, ready=False)
        return replace(stats, ready=False) if self.dead else stats

    def reset(self) -> None:
        """Begin a new epoch, even in a dead tier. A tier without epochs gets no more work: its blocks may be wrong."""
        self.dead = False
        self._strikes.clear()
        if not self.call(self.tier.begin_epoch, otherwise=False):
            self.dead = True
            logger.error(
                "Tier %s gets no more work: it can't separate the blocks stored before this reset from later ones. "
                "Give it a begin_epoch() that returns True.",
                self.name,
            )

    def note_invalid(self, fault: str) -> None:
        """Count an invalid result, which is ignored. It means a defect of the tier."""
        if not self.errors:
            logger.error("Tier %s: %s; ignored, as are further ones, which are counted only", self.name, fault)
        self.errors += 1

    def _valid(self, result: JobResult) -> JobResult:
        if isinstance(result.successful_keys, Collection):
            return result
        self.note_invalid(f"job {result.job_id} succeeded for {result.successful_keys!r}")
        return JobResult(result.job_id, result.success, ())

    def _note_exception(self, method: Callable[..., Any], error: Exception) -> None:
        name = getattr(method, "__name__", repr(method))
        self.errors += 1
        strikes = self._strikes[method] = self._strikes.get(method, 0) + 1
        if strikes == 1:
            logger.error("Tier %s raised in %s", self.name, name, exc_info=error)
        if strikes == _STRIKES_MAX and not self.dead:
            self.dead = True
            logger.error("Tier %s gets no more work: %s raised %d times in a row", self.name, name, strikes)
