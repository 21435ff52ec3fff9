"""The state that the parts of a manager share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.primary.tier import PrimaryTier
from kvstore.tiering.config import TieringConfig
from kvstore.tiering.events import EventLog
from kvstore.tiering.gate import Gate
from kvstore.tiering.jobs import JobTable
from kvstore.tiering.link import TierLink
from kvstore.tiering.tenants import TenantTable
from kvstore.types import BlockKey, RemovalCause


@dataclass(slots=True)
class Core:
    """The state that the parts of a manager share."""

    primary: PrimaryTier  # The primary tier.
    links: Sequence[TierLink]  # The other tiers, in order.
    config: TieringConfig  # Options.
    clock: Callable[[], float]  # Monotonic seconds.
    jobs: JobTable  # The unfinished jobs of all tiers.
    log: EventLog  # Events of the primary tier.
    gate: Gate | None  # Decides which blocks to load; None to load all blocks.
    tenants: TenantTable | None  # The tenants; None if none are configured.
    on_left: Callable[[Sequence[BlockKey]], None] = lambda keys: None  # Called with blocks that left the primary tier.

    def left(self, keys: Sequence[BlockKey], cause: RemovalCause) -> None:
        """Record that blocks left the primary tier."""
        self.on_left(keys)
        self.log.primary(keys, cause)

    def take_evicted(self) -> list[BlockKey]:
        """Record and return the evicted blocks. Call this after each allocation."""
        evicted = self.primary.take_evicted()
        if evicted:
            self.left(evicted, RemovalCause.EVICTED)
        return evicted
