"""The state that the parts of a manager share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvstore.primary.tier import PrimaryTier
from kvstore.tiering.config import TieringConfig
from kvstore.tiering.events import EventLog
from kvstore.tiering.gate import Gate
from kvstore.tiering.jobs import JobTable
from kvstore.tiering.link import Reasons, TierLink
from kvstore.tiering.tenants import TenantTable
from kvstore.types import BlockKey, MissCause, RemovalCause


class Part(ABC):
    """A part of a manager with work for the end of a step, or with state about blocks of the primary tier.

    Attributes:
        active: Whether it has such work or state. The part sets it; only active parts are called.
    """

    active = False

    @abstractmethod
    def step(self) -> bool:
        """Do the work of a step; return whether work or state is left."""

    def left(self, keys: Sequence[BlockKey]) -> None:  # noqa: B027
        """Drop the state of blocks that left the primary tier."""

    def reset(self) -> None:  # noqa: B027
        """Drop all state about blocks, because the primary tier is cleared."""


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
    parts: Sequence[Part] = ()  # In the order of their work in a step.
    absent: Reasons = field(default_factory=Reasons)  # Why blocks are not in the primary tier, if it is the only one.

    def left(self, keys: Sequence[BlockKey], cause: RemovalCause) -> None:
        """Record that blocks left the primary tier."""
        for part in self.parts:
            if part.active:
                part.left(keys)
        if not self.links:
            self.absent.note(keys, MissCause(cause.value))
        self.log.primary(keys, cause)

    def note_unstored(self, links: Iterable[TierLink], keys: Sequence[BlockKey], cause: MissCause) -> None:
        """Note why blocks are not stored in some tiers, or in the primary tier if it is the only one."""
        for reasons in [link.unstored for link in links] if self.links else [self.absent]:
            reasons.note(keys, cause)

    def take_evicted(self) -> list[BlockKey]:
        """Record and return the evicted blocks. Call this after each allocation."""
        evicted = self.primary.take_evicted()
        if evicted:
            self.left(evicted, RemovalCause.EVICTED)
        return evicted
