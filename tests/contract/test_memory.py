"""The memory backend keeps the contract."""

from __future__ import annotations

import itertools
from typing import cast

import pytest

from kvstore.backends.base import Backend
from kvstore.backends.memory import MemoryBackend, MemoryConfig
from kvstore.config import ByteSize
from kvstore.eviction import POLICY_NAMES
from kvstore.testing import BackendTests, HoldingsTests

_shelves = (f"contract-{number}" for number in itertools.count())


class TestMemory(BackendTests):
    """With a shelf per backend, so that a restart can be tried."""

    eviction = "lru"

    async def make_backend(self) -> Backend:
        """Return a backend over an empty shelf."""
        return MemoryBackend(MemoryConfig(shelf=next(_shelves), eviction=self.eviction))

    async def reopen(self, backend: Backend) -> Backend:
        """Return a backend over the same shelf."""
        return MemoryBackend(cast(MemoryConfig, backend.config))

    async def make_small_backend(self, capacity_bytes: int) -> Backend:
        """Return a backend that evicts."""
        return MemoryBackend(MemoryConfig(capacity=ByteSize(capacity_bytes), eviction=self.eviction))


class TestMemoryWithoutShelf(BackendTests):
    """What a close forgets is not asked for."""

    async def make_backend(self) -> Backend:
        """Return a backend without a shelf."""
        return MemoryBackend(MemoryConfig())


@pytest.mark.parametrize("eviction", POLICY_NAMES)
@pytest.mark.parametrize("check", ["test_capacity_is_kept", "test_a_block_in_use_outlives_one_that_is_not"])
def test_capacity_under_each_policy(eviction: str, check: str) -> None:
    """Whatever the eviction policy, the capacity is kept and a block in use stays."""
    suite = TestMemory()
    suite.eviction = eviction
    getattr(suite, check)()


class TestMemoryHoldings(HoldingsTests):
    """The default holdings, which use nothing but the backend's own methods."""

    shares = False
    make_backend = TestMemory.make_backend
    reopen = TestMemory.reopen
    eviction = "lru"
