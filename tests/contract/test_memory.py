"""The memory backend keeps the contract."""

from __future__ import annotations

import random

import pytest

from kvstore.backends.base import Backend, RecordGeometry
from kvstore.backends.memory import MemoryBackend, MemoryConfig
from kvstore.codec.record import HEADER_BYTES
from kvstore.config import ByteSize
from kvstore.eviction import POLICY_NAMES
from kvstore.namespace import Namespace
from kvstore.tenants import Tenant, Tenants, tag_of
from kvstore.testing import BackendTests, HoldingsTests
from kvstore.testing.records import RecordMaker
from tests.contract.memory import MemorySuite, fresh_shelf


class TestMemory(MemorySuite):
    """The memory backend, with one shelf per backend, so that it can be reopened."""


class TestMemoryWithoutShelf(BackendTests):
    """A backend without a shelf, which forgets its blocks at a close; the suite skips restarts."""

    async def make_backend(self) -> Backend:
        return MemoryBackend(MemoryConfig())


@pytest.mark.parametrize("eviction", POLICY_NAMES)
@pytest.mark.parametrize("check", ["test_capacity_is_kept", "test_a_block_in_use_outlives_one_that_is_not"])
def test_capacity_under_each_policy(eviction: str, check: str) -> None:
    """Under every eviction policy, the capacity is kept and a block in use stays."""
    suite = TestMemory()
    suite.eviction = eviction
    getattr(suite, check)()


class TestMemoryHoldings(HoldingsTests):
    """The default holdings, which use only the backend's own methods."""

    shares = False
    make_backend = TestMemory.make_backend
    reopen = TestMemory.reopen
    eviction = "lru"


async def test_neighbour_displaces_no_guaranteed_block() -> None:
    """Guaranteed blocks stay, even on a shelf that an earlier backend has filled."""
    tenants = Tenants(by="cache_salt", named={"quiet": Tenant(guaranteed=0.5)})
    namespace, rng = Namespace({"test": "tenants"}), random.Random(1)
    geometry = RecordGeometry(HEADER_BYTES, 4096)
    maker = RecordMaker(namespace, geometry, rng)
    config = MemoryConfig(shelf=fresh_shelf(), capacity=ByteSize(20 * geometry.record_bytes_max))
    quiet = [tag_of("quiet", named=True) + b"%d" % number for number in range(8)]
    for turn in range(2):
        backend = MemoryBackend(config)
        backend.tenants = tenants
        await backend.open(namespace, geometry)
        await backend.put([maker.write(key, maker.payload()) for key in quiet])
        await backend.put([maker.write(maker.key(), maker.payload()) for _ in range(100)])
        assert list(await backend.exists(quiet)) == [True] * 8, turn
        assert backend.stats().blocks >= 19
        await backend.close()
