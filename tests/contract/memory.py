"""The contract suites over the memory backend."""

from __future__ import annotations

import itertools
from typing import Any, cast

from kvstore.backends.base import Backend
from kvstore.backends.memory import MemoryBackend, MemoryConfig
from kvstore.config import ByteSize
from kvstore.testing import BackendTests, TierTests

_shelves = (f"contract-{number}" for number in itertools.count())


def fresh_shelf() -> str:
    """Return the name of an unused shelf."""
    return next(_shelves)


class MemorySuite(BackendTests):
    """One shelf per backend, so that restarts can be tested."""

    eviction = "lru"

    async def make_backend(self) -> Backend:
        return MemoryBackend(MemoryConfig(shelf=fresh_shelf(), eviction=self.eviction))

    async def reopen(self, backend: Backend) -> Backend:
        return MemoryBackend(cast(MemoryConfig, backend.config))

    async def make_small_backend(self, capacity_bytes: int) -> Backend:
        return MemoryBackend(MemoryConfig(capacity=ByteSize(capacity_bytes), eviction=self.eviction))


class MemoryTierSuite(TierTests):
    """One shelf per tier, so that restarts can be tested."""

    def make_config(self) -> dict[str, Any]:
        return {"backend": "memory", "shelf": fresh_shelf()}

    def small_config(self, capacity_bytes: int) -> dict[str, Any]:
        return {**self.make_config(), "capacity": capacity_bytes}
