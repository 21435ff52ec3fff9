"""Events: which block entered or left which tier, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.tiering.link import TierLink
from kvstore.tiers.inventory import Inventory
from kvstore.types import BlockKey, Locality, Medium, RemovalCause

__all__ = ["PRIMARY_NAME", "BlockEvent", "EventLog", "Repeats"]

PRIMARY_NAME = "cpu"
"""Name of the primary tier in events and policies."""

_REPEAT_S: Final = 300.0
"""Time between two repetitions of the inventory. A consumer that lost events, or came late, is right again after
that time, and the blocks have been repeated."""


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
    """The inventory of the primary tier, and the way to those of the tiers.

    Args:
        enabled: Whether anything is kept.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._inventory = Inventory(enabled=enabled)

    def set_parents(self, parent_of: Callable[[BlockKey], BlockKey | None]) -> None:
        """State the parents of blocks of the primary tier before them."""
        self._inventory.parent_of = parent_of

    def primary(self, keys: Sequence[BlockKey], cause: RemovalCause | None = None) -> None:
        """Note blocks that entered or left the primary tier."""
        if cause is None:
            self._inventory.stored(keys)
        else:
            self._inventory.removed(keys, cause)

    @property
    def has_unreported(self) -> bool:
        """Whether :meth:`take` has an event of the primary tier to return."""
        return bool(self._inventory)

    def repeat(self, links: Sequence[TierLink]) -> None:
        """Let the next calls of :meth:`take` state all blocks of all tiers as stored, some at a time."""
        self._inventory.repeat()
        for link in links:
            link.repeat_events()

    def take(self, links: Sequence[TierLink]) -> list[BlockEvent]:
        """Return the events since the last call, those of the tiers included.

        Those of the tiers come first. A block may have left the primary tier after a lower tier stored it, and a
        consumer that counts copies must not see it without any in between.
        """
        events: list[BlockEvent] = []
        for link in links:
            # Taken in any case, so that they don't pile up in the tier.
            taken, tier = link.take_events(), link.tier
            for event in taken if self._enabled else ():
                events.append(BlockEvent(link.name, tier.medium, tier.locality, event.keys, event.cause))
        for event in self._inventory.take():
            events.append(BlockEvent(PRIMARY_NAME, Medium.CPU, Locality.LOCAL, event.keys, event.cause))
        return events


class Repeats:
    """The times at which all blocks are reported once more."""

    def __init__(self) -> None:
        self._due = 0.0

    def is_due(self, now: float) -> bool:
        """Return whether a repetition begins now (monotonic seconds)."""
        if now < self._due:
            return False
        is_first, self._due = not self._due, now + _REPEAT_S
        return not is_first
