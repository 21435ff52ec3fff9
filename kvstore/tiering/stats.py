"""Statistics of the manager: snapshots for users, and counts and samples for an engine's own metrics."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.primary.tier import PrimaryStats
from kvstore.tiering.gate import GateCounts
from kvstore.tiering.hedges import HedgeCounts
from kvstore.tiering.jobs import JobTable, OpenJob
from kvstore.tiering.link import TierLink
from kvstore.tiering.requests import RequestState
from kvstore.tiering.tenants import TenantStats
from kvstore.types import BlockKey, JobResult, LookupResult

__all__ = ["TIMED_EVERY", "LookupCounts", "Tally", "TierFlow", "TierTally", "TieringStats", "flow_of"]

TIMED_EVERY = 16
"""One in so many answers of a tier is timed, starting with the first: reading the clock costs as much as a lookup."""

_SAMPLES_MAX = 1024
"""Samples of each kind kept until taken; a single long prompt has more lookups."""

_PRIMARY_BIT = 1
"""The primary tier in the masks of ``RequestState.asked``; another tier has ``TierLink.bit``, one place higher."""


@dataclass(slots=True)
class LookupCounts:
    """Lookup answers since the start; repeated lookups of a block count each time.

    Attributes:
        hits: Blocks ready in the primary tier.
        pending: Blocks being promoted.
        retries: Blocks unknown to a tier so far, or without room so far.
        misses: Blocks in no tier.
    """

    hits: int = 0
    pending: int = 0
    retries: int = 0
    misses: int = 0


@dataclass(frozen=True, slots=True)
class TierFlow:
    """Blocks between the primary tier and one other, since the start; the tier's own statistics say more.

    Attributes:
        name: Name of the tier.
        storing: Blocks of unfinished stores.
        loading: Blocks of unfinished loads.
        store_jobs: Unfinished stores.
        load_jobs: Unfinished loads.
        stored: Blocks stored, including those that the tier held already.
        loaded: Blocks loaded.
        failed_stores: Blocks not stored.
        failed_loads: Blocks not loaded.
        waiting: Blocks that wait for room in the tier's share.
        dropped: Blocks not stored because they left the primary tier before there was room, or the tier is dead.
        errors: Exceptions and invalid results of the tier.
        dead: Whether the tier gets no more work because of them.
    """

    name: str
    storing: int
    loading: int
    stored: int
    loaded: int
    failed_stores: int
    failed_loads: int
    waiting: int
    dropped: int
    errors: int
    dead: bool
    store_jobs: int = 0
    load_jobs: int = 0


@dataclass(frozen=True, slots=True)
class TieringStats:
    """A snapshot of the manager.

    Attributes:
        primary: Slots of the primary tier.
        tiers: Flow to and from each tier.
        lookups: Lookup answers.
        requests: Known requests.
        jobs: Jobs not yet reported by tiers.
        promoting: Slots held by promotions: being filled, or not yet loaded.
        throttled: Lookups without room for a promotion.
        refused_stores: Blocks without room in the primary tier (they may have been offered again).
        refused_pins: Blocks not pinned, because the share for ``pin`` was used up.
        lost: Blocks with ``lazy`` that a tier failed to store before their eviction.
        expired: Blocks whose lifetime ended.
        policy_mistakes: Invalid values in requests' policies.
        policy_refused: Parameters of requests ignored because ``allow`` lacks them.
        gate: Decisions of the gate.
        hedges: Hedged reads.
        forgetting: Tenants that are being forgotten.
        tenants: Counts of each tenant with a name, and of the others together; empty without tenants.
    """

    primary: PrimaryStats
    tiers: tuple[TierFlow, ...]
    lookups: LookupCounts
    requests: int
    jobs: int
    promoting: int
    throttled: int
    refused_stores: int
    refused_pins: int
    lost: int
    expired: int
    policy_mistakes: int
    policy_refused: int
    gate: GateCounts = field(default_factory=GateCounts)
    hedges: HedgeCounts = field(default_factory=HedgeCounts)
    forgetting: int = 0
    tenants: Mapping[str, TenantStats] = field(default_factory=dict)


def flow_of(link: TierLink, jobs: JobTable) -> TierFlow:
    """Return the flow of one tier."""
    loads = [job.is_load for job in jobs if job.link is link]
    return TierFlow(
        name=link.name,
        storing=link.storing,
        loading=link.loading,
        stored=link.stored_blocks,
        loaded=link.loaded_blocks,
        failed_stores=link.failed_stores,
        failed_loads=link.failed_loads,
        waiting=len(link.waiting),
        dropped=link.dropped_blocks,
        errors=link.errors,
        dead=link.dead,
        store_jobs=len(loads) - sum(loads),
        load_jobs=sum(loads),
    )


def _samples() -> deque[float]:
    return deque(maxlen=_SAMPLES_MAX)


@dataclass(slots=True)
class TierTally:
    """Counts of one tier since the start, and samples since they were last taken.

    Attributes:
        queries: Answered lookups of this tier, once per block and request.
        hits: Those answered HIT.
        failed_loads: Load jobs that failed, wholly or in part.
        failed_stores: Store jobs that failed, wholly or in part.
        load_seconds: Time of load jobs on the I/O side.
        store_seconds: The same for store jobs.
        last_lookup_s: Seconds of the last timed lookup with the answer HIT or MISS.
        lookup_samples: Seconds of each such lookup; an untimed one repeats the last timed one, so that number and sum
            of the samples are right.
        wait_samples: Seconds from the first RETRY to the answer.
        loaded_samples: Seconds from the submission of a successful load to its report.
        failed_samples: The same for failed loads.
    """

    queries: int = 0
    hits: int = 0
    failed_loads: int = 0
    failed_stores: int = 0
    load_seconds: float = 0.0
    store_seconds: float = 0.0
    last_lookup_s: float = 0.0
    lookup_samples: deque[float] = field(default_factory=_samples)
    wait_samples: deque[float] = field(default_factory=_samples)
    loaded_samples: deque[float] = field(default_factory=_samples)
    failed_samples: deque[float] = field(default_factory=_samples)


class Tally:
    """The counts of all tiers.

    Args:
        links: The tiers below the primary one.
        clock: Monotonic seconds.

    Attributes:
        primary: Counts of the primary tier.
        tiers: Counts of the others, in order.
        by_link: The same by tier.
        allocations: Blocks allocated by each store, since last taken.
    """

    def __init__(self, links: Sequence[TierLink], clock: Callable[[], float]) -> None:
        self._clock = clock
        self.primary = TierTally()
        self.tiers = tuple(TierTally() for _ in links)
        self.allocations: deque[int] = deque(maxlen=_SAMPLES_MAX)
        self.by_link = dict(zip(links, self.tiers, strict=True))

    def note_primary(self, state: RequestState, key: BlockKey, hit: bool, started: float) -> None:
        """Count the primary tier's first answer about a block to a request.

        Args:
            state: The request.
            key: The block.
            hit: The answer.
            started: Start of the lookup (``time.perf_counter``); 0 if untimed.
        """
        if key in state.asked:
            return
        state.asked[key] = _PRIMARY_BIT
        tally = self.primary
        tally.queries += 1
        tally.hits += hit
        if started:
            tally.last_lookup_s = time.perf_counter() - started
        tally.lookup_samples.append(tally.last_lookup_s)

    def note_answer(
        self, state: RequestState, key: BlockKey, link: TierLink, result: LookupResult, started: float
    ) -> None:
        """Count another tier's first answer other than RETRY, as for the primary tier."""
        bit = link.bit << 1
        mask = state.asked.get(key, 0)
        if mask & bit:
            return
        if result is LookupResult.RETRY:
            state.retried.setdefault((key, bit), self._clock())
            return
        state.asked[key] = mask | bit
        tally = self.by_link[link]
        tally.queries += 1
        tally.hits += result is LookupResult.HIT
        if started:
            tally.last_lookup_s = time.perf_counter() - started
        tally.lookup_samples.append(tally.last_lookup_s)
        if state.retried:
            since = state.retried.pop((key, bit), None)
            if since is not None:
                tally.wait_samples.append(self._clock() - since)

    def note_job(self, job: OpenJob, result: JobResult) -> None:
        """Count a reported job."""
        tally = self.by_link[job.link]
        success = result.success and not job.is_void
        if job.is_load:
            tally.failed_loads += not success
            tally.load_seconds += result.seconds
            samples = tally.loaded_samples if success else tally.failed_samples
            samples.append(self._clock() - job.since)
        else:
            tally.failed_stores += not success
            tally.store_seconds += result.seconds
