"""One statement per block, medium and locality: consumers of KV cache events do not distinguish tiers further."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Any

from vllm.v1.kv_offload.base import Locality, OffloadingEvent

__all__ = ["Statements"]

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
        self._copies: dict[_Nature, dict[bytes, int]] = {}

    def merge(self, events: Iterable[OffloadingEvent]) -> list[OffloadingEvent]:
        """Return the statements to publish; none for a copy of a block already stated, or not the last to leave."""
        if not (self._shared or self._all_shared):
            return list(events)
        merged = []
        for event in events:
            # The events of a primary tier have no locality.
            locality = event.locality or Locality.LOCAL
            if self._all_shared or (event.medium, locality) in self._shared:
                copies = self._copies.setdefault((event.medium, locality, getattr(event, "ownership", None)), {})
                count = _removed if event.removed else _stored
                event = dataclasses.replace(event, keys=[key for key in event.keys if count(copies, key)])
            if event.keys:
                merged.append(event)
        return merged

    def clear(self) -> None:
        """Note that consumers have dropped all blocks."""
        self._copies.clear()


def _stored(copies: dict[bytes, int], key: bytes) -> bool:
    """Count a copy; return whether it is the first."""
    copies[key] = copies.get(key, 0) + 1
    return copies[key] == 1


def _removed(copies: dict[bytes, int], key: bytes) -> bool:
    """Drop a copy; return whether it was the last."""
    left = copies.pop(key, 0) - 1
    if left > 0:
        copies[key] = left
    return left == 0
