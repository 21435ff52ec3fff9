"""One statement per block, medium and locality: consumers of KV cache events do not distinguish tiers further."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Any

from vllm.v1.kv_offload.base import Locality, OffloadingEvent

_Nature = tuple[Any, Any, str | None]
"""vLLM's medium, locality and ownership."""


class Statements:
    """Merges the events of several tiers.

    A block that two tiers of one medium and locality hold, or that two tenants hold under one name of vLLM's, is
    reported as stored by the first and as removed by the last. Dynamo's index would forget it at the first removal.

    Args:
        natures: Medium and locality of each tier, the primary one included.
        all_shared: Whether one tier may hold several blocks of one name.
    """

    def __init__(self, natures: Iterable[tuple[Any, Any]], *, all_shared: bool = False) -> None:
        self._all_shared = all_shared
        self._shared = {nature for nature, tiers in Counter(natures).items() if tiers > 1}
        self._copies: dict[_Nature, dict[bytes, dict[str, int]]] = {}
        """Copies of each stated block by tier."""

    def merge(self, events: Iterable[tuple[str, OffloadingEvent]]) -> list[OffloadingEvent]:
        """Return the statements to publish; none for a copy of a block already stated, or not the last to leave.

        Args:
            events: Events, each with the name of its tier, which can only remove its own copies.
        """
        if not (self._shared or self._all_shared):
            return [event for _, event in events]
        merged = []
        for tier, event in events:
            # The events of a primary tier have no locality.
            locality = event.locality or Locality.LOCAL
            if self._all_shared or (event.medium, locality) in self._shared:
                copies = self._copies.setdefault((event.medium, locality, getattr(event, "ownership", None)), {})
                count = self._removed if event.removed else self._stored
                event = dataclasses.replace(event, keys=[key for key in event.keys if count(copies, key, tier)])
            if event.keys:
                merged.append(event)
        return merged

    def clear(self) -> None:
        """Note that consumers have dropped all blocks."""
        self._copies.clear()

    def _stored(self, copies: dict[bytes, dict[str, int]], key: bytes, tier: str) -> bool:
        """Count a copy; return whether it is the first. Without tenants and adapters, a tier has one at most."""
        by_tier = copies.setdefault(key, {})
        is_first = not by_tier
        by_tier[tier] = by_tier.get(tier, 0) + 1 if self._all_shared else 1
        return is_first

    @staticmethod
    def _removed(copies: dict[bytes, dict[str, int]], key: bytes, tier: str) -> bool:
        """Drop a copy; return whether it was the last."""
        by_tier = copies.get(key)
        if by_tier is None or tier not in by_tier:
            return False
        by_tier[tier] -= 1
        if not by_tier[tier]:
            del by_tier[tier]
        if by_tier:
            return False
        del copies[key]
        return True
