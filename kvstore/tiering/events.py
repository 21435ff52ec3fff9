"""Events: blocks that entered or left a tier, with the cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.tiering.link import TierLink
from kvstore.tiers.inventory import Inventory
from kvstore.types import BlockKey, Locality, Medium, RemovalCause

PRIMARY_NAME = "cpu"
"""Name of the primary tier in events and policies."""

ALL_TIERS_NAME = "all"
"""Name in counts and accounts of causes that concern all tiers."""


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """Blocks entered or left a tier (vLLM's ``BlockStored`` and ``BlockRemoved``).

    Attributes:
        tier: Name of the tier; ``"cpu"`` is the primary one.
        medium: Kind of device of the tier.
        locality: Whether the tier is local or behind a network.
        keys: The blocks.
        cause: Cause of the removal; None if the blocks did not leave.
        accessed: Whether the blocks were read, and neither entered nor left.
    """

    tier: str
    medium: Medium
    locality: Locality
    keys: Sequence[BlockKey]
    cause: RemovalCause | None = None
    accessed: bool = False


class EventLog:
    """Collects the events of the primary tier and of the tiers below.

    ``accesses``: whether reads of blocks in the primary tier are events.
    """

    def __init__(self, enabled: bool, accesses: bool) -> None:
        self._enabled = enabled
        self._inventory = Inventory(enabled=enabled, accesses=enabled and accesses)

    def primary(self, keys: Sequence[BlockKey], cause: RemovalCause | None = None) -> None:
        """Record blocks that entered (no cause) or left the primary tier."""
        if cause is None:
            self._inventory.stored(keys)
        else:
            self._inventory.removed(keys, cause)

    def accessed(self, keys: Sequence[BlockKey]) -> None:
        """Record that the engine reads blocks of the primary tier."""
        self._inventory.accessed(keys)

    @property
    def has_unreported(self) -> bool:
        """Whether :meth:`take` has an event of the primary tier to return."""
        return bool(self._inventory)

    def restate(self, links: Sequence[TierLink]) -> None:
        """Make the next calls of :meth:`take` report all blocks of all tiers as stored, some at a time."""
        self._inventory.restate()
        for link in links:
            link.call(link.tier.restate_events, otherwise=None)

    def take(self, links: Sequence[TierLink]) -> list[BlockEvent]:
        """Return the events of all tiers since the last call.

        Events of the lower tiers come first. A block may have left the primary tier after a lower tier stored it, and a
        consumer that counts copies must never see the count drop to zero in between.
        """
        events: list[BlockEvent] = []
        for link in links:
            # Taken even if disabled, so that events do not accumulate in the tier.
            tier = link.tier
            taken = link.call(link.tier.take_events, otherwise=())
            for event in taken if self._enabled else ():
                events.append(
                    BlockEvent(link.name, tier.medium, tier.locality, event.keys, event.cause, event.accessed)
                )
        for event in self._inventory.take():
            events.append(BlockEvent(PRIMARY_NAME, Medium.CPU, Locality.LOCAL, event.keys, event.cause, event.accessed))
        return events
