"""The contract suites of backends and tiers, on all kinds of servers.

Variants that only change the connection or an option of the writes run the value part.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest

from kvstore.backends.base import Backend
from kvstore.backends.redis import RedisBackend, RedisConfig
from kvstore.testing import BackendTests, HoldingsTests, TierTests
from kvstore.testing.backend_harness import BackendHarness
from kvstore.testing.backend_tests import BackendConcurrencyTests, BackendFailureTests, BackendValueTests
from kvstore.testing.tier_tests import TierHarness, TierValueTests
from tests.redis.clients import options_for
from tests.redis.fixtures import OnServer


class RedisHarness(OnServer, BackendHarness):
    """Shared parts of the suites below."""

    scans: ClassVar[bool] = False
    more: ClassVar[dict[str, Any]] = {}
    kind: ClassVar[type[RedisBackend]] = RedisBackend

    def options(self) -> dict[str, Any]:
        return options_for(self.server, **self.more)

    async def make_backend(self) -> Backend:
        return self.kind(RedisConfig(**self.options()))

    async def reopen(self, backend: Backend) -> Backend:
        assert isinstance(backend, RedisBackend)
        return self.kind(backend.config)


class TestRedis(RedisHarness, BackendTests):
    """Redis over TCP."""


@pytest.mark.matrix
class TestRedisRESP2(RedisHarness, BackendValueTests):
    """Blocks without a time to live."""

    more: ClassVar[dict[str, Any]] = {"ttl": 0}


@pytest.mark.matrix
class TestUnixSocket(RedisHarness, BackendValueTests):
    """Redis over a unix socket."""

    def options(self) -> dict[str, Any]:
        return {**super().options(), "url": f"unix://{self.server.unix_path}"}


class InParts(RedisBackend):
    """A backend with a small part size."""

    part_bytes: ClassVar[int] = 16384


class TestParts(RedisHarness, BackendValueTests):
    """Blocks in parts of 16 KiB on one node."""

    kind = InParts


@pytest.mark.matrix
class TestPartsInCluster(RedisHarness, BackendTests):
    """Parts on different nodes."""

    kind = InParts
    on = "cluster"


@pytest.mark.matrix
class TestValkey(RedisHarness, BackendValueTests, BackendConcurrencyTests):
    """Valkey 9."""

    on = "valkey_server"


@pytest.mark.matrix
class TestTLS(RedisHarness, BackendValueTests, BackendConcurrencyTests):
    """TLS, with a user of least rights."""

    on = "tls_server"


@pytest.mark.matrix
class TestCluster(RedisHarness, BackendValueTests, BackendConcurrencyTests):
    """Three masters; the backend detects the cluster."""

    on = "cluster"


class TestOutage(RedisHarness, BackendFailureTests):
    """A server of its own, which the suite may stop."""

    # The check that stops the server waits for these timeouts a few times.
    more: ClassVar[dict[str, Any]] = {"timeout": 3, "connect_timeout": 3}

    on = "own_server"

    async def break_medium(self, backend: Backend) -> bool:
        self.server.pause()
        return True

    async def mend_medium(self, backend: Backend) -> None:
        self.server.resume()
        await _until_back(backend)


async def _until_back(backend: Backend) -> None:
    async with asyncio.timeout(50):
        while True:
            try:
                return await backend.probe()
            except Exception:
                # Any error is accepted while the server is down; it has to recover.
                await asyncio.sleep(0.02)


class RedisTierHarness(OnServer, TierHarness):
    """Shared parts of the suites below."""

    authoritative = False

    def make_config(self) -> dict[str, Any]:
        return {"backend": "redis", **options_for(self.server)}


class TestRedisTier(RedisTierHarness, TierTests):
    """A tier over Redis."""


@pytest.mark.matrix
class TestValkeyTier(RedisTierHarness, TierValueTests):
    """A tier over Valkey."""

    on = "valkey_server"


@pytest.mark.matrix
class TestTLSTier(RedisTierHarness, TierValueTests):
    """A tier over TLS, whose user has the rights of an engine and may not list."""

    forgets = False

    on = "tls_server"


@pytest.mark.matrix
class TestClusterTier(RedisTierHarness, TierValueTests):
    """A tier over a cluster."""

    on = "cluster"


class TestHoldings(RedisHarness, HoldingsTests):
    """Values of one part, listed by SCAN."""
