"""Statistics of the manager: snapshots for users."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstore.primary.tier import PrimaryStats
from kvstore.tiering.gate import GateCounts
from kvstore.tiering.hedges import HedgeCounts
from kvstore.tiering.jobs import JobTable
from kvstore.tiering.link import TierLink
from kvstore.tiering.tenants import TenantStats


@dataclass(slots=True)
class LookupCounts:
    """Lookup answers since the start; repeated lookups of a block count each time.

    Attributes:
        hits: Blocks ready in the primary tier.
        pending: Blocks being promoted.
        retries: Blocks without an answer from a tier yet, or without room yet.
        misses: Blocks in no tier.
    """

    hits: int = 0
    pending: int = 0
    retries: int = 0
    misses: int = 0


@dataclass(frozen=True, slots=True)
class TierFlow:
    """Blocks moved between the primary tier and another tier since the start; see also the tier's own statistics.

    Attributes:
        name: Name of the tier.
        storing: Blocks of unfinished stores.
        loading: Blocks of unfinished loads, except loads without a report after ``load_s_max``.
        store_jobs: Unfinished stores.
        load_jobs: Unfinished loads.
        stored: Blocks stored, including blocks that the tier held already.
        loaded: Blocks loaded.
        failed_stores: Blocks not stored.
        failed_loads: Blocks not loaded.
        waiting: Blocks that wait for room in the tier's share.
        dropped: Blocks not stored because they left the primary tier before there was room, or the tier is dead.
        errors: Exceptions and invalid results of the tier.
        dead: Whether the tier gets no more work because of errors.
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
        refused_stores: Blocks without room in the primary tier, counted per offer.
        refused_pins: Blocks not pinned, because the share for ``pin`` was used up.
        lost: Blocks with ``lazy`` that a tier failed to store before their eviction.
        expired: Blocks whose lifetime ended.
        policy_mistakes: Invalid values in requests' policies.
        policy_refused: Parameters of requests ignored because ``allow`` does not contain them.
        gate: Decisions of the gate.
        hedges: Hedged reads.
        forgetting: Tenants that are being forgotten.
        tenants: Counts per named tenant, and of all others together; empty without tenants.
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
        stored=link.stored,
        loaded=link.loaded,
        failed_stores=link.failed_stores,
        failed_loads=link.failed_loads,
        waiting=len(link.waiting),
        dropped=link.dropped,
        errors=link.errors,
        dead=link.dead,
        store_jobs=len(loads) - sum(loads),
        load_jobs=sum(loads),
    )
