"""What the manager tells of itself."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.primary.tier import PrimaryStats
from kvstore.tiering.jobs import JobTable
from kvstore.tiering.link import TierLink

__all__ = ["LookupCounts", "TierFlow", "TieringStats", "flow_of"]


@dataclass(slots=True)
class LookupCounts:
    """Lookup answers since the start; a block that is asked for in each step counts in each.

    Attributes:
        hits: Blocks that were ready in the primary tier.
        pending: Blocks on their way into it.
        retries: Blocks of which a tier did not know yet, or for which there was no room yet.
        misses: Blocks that no tier has.
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
        stored: Blocks stored, those the tier held already included.
        loaded: Blocks loaded.
        failed_stores: Blocks not stored.
        failed_loads: Blocks not loaded.
        waiting: Blocks that wait for room in the tier's share.
        dropped: Blocks not stored, as they left the primary tier before there was room, or as the tier is dead.
        errors: Exceptions out of the tier, and results that made no sense.
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
    """A moment's view of the manager.

    Attributes:
        primary: Slots of the primary tier.
        tiers: Flow to and from each tier.
        lookups: Lookup answers.
        requests: Requests that are known.
        jobs: Jobs that tiers have not reported.
        promoting: Blocks that promotions hold in the primary tier: on their way, or not yet loaded.
        throttled: Lookups that found no room for a promotion.
        refused_stores: Blocks for which the primary tier had no room (they may have been offered again).
        refused_pins: Blocks not held for ``pin``, as its share was used up.
        lost: Blocks with ``lazy`` that a tier failed to take when their turn to be evicted came.
        expired: Blocks whose lifetime ended.
        policy_mistakes: Values of requests' policies that could not be used.
        policy_refused: Parameters of requests that were ignored, as they are not in ``allow``.
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
