"""Sightings: how often a block was seen, for admission to tiers, in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.bounded import BoundedDict
from kvstore.types import BlockKey

__all__ = ["Sightings"]


class Sightings:
    """Counts sightings of blocks; what was not seen for longest is forgotten first.

    Args:
        blocks_max: Blocks remembered.
    """

    def __init__(self, blocks_max: int) -> None:
        self._counts: BoundedDict[BlockKey, int] = BoundedDict(blocks_max)

    def add(self, keys: Sequence[BlockKey]) -> None:
        """Note one sighting of each block of a prefix.

        The end of the prefix is forgotten before its start, so that a block is never admitted without those before it.
        """
        # Counted before any is noted: each that is new may push out one of the same prefix.
        seen = {key: self.count(key) + 1 for key in reversed(keys)}
        for key, count in seen.items():
            self._counts[key] = count

    def count(self, key: BlockKey) -> int:
        """Return the sightings of a block, as far as they are remembered."""
        return self._counts.get(key, 0)

    def clear(self) -> None:
        """Forget everything."""
        self._counts.clear()

    def __len__(self) -> int:
        return len(self._counts)
