"""Statistics of the manager: snapshots for users."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstore.primary.tier import PrimaryStats
from kvstore.tiering.gate import GateCounts
from kvstore.tiering.hedges import HedgeCounts
from kvstore.tiering.link import TierFlow
from kvstore.tiering.tenants import TenantStats
from kvstore.types import MissCause


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
class TieringStats:
    """A snapshot of the manager.

    Attributes:
        primary: Slots of the primary tier.
        tiers: Flow to and from each tier.
        lookups: Lookup answers.
        missed: Blocks that requests looked for and computed nevertheless, by tier (``"all"`` for causes of all tiers),
            then by cause; once per request, and once for each tier that missed them.
        repeated: Requests whose first computed block an earlier request had computed.
        requests: Known requests.
        jobs: Jobs not yet reported by tiers.
        promoting: Slots held by promotions: being filled, or not yet loaded.
        throttled: Lookups without room for a promotion.
        refused_stores: Blocks without room in the primary tier, counted per offer.
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
    lost: int
    expired: int
    policy_mistakes: int
    policy_refused: int
    gate: GateCounts = field(default_factory=GateCounts)
    hedges: HedgeCounts = field(default_factory=HedgeCounts)
    forgetting: int = 0
    tenants: Mapping[str, TenantStats] = field(default_factory=dict)
    missed: Mapping[str, Mapping[MissCause, int]] = field(default_factory=dict)
    repeated: int = 0
