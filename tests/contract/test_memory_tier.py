"""A tier over the memory backend keeps the contract of tiers."""

from __future__ import annotations

import itertools
from typing import Any

from kvstore.backends.memory import MemoryBackend
from kvstore.testing import TierTests

_shelves = (f"tier-{number}" for number in itertools.count())


class SharedMemoryBackend(MemoryBackend):
    """The same, as if others might write to it: the tier has to ask for what it does not know."""

    exclusive = False


class TestMemoryTier(TierTests):
    """With a shelf per tier, so that a restart can be tried."""

    def make_config(self) -> dict[str, Any]:
        """Return the configuration of a tier over an empty shelf."""
        return {"backend": "memory", "shelf": next(_shelves)}

    def small_config(self, capacity_bytes: int) -> dict[str, Any]:
        """Return the same with a capacity."""
        return {**self.make_config(), "capacity": capacity_bytes}


class TestSharedMemoryTier(TestMemoryTier):
    """A tier that does not own its medium, found by the path of its class. Only one backend can have the shelf."""

    exclusive = False
    forgets = False

    def make_config(self) -> dict[str, Any]:
        """Return the configuration of a tier over an empty shelf."""
        return {"backend": f"{__name__}:SharedMemoryBackend", "shelf": next(_shelves)}


class TestMemoryTierWithoutShelf(TierTests):
    """What a close forgets is not asked for."""

    persistent = False

    def make_config(self) -> dict[str, Any]:
        """Return the configuration of a tier without a shelf."""
        return {"backend": "memory"}
