"""Events: which block entered or left which tier, and why."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.tiering.link import TierLink
from kvstore.types import BlockKey, Locality, Medium, RemovalCause

__all__ = ["PRIMARY_NAME", "BlockEvent", "EventLog"]

PRIMARY_NAME = "cpu"
"""Name of the primary tier in events and policies."""

_EVENTS_MAX = 65536


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """Blocks entered or left a tier (vLLM's ``BlockStored`` and ``BlockRemoved``).

    Attributes:
        tier: Name of the tier; ``"cpu"`` is the primary one.
        medium: Its kind of device.
        locality: Whether a network lies between.
        keys: The blocks.
        cause: Why they left; None if they were stored.
    """

    tier: str
    medium: Medium
    locality: Locality
    keys: Sequence[BlockKey]
    cause: RemovalCause | None = None


class EventLog:
    """Events of the primary tier until they are taken, and those of the tiers with them.

    Args:
        enabled: Whether anything is kept.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._events: deque[BlockEvent] = deque(maxlen=_EVENTS_MAX)

    def primary(self, keys: Sequence[BlockKey], cause: RemovalCause | None = None) -> None:
        """Note blocks that entered or left the primary tier."""
        if self.enabled and keys:
            self._events.append(BlockEvent(PRIMARY_NAME, Medium.CPU, Locality.LOCAL, tuple(keys), cause))

    def take(self, links: Sequence[TierLink]) -> list[BlockEvent]:
        """Return the events since the last call, those of the tiers included."""
        events = list(self._events)
        self._events.clear()
        for link in links:
            # Taken in any case, so that they don't pile up in the tier.
            for event in link.take_events():
                if self.enabled:
                    tier = link.tier
                    events.append(BlockEvent(link.name, tier.medium, tier.locality, event.keys, event.cause))
        return events
