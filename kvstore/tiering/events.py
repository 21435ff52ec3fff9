"""Events: which block entered or left which tier, and why."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvstore.tiering.link import TierLink
from kvstore.types import BlockKey, Locality, Medium, RemovalCause, TierEvent

__all__ = ["PRIMARY_NAME", "BlockEvent", "EventLog", "merged"]

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
        self._events: deque[TierEvent] = deque(maxlen=_EVENTS_MAX)

    def primary(self, keys: Sequence[BlockKey], cause: RemovalCause | None = None) -> None:
        """Note blocks that entered or left the primary tier."""
        if self.enabled and keys:
            self._events.append(TierEvent(tuple(keys), cause))

    def take(self, links: Sequence[TierLink]) -> list[BlockEvent]:
        """Return the events since the last call, those of the tiers included; see :func:`merged`.

        Those of the tiers come first. A block may have left the primary tier after a lower tier stored it, and a
        consumer that counts copies must not see it without any in between.
        """
        events: list[BlockEvent] = []
        for link in links:
            # Taken in any case, so that they don't pile up in the tier.
            taken, tier = link.take_events(), link.tier
            if self.enabled:
                events += [
                    BlockEvent(link.name, tier.medium, tier.locality, event.keys, event.cause)
                    for event in merged(taken)
                ]
        events += [
            BlockEvent(PRIMARY_NAME, Medium.CPU, Locality.LOCAL, event.keys, event.cause)
            for event in merged(self._events)
        ]
        self._events.clear()
        return events


def merged(events: Iterable[TierEvent]) -> list[TierEvent]:
    """Join neighbouring events of one tier and one cause: consumers pay per event, and a job or a step is one."""
    joined: list[tuple[RemovalCause | None, list[BlockKey]]] = []
    for event in events:
        if joined and joined[-1][0] is event.cause:
            joined[-1][1].extend(event.keys)
        else:
            joined.append((event.cause, list(event.keys)))
    return [TierEvent(tuple(keys), cause) for cause, keys in joined]
