"""A tier over the memory backend keeps the contract of tiers."""

from __future__ import annotations

from typing import Any

from kvstore.backends.memory import MemoryBackend
from kvstore.testing import TierTests
from tests.contract.memory import MemoryTierSuite, fresh_shelf


class TestMemoryTier(MemoryTierSuite):
    """A tier over the memory backend, with one shelf per tier, so that it can restart."""


class SharedMemoryBackend(MemoryBackend):
    """The same backend, treated as shared with other writers: the tier has to look up unknown blocks."""

    authoritative = False


class TestSharedMemoryTier(TestMemoryTier):
    """A tier that does not own its medium, found by the path of its class. Only one backend can use the shelf."""

    authoritative = False
    forgets = False

    def make_config(self) -> dict[str, Any]:
        return {"backend": f"{__name__}:SharedMemoryBackend", "shelf": fresh_shelf()}


class TestMemoryTierWithoutShelf(TierTests):
    """A tier without a shelf, which forgets its blocks at a close; the suite skips restarts."""

    persistent = False

    def make_config(self) -> dict[str, Any]:
        return {"backend": "memory"}
